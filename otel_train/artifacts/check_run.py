"""Whether a run directory is whole, its files say the same, and its figures obey the laws."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from otel_train.artifacts.check import Fault, check
from otel_train.artifacts.laws import laws_of
from otel_train.artifacts.run_reader import FLIGHT, METRICS, SUMMARY, left_by
from otel_train.artifacts.write import SUMMARY as ARTIFACTS_SUMMARY
from otel_train.artifacts.write import home_of
from otel_train.errors import RunDirectoryError
from otel_train.exporters.jsonl import parse_line, predecessor
from otel_train.exporters.run_directory import rank_directories
from otel_train.files import lines_of, open_binary, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LINES = ("events.jsonl", METRICS, "spans.otlp.jsonl")


def check_run(run: Path) -> list[Fault]:
    """Everything that is missing or does not agree in a run directory and in the artifacts in it."""
    faults = list(_document(run / "run.json"))
    ranks = rank_directories(run)
    if not ranks:
        faults.append(Fault(str(run), "there is no folder of a rank"))
    for folder in ranks:
        faults += _rank(run, int(folder.name[4:]))
    return faults


def _document(path: Path) -> Iterator[Fault]:
    try:
        read_json(path)
    except RunDirectoryError as error:
        yield Fault(path.name, str(error))


def _rank(run: Path, rank: int) -> Iterator[Fault]:
    folder = run / f"rank{rank}"
    try:
        left = left_by(run, rank)
    except RunDirectoryError as error:
        yield Fault(folder.name, str(error))
        return
    if not left.summary:
        yield Fault(f"{folder.name}/{SUMMARY}", "is missing, or cannot be read")
    elif not left.ended:
        yield Fault(f"{folder.name}/{SUMMARY}", "the run has not come to an end that anybody wrote down")
    if left.timeline is None and (left.about.get("settings") or {}).get("flight", True):
        yield Fault(f"{folder.name}/{FLIGHT}", "is missing, cannot be read, or holds nothing")
    for said in left.notes:
        yield Fault(folder.name, said)
    for name in LINES:
        yield from _lines(folder / name)
    try:
        yield from _figures(f"{folder.name}/{SUMMARY}", left.summary)
    except (TypeError, KeyError, AttributeError, ValueError, ArithmeticError) as error:
        yield Fault(f"{folder.name}/{SUMMARY}", f"a figure has not the shape it should have: {error!r}")
    home = home_of(run, rank)
    if (home / ARTIFACTS_SUMMARY).exists():
        yield from (Fault(f"{home.relative_to(run)}/{fault.file}", fault.what) for fault in check(home))


def _lines(path: Path) -> Iterator[Fault]:
    """Lines that are whole must be JSON; a last one that a crash tore off is none of those."""
    for part in (predecessor(path), path):
        if not os.path.lexists(part):
            continue
        try:
            with open_binary(part) as file:
                broken = sum(parse_line(line) is None for line in lines_of(file) if line.endswith(b"\n"))
        except OSError as error:
            yield Fault(f"{part.parent.name}/{part.name}", error.strerror or str(error))
            continue
        if broken:
            yield Fault(f"{part.parent.name}/{part.name}", f"{broken} lines are no JSON objects")


def _figures(name: str, summary: Mapping[str, Any]) -> Iterator[Fault]:
    """What breaks a law, and what was lost."""
    if not summary:
        return
    yield from (Fault(name, broken) for broken in laws_of(summary))
    lost = summary["telemetry"]["records_lost"]
    if lost:
        yield Fault(name, f"{lost} records were lost: what happened in them is in no figure")
