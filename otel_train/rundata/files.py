"""Files of a run directory: which of them may be downloaded, and values read from them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.datamodel import CAPTURES_FOLDER, FLIGHT_FILE, RUN_FILE, SUMMARY_FILE, SUMMARY_SCHEMA
from otel_train.files import JsonFileCache, Mark, is_folder, mark_of, names_in, rank_folders

if TYPE_CHECKING:
    from pathlib import Path

_LONGEST = 200
"""Characters of a name that are shown: a file may hold megabytes."""


def is_run(path: Path) -> bool:
    """Returns whether a folder is one of a run: it has a ``run.json``, or a rank has a folder in it."""
    return is_folder(path) and (mark_of(path / RUN_FILE) is not None or bool(rank_folders(path)))


def has_postmortem(run: Path) -> bool:
    """Returns whether a rank of a run has a flight file, which ``otel-train postmortem`` reads."""
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
    """Returns a summary, or the metadata of a capture, under the keys of this version, whichever version wrote it."""
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
    """Returns whether a former version wrote it, whose documents lack some keys of this one."""
    return text(document.get("schema")) in _FORMER_SCHEMAS


def summary_of(documents: JsonFileCache, folder: Path, warnings: list[str]) -> dict[str, Any]:
    """Returns a rank's summary; empty, with a warning, if it is not one of a version known here."""
    return known_summary(documents.get_or_empty(folder / SUMMARY_FILE, warnings), warnings)


def known_summary(document: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Returns a summary under the keys of this version; empty, with a warning, if it is not one of a version known here."""
    summary = current_document(document)
    if summary and summary.get("schema") != SUMMARY_SCHEMA:
        warnings.append(
            f"{SUMMARY_FILE} has schema {text(summary.get('schema'))!r}, which is not known here: it is passed over."
        )
        return {}
    return summary


def has_ended(summary: Mapping[str, Any]) -> bool:
    """Returns whether a summary says how its rank ended."""
    return summary.get("state") not in (None, "running")


FOREIGN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""What reading a document of an unknown shape may raise; RuntimeError: a generator ended too soon, or nesting is too deep."""


def mapping(value: object) -> dict[str, Any]:
    """Returns an object from a file; empty for anything else."""
    return value if isinstance(value, dict) else {}


def rows(value: object) -> list[dict[str, Any]]:
    """Returns the objects of a list from a file; none for anything else."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def text(value: object) -> str:
    """Returns a name from a file, no longer than a reader can use; "" for what is no text."""
    return value[:_LONGEST] if isinstance(value, str) else ""


def number(value: object) -> float | None:
    """Returns a finite number from a file; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: object) -> int | None:
    """Returns a count from a file; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else None


MOST_FILES = 400
_DEEPEST = 3
_SHOWN = re.compile(
    r"report\.html|captures/[^/]+\.json(?:\.gz)?|artifacts/.+|"
    r"rank\d+/(?:summary\.json|flight(?:-\d+)?\.bin|(?:events|metrics\.otlp|spans\.otlp)\.jsonl(?:\.1)?)"
)
"""What may be downloaded. Others may open doors: ``capture-token`` arms captures, and ``run.json`` of older versions has it."""


class File(NamedTuple):
    """One file; its name is below the run directory, with parts joined by ``/``."""

    name: str
    path: Path
    mark: Mark


def files_of(run: Path, rank: int | None) -> list[File]:
    """Returns the files of the run and of one of its ranks, by name. Links, hidden files and deeply nested ones are skipped."""
    folders = [CAPTURES_FOLDER, "artifacts", *([f"rank{rank}"] if rank is not None else [])]
    found = list(_plain(run, ""))
    for name in folders:
        found += _below(run / name, f"{name}/", _DEEPEST)
    return found[:MOST_FILES]


def _below(folder: Path, above: str, deeper: int) -> Iterator[File]:
    if deeper == 0 or not is_folder(folder):
        return
    yield from _plain(folder, above)
    for name in _names(folder):
        yield from _below(folder / name, f"{above}{name}/", deeper - 1)


def _plain(folder: Path, above: str) -> Iterator[File]:
    for name in _names(folder):
        mark = mark_of(folder / name)
        if mark is not None and _SHOWN.fullmatch(above + name):
            yield File(above + name, folder / name, mark)


def _names(folder: Path) -> list[str]:
    shown = [name for name in names_in(folder) if not name.startswith(".") and name.isprintable()]
    return shown[:MOST_FILES]
