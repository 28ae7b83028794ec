"""Stage times under flat names: means since the last log, totals since the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.accounting.types import EVAL, TRAIN
from otel_train.clock import NS_PER_S
from otel_train.recording.events import SourceKind

if TYPE_CHECKING:
    from otel_train.aggregation.flat import Slice
    from otel_train.aggregation.flat_names import SafeNames
    from otel_train.aggregation.series_names import Names

MS_PER_NS = 1e-6

_LOGGED = {
    TRAIN: ("train", ("data", "forward", "backward", "optimizer")),
    EVAL: ("val", ("data", "forward")),
}
_FORWARD = (int(SourceKind.FORWARD),)
_WHOLE = (int(SourceKind.WHOLE),)
_PHASES = 8


class Sum(NamedTuple):
    """Durations, counted and added up."""

    count: int = 0  # type: ignore[assignment]  # hides tuple.count, as StageTotals does
    total_ns: int = 0

    def plus(self, lasted_ns: np.ndarray) -> Sum:
        """These as well."""
        return Sum(self.count + len(lasted_ns), self.total_ns + int(lasted_ns.sum()))


class StageMeans:
    """``profile/{train,val}/dl_{loader}/time_{stage}_ms``: mean of one call since the last log.

    Args:
        names: what the sources are called.
        safe: makes names safe.
    """

    def __init__(self, names: Names, safe: SafeNames) -> None:
        self._names = names
        self._safe = safe
        self._sums: dict[str, Sum] = {}
        self._waits: dict[int, _BatchWait] = {}

    def add(self, part: Slice) -> None:
        """Count what ended."""
        flat = (part.source * (len(self._names.sources) + 1) + part.loader + 1) * _PHASES + part.phase
        for value in np.unique(flat).tolist():
            mine = np.flatnonzero(flat == value)
            phase = value % _PHASES
            source, loader = int(part.source[mine[0]]), int(part.loader[mine[0]])
            spelled, stages = _LOGGED.get(phase, ("", ()))
            stage = self._names.sources[source].stage
            if stage in stages and loader >= 0:
                self._count(f"profile/{spelled}/{self._loader(loader)}/time_{stage}_ms", part.lasted_ns[mine])
        train = np.flatnonzero((part.phase == TRAIN) & (part.loader >= 0))
        for loader in np.unique(part.loader[train]).tolist():
            mine = train[part.loader[train] == loader]
            wait = self._waits.setdefault(loader, _BatchWait())
            found = wait.take(part.kind[mine], part.started_ns[mine], part.lasted_ns[mine])
            self._count(f"profile/train/{self._loader(loader)}/time_batch_wait_ms", found)

    def take(self) -> dict[str, float]:
        """The means; the next ones begin here."""
        sums, self._sums = self._sums, {}
        return {key: had.total_ns / had.count * MS_PER_NS for key, had in sums.items()}

    def _loader(self, source: int) -> str:
        return f"dl_{self._safe(self._names.sources[source].name)}"

    def _count(self, key: str, lasted_ns: np.ndarray) -> None:
        if len(lasted_ns):
            self._sums[key] = self._sums.get(key, Sum()).plus(lasted_ns)


class _BatchWait:
    """From the end of a loader's previous batch's last stage to the first forward of its next batch."""

    def __init__(self) -> None:
        self._worked_ns = -1  # end of the last stage so far
        self._since_ns = -1  # the same for the batch before the present one; -1 once it has had its forward

    def take(self, kind: np.ndarray, started_ns: np.ndarray, lasted_ns: np.ndarray) -> np.ndarray:
        """Waits of the batches whose forward ended here: int64[batches]. Calls come in the order of their ends."""
        fetched = kind == SourceKind.DATA
        ended = started_ns + lasted_ns
        batch = np.cumsum(fetched)
        last = int(batch[-1])
        worked = np.full(last + 1, -1, dtype=np.int64)
        worked[batch[~fetched]] = ended[~fetched]  # the last one written is the last one that ended
        worked[0] = max(worked[0], self._worked_ns)
        np.maximum.accumulate(worked, out=worked)
        since = np.concatenate(([self._since_ns], worked[:-1]))
        forwards = np.flatnonzero(np.isin(kind, (*_FORWARD, *_WHOLE)))
        batches, first = np.unique(batch[forwards], return_index=True)
        known = since[batches] >= 0
        waits: np.ndarray = (started_ns[forwards[first]] - since[batches])[known]
        self._worked_ns = int(worked[-1])
        self._since_ns = -1 if last in batches else int(since[-1])
        return waits


class Operations:
    """``profiling/{operation}_{avg_time,total_time,count}``: seconds since the start or the last reset.

    Args:
        names: what the sources are called.
        safe: makes names safe.
    """

    def __init__(self, names: Names, safe: SafeNames) -> None:
        self._names = names
        self._safe = safe
        self._sums: dict[str, Sum] = {}

    def reset(self) -> None:
        """Start from now."""
        self._sums = {}

    def add(self, part: Slice) -> None:
        """Count what ended."""
        train = part.phase == TRAIN
        self._count("data_batch_production", part.lasted_ns[train & (part.kind == SourceKind.DATA)])
        self._tell("loss_fn_computation", int(part.losses.sum()), int(part.loss_ns.sum()))
        # A step in which no call was seen has a duration, and nothing that could be timed.
        self._count("training_step", part.training_ns[part.training_ns > 0])
        self._tell("make_step_total", len(part.step_ns), int(part.work_ns.sum()))
        own = part.kind == SourceKind.STAGE
        for source in np.unique(part.source[own]).tolist():
            mine = own & (part.source == source)
            self._count(self._safe(self._names.sources[source].name), part.lasted_ns[mine])

    def values(self) -> dict[str, float]:
        """The figures now, in seconds."""
        found: dict[str, float] = {}
        for name, had in self._sums.items():
            if had.count:
                total_s = had.total_ns / NS_PER_S
                found[f"profiling/{name}_avg_time"] = total_s / had.count
                found[f"profiling/{name}_total_time"] = total_s
                found[f"profiling/{name}_count"] = had.count
        return found

    def _count(self, name: str, lasted_ns: np.ndarray) -> None:
        self._tell(name, len(lasted_ns), int(lasted_ns.sum()))

    def _tell(self, name: str, count: int, total_ns: int) -> None:
        if count or total_ns:
            had = self._sums.get(name, Sum())
            self._sums[name] = Sum(had.count + count, had.total_ns + total_ns)
