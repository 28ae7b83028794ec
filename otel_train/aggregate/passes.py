"""Passes over loaders: what it cost to begin them, and why they ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.aggregate.words import KIND_DATA, OP_END, OP_FAIL, OP_STOP
from otel_train.codes import Ending

if TYPE_CHECKING:
    from otel_train.aggregate.marks import Marks
    from otel_train.aggregate.pairing import Edges
    from otel_train.aggregate.phases import Labels
    from otel_train.aggregate.units import Pieces

_GOT, _STARTED, _STOPPED, _FAILED = range(4)
_NO_STARTS = np.zeros((0, 4), dtype=np.int64)
_NO_ENDINGS = np.zeros((0, 3), dtype=np.int64)


class PassEnds(NamedTuple):
    """What one slice says of passes.

    Attributes:
        starts: int64[n, 4]: loader source, phase, nanoseconds to make the iterator, nanoseconds to wait for
            its first batch.
        endings: int64[n, 3]: loader source, ``Ending``, when.
    """

    starts: np.ndarray = _NO_STARTS
    endings: np.ndarray = _NO_ENDINGS


class Passes:
    """Remembers, from slice to slice, what happened last to loaders that are not in mid-pass."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}

    def settle(self, edges: Edges, found: Marks, pieces: Pieces, labels: Labels) -> PassEnds:
        """Take what has been settled.

        A start is the making of an iterator and the first batch right after it. An exception ends a pass if
        the next thing asked of the loader is not a batch; a loader at its end ends once, however often it is asked.
        """
        last = int(pieces.first[-1]) + 1
        data = found.close[:last] & (edges.kinds[:last] == KIND_DATA) & edges.counted[:last]
        ops = edges.ops[:last]
        started = data & (ops == OP_END) & found.starting[:last]
        stopped = data & (ops == OP_STOP)
        failed = data & (ops == OP_FAIL) & (edges.payloads[:last] == Ending.ERROR)
        if not (self._last or started.any() or stopped.any() or failed.any()):
            return PassEnds()
        what = np.select([started, stopped, failed], [_STARTED, _STOPPED, _FAILED], _GOT)
        at = np.flatnonzero(started | stopped | failed | (data & (ops == OP_END)))
        at = at[np.argsort(edges.sources[at], kind="stable")]
        source, what = edges.sources[at], what[at]
        lasted = edges.times[at] - edges.begun_ns[at]
        before, took = self._before(source, what, lasted)
        first = (what == _GOT) & (before == _STARTED)
        phase = labels.phase[pieces.of_event[at]]
        starts = np.stack((source[first], phase[first], took[first], lasted[first]), axis=1)
        stop = (what == _STOPPED) & (before != _STOPPED)
        broke = (what == _STARTED) & (before == _FAILED)
        over = stop | broke
        why = np.where(stop, edges.payloads[at], int(Ending.ERROR))
        endings = np.stack((source, why, edges.times[at]), axis=1)[over]
        return PassEnds(starts, endings)

    def close(self, at_ns: int) -> np.ndarray:
        """Endings that nothing followed: the exceptions that ended the run."""
        left = [
            (source, int(Ending.ERROR), at_ns) for source, (what, _) in self._last.items() if what == _FAILED
        ]
        self._last = {}
        return np.array(left, dtype=np.int64).reshape(-1, 3)

    def _before(
        self, source: np.ndarray, what: np.ndarray, lasted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What happened to the same loader before, and how long that took."""
        before, took = np.roll(what, 1), np.roll(lasted, 1)
        new = np.flatnonzero(np.diff(source, prepend=-1) != 0)
        ends = np.append(new[1:], len(source))[: len(new)] - 1
        for begin, end in zip(new.tolist(), ends.tolist(), strict=True):
            loader = int(source[begin])
            before[begin], took[begin] = self._last.pop(loader, (_GOT, 0))
            if what[end] != _GOT:
                self._last[loader] = (int(what[end]), int(lasted[end]))
        return before, took
