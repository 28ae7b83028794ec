"""What is known of loaders beside the stages: builds, starts, endings."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.accounting.types import PHASES
from otel_train.aggregation.histogram import Histograms
from otel_train.clock import NS_PER_S
from otel_train.recording.events import Ending

if TYPE_CHECKING:
    from otel_train.aggregation.series_names import Names

_REASONS: dict[int, str] = {
    Ending.UNKNOWN: "epoch_end",
    Ending.EPOCH_END: "epoch_end",
    Ending.SHORT: "short",
    Ending.STREAMING_END: "streaming_end",
    Ending.ERROR: "error",
}
REMEMBERED_STOPS = 256
"""Of those the time is known."""

_UNCLAIMED = 8192
"""Builds of a loader that wait for the epoch their batches belong to: as many as one slice of edges can claim."""


class Start(NamedTuple):
    """What beginning its passes has cost a loader.

    Attributes:
        passes: those that gave a batch.
        making_s: seconds to make their iterators, workers included.
        waiting_s: seconds to wait for their first batches.
    """

    passes: int = 0
    making_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both together."""
        return self.making_s + self.waiting_s


class LoaderTotals:
    """Counts and histograms by loader name. One thread owns it."""

    def __init__(self) -> None:
        self.builds = Histograms()
        """Time of a worker for a batch."""
        self.start_ups = Histograms()
        """Time from the ask for an iterator to its first batch."""
        self.lost: dict[str, int] = {}
        """Builds that were not read in time."""
        self.endings: dict[tuple[str, str], int] = {}
        """By loader and reason."""
        self.starts: dict[tuple[str, str], Start] = {}
        """By loader and phase."""
        self._unclaimed: dict[str, deque[int]] = {}
        self._stops: deque[tuple[str, int]] = deque(maxlen=REMEMBERED_STOPS)
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def add_builds(self, loader: str, build_ns: np.ndarray, missed: int) -> None:
        """Count what workers have built."""
        number = self.number(loader)
        self.builds.add(np.full(len(build_ns), number), build_ns)
        self.lost[loader] = self.lost.get(loader, 0) + missed
        self._unclaimed.setdefault(loader, deque(maxlen=_UNCLAIMED)).extend(build_ns.tolist())

    def claim(self, loader: str, most: int) -> np.ndarray:
        """The oldest builds that nobody has claimed: int64[n], n at most ``most``. Batches come in the same order."""
        waiting = self._unclaimed.get(loader, deque[int]())
        return np.array([waiting.popleft() for _ in range(min(most, len(waiting)))], dtype=np.int64)

    def claim_all(self) -> None:
        """What was built up to now is nobody's."""
        self._unclaimed.clear()

    def add_starts(self, batches: np.ndarray, names: Names) -> None:
        """Count passes that gave their first batch, among batches: int64[n, 6] as in ``ClosedSteps``."""
        for source, phase, _, _, making_ns, waiting_ns in batches[batches[:, 4] >= 0].tolist():
            loader = names.sources[source].name
            key = (loader, PHASES[phase] if phase < len(PHASES) else "")
            had = self.starts.get(key, Start())
            self.starts[key] = Start(
                had.passes + 1, had.making_s + making_ns / NS_PER_S, had.waiting_s + waiting_ns / NS_PER_S
            )
            self.start_ups.add([self.number(loader)], [making_ns + waiting_ns])

    def add_endings(self, endings: np.ndarray, names: Names) -> list[tuple[str, str, int]]:
        """Count endings: int64[n, 3] as in ``ClosedSteps``; loader and reason of each, and when it was."""
        told = [
            (
                names.sources[source].name,
                _REASONS.get(why, "epoch_end"),
                at_ns,
            )  # of a torn edge it is not known
            for source, why, at_ns in endings.tolist()
            if why != Ending.DISPOSED
        ]
        self._stops += [
            (names.sources[source].name, at_ns)
            for source, why, at_ns in endings.tolist()
            if why not in (Ending.ERROR, Ending.DISPOSED)
        ]
        for loader, reason, _ in told:
            self.endings[loader, reason] = self.endings.get((loader, reason), 0) + 1
        return told

    def number(self, loader: str) -> int:
        """Series of a loader in the histograms."""
        if loader not in self._numbers:
            self._numbers[loader] = len(self.names)
            self.names.append(loader)
            self.builds.grow(len(self.names))
            self.start_ups.grow(len(self.names))
        return self._numbers[loader]

    def known(self, loader: str) -> int | None:
        """The same for a loader of which something has been counted."""
        return self._numbers.get(loader)

    def stops(self, loader: str) -> int:
        """Passes that came to an end."""
        return sum(n for (name, reason), n in self.endings.items() if name == loader and reason != "error")

    def stops_before(self, loader: str, at_ns: int) -> int:
        """The same up to an instant, of which the last ``REMEMBERED_STOPS`` are known."""
        return self.stops(loader) - sum(name == loader and when > at_ns for name, when in self._stops)

    def copy(self) -> LoaderTotals:
        """The same counts, independent from now on."""
        twin = LoaderTotals()
        twin.builds, twin.start_ups = self.builds.copy(), self.start_ups.copy()
        twin.lost, twin.endings, twin.starts = dict(self.lost), dict(self.endings), dict(self.starts)
        twin.names, twin._numbers = list(self.names), dict(self._numbers)
        return twin

    def since(self, earlier: LoaderTotals) -> LoaderTotals:
        """The window between an earlier copy and now."""
        window = self.copy()
        window.builds = self.builds.minus(earlier.builds)
        window.start_ups = self.start_ups.minus(earlier.start_ups)
        window.lost = {name: n - earlier.lost.get(name, 0) for name, n in self.lost.items()}
        window.endings = {key: n - earlier.endings.get(key, 0) for key, n in self.endings.items()}
        for key, had in earlier.starts.items():
            now = self.starts[key]
            window.starts[key] = Start(
                now.passes - had.passes, now.making_s - had.making_s, now.waiting_s - had.waiting_s
            )
        return window
