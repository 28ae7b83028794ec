"""What lies inside a session whose agent is a thread of the test."""

from __future__ import annotations

from otel_train.agent.rank_connection import RankConnection
from otel_train.session import Session


def inside(session: Session) -> RankConnection:
    """Its account, exports and files."""
    here = session._service.connection.thread
    assert here is not None, "the test looks into a thread: run it without TEST_AGENT=process"
    assert here.service is not None
    return here.service
