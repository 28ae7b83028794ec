"""The files of a run directory that may be looked at and taken away."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from otel_train.files import Mark, is_folder, mark_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_FILES = 400
_DEEPEST = 3
_SHOWN = re.compile(
    r"report\.html|captures/[^/]+\.json(?:\.gz)?|artifacts/.+|"
    r"rank\d+/(?:summary\.json|flight(?:-\d+)?\.bin|(?:events|metrics\.otlp|spans\.otlp)\.jsonl(?:\.1)?)"
)
"""What may be taken away. Others may open doors: ``capture-token`` arms captures, and ``run.json`` of older versions has it."""


class File(NamedTuple):
    """One file.

    Attributes:
        name: below the run directory, parts joined by ``/``.
        path: where it lies.
        mark: its version.
    """

    name: str
    path: Path
    mark: Mark


def files_of(run: Path, rank: int | None) -> list[File]:
    """Files of the run and of one of its ranks, by name. Links, hidden files and what lies too deep are left out."""
    folders = ["captures", "artifacts", *([f"rank{rank}"] if rank is not None else [])]
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
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    return sorted(name for name in names if not name.startswith(".") and name.isprintable())[:MOST_FILES]
