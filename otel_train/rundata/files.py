"""Files of a run directory: former versions of documents, checks of untrusted values, and the files that may be downloaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.datamodel import CAPTURES_FOLDER, FLIGHT_FILE, RUN_FILE, SUMMARY_FILE, SUMMARY_SCHEMA
from otel_train.errors import shown
from otel_train.files import JsonFileCache, Mark, is_folder, mark_of, names_in, rank_folders

if TYPE_CHECKING:
    from pathlib import Path

_LONGEST = 200
"""Most characters of a name from a file, which is untrusted and may hold megabytes."""


def is_run(path: Path) -> bool:
    """Returns whether a folder is a run directory: it has a ``run.json`` or the folder of a rank."""
    return is_folder(path) and (mark_of(path / RUN_FILE) is not None or bool(rank_folders(path)))


def has_postmortem(run: Path) -> bool:
    """Returns whether a rank of the run has a flight file, which ``otel-train postmortem`` reads."""
    return any(mark_of(folder / FLIGHT_FILE) is not None for folder in rank_folders(run).values())


_FORMER_SCHEMAS = {
    "otel_train.summary/1": SUMMARY_SCHEMA,
    "otel_train.artifacts.profiler_summary/1": "otel_train.artifacts.profiler_summary/2",
}
_FORMER_KEYS = {
    "verdicts": "findings",
    "claim": "summary",
    "unobserved": "instrumentation_gaps",
    "notes": "warnings",
    "pump_cpu_seconds": "agent_cpu_seconds",
}
_WITH_FORMER_KEYS = ("findings", "finding", "telemetry", "capture")


def current_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a summary, or the metadata of a capture, with former keys renamed to those of this version."""
    found = {_FORMER_KEYS.get(key, key): value for key, value in document.items()}
    for key in _WITH_FORMER_KEYS:
        inner = found.get(key)
        if isinstance(inner, dict):
            found[key] = current_document(inner)
        elif isinstance(inner, list):
            found[key] = [current_document(each) if isinstance(each, dict) else each for each in inner]
    if (schema := text(found.get("schema"))) in _FORMER_SCHEMAS:
        found["schema"] = _FORMER_SCHEMAS[schema]
    return found


def is_former(document: Mapping[str, Any]) -> bool:
    """Returns whether a former version wrote the document: then it may lack keys of this version."""
    return text(document.get("schema")) in _FORMER_SCHEMAS


def summary_of(documents: JsonFileCache, folder: Path, warnings: list[str]) -> dict[str, Any]:
    """Returns a rank's summary; empty if there is none, and with a warning if it cannot be read or its version is unknown."""
    return known_summary(documents.get_or_empty(folder / SUMMARY_FILE, warnings), warnings)


def known_summary(document: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Returns a summary with the keys of this version; empty, with a warning, if its version is unknown."""
    summary = current_document(document)
    if summary and (problem := version_problem(summary)):
        warnings.append(f"{SUMMARY_FILE}: {problem}. It is passed over.")
        return {}
    return summary


def version_problem(summary: Mapping[str, Any]) -> str:
    """Returns how the version of a summary differs from the known one; "" if it does not."""
    schema = summary.get("schema")
    return "" if schema == SUMMARY_SCHEMA else f"schema is {shown(schema)}, expected {SUMMARY_SCHEMA!r}"


def has_ended(summary: Mapping[str, Any]) -> bool:
    """Returns whether a summary has an end state of its rank."""
    return summary.get("state") not in (None, "running")


FOREIGN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""Exceptions that reading a document of unknown shape may raise. RuntimeError: StopIteration in a generator, or RecursionError."""


def mapping(value: object) -> dict[str, Any]:
    """Returns ``value`` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def rows(value: object) -> list[dict[str, Any]]:
    """Returns the JSON objects in a list; an empty list if ``value`` is not a list."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def text(value: object) -> str:
    """Returns a text, cut to ``_LONGEST`` characters; "" if ``value`` is not a text."""
    return value[:_LONGEST] if isinstance(value, str) else ""


def number(value: object) -> float | None:
    """Returns a finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: object) -> int | None:
    """Returns an integer of 64 bits; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else None


MOST_FILES = 400
_DEEPEST = 3
_SHOWN = re.compile(
    r"report\.html|captures/[^/]+\.json(?:\.gz)?|artifacts/.+|"
    r"rank\d+/(?:summary\.json|flight(?:-\d+)?\.bin|(?:events|metrics\.otlp|spans\.otlp)\.jsonl(?:\.1)?)"
)
"""Files that may be downloaded: not ``capture-token``, which permits captures, nor ``run.json``, old ones of which contain it."""

_OF_A_RANK = re.compile(r"rank(\d+)")


class File(NamedTuple):
    """One file. ``name`` is its path relative to the run directory, with ``/``."""

    name: str
    path: Path
    mark: Mark


def files_of(run: Path, rank: int | None) -> list[File]:
    """Returns the files of the run and of one rank that may be downloaded, without links, hidden and deeply nested files.

    Captures are sorted, the newest first. Of more than ``MOST_FILES`` files, those of other ranks are left out first.
    """
    own = [f"rank{rank}"] if rank is not None else []
    found = list(_plain(run, "", rank))
    for name in (*own, CAPTURES_FOLDER, "artifacts"):
        below = list(_below(run / name, f"{name}/", rank, _DEEPEST))
        found += sorted(below, key=lambda file: -file.mark.changed_ns) if name == CAPTURES_FOLDER else below
    return sorted(found, key=lambda file: _is_of_another(file.name, rank))[:MOST_FILES]


def _below(folder: Path, above: str, rank: int | None, deeper: int) -> Iterator[File]:
    if deeper == 0 or not is_folder(folder):
        return
    yield from _plain(folder, above, rank)
    for name in _names(folder, rank):
        yield from _below(folder / name, f"{above}{name}/", rank, deeper - 1)


def _plain(folder: Path, above: str, rank: int | None) -> Iterator[File]:
    for name in _names(folder, rank):
        mark = mark_of(folder / name)
        if mark is not None and _SHOWN.fullmatch(above + name):
            yield File(above + name, folder / name, mark)


def _names(folder: Path, rank: int | None) -> list[str]:
    shown = [name for name in names_in(folder) if not name.startswith(".") and name.isprintable()]
    return sorted(shown, key=lambda name: _is_of_another(name, rank))[:MOST_FILES]


def _is_of_another(name: str, rank: int | None) -> bool:
    """Returns whether a path has the number of another rank than ``rank``; never without a ``rank``."""
    match = _OF_A_RANK.search(name) if rank is not None else None
    return match is not None and match[1] != str(rank)
