"""Reads Chrome traces of any size, piece by piece."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from functools import cache
from importlib.util import find_spec
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from otel_train.errors import TraceError
from otel_train.files import open_given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

_LARGEST = 2**63 - 1


class BrokenTextError(ValueError):
    """A text is not JSON."""


class Arguments(NamedTuple):
    """What is read of an event's ``args``; -1, NaN and "" stand for what is not said."""

    external: int = -1
    correlation: int = -1
    stream: int = -1
    device: int = -1
    size: int = -1
    occupancy: float = math.nan
    group: str = ""
    collective: str = ""
    change: int = 0
    allocated: int = -1
    reserved: int = -1
    device_type: int = -1
    device_id: int = -1


KEYS = {
    "external": "External id",
    "correlation": "correlation",
    "stream": "stream",
    "device": "device",
    "size": "bytes",
    "occupancy": "est. achieved occupancy %",
    "group": "Process Group Name",
    "collective": "Collective name",
    "change": "Bytes",
    "allocated": "Total Allocated",
    "reserved": "Total Reserved",
    "device_type": "Device Type",
    "device_id": "Device Id",
}
"""How Kineto calls what is read of ``args``. Source: output_json.cpp of pytorch/kineto."""

_NOTHING = Arguments()


class TraceEvent(NamedTuple):
    """What is read of an event. Times are microseconds; NaN stands for what is not said."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = math.nan
    dur: float = math.nan
    args: Arguments = _NOTHING


class Decoded(NamedTuple):
    """The events of one piece of text.

    Attributes:
        events: objects with the attributes of ``TraceEvent``.
        skipped: list entries that are no event.
    """

    events: Sequence[TraceEvent]
    skipped: int = 0


def decode(text: bytes) -> Decoded:
    """The events of a JSON array.

    Raises:
        BrokenTextError: the text is not a JSON array.
    """
    quick = _quick()
    if quick is not None:
        try:
            return Decoded(quick(text))
        except (ValueError, RecursionError):
            # msgspec's errors are ValueErrors: no JSON, or a value of a type that Kineto does not write.
            pass
    return _patient(text)


def json_value(text: bytes) -> Any:  # Any: JSON
    """Any JSON, by the standard library, which takes what stricter readers refuse.

    Raises:
        BrokenTextError: it is none, or nested too deeply to be read.
    """
    try:
        return json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise BrokenTextError(str(error)) from error


@cache
def _quick() -> Callable[[bytes], Sequence[TraceEvent]] | None:
    """msgspec, with the types to read: it skips the rest without making objects of it. None if not installed."""
    if find_spec("msgspec") is None:
        return None
    import msgspec

    whole = Annotated[int, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
    types: dict[type, Any] = {int: whole, float: float, str: str}
    arguments = msgspec.defstruct(
        "_Arguments",
        [(name, types[type(default)], default) for name, default in Arguments._field_defaults.items()],
        rename=KEYS,
        frozen=True,
        gc=False,
    )
    place = whole | str
    event = msgspec.defstruct(
        "_Event",
        [
            ("ph", str, ""), ("name", str, ""), ("cat", str, ""), ("pid", place, 0), ("tid", place, 0),
            ("ts", float, math.nan), ("dur", float, math.nan), ("args", arguments, arguments()),
        ],
        frozen=True,
        gc=False,
    )  # fmt: skip
    decoder: Callable[[bytes], Sequence[TraceEvent]] = msgspec.json.Decoder(
        GenericAlias(list, (event,))
    ).decode
    return decoder


def _patient(text: bytes) -> Decoded:
    """As ``decode``, for texts with values of any type: what is not what it should be counts as not said."""
    found = json_value(text)
    if not isinstance(found, list):
        raise BrokenTextError("not a list")
    events = [_event(value) for value in found if isinstance(value, dict)]
    return Decoded(events, len(found) - len(events))


def _event(value: dict[str, Any]) -> TraceEvent:
    args = value.get("args")
    return TraceEvent(
        ph=_text(value.get("ph")),
        name=_text(value.get("name")),
        cat=_text(value.get("cat")),
        pid=_place(value.get("pid")),
        tid=_place(value.get("tid")),
        ts=_real(value.get("ts")),
        dur=_real(value.get("dur")),
        args=_arguments(args) if isinstance(args, dict) else _NOTHING,
    )


def _arguments(args: dict[str, Any]) -> Arguments:
    said: dict[str, Any] = {}
    for name, default in Arguments._field_defaults.items():
        value = args.get(KEYS[name])
        if value is not None:
            said[name] = (
                _text(value)
                if isinstance(default, str)
                else _whole(value, default)
                if isinstance(default, int)
                else _real(value)
            )
    return Arguments(**said)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _place(value: object) -> int | str:
    return value if isinstance(value, (int, str)) else str(value)


def _real(value: object) -> float:
    """A number, also one in quotes as early versions wrote it; NaN for anything else."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _whole(value: object, default: int) -> int:
    number = value if isinstance(value, int) else _real(value)
    return int(number) if abs(number) <= _LARGEST else default  # also False for NaN


PIECE_BYTES = 1 << 20
"""Text decoded at a time: small beside any file that takes time, large beside an event."""

LONGEST_BYTES = 64 << 20
"""Text in which an event, or the head of the file, must end."""

MOST_EXPANSION, FREE_EXPANSION_BYTES = 200, 256 << 20
"""How many times its own size, beyond what is free, a gzip file may grow to. Traces grow 10 to 40 times."""

_READ_BYTES = 1 << 18
_GZIP = b"\x1f\x8b"
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_BETWEEN = re.compile(rb'(?<=\})\s*,\s*(?=\{\s*"(?:ph|name|cat|ts|pid)")')
_CLOSES = b"}]"
_TRIES = 4


class Limits(NamedTuple):
    """What a file may cost before it is refused.

    Attributes:
        longest_bytes: text without the end of an event.
        expansion: times its own size that a gzip file may grow to.
        free_bytes: text a gzip file may grow to whatever its own size is.
    """

    longest_bytes: int = LONGEST_BYTES
    expansion: int = MOST_EXPANSION
    free_bytes: int = FREE_EXPANSION_BYTES


class TraceFileSource:
    """Reads a plain or a gzip file as text, in order.

    Args:
        path: the file.
        limits: what it may cost.
        progress: called with (bytes read, bytes in the file) after each read.

    Attributes:
        broken: why the text ends before its end, or "".
    """

    def __init__(
        self, path: Path, limits: Limits, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.broken = ""
        self._path = path
        self._limits = limits
        self._progress = progress
        with open_given(path) as file:
            self.size = os.fstat(file.fileno()).st_size

    def __iter__(self) -> Iterator[bytes]:
        """The text, in parts of some hundred kilobytes."""
        with open_given(self._path) as file:
            zipped = file.read(2) == _GZIP
            file.seek(0)
            parts = self._unzipped(file) if zipped else self._plain(file)
            for part in parts:
                if self._progress:
                    self._progress(file.tell(), self.size)
                yield part

    def _plain(self, file: BinaryIO) -> Iterator[bytes]:
        while part := file.read(_READ_BYTES):
            yield part

    def _unzipped(self, file: BinaryIO) -> Iterator[bytes]:
        allowed = max(self._limits.free_bytes, self._limits.expansion * self.size)
        unzip, text_bytes, fed = zlib.decompressobj(wbits=31), 0, b""
        while fed := fed or file.read(_READ_BYTES):
            if unzip.eof:  # members may follow one another, with zeros for padding
                fed, unzip = fed.lstrip(b"\0"), zlib.decompressobj(wbits=31)
                continue
            try:
                part = unzip.decompress(fed, _READ_BYTES)
            except zlib.error as error:
                self.broken = f"the gzip data are damaged after {text_bytes:,} bytes of text ({error})"
                return
            fed = unzip.unconsumed_tail or unzip.unused_data
            text_bytes += len(part)
            if text_bytes > allowed:
                raise TraceError(
                    f"{self._path}: {self.size:,} bytes of gzip grow to more than {allowed:,}: this is no trace"
                )
            yield part
        if not unzip.eof:
            self.broken = f"the gzip data end early, after {text_bytes:,} bytes of text"


class Pieces:
    """The events of a file, in decoded pieces, and what stands around them.

    Args:
        source: the text.
        path: what to call it in errors.
        decode: turns the text of a JSON array of events into anything; raises ``BrokenTextError`` if it is not JSON.
        limits: what the file may cost.

    Attributes:
        about: the other keys of the document: ``schemaVersion``, ``distributedInfo`` and so on.
        broken: why events are missing at the end, or "".
        skipped: pieces of text that looked like an event and could not be read.
    """

    def __init__(
        self,
        source: TraceFileSource,
        path: Path,
        *,
        decode: Callable[[bytes], Any],
        limits: Limits | None = None,
    ) -> None:
        self.about: dict[str, Any] = {}
        self.broken = ""
        self.skipped = 0
        self._source = source
        self._path = path
        self._decode = decode
        self._longest = (limits or Limits()).longest_bytes
        self._parts = iter(source)

    def __iter__(self) -> Iterator[Any]:
        """Each piece as ``decode`` made it."""
        held, listed = self._head()
        wanted = PIECE_BYTES
        while True:
            held, ended = self._filled(held, wanted)
            if ended:
                break
            end, made = self._whole_events(held)
            if end == 0:
                if len(held) > self._longest:
                    raise TraceError(
                        f"{self._path}: no event ends within {self._longest:,} bytes: this is no trace"
                    )
                wanted = 2 * len(held)
                continue
            yield from made
            wanted, held = PIECE_BYTES, held[end:]
            if held.lstrip()[:1] == b"]":
                held, _ = self._filled(held, self._longest)
                break
        yield from self._last(held, listed=listed)
        self.broken = self._source.broken or self.broken

    def _filled(self, held: bytes, wanted: int) -> tuple[bytes, bool]:
        parts, size = [held], len(held)
        while size < wanted:
            part = next(self._parts, None)
            if part is None:
                return b"".join(parts), True
            parts.append(part)
            size += len(part)
        return b"".join(parts), False

    def _head(self) -> tuple[bytes, bool]:
        """The text after the opening bracket of the events, and whether the document is nothing but a list."""
        held, ended = self._filled(b"", 1)
        while not (start := held.removeprefix(b"\xef\xbb\xbf").lstrip()) and not ended:
            held, ended = self._filled(held, len(held) + 1)
        if not start:
            raise TraceError(f"{self._path}: {self._source.broken or 'the file is empty'}")
        if start[:1] == b"[":
            return start[1:], True
        if start[:1] != b"{":
            raise TraceError(
                f"{self._path}: starts with {bytes(start[:12])!r}: expected JSON of a Chrome trace"
            )
        tried = 0
        while True:
            for found in _EVENTS.finditer(start, max(0, tried - 64)):
                about = _object(start[: found.end()] + b"]}")
                if about is not None and about.pop("traceEvents", None) == []:
                    self.about = about
                    return start[found.end() :], False
            tried = len(start)
            if ended or tried > self._longest:
                why = self._source.broken or "is it a capture of torch.profiler (export_chrome_trace)?"
                raise TraceError(f"{self._path}: has no traceEvents: {why}")
            start, ended = self._filled(start, 2 * tried)

    def _whole_events(self, held: bytes) -> tuple[int, list[Any]]:
        """Where the last whole event ends, its comma included, and the events before it."""
        end = len(held)
        for _ in range(_TRIES):
            end = held.rfind(b"},", 0, end) + 1
            if not end:
                break
            try:
                # A text that begins at an event and is a whole array in brackets ends at an event, too.
                return end + 1, [self._decode(b"[" + held[:end] + b"]")]
            except BrokenTextError:
                continue
        end, _ = _scan(held)
        return (_after_comma(held, end), self._by_one(held[:end])) if end else (0, [])

    def _by_one(self, text: bytes) -> list[Any]:
        """Events of a text in which not all is JSON."""
        try:
            return [self._decode(b"[" + text + b"]")]
        except BrokenTextError:
            made: list[Any] = []
        for event in _BETWEEN.split(text):
            made += self._one(event)
        return made

    def _one(self, event: bytes) -> list[Any]:
        try:
            return [self._decode(b"[" + event + b"]")]
        except BrokenTextError:
            self.skipped += 1
            return []

    def _last(self, held: bytes, *, listed: bool) -> list[Any]:
        """The events at the end of the text, and what the document says after them."""
        end = len(held)
        for _ in range(_TRIES):
            end = held.rfind(b"]", 0, end)
            if end < 0:
                break
            after = {} if listed and not held[end + 1 :].strip() else _object(b'{"":0' + held[end + 1 :])
            if after is None:
                continue
            try:
                made = [self._decode(b"[" + held[:end].rstrip().rstrip(b",") + b"]")]
            except BrokenTextError:
                continue
            after.pop("", None)
            self.about = {**self.about, **after}
            return made
        end, closed = _scan(held)
        # Chrome's plain list of events may go without its bracket at the end.
        if not closed and (held[end:].strip(b" \t\r\n,") or not listed):
            self.broken = "it ends in the middle of an event"
        return self._by_one(held[:end].strip()) if held[:end].strip() else []


def _scan(text: bytes) -> tuple[int, bool]:
    """Where the last whole value of a list that began before ``text`` ends, and whether the list ends after it."""
    depth = end = 0
    for token in _TOKENS.finditer(text):
        first = token[0][:1]
        if first == b'"':
            continue
        depth += -1 if first in _CLOSES else 1
        if depth < 0:
            return end, True
        if depth == 0:
            end = token.end()
    return end, False


def _after_comma(text: bytes, end: int) -> int:
    while text[end : end + 1].isspace():
        end += 1
    return end + 1 if text[end : end + 1] == b"," else end


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json_value(text)
    except BrokenTextError:
        return None
    return value if isinstance(value, dict) else None
