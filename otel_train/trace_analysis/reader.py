"""Reads Chrome traces of any size, piece by piece."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from otel_train.errors import TraceError
from otel_train.files import open_given, unzipped

if TYPE_CHECKING:
    from pathlib import Path

_LARGEST = 2**63 - 1  # of int64


class BrokenTextError(ValueError):
    """A text is not JSON."""


class EventArguments(NamedTuple):
    """The fields of an event's ``args`` that are read; -1, NaN and "" if missing."""

    correlation: int = -1
    stream: int = -1
    occupancy: float = math.nan
    group: str = ""
    collective: str = ""
    change: int = 0
    allocated: int = -1
    reserved: int = -1
    device_type: int = -1
    device_id: int = -1


KEYS = {
    "correlation": "correlation", "stream": "stream", "occupancy": "est. achieved occupancy %",
    "group": "Process Group Name", "collective": "Collective name", "change": "Bytes", "allocated": "Total Allocated",
    "reserved": "Total Reserved", "device_type": "Device Type", "device_id": "Device Id",
}  # fmt: skip
"""Keys of ``args`` by field of ``EventArguments``. Source: output_json.cpp of pytorch/kineto."""


class TraceEvent(NamedTuple):
    """The fields of an event that are read. Times are microseconds; NaN if missing."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = math.nan
    dur: float = math.nan
    args: EventArguments = EventArguments()


def decode(text: bytes) -> tuple[Sequence[TraceEvent], int]:
    """Returns the events of a JSON array, and how many of its entries are not events; BrokenTextError if it is not an array."""
    fast_decode = _msgspec_decoder()
    if fast_decode is not None:
        try:
            return fast_decode(text), 0
        except (ValueError, RecursionError):
            pass  # msgspec's errors are ValueErrors: invalid JSON, or a value of a type that Kineto does not write
    found = json_list(text)
    events = [_event(value) for value in found if isinstance(value, dict)]
    return events, len(found) - len(events)


def json_list(text: bytes) -> list[Any]:
    """Parses a JSON array with the standard library, which accepts more than msgspec; raises BrokenTextError if it is not one."""
    found = _json(text)
    if not isinstance(found, list):
        raise BrokenTextError("not a list")
    return found


def _json(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise BrokenTextError(str(error)) from error


@cache
def _msgspec_decoder() -> Callable[[bytes], Sequence[TraceEvent]] | None:
    """Returns a msgspec decoder of the fields that are read, which makes no objects of others; None if msgspec is not installed."""
    if find_spec("msgspec") is None:
        return None
    import msgspec

    int64 = Annotated[int, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
    types: dict[type, Any] = {int: int64, float: float, str: str}
    fields = [
        (name, types[type(default)], default) for name, default in EventArguments._field_defaults.items()
    ]
    arguments = msgspec.defstruct("_Arguments", fields, rename=KEYS, frozen=True, gc=False)
    int64_or_text = int64 | str
    event = msgspec.defstruct("_Event", [
        ("ph", str, ""), ("name", str, ""), ("cat", str, ""), ("pid", int64_or_text, 0), ("tid", int64_or_text, 0),
        ("ts", float, math.nan), ("dur", float, math.nan), ("args", arguments, arguments()),
    ], frozen=True, gc=False)  # fmt: skip
    decoder: Callable[[bytes], Sequence[TraceEvent]]
    decoder = msgspec.json.Decoder(GenericAlias(list, (event,))).decode
    return decoder


def _event(value: dict[str, Any]) -> TraceEvent:
    """Converts an event whose values may have any type: wrong ones count as missing."""
    args = value.get("args")
    args = args if isinstance(args, dict) else {}
    defaults, keys = TraceEvent._field_defaults, ("ph", "name", "cat", "ts", "dur")
    ph, name, cat, ts, dur = (_typed(value.get(key), defaults[key]) for key in keys)
    places = (value.get(key) for key in ("pid", "tid"))
    pid, tid = (place if isinstance(place, (int, str)) else str(place) for place in places)
    typed = (_typed(args.get(KEYS[key]), default) for key, default in EventArguments._field_defaults.items())
    return TraceEvent(ph, name, cat, pid, tid, ts, dur, EventArguments(*typed))


def _typed(value: object, default: Any) -> Any:
    """Converts a value to the type of ``default``, or returns ``default``. Early versions wrote numbers in quotes."""
    if isinstance(default, str):
        return value if isinstance(value, str) else default
    try:
        number = value if isinstance(value, int) else math.nan
        if isinstance(value, (float, str)):
            number = float(value)
        if isinstance(default, float):
            return float(number)
    except (ValueError, OverflowError):
        return default
    return int(number) if abs(number) <= _LARGEST else default  # also if it is NaN


PIECE_BYTES = 1 << 20
"""Text decoded at a time. Events are much smaller, and files that take long to read are much larger."""

_READ_BYTES = 1 << 18  # of one read of a plain file
_GZIP = b"\x1f\x8b"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_TOKENS = re.compile(rb'\\.(?:\\.){0,255}|"|\{|\}|\[|\]', re.DOTALL)
"""Each alternative begins with a literal character, so that the search skips other text: 7 times faster."""

_BETWEEN = re.compile(rb'(?<=\})\s*,\s*(?=\{\s*"(?:ph|name|cat|ts|pid)")')
_CLOSES = b"}]"
_TRIES = 4  # candidates for the end of the last event, before the text is scanned for it


LONGEST_BYTES = 64 << 20
"""Longest event, and longest text before the first one."""

DEEPEST = 1 << 20
"""Deepest nesting of brackets in an event. No JSON decoder accepts that many, and each costs microseconds here."""

EXPANSION, FREE_BYTES = 200, 256 << 20
"""Largest ratio of text to the size of a gzip file (10 to 40 for traces); text that a file of any size may unpack to."""


class TraceFileReader:
    """Reads the events of a plain or gzip file in pieces, and the metadata around them.

    ``decode`` converts the text of a JSON array of events, or raises ``BrokenTextError``; ``progress`` is called with
    (bytes read, bytes in the file) after each read.
    """

    def __init__(
        self, path: Path, decode: Callable[[bytes], Any], progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.about: dict[str, Any] = {}  # other keys of the document, such as ``distributedInfo``
        self.broken = ""  # why events are missing at the end
        self.skipped = 0  # pieces of text that looked like an event and could not be read
        self._path = path
        self._decode = decode
        self._progress = progress
        self._text = self._read()

    def _read(self) -> Iterator[bytes]:
        """Yields the text, uncompressed, in parts of at most 1 MiB."""
        with open_given(self._path) as file:
            size = os.fstat(file.fileno()).st_size
            zipped = file.read(2) == _GZIP
            file.seek(0)
            parts = unzipped(file) if zipped else iter(lambda: file.read(_READ_BYTES), b"")
            allowed = max(FREE_BYTES, EXPANSION * size)
            text_bytes = 0
            try:
                for part in parts:
                    text_bytes += len(part)
                    if zipped and text_bytes > allowed:
                        raise TraceError(
                            f"{self._path}: {size:,} bytes of gzip unpack to more than {allowed:,}: this is not a trace"
                        )
                    if self._progress:
                        self._progress(file.tell(), size)
                    yield part
            except EOFError:
                self.broken = f"the gzip data end early, after {text_bytes:,} bytes of text"
            except zlib.error as error:
                self.broken = f"the gzip data are damaged after {text_bytes:,} bytes of text ({error})"

    def __iter__(self) -> Iterator[Any]:
        """Yields the result of ``decode`` for each piece."""
        held, listed = self._head()
        wanted = PIECE_BYTES
        while True:
            held, ended = self._filled(held, wanted)
            if ended:
                break
            end, made = self._whole_events(held)
            if end == 0:
                if len(held) > LONGEST_BYTES:
                    raise TraceError(
                        f"{self._path}: no event ends within {LONGEST_BYTES:,} bytes: this is not a trace"
                    )
                wanted = min(2 * len(held), LONGEST_BYTES + 1)
                continue
            yield from made
            wanted, held = PIECE_BYTES, held[end:]
            if held.lstrip()[:1] == b"]":
                held, _ = self._filled(held, LONGEST_BYTES)
                break
        yield from self._last(held, listed=listed)

    def _filled(self, held: bytes, wanted: int) -> tuple[bytes, bool]:
        """Returns ``held`` extended by text of the file to ``wanted`` bytes, and whether the file has ended."""
        parts, size = [held], len(held)
        while size < wanted:
            part = next(self._text, None)
            if part is None:
                return b"".join(parts), True
            parts.append(part)
            size += len(part)
        return b"".join(parts), False

    def _head(self) -> tuple[bytes, bool]:
        """Returns the text after the opening bracket of the events, and whether the document is a plain list of events."""
        held, ended = self._filled(b"", 1)
        held = held.removeprefix(b"\xef\xbb\xbf")
        while not (start := held.lstrip()) and not ended:
            held, ended = self._filled(b"", 1)
        if not start:
            raise TraceError(f"{self._path}: {self.broken or 'the file is empty'}")
        if start[:1] == b"[":
            return start[1:], True
        if start[:1] != b"{":
            raise TraceError(
                f"{self._path}: starts with {start[:12].decode(errors='backslashreplace')!r}: expected JSON of a Chrome trace"
            )
        tried = 0
        while True:
            for found in _EVENTS.finditer(start, max(0, tried - 64)):
                about = _object(start[: found.end()] + b"]}")
                if about is not None and about.pop("traceEvents", None) == []:
                    self.about = about
                    return start[found.end() :], False
            tried = len(start)
            if ended or tried > LONGEST_BYTES:
                why = self.broken or "is it a capture of torch.profiler (export_chrome_trace)?"
                raise TraceError(f"{self._path}: has no traceEvents: {why}")
            start, ended = self._filled(start, min(2 * tried, LONGEST_BYTES + 1))

    def _decoded(self, text: bytes) -> Any:
        """Returns the result of ``decode`` for a text of events; None if some of it is not JSON."""
        try:
            return self._decode(b"[" + text + b"]")
        except BrokenTextError:
            return None

    def _whole_events(self, held: bytes) -> tuple[int, list[Any]]:
        """Returns the end of the last complete event and its comma, and the decoded events up to there."""
        end = len(held)
        for _ in range(_TRIES):
            end = held.rfind(b"},", 0, end) + 1
            if not end:
                break
            # The text starts with an event: if it is valid JSON in brackets, it ends with an event, too.
            if (made := self._decoded(held[:end])) is not None:
                return end + 1, [made]
        end, _ = self._scan(held)
        comma = re.compile(rb"\s*,?").match(held, end)
        return (comma.end() if comma else end, self._one_by_one(held[:end])) if end else (0, [])

    def _one_by_one(self, text: bytes) -> list[Any]:
        """Returns the events of a text of which a part may be invalid JSON: then one by one."""
        if (whole := self._decoded(text)) is not None:
            return [whole]
        made = [self._decoded(event) for event in _BETWEEN.split(text)]
        self.skipped += made.count(None)
        return [piece for piece in made if piece is not None]

    def _last(self, held: bytes, *, listed: bool) -> list[Any]:
        """Returns the last events; adds the metadata after them to ``about``."""
        end = len(held)
        for _ in range(_TRIES):
            end = held.rfind(b"]", 0, end)
            if end < 0:
                break
            after = {} if listed and not held[end + 1 :].strip() else _object(b'{"":0' + held[end + 1 :])
            if after is None:
                continue
            if (made := self._decoded(held[:end].rstrip().rstrip(b","))) is not None:
                after.pop("", None)
                self.about = {**self.about, **after}
                return [made]
        end, closed = self._scan(held)
        # Chrome's plain list of events may go without its bracket at the end.
        if not closed and (held[end:].strip(b" \t\r\n,") or not listed):
            self.broken = self.broken or "it ends in the middle of an event"
        return self._one_by_one(held[:end].strip()) if held[:end].strip() else []

    def _scan(self, text: bytes) -> tuple[int, bool]:
        """Returns the end of the last complete value of a list that began before ``text``, and whether the list ends after it."""
        depth = end = 0
        quoted = False  # a pattern for strings would backtrack over all text after a string without an end
        for token in _TOKENS.finditer(text):
            first = token[0][:1]
            if first == b'"':
                quoted = not quoted
            if quoted or first in b'"\\':
                continue
            depth += -1 if first in _CLOSES else 1
            if depth < 0:
                return end, True
            if depth > DEEPEST:
                raise TraceError(
                    f"{self._path}: an event is nested deeper than {DEEPEST:,} levels: this is not a trace"
                )
            if depth == 0:
                end = token.end()
        return end, False


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = _json(text)
    except BrokenTextError:
        return None
    return value if isinstance(value, dict) else None
