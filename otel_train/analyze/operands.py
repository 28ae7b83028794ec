"""Shapes of what operators were given: a second reading, for those who ask."""

from __future__ import annotations

import json
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any

from otel_train.analyze.decode import BrokenTextError, json_value
from otel_train.analyze.pieces import Limits, Pieces, TraceFileSource
from otel_train.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_KEY = "Input Dims"
Seen = tuple[str, float]


def shapes(path: str | Path, name: str, *, most: int = 10) -> list[dict[str, Any]]:
    """The shapes with which an operator was called, the heaviest first.

    Args:
        path: a trace taken with ``record_shapes=True``.
        name: the operator, such as ``aten::addmm``.
        most: entries at most.

    Returns:
        ``shapes`` (JSON: one list per input, empty for what is no tensor), ``count``, and ``seconds`` from begin to
        end. Empty where the operator does not occur or shapes were not recorded.

    Raises:
        TraceError: it is no trace.
    """
    path = Path(path)
    sums: dict[str, list[float]] = {}
    try:
        for piece in Pieces(TraceFileSource(path, Limits()), path, decode=partial(_seen, name)):
            for dims, dur_us in piece:
                entry = sums.setdefault(dims, [0, 0.0])
                entry[0] += 1
                entry[1] += dur_us
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
    ranked = sorted(sums.items(), key=lambda item: -item[1][1])[:most]
    return [{"shapes": dims, "count": int(count), "seconds": us / 1e6} for dims, (count, us) in ranked]


def _seen(name: str, text: bytes) -> list[Seen]:
    quick = _quick()
    if quick is not None:
        try:
            return [
                (_plain(event.args.dims), event.dur)
                for event in quick(text)
                if event.name == name and event.args.dims
            ]
        except (ValueError, RecursionError):
            pass  # as in ``decode``: the patient way tells whether it is JSON at all
    return list(_patiently(name, text))


def _patiently(name: str, text: bytes) -> Iterator[Seen]:
    found = json_value(text)
    if not isinstance(found, list):
        raise BrokenTextError("not a list")
    for event in found:
        if isinstance(event, dict) and event.get("name") == name and isinstance(event.get("args"), dict):
            dims, dur = event["args"].get(_KEY), event.get("dur")
            if dims and isinstance(dur, (int, float)):
                yield json.dumps(dims), float(dur)


def _plain(dims: Any) -> str:  # Any: msgspec.Raw, the text as it stands
    return json.dumps(json.loads(bytes(dims)))


@cache
def _quick() -> Callable[[bytes], list[Any]] | None:
    if find_spec("msgspec") is None:
        return None
    import msgspec

    arguments = msgspec.defstruct(
        "_Dims", [("dims", msgspec.Raw, msgspec.Raw(b""))], rename={"dims": _KEY}, frozen=True
    )
    event = msgspec.defstruct(
        "_Shaped", [("name", str, ""), ("dur", float, 0.0), ("args", arguments, arguments())], frozen=True
    )
    decoder: Callable[[bytes], list[Any]] = msgspec.json.Decoder(GenericAlias(list, (event,))).decode
    return decoder
