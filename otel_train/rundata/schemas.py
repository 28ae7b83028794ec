"""Checks documents of a run against their JSON Schemas, the files ``*.schema.json`` in this folder.

Supports the part of JSON Schema, draft 2020-12, that these use: types, ranges, patterns, enums, required keys, references.
Unknown keys are allowed, whatever a schema says: a later version may have added them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from otel_train.errors import RunDirectoryError, shown
from otel_train.files import dump_json

if TYPE_CHECKING:
    from pathlib import Path

    Schema = Mapping[str, Any]

_Place: TypeAlias = "tuple[()] | tuple[_Place, str | int]"
"""Path of a value in a document, as a linked list: the path of its container, and its key or index in that."""

REMEDY: Final = (
    "The file was edited or damaged: restore it from a copy. 'otel-train validate' lists every such value"
)

_MOST: Final = 200
"""Most wrong values of a document that are reported: each of a million elements may be one."""

_IN_MESSAGE: Final = 3  # most wrong values in one message
_MOST_EXACT: Final = float(1 << 53)  # below it a float represents every integer exactly
_WORDS: Final = {
    "object": "an object", "array": "a list", "string": "text", "boolean": "true or false", "null": "null",
    "integer": "a whole number", "number": "a number",
}  # fmt: skip
_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int,
    "number": (int, float),
}  # fmt: skip
_UNREADABLE: Final = " (so are NaN, Infinity and integers beyond 64 bits read)"


def wrong_values(document: object, schema: str, *, complete: bool = True) -> list[str]:
    """Returns the violations of a schema: a sentence for each wrong value, with key, value and rule.

    Args:
        document: the JSON value of a file, or of one line of it.
        schema: a schema file, and a definition in it, such as ``summary`` or ``files/run``.
        complete: whether required keys are checked. Documents of former versions lack some.
    """
    name, _, part = schema.partition("/")
    checker = _Checker(_schema(name), complete=complete)
    checker.compare(document, checker.root["$defs"][part] if part else checker.root)
    found = checker.found
    return [*found[:_MOST], f"and further wrong values, behind the first {_MOST}"] if found[_MOST:] else found


def check(document: object, schema: str, path: Path, *, complete: bool = True) -> None:
    """Raises RunDirectoryError for a document with wrong values; the message has path, first wrong values and remedy."""
    if found := wrong_values(document, schema, complete=complete):
        raise RunDirectoryError(message_of(found, path))


def checked(
    document: dict[str, Any], schema: str, path: Path, warnings: list[str], *, complete: bool = True
) -> dict[str, Any]:
    """Returns the document, or an empty one, with a warning, if it has wrong values. An empty document passes."""
    if document and (found := wrong_values(document, schema, complete=complete)):
        warnings.append(f"{message_of(found, path.name)}. It is passed over.")
        return {}
    return document


def message_of(found: list[str], path: Path | str) -> str:
    """Returns one message about wrong values of a file."""
    more = f"; and {len(found) - _IN_MESSAGE} more" if len(found) > _IN_MESSAGE else ""
    return f"{path}: {'; '.join(found[:_IN_MESSAGE])}{more}. {REMEDY}"


@lru_cache
def _schema(name: str) -> Schema:
    text = resources.files("otel_train.rundata").joinpath(f"{name}.schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


class _Checker:
    """Compares a document with a schema, whose references point into ``root``; collects violations in ``found``."""

    def __init__(self, root: Schema, *, complete: bool) -> None:
        self.root, self.complete = root, complete
        self.found: list[str] = []

    def compare(self, value: Any, rule: Schema, place: _Place = ()) -> None:
        """Compares a value, and recursively its elements, with a rule; ``place``: path of the value in the document."""
        if len(self.found) > _MOST:
            return
        if "$ref" in rule:
            self.compare(value, self.root["$defs"][rule["$ref"].rpartition("/")[2]], place)
        if (expected := _expected(value, rule)) is not None:
            note = _UNREADABLE if value is None and "number" in expected else ""
            self.found.append(f"{_key(place)} is {shown_json(value)}{note}: expected {expected}")
        elif isinstance(value, dict):
            self._compare_object(value, rule, place)
        elif isinstance(value, list) and "items" in rule:
            for index, each in enumerate(value):
                self.compare(each, rule["items"], (place, index))

    def _compare_object(self, value: dict[str, Any], rule: Schema, place: _Place) -> None:
        for name in rule.get("required", ()) if self.complete else ():
            if name not in value:
                self.found.append(f"{_key((place, name))} is missing")
        choices = rule.get("anyOf", ())
        if choices and not any(all(name in value for name in one["required"]) for one in choices):
            sets = " or ".join(", ".join(one["required"]) for one in choices)
            self.found.append(f"{_key(place)} has none of its keys {sets}")
        known, others = rule.get("properties", {}), rule.get("additionalProperties")
        for name, each in value.items():
            if inner := known.get(name, others):
                self.compare(each, inner, (place, name))


def _key(place: _Place) -> str:
    """Returns the path of a value as text, such as ``stages[2].count``."""
    text = ""
    while place:
        place, step = place
        if isinstance(step, int):
            text = f"[{step}]{text}"
        else:
            text = (
                f".{step}{text}"
                if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", step)
                else f"[{shown(step)}]{text}"
            )
    return text.removeprefix(".") or "the document"


def _expected(value: Any, rule: Schema) -> str | None:
    """Returns what a rule requires if a value violates it; None if the value is right."""
    if "const" in rule and value != rule["const"]:
        return shown_json(rule["const"])
    if "enum" in rule and not any(value is each or value == each for each in rule["enum"]):
        return f"one of {', '.join(map(str, rule['enum']))}"
    types = rule.get("type", ())
    types = (types,) if isinstance(types, str) else types
    if types and not any(_is(value, name) for name in types):
        return " or ".join(map(_WORDS.__getitem__, types))
    return _out_of_bounds(value, rule)


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer() and abs(value) < _MOST_EXACT  # other programs may write 5 as 5.0
    return isinstance(value, _TYPES[name])


def _out_of_bounds(value: Any, rule: Schema) -> str | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < rule.get("minimum", value):
            return f"at least {rule['minimum']}"
        return f"at most {rule['maximum']}" if value > rule.get("maximum", value) else None
    if isinstance(value, str) and "pattern" in rule:
        return None if re.fullmatch(rule["pattern"], value) else f"text that matches {rule['pattern']}"
    if isinstance(value, (dict, list)):
        of = "Properties" if isinstance(value, dict) else "Items"
        least, most = rule.get(f"min{of}", 0), rule.get(f"max{of}", len(value))
        if not least <= len(value) <= most:
            return f"from {least} to {most} in it" if f"max{of}" in rule else f"at least {least} in it"
    return None


def shown_json(value: object) -> str:
    """Returns a value as JSON on one line, cut to ``_LONGEST`` characters."""
    text = " ".join(dump_json(value).split()) if not isinstance(value, (dict, list)) else _outline(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_LONGEST: Final = 80


def _outline(value: dict[str, Any] | list[Any]) -> str:
    """Returns an object or a list in a message: its number of elements, since it may have any size."""
    if not value:
        return "{}" if isinstance(value, dict) else "[]"
    return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value):,}"
