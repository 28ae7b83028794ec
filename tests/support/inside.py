"""What lies inside a session whose agent is a thread of the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train.agent.in_thread import ThreadService

if TYPE_CHECKING:
    from otel_train.session import Session


def inside(session: Session) -> ThreadService:
    """Its account, exports and files."""
    service = session._service
    assert isinstance(service, ThreadService), (
        "the test looks into a thread: run it without TEST_AGENT=process"
    )
    return service
