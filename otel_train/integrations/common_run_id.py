"""One run id for ranks that a library has started itself: their launcher has given them none."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from otel_train.guard import Guard
from otel_train.instrumentation.job_store import JobStore, connect, find_job
from otel_train.launchers import given_run_id
from otel_train.runinfo import LAUNCH_RUN, run_id_of_start

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger("otel_train")

PATIENCE_S = 30.0
"""Longest wait of a rank for rank 0, which may still be importing."""

_POLL_S = 0.05


def common_run_id(
    number: int,
    *,
    environ: Mapping[str, str] = os.environ,
    ranks: Callable[[], tuple[int, int] | None] = find_job,
    store: Callable[[], JobStore | None] = connect,
    patience_s: float = PATIENCE_S,
) -> str:
    """An id that all ranks of this job get here; "" where they have one in common anyway, or cannot meet.

    Nothing collective: a rank that does not come keeps nobody waiting but for its own figures.

    Args:
        number: of the session in this process; the same on every rank.
        environ: the process environment.
        ranks: rank and world size of the job, if there is one of several.
        store: the job's own.
        patience_s: longest wait for rank 0.
    """
    place = ranks()
    if place is None or given_run_id(environ) or environ.get(LAUNCH_RUN):
        return ""
    guard = Guard("the run id of all ranks")
    with guard:
        meeting = store()
        return "" if meeting is None else _met(meeting, f"otel_train/run/{number}", place[0], patience_s)
    return ""


def _met(store: JobStore, key: str, rank: int, patience_s: float) -> str:
    if rank == 0:
        mine = run_id_of_start(time.time_ns(), os.urandom(3))
        store.put(key, mine)
        return mine
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        found = store.read([key])
        if found:
            return found[key]
        time.sleep(_POLL_S)
    _log.warning("rank 0 named no run within %g s: this rank's figures lie in a run of their own", patience_s)
    return ""
