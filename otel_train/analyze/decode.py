"""The text of events as typed values, by the quickest reader that takes it."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.util import find_spec
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    warps: float = math.nan
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
    "warps": "warps per SM",
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


class Event(NamedTuple):
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
        events: objects with the attributes of ``Event``.
        skipped: list entries that are no event.
    """

    events: Sequence[Event]
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
def _quick() -> Callable[[bytes], Sequence[Event]] | None:
    """msgspec, told what to read: it steps over the rest without making objects of it. None if not installed."""
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
    decoder: Callable[[bytes], Sequence[Event]] = msgspec.json.Decoder(GenericAlias(list, (event,))).decode
    return decoder


def _patient(text: bytes) -> Decoded:
    """As ``decode``, for texts with values of any type: what is not what it should be counts as not said."""
    found = json_value(text)
    if not isinstance(found, list):
        raise BrokenTextError("not a list")
    events = [_event(value) for value in found if isinstance(value, dict)]
    return Decoded(events, len(found) - len(events))


def _event(value: dict[str, Any]) -> Event:
    args = value.get("args")
    return Event(
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
