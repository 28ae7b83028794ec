"""Checkpoints saved, and how far they are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.aggregation.histogram import Histograms
from otel_train.clock import NS_PER_S
from otel_train.recording.events import SourceKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from otel_train.accounting.types import StageCalls


class Saved(NamedTuple):
    """One checkpoint: when, and whether it failed."""

    within_ns: tuple[int, int]
    failed: bool


class Checkpoints:
    """Counts them.

    Attributes:
        durations: how long the loop was held up.
        failures: those that raised.
        last_ns: when the last good one was done; 0 before the first.
        interval_s: from the last but one to the last; 0 before the second.
    """

    def __init__(self) -> None:
        self.durations = Histograms(size=1)
        self.failures = self.last_ns = 0
        self.interval_s = 0.0

    def take(self, ended: StageCalls, kinds: np.ndarray) -> Iterator[Saved]:
        """Count the checkpoints among calls that have ended; each of them.

        Args:
            ended: calls.
            kinds: of every source.
        """
        for place in np.flatnonzero(kinds[ended.source] == SourceKind.CHECKPOINT).tolist():
            begun, lasted = int(ended.started_ns[place]), int(ended.inclusive_ns[place])
            saved = Saved((begun, begun + lasted), bool(ended.failed[place]))
            self.durations.add([0], [lasted])
            if saved.failed:
                self.failures += 1
            else:
                before, self.last_ns = self.last_ns, begun + lasted
                if before:
                    self.interval_s = (self.last_ns - before) / NS_PER_S
            yield saved
