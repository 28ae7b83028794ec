"""Reads a trace into columns: events, their kinds, memory events and metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.errors import TraceError
from otel_train.files import OF_A_RANK
from otel_train.trace_analysis.reader import TraceEvent, TraceFileReader, decode, json_list

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Codes = NDArray[np.int32]


MOST_NAMES = 1_000_000
"""Distinct names kept at most; a trace has thousands. All further names count as ``OTHER``."""

OTHER = "(other)"
NS_PER_US = 1000
LONGEST_US = 366 * 86400 * 1e6
"""One year. The timestamp of an event that is further than this from the median one is invalid."""

_LARGEST_CODE = 2**31 - 1  # of int32
_TIMES = attrgetter("ts", "dur")
_ASSOCIATIONS = attrgetter("correlation", "stream")
_DEVICE = attrgetter("occupancy", "group", "collective")
_MEMORY = attrgetter("change", "allocated", "reserved", "device_type", "device_id")


class NameCodes(dict[Any, int]):
    """Numbers names in the order of their appearance; those after the first ``MOST_NAMES`` share a number."""

    def __missing__(self, thing: Any) -> int:  # Any: a name, or a (pid, tid)
        if len(self) >= MOST_NAMES:
            return self.setdefault(OTHER, MOST_NAMES)
        number = self[thing] = len(self)
        return number

    def codes(self, things: Iterable[Any], count: int) -> Codes:
        """Returns the number of each of ``count`` things."""
        return np.fromiter(map(self.__getitem__, things), np.int32, count)


class Spans(NamedTuple):
    """Complete events (``ph`` X) as columns. Times count from the first event; names, categories and lanes are ``NameCodes``."""

    name: Codes
    category: Codes
    lane: Codes  # (pid, tid)
    start_ns: Ints
    dur_ns: Ints  # 0 or more
    correlation: Ints  # equal for a launch and the kernel that it launched; -1 if missing
    stream: Codes  # -1 on the host
    occupancy: NDArray[np.float32]  # estimated, percent; NaN if missing
    group: Codes  # name of the process group; the code of "" if missing
    collective: Codes  # name of the collective; the code of "" if missing

    @property
    def end_ns(self) -> Ints:
        """int64, since the first event."""
        ends: Ints = self.start_ns + self.dur_ns
        return ends

    def take(self, rows: Any) -> Spans:  # Any: whatever indexes an array
        """Returns the same columns for some rows."""
        return Spans(*(column[rows] for column in self))


class Memory(NamedTuple):
    """Allocator events, in the order of the file. Bytes are -1 if missing."""

    at_ns: Ints  # since the first event
    change: Ints  # below zero for a release
    allocated: Ints  # in live tensors, after the event
    reserved: Ints  # obtained from the driver
    device_type: Ints  # 0 is the host
    device_id: Ints  # -1 on the host


class EventColumns:
    """Collects the events of a trace, one piece of the file at a time."""

    def __init__(self) -> None:
        self.names, self.categories, self.lanes = NameCodes({"": 0}), NameCodes(), NameCodes()
        self.unpaired = 0  # begin events (``ph`` B), which are left out; Kineto writes none
        self.untimed = 0  # complete events left out because they have no instant or length
        self._spans: list[list[NDArray[Any]]] = []
        self._memory: list[NDArray[Any]] = []

    def add(self, events: Sequence[TraceEvent]) -> None:
        """Adds the events of one piece."""
        spans = [event for event in events if event.ph == "X"]
        others = [event for event in events if event.ph != "X"]
        allocations = [event for event in others if event.ph == "i" and event.name == "[memory]"]
        self.unpaired += sum(event.ph == "B" for event in others)
        if allocations:
            records = np.array([(event.ts, *_MEMORY(event.args)) for event in allocations], np.float64)
            self._memory.append(records[np.isfinite(records[:, 0])])
        if spans:
            self._add_spans(spans)

    def _add_spans(self, spans: list[TraceEvent]) -> None:
        count = len(spans)
        start, dur = (np.array(column, np.float64) for column in zip(*map(_TIMES, spans), strict=True))
        correlation, stream = zip(*(_ASSOCIATIONS(event.args) for event in spans), strict=True)
        wide = np.array(stream, np.int64)
        columns: list[NDArray[Any]] = [
            self.names.codes([event.name for event in spans], count),
            self.categories.codes([event.cat for event in spans], count),
            self.lanes.codes([(event.pid, event.tid) for event in spans], count),
            start,
            dur,
            np.array(correlation, np.int64),
            np.where(np.abs(wide) > _LARGEST_CODE, -1, wide).astype(np.int32),
            *self._of_device(spans),
        ]
        timed = np.isfinite(start) & np.isfinite(dur) & (dur >= 0)
        if not timed.all():
            columns = [column[timed] for column in columns]
            self.untimed += count - int(timed.sum())
        self._spans.append(columns)

    def _of_device(self, spans: list[TraceEvent]) -> tuple[NDArray[np.float32], Codes, Codes]:
        """Returns the columns that only device events have: reading them for every event would take half of the time."""
        rows = [row for row, event in enumerate(spans) if event.args.stream >= 0]
        occupancy = np.full(len(spans), np.nan, np.float32)
        group, collective = np.zeros((2, len(spans)), np.int32)
        if rows:
            columns = list(zip(*(_DEVICE(spans[row].args) for row in rows), strict=True))
            occupancy[rows] = columns[0]
            group[rows], collective[rows] = (self.names.codes(names, len(rows)) for names in columns[1:])
        return occupancy, group, collective

    def spans(self) -> tuple[Spans, Memory]:
        """Returns the columns of all events. Call it once: it consumes them."""
        parts, self._spans = self._spans, []
        columns: list[NDArray[Any]] = []
        for number, kind in enumerate(_TYPES):
            columns.append(np.concatenate([part[number] for part in parts]) if parts else np.zeros(0, kind))
            for part in parts:
                part[number] = _EMPTY  # frees the part: memory peaks at one column more than the result
        memory = np.concatenate(self._memory) if self._memory else np.zeros((0, 6))
        columns, first_us = self._with_relative_times(columns)
        at_ns = np.rint((memory[:, 0] - first_us) * NS_PER_US)
        return Spans(*columns), Memory(
            *(np.clip(column, -(2.0**62), 2.0**62).astype(np.int64) for column in (at_ns, *memory.T[1:]))
        )

    def _with_relative_times(self, columns: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], float]:
        start, dur = columns[3], columns[4]
        valid = (np.abs(start - (np.median(start) if start.size else 0.0)) < LONGEST_US) & (dur < LONGEST_US)
        if not valid.all():
            self.untimed += int((~valid).sum())
            columns = [column[valid] for column in columns]
            start, dur = columns[3], columns[4]
        first_us = float(start.min()) if start.size else 0.0
        columns[3] = np.rint((start - first_us) * NS_PER_US).astype(np.int64)
        columns[4] = np.rint(dur * NS_PER_US).astype(np.int64)
        return columns, first_us


_EMPTY: NDArray[Any] = np.zeros(0)
_TYPES: tuple[type[np.generic], ...] = (
    np.int32, np.int32, np.int32, np.float64, np.float64, np.int64, np.int32, np.float32, np.int32, np.int32,
)  # fmt: skip
"""Types of the columns of ``Spans``, while times are still microseconds."""


def shapes(path: str | Path, name: str, *, most: int = 10) -> list[dict[str, Any]]:
    """Returns the shapes with which an operator was called, those with the most time first.

    Args:
        path: a trace taken with ``record_shapes=True``.
        name: the operator, such as ``aten::addmm``.
        most: entries at most.

    Returns:
        ``shapes`` (JSON: one list per input, empty if it is not a tensor), ``count``, and ``seconds`` from start to
        end. Empty if the operator does not occur or shapes were not recorded.

    Raises:
        TraceError: it is not a trace.
    """
    path = Path(path)
    sums: dict[str, list[float]] = {}
    try:
        for event in (event for piece in TraceFileReader(path, json_list) for event in piece):
            if isinstance(event, dict) and event.get("name") == name and isinstance(event.get("args"), dict):
                dims, dur_us = event["args"].get("Input Dims"), event.get("dur")
                if dims and isinstance(dur_us, (int, float)):
                    entry = sums.setdefault(json.dumps(dims), [0, 0.0])
                    entry[0] += 1
                    entry[1] += float(dur_us)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    ranked = sorted(sums.items(), key=lambda item: -item[1][1])[:most]
    return [{"shapes": dims, "count": int(count), "seconds": us / 1e6} for dims, (count, us) in ranked]


class EventKind(IntEnum):
    """Kind of a complete event."""

    ELSE = 0
    OP = 1
    ANNOTATION = 2
    RUNTIME = 3
    KERNEL = 4
    COPY = 5


_KINDS = {
    **dict.fromkeys(("cpu_op", "operator"), EventKind.OP),
    "user_annotation": EventKind.ANNOTATION,
    **dict.fromkeys(
        ("cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "xpu_runtime", "xpu_driver"),
        EventKind.RUNTIME,
    ),
    "kernel": EventKind.KERNEL,
    **dict.fromkeys(("gpu_memcpy", "gpu_memset", "memcpy", "memset"), EventKind.COPY),
}
"""Kind by category in lower case. Source: libkineto's ActivityType.cpp; torch before 1.11 wrote ``Operator``, ``Kernel`` and so on."""


_FORMER_OPERATOR = re.compile(r"ProfilerStep#|Optimizer\.\w+#|enumerate\(DataLoader\)#|otel_train:")
"""Ranges to which torch before 1.11 gave the category ``Operator``. As operators they would count the time of those inside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The complete events of one process as columns, and the metadata of the file."""

    path: Path
    rank: int | None  # from the file or, where that does not say, from its name; None where neither does
    world_size: int | None
    about: Mapping[str, Any]  # keys of the document other than ``traceEvents``
    spans: Spans  # in order of their start
    kind: NDArray[np.int8]  # ``EventKind`` of each span
    memory: Memory
    names: Sequence[str]  # by code
    missing: tuple[str, ...]  # what is not in the trace or could not be read, a sentence each
    broken: str  # why events at the end are missing; "" where none are

    def rows(self, *kinds: EventKind) -> NDArray[np.intp]:
        """Returns the rows of events of some kinds, in order of their start."""
        chosen: NDArray[np.intp] = np.flatnonzero(np.isin(self.kind, kinds))
        return chosen

    def named(self, rows: NDArray[np.intp], matches: Callable[[str], object]) -> NDArray[np.bool_]:
        """Returns bool[row]: whether the name of each of these rows matches."""
        wanted = np.array([bool(matches(name)) for name in self.names], np.bool_)
        return wanted[self.spans.name[rows]]


def read(path: str | Path, *, progress: Callable[[int, int], None] | None = None) -> Trace:
    """Reads a Chrome trace, plain JSON or gzip, as exported by ``torch.profiler``; ``missing`` lists what could not be read.

    The file is read in pieces. ``progress`` is called with (bytes read, bytes in the file) after each.

    Raises:
        TraceError: there is no such file, or it is not a trace.
    """
    path = Path(path)
    columns, about, faults = _collected(path, progress)
    spans, memory = columns.spans()
    order = np.argsort(spans.start_ns, kind="stable")
    if not np.array_equal(order, np.arange(order.size)):
        spans = spans.take(order)
    faults["untimed"] = columns.untimed
    if not spans.name.size and (faults["broken"] or faults["skipped"]):
        raise TraceError(f"{path}: {faults['broken'] or 'nothing in it is an event'}; no event could be read")
    kind = _kinds(columns, spans)
    rank, world_size = _place(about)
    if rank is None and (match := OF_A_RANK.search(path.name)):
        rank = int(match[1])
    return Trace(
        path=path,
        rank=rank,
        world_size=world_size,
        about=about,
        spans=spans,
        kind=kind,
        memory=memory,
        names=list(columns.names),
        missing=tuple(_missing(about, rank, kind, remembers=bool(memory.at_ns.size), faults=faults)),
        broken=faults["broken"],
    )


def _kinds(columns: EventColumns, spans: Spans) -> NDArray[np.int8]:
    """Returns the kind of each span."""
    categories = [str(name).lower() for name in columns.categories]
    kinds = [_KINDS.get(name, EventKind.ELSE) for name in categories] or [EventKind.ELSE]
    kind: NDArray[np.int8] = np.array(kinds, np.int8)[np.minimum(spans.category, len(kinds) - 1)]
    if "operator" in categories:
        ranges = np.array([_FORMER_OPERATOR.match(name) is not None for name in columns.names], np.bool_)
        kind[(kind == EventKind.OP) & ranges[spans.name]] = EventKind.ANNOTATION
    return kind


def _collected(
    path: Path, progress: Callable[[int, int], None] | None
) -> tuple[EventColumns, Mapping[str, Any], dict[str, Any]]:
    """Returns the events of a file, its metadata, and errors."""
    columns, skipped = EventColumns(), 0
    try:
        pieces = TraceFileReader(path, decode, progress)
        for events, others in pieces:
            columns.add(events)
            skipped += others
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    faults = {"broken": pieces.broken, "skipped": skipped + pieces.skipped, "unpaired": columns.unpaired}
    return columns, pieces.about, faults


def _place(about: Mapping[str, Any]) -> tuple[int | None, int | None]:
    info = about.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    numbers = ((info.get(key), least) for key, least in (("rank", 0), ("world_size", 1)))
    rank, size = (value if isinstance(value, int) and value >= least else None for value, least in numbers)
    return rank, size


_NO_DEVICE = (
    "No device events: the run was on the CPU, ProfilerActivity.CUDA was not requested, or the profiler may not read the "
    "device's counters."
)


def _missing(
    about: Mapping[str, Any],
    rank: int | None,
    kind: NDArray[np.int8],
    *,
    remembers: bool,
    faults: Mapping[str, Any],
) -> list[str]:
    """Returns what the trace lacks, a sentence each."""
    kinds = set(np.unique(kind).tolist())
    version = about.get("schemaVersion")
    sentences = [  # Kineto writes ``schemaVersion`` 1; others are read as if they were 1
        (faults["broken"], f"The file is cut off: {faults['broken']}."),
        (faults["skipped"], f"Pieces of text that cannot be read as events: {faults['skipped']:,}."),
        (faults["untimed"], f"Events without a valid start or duration: {faults['untimed']:,}."),
        (
            faults["unpaired"],
            f"Events with a separate begin and end (ph B and E), which are left out: {faults['unpaired']:,}.",
        ),
        (not kinds, "There are no events. Was the profiler stepped, and long enough for its schedule?"),
        (kinds and EventKind.OP not in kinds, "No operators: was ProfilerActivity.CPU requested?"),
        (kinds and not kinds & {EventKind.KERNEL, EventKind.COPY}, _NO_DEVICE),
        (not remembers, "No memory events: use `otel-train profile --memory`, or profile_memory=True."),
        (rank is None, "The file does not name its rank."),
        (version is None, "The file does not name the version of its format; it is read as version 1."),
        (version not in (None, 1), f"Its format has version {version!r}; it is read as version 1."),
    ]
    return [sentence for applies, sentence in sentences if applies]
