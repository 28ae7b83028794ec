"""What one thread did, worked out from its edges in a flight file."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.accounting.account import ThreadAccount
from otel_train.accounting.types import TRAIN, ClosedSteps, SourceTable
from otel_train.recording.events import SOURCE_MASK, SOURCE_SHIFT

if TYPE_CHECKING:
    from otel_train.accounting.nesting import OpenStage
    from otel_train.recording.flight_recorder import ThreadEdges


class ThreadHistory(NamedTuple):
    """What one thread did.

    Attributes:
        thread: its edges.
        open: stages open at the end, outermost first.
        settled: everything before.
        started_ns: when the step that is still open began; -1 if none is.
    """

    thread: ThreadEdges
    open: list[OpenStage]
    settled: ClosedSteps
    started_ns: int

    @property
    def steps(self) -> int:
        """Training steps that closed."""
        return int(np.count_nonzero(trained(self.settled)))


def story_of(thread: ThreadEdges, sources: SourceTable) -> ThreadHistory:
    """Work out a thread's edges, with the stages of every step."""
    numbers = (thread.codes >> SOURCE_SHIFT) & SOURCE_MASK
    known = numbers < len(sources.kinds)
    account = ThreadAccount(int(thread.times[0]), sources, by_step=True)
    account.feed(thread.times[known].tolist(), thread.codes[known].tolist())
    still_open = list(account.open)
    settled = account.close(int(thread.times[-1]))
    left = np.flatnonzero(settled.steps.counted == 0)
    started_ns = int(settled.steps.started_ns[left[-1]]) if len(left) else -1
    return ThreadHistory(thread, still_open, settled, started_ns)


def trained(part: ClosedSteps) -> np.ndarray:
    """bool[step]: which steps are counted as training."""
    mine: np.ndarray = (part.steps.phase == TRAIN) & (part.steps.counted > 0)
    return mine
