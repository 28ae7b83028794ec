"""One profiler trace, read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.analyze.columns import Columns, Memory, Spans
from otel_train.analyze.decode import decode
from otel_train.analyze.pieces import Limits, Pieces, TraceFileSource
from otel_train.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

KNOWN_SCHEMA = 1
"""The ``schemaVersion`` that Kineto writes. Others are read as far as they are alike."""


class Kind(IntEnum):
    """What a complete event is."""

    ELSE = 0
    OP = 1
    NOTE = 2
    RUNTIME = 3
    KERNEL = 4
    COPY = 5
    PYTHON = 6
    DEVICE_NOTE = 7


_KINDS = {
    "cpu_op": Kind.OP,
    "operator": Kind.OP,
    "user_annotation": Kind.NOTE,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME,
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "memcpy": Kind.COPY,
    "memset": Kind.COPY,
    "python_function": Kind.PYTHON,
    "gpu_user_annotation": Kind.DEVICE_NOTE,
}
"""By category, in lower case. Source: libkineto's ActivityType.cpp; before 1.11 ``Operator``, ``Kernel`` and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The complete events of one process as columns, and what the document says about itself.

    Attributes:
        path: where it was read.
        rank: which rank; None where the trace does not say.
        world_size: ranks in the run; None where the trace does not say.
        about: keys of the document that are no events.
        spans: complete events, in order of their start.
        kind: int8, ``Kind`` of each.
        memory: what the allocators said, in order of time.
        names: by the numbers in the columns.
        lanes: (pid, tid), by the numbers in the columns.
        first_us: the instant 0 of the columns, on the clock of the trace.
        missing: what is not in the trace or could not be read, a sentence each.
    """

    path: Path
    rank: int | None
    world_size: int | None
    about: Mapping[str, Any]
    spans: Spans
    kind: NDArray[np.int8]
    memory: Memory
    names: Sequence[str]
    lanes: Sequence[tuple[Any, Any]]
    first_us: float
    missing: tuple[str, ...]

    def rows(self, *kinds: Kind) -> NDArray[np.intp]:
        """Rows of events of some kinds, in order of their start."""
        chosen: NDArray[np.intp] = np.flatnonzero(np.isin(self.kind, kinds))
        return chosen

    @property
    def device_rows(self) -> NDArray[np.intp]:
        """Rows of everything a device did: kernels, copies and fills."""
        return self.rows(Kind.KERNEL, Kind.COPY)

    @property
    def span_ns(self) -> tuple[int, int]:
        """First and last instant of all complete events; (0, 0) if there are none."""
        ends = self.spans.end_ns
        return (0, int(ends.max())) if ends.size else (0, 0)


def read(
    path: str | Path, *, progress: Callable[[int, int], None] | None = None, limits: Limits | None = None
) -> Trace:
    """Read a Chrome trace, as ``torch.profiler`` exports it.

    Args:
        path: plain JSON or gzip, up to gigabytes: it is read in pieces, and events become columns.
        progress: called with (bytes read, bytes in the file) now and then.
        limits: what a file may cost before it is refused.

    Returns:
        What could be read. ``missing`` says what could not.

    Raises:
        TraceError: there is no such file, or it is no trace.
    """
    path = Path(path)
    columns, about, faults = _collected(path, progress, limits or Limits())
    spans, memory, first_us = columns.spans()
    order = np.argsort(spans.start_ns, kind="stable")
    if not np.array_equal(order, np.arange(order.size)):
        spans = spans.take(order)
    faults["untimed"] = columns.untimed
    if not spans.name.size and (faults["broken"] or faults["skipped"]):
        raise TraceError(f"{path}: {faults['broken'] or 'nothing in it is an event'}; no event could be read")
    kinds = [_KINDS.get(str(name).lower(), Kind.ELSE) for name in columns.categories] or [Kind.ELSE]
    kind = np.array(kinds, np.int8)[np.minimum(spans.category, len(kinds) - 1)]
    rank, world_size = _place(about)
    return Trace(
        path=path,
        rank=rank,
        world_size=world_size,
        about=about,
        spans=spans,
        kind=kind,
        memory=memory,
        names=list(columns.names),
        lanes=list(columns.lanes),
        first_us=first_us,
        missing=tuple(_missing(about, kind, remembers=bool(memory.at_ns.size), faults=faults)),
    )


def _collected(
    path: Path, progress: Callable[[int, int], None] | None, limits: Limits
) -> tuple[Columns, Mapping[str, Any], dict[str, Any]]:
    """The events of a file, what stands around them, and what went wrong."""
    columns, skipped = Columns(), 0
    try:
        pieces = Pieces(TraceFileSource(path, limits, progress), path, decode=decode, limits=limits)
        for piece in pieces:
            columns.add(piece.events)
            skipped += piece.skipped
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    faults = {"broken": pieces.broken, "skipped": skipped + pieces.skipped, "unpaired": columns.unpaired}
    return columns, pieces.about, faults


def _place(about: Mapping[str, Any]) -> tuple[int | None, int | None]:
    told = about.get("distributedInfo")
    told = told if isinstance(told, dict) else {}
    rank, size = (told.get(key) for key in ("rank", "world_size"))
    return (
        rank if isinstance(rank, int) and rank >= 0 else None,
        size if isinstance(size, int) and size > 0 else None,
    )


def _missing(
    about: Mapping[str, Any], kind: NDArray[np.int8], *, remembers: bool, faults: Mapping[str, Any]
) -> list[str]:
    """What the reader of any figure must know is not in it."""
    here = set(np.unique(kind).tolist())
    version = about.get("schemaVersion")
    said = [
        (faults["broken"], f"The file is cut off: {faults['broken']}."),
        (faults["skipped"], f"{faults['skipped']:,} pieces of text are no events that can be read."),
        (faults["untimed"], f"{faults['untimed']:,} events have no instant or length that makes sense."),
        (faults["unpaired"], f"{faults['unpaired']:,} events are halves (ph B and E) and are left out."),
        (not kind.size, "There are no events. Was the profiler stepped, and long enough for its schedule?"),
        (kind.size and Kind.OP not in here, "There are no operators: was ProfilerActivity.CPU asked for?"),
        (
            kind.size and not here & {Kind.KERNEL, Kind.COPY},
            (
                "Nothing of a device is in it: a run on the CPU, ProfilerActivity.CUDA not asked for, or a profiler "
                "that was not let to the device's counters."
            ),
        ),
        (not remembers, "Nothing is said about memory: profile_memory=True was not set."),
        (_place(about)[0] is None, "It does not say which rank it is."),
        (version is None, "It does not say which version of the format it has; it is read as version 1."),
        (
            version not in (None, KNOWN_SCHEMA),
            f"Its format has version {version!r}; it is read as version 1.",
        ),
    ]
    return [sentence for applies, sentence in said if applies]
