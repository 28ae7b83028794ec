"""Whether the artifacts in a folder are all there, readable, and say the same."""

from __future__ import annotations

import csv
import io
import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.artifacts import documents
from otel_train.artifacts.traces import ABOUT, MOST_BYTES
from otel_train.artifacts.write import (
    BY_STAGE,
    CAPTURES,
    CONFIG,
    METRICS,
    NAMES,
    OP_COLUMNS,
    OPS,
    STAGE_TIMES,
    SUMMARY,
    TRACE,
)
from otel_train.errors import RunDirectoryError
from otel_train.files import open_binary, parse_json, problem_of, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    Document = Mapping[str, Any]

CLOSE = 1e-6
"""Sums of the same nanoseconds, added in another order, differ by less than this share."""

_SCHEMAS = {CONFIG: "config", METRICS: "metrics", STAGE_TIMES: "stage_times", BY_STAGE: "by_stage"}
_MOST_TRACE_BYTES = 256 << 20
"""A larger trace is looked at by its beginning and its end: parsed, it would take ten times its size in memory."""

_EDGE_BYTES = 4096
_WORDS = ("phase", "loader", "model", "stage")


class Fault(NamedTuple):
    """What is wrong, and where."""

    file: str
    what: str


def check(folder: Path) -> list[Fault]:
    """Everything that is missing or does not agree; empty when all is well.

    Args:
        folder: of artifacts; one whose ``profiler_summary.json`` cannot be read has that fault alone.
    """
    try:
        summary = _read(folder, SUMMARY, "profiler_summary")
    except RunDirectoryError as error:
        return [Fault(SUMMARY, str(error))]
    told = summary.get("artifacts")
    told = told if isinstance(told, dict) else {}
    faults = list(_presence(folder, told))
    broken = {fault.file for fault in faults}
    read: dict[str, Document] = {}
    for name, schema in _SCHEMAS.items():
        if name in broken:
            continue
        try:
            read[name] = _read(folder, name, schema)
        except RunDirectoryError as error:
            faults.append(Fault(name, str(error)))
    for name, look in ((OPS, _operations), (TRACE, _trace)):
        if name not in broken and "absent" not in (told.get(name) or {}):
            faults += [Fault(name, said) for said in look(folder / name)]
    try:
        return [*faults, *_identities(summary, read), *_agreement(summary, read)]
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        return [*faults, Fault(SUMMARY, f"a figure has not the shape it should have: {error!r}")]


def _read(folder: Path, name: str, schema: str) -> dict[str, Any]:
    document = read_json(folder / name, root=folder)
    found, wanted = document.get("schema"), documents.schema(schema)
    if found != wanted:
        raise RunDirectoryError(f"{name} has schema {found!r}, expected {wanted!r}.")
    return document


def _presence(folder: Path, told: Document) -> Iterator[Fault]:
    for name in NAMES:
        entry = told.get(name)
        if not isinstance(entry, dict):
            yield Fault(name, f"{SUMMARY} does not account for it")
        elif "absent" in entry:
            if name != CAPTURES and (folder / name).exists():
                yield Fault(name, f"is there, and {SUMMARY} says it is not")
        elif "files" in entry:
            for file in map(str, entry["files"] if isinstance(entry["files"], list) else ()):
                problem = (
                    "its name is a path" if "/" in file else problem_of(folder / name / file, root=folder)
                )
                if problem:
                    yield Fault(f"{name}/{file}", problem)
        elif problem := problem_of(folder / name, root=folder):
            yield Fault(name, problem)
        elif (size := (folder / name).stat().st_size) != entry.get("bytes"):
            yield Fault(name, f"has {size:,} bytes; {SUMMARY} says {entry.get('bytes')}")


def _operations(path: Path) -> Iterator[str]:
    try:
        with io.TextIOWrapper(open_binary(path, root=path.parent), encoding="utf-8", newline="") as file:
            rows = csv.reader(file, strict=True)
            if tuple(next(rows, ())) != OP_COLUMNS:
                yield f"its columns are not {', '.join(OP_COLUMNS)}"
                return
            for line, row in enumerate(rows, 2):
                if len(row) != len(OP_COLUMNS) or any(documents.number(cell) is None for cell in row[2:]):
                    yield f"line {line} is no row of figures"
                    return
    except (OSError, ValueError, csv.Error) as error:
        yield f"cannot be read: {error}"


def _trace(path: Path) -> Iterator[str]:
    with open_binary(path, root=path.parent) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES + _EDGE_BYTES:
            yield f"has {size:,} bytes: more than a viewer opens"
            return
        if size > _MOST_TRACE_BYTES:
            head = file.read(_EDGE_BYTES)
            file.seek(size - _EDGE_BYTES)
            if f'"{ABOUT}"'.encode() not in head or not file.read().rstrip().endswith(b"}"):
                yield "does not say what it was made from, or is cut off"
            return
        try:
            document = parse_json(file.read(_MOST_TRACE_BYTES))
        except ValueError as error:
            yield f"cannot be read: {error}"
            return
    told = document if isinstance(document, dict) else {}
    events = told.get("traceEvents")
    if not isinstance(events, list) or not events:
        yield "has no events"
    elif ABOUT not in told:
        yield "does not say what it was made from"


def _identities(summary: Document, read: Mapping[str, Document]) -> Iterator[Fault]:
    for name, document in read.items():
        for key in ("run_id", "rank", "attempt"):
            if document.get(key) != summary.get(key):
                yield Fault(
                    name, f"{key} is {document.get(key)!r}; that of {SUMMARY} is {summary.get(key)!r}"
                )


def _agreement(summary: Document, read: Mapping[str, Document]) -> Iterator[Fault]:
    rows = {_key(row): row for row in summary["stages"]}
    if (times := read.get(STAGE_TIMES)) is not None:
        there = {_key(row): row for row in times["totals"]}
        for key in sorted(rows.keys() | there.keys()):
            for figure in ("count", "inclusive_seconds", "self_seconds"):
                mine, theirs = ((of.get(key) or {}).get(figure) for of in (rows, there))
                if not _same(mine, theirs):
                    yield Fault(
                        STAGE_TIMES,
                        f"{figure} of {' · '.join(filter(None, key))} is {theirs}; in {SUMMARY} {mine}",
                    )
        yield from _steps(summary, times)
    if (timer := read.get(BY_STAGE)) is not None:
        yield from _timer(rows, timer)
    if (metrics := read.get(METRICS)) is not None and summary.get("ended") and metrics["metrics"]:
        yield from _metrics(rows, metrics)


def _key(row: Document) -> tuple[str, ...]:
    return tuple(str(row[word]) for word in _WORDS)


def _steps(summary: Document, times: Document) -> Iterator[Fault]:
    rows = times["per_step"]
    if [row["step"] for row in rows] != list(
        range(rows[0]["step"], rows[0]["step"] + len(rows)) if rows else ()
    ):
        yield Fault(STAGE_TIMES, "the steps of per_step do not follow one another")
    for row in (*rows, *times["per_epoch"]):
        if not _same(sum(row["stages"].values()), row["seconds"]):
            what = f"step {row['step']}" if "step" in row else f"epoch {row['epoch']}"
            yield Fault(STAGE_TIMES, f"the stages of {what} do not add up to its seconds")
    by_epoch: dict[int, list[float]] = {}
    for row in rows:
        by_epoch.setdefault(row["epoch"], []).append(row["seconds"])
    for row in times["per_epoch"]:
        mine = by_epoch.get(row["epoch"], [])
        if len(mine) == row["steps"] and not _same(sum(mine), row["seconds"]):
            yield Fault(STAGE_TIMES, f"the steps of epoch {row['epoch']} do not add up to its seconds")
    counted = (summary.get("steps") or {}).get("train")
    if times["whole"] and counted is not None and counted != times["steps_on_file"]:
        yield Fault(STAGE_TIMES, f"has {times['steps_on_file']} steps; {SUMMARY} counts {counted}")
    trained = [row["total_seconds"] for row in summary.get("step_durations", ()) if row["phase"] == "train"]
    spent_s = sum(row["seconds"] for row in times["per_epoch"])
    if times["whole"] and summary.get("ended") and trained and not _same(sum(trained), spent_s):
        yield Fault(
            STAGE_TIMES, f"its epochs took {spent_s} s; {SUMMARY} says {sum(trained)} s of training steps"
        )


def _timer(rows: Mapping[tuple[str, ...], Document], timer: Document) -> Iterator[Fault]:
    stages = timer["stages"]
    for stage in sorted({key[-1] for key in rows} | set(stages)):
        mine = sum(row["self_seconds"] or 0.0 for key, row in rows.items() if key[-1] == stage)
        theirs = (stages.get(stage) or {}).get("self_seconds")
        if not _same(mine, theirs):
            yield Fault(BY_STAGE, f"self_seconds of {stage} is {theirs}; in {SUMMARY} {mine}")


def _metrics(rows: Mapping[tuple[str, ...], Document], metrics: Document) -> Iterator[Fault]:
    """Names may be folded in metrics: phases are compared."""
    exported: dict[str, int] = {}
    for row in metrics["metrics"]:
        if row["name"] == "train.stage.duration":
            phase = row["attributes"].get("train.phase", "")
            exported[phase] = exported.get(phase, 0) + row["count"]
    for phase, count in sorted(exported.items()):
        mine = sum(row["count"] or 0 for key, row in rows.items() if key[0] == phase)
        if mine != count:
            yield Fault(METRICS, f"has {count} calls in phase {phase or 'none'}; {SUMMARY} has {mine}")


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=1e-8)
