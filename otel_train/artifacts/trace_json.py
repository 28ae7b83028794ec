"""``trace.json``: the newest capture unpacked, or the stages of the last steps, for Perfetto."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

from otel_train.errors import RunDirectoryError
from otel_train.files import create, open_given

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from otel_train.rundata.flight import Timeline
    from otel_train.rundata.run import RunReader

ABOUT = "otel_train"
"""Key of the document that says what it was made from; viewers pass over keys they do not know."""

LAST_STEPS = 200
"""Steps of a trace made from stages: as many as one looks at."""

MOST_BYTES = 2 << 30
"""Perfetto's own limit for JSON in a browser is about this."""

_CHUNK_BYTES = 1 << 20
_STEPS, _STAGES = 1, 2
_NS_PER_US = 1e3


def unpack(capture: Path, target: Path) -> None:
    """Write a capture as plain JSON, with a key that says which it is.

    Raises:
        RunDirectoryError: it unpacks to more than a viewer opens.
        OSError: it cannot be read, or written; nothing is left behind.
    """
    about = {"source": "capture", "capture": capture.name}
    with _replacing(target) as sink, _opened(capture) as source:
        head = source.read(_CHUNK_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
        bare = head[:1] == b"["
        rest = head if bare else head[1:].lstrip()
        empty = rest[:1] == b"}"
        sink.write(f'{{"{ABOUT}": {json.dumps(about)}{"" if empty else ", "}'.encode())
        sink.write(b'"traceEvents": ' if bare else b"")
        written = 0
        while rest:
            written += len(rest)
            if written > MOST_BYTES:
                raise RunDirectoryError(f"{capture.name} unpacks to more than {MOST_BYTES >> 30} GiB")
            sink.write(rest)
            rest = source.read(_CHUNK_BYTES)
        sink.write(b"}" if bare else b"")


def from_stages(left: RunReader, timeline: Timeline, first: int) -> dict[str, Any]:
    """The last steps and the calls in them, one track each.

    Args:
        left: whose.
        timeline: with at least one step.
        first: number of the first step in ``timeline``.
    """
    begin = max(0, len(timeline) - LAST_STEPS)
    origin_ns = int(timeline.started_ns[begin])
    events = [
        _named("process_name", 0, f"rank {left.rank}"),
        _named("thread_name", _STEPS, "steps"),
        _named("thread_name", _STAGES, "stages"),
    ]
    events += [
        _event(f"step {first + row}", "step", _STEPS, (
            int(timeline.started_ns[row]) - origin_ns, int(timeline.ended_ns[row] - timeline.started_ns[row])
        ))
        for row in range(begin, len(timeline))
    ]  # fmt: skip
    events += [
        _event(call.stage, "stage", _STAGES, (call.started_ns - origin_ns, call.lasted_ns), of=call.about)
        for call in timeline.calls(origin_ns)
    ]
    about = {
        "source": "stages",
        "steps": [first + begin, first + len(timeline) - 1],
        "started_unix_s": timeline.unix_s(origin_ns),
        "reason": "there is no capture that can be read: these are the stages as they were timed, without operations",
    }
    return {ABOUT: about, "displayTimeUnit": "ms", "traceEvents": events}


def _event(name: str, category: str, track: int, span_ns: tuple[int, int], **args: str) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": 0, "tid": track,
        "ts": span_ns[0] / _NS_PER_US, "dur": span_ns[1] / _NS_PER_US,
        "args": {key: value for key, value in args.items() if value},
    }  # fmt: skip


def _named(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": track, "args": {"name": name}}


@contextlib.contextmanager
def _opened(capture: Path) -> Iterator[BinaryIO]:
    with open_given(capture) as file:
        yield cast("BinaryIO", gzip.GzipFile(fileobj=file)) if capture.suffix == ".gz" else file


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    """A file that takes its place when it is whole."""
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with os.fdopen(create(fresh), "wb") as sink:
            yield sink
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
