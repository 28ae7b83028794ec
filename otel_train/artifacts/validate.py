"""Checks that the artifacts and files of a run are complete and consistent."""

from __future__ import annotations

import csv
import io
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train import catalog as c
from otel_train.artifacts import writer
from otel_train.artifacts.summary_consistency import CLOSE, applicable
from otel_train.artifacts.writer import BY_STAGE, CAPTURES, CONFIG, METRICS, OPS, STAGE_TIMES, SUMMARY, TRACE
from otel_train.config.deprecated import present
from otel_train.console.text import plural
from otel_train.datamodel import (
    CAPTURES_FOLDER,
    EVENTS_FILE,
    FLIGHT_FILE,
    METRICS_FILE,
    RUN_FILE,
    SPANS_FILE,
    SUMMARY_FILE,
)
from otel_train.errors import RunDirectoryError, shown
from otel_train.exporters.spool import parts_of
from otel_train.files import (
    MOST_LINE_BYTES,
    folder_problem,
    lines_of,
    names_in,
    open_binary,
    parse_json,
    parse_line,
    problem_of,
    rank_folders,
    rank_problems,
    read_json,
)
from otel_train.profiler.storage import METADATA_SUFFIX, read_metadata
from otel_train.rundata.files import current_document, is_former, mapping, whole
from otel_train.rundata.run import read_run
from otel_train.rundata.schemas import REMEDY, wrong_values

if TYPE_CHECKING:
    from pathlib import Path

    Document = Mapping[str, Any]


_SCHEMAS = {CONFIG: "config", METRICS: "metrics", STAGE_TIMES: "stage_times", BY_STAGE: "by_stage"}
_MOST_PARSED_BYTES = 256 << 20
"""Largest trace that is parsed, which takes ten times its size in memory; of a larger one beginning and end are checked."""

_EDGE_BYTES = 4096

_MOST_LINES_BYTES = 1 << 30
"""Largest file of lines that is checked: four times the default of ``max_run_dir_bytes``, for all files of a rank."""


class Fault(NamedTuple):
    """One fault: the file and what is wrong."""

    file: str
    what: str


def check_artifacts(folder: Path) -> list[Fault]:
    """Returns the faults of a folder of artifacts: missing, damaged and inconsistent files."""
    try:
        summary = _read(folder, SUMMARY, "profiler_summary")
    except RunDirectoryError as error:
        return [Fault(SUMMARY, str(error))]
    listed = mapping(summary.get("artifacts"))
    faults = list(_presence(folder, listed))
    faults += [Fault(SUMMARY, wrong) for wrong in wrong_values(summary, "artifacts/profiler_summary")]
    broken = {fault.file for fault in faults}
    read: dict[str, Document] = {}
    for name, schema in _SCHEMAS.items():
        if name in broken:
            continue
        try:
            document = _read(folder, name, schema)
        except RunDirectoryError as error:
            faults.append(Fault(name, str(error)))
            continue
        found = [Fault(name, wrong) for wrong in wrong_values(document, f"artifacts/{schema}")]
        faults += found
        if not found:
            read[name] = document
    for name, check_file in ((OPS, _operations), (TRACE, _trace)):
        if name not in broken and "absent" not in (listed.get(name) or {}):
            faults += [Fault(name, wrong) for wrong in check_file(folder / name)]
    if SUMMARY in broken:
        return faults
    return [*faults, *_identities(summary, read), *_agreement(summary, read)]


def _read(folder: Path, name: str, schema: str) -> dict[str, Any]:
    document = current_document(read_json(folder / name, root=folder))
    found, wanted = document.get("schema"), writer.schema(schema)
    if found != wanted:
        raise RunDirectoryError(f"{name} has schema {found!r}, expected {wanted!r}.")
    return document


def _presence(folder: Path, listed: Document) -> Iterator[Fault]:
    for name in writer.NAMES:
        entry = listed.get(name)
        if not isinstance(entry, dict):
            yield Fault(name, f"{SUMMARY} does not account for it")
        elif "absent" in entry:
            if name != CAPTURES and (folder / name).exists():
                yield Fault(name, f"is there, and {SUMMARY} says it is not")
        elif "files" in entry:
            for file in map(str, entry["files"] if isinstance(entry["files"], list) else ()):
                path = folder / name / file
                if problem := "its name is a path" if "/" in file else problem_of(path, root=folder):
                    yield Fault(f"{name}/{file}", problem)
        elif problem := problem_of(folder / name, root=folder):
            yield Fault(name, problem)
        else:
            yield from _size(folder / name, name, entry, SUMMARY)


def _operations(path: Path) -> Iterator[str]:
    try:
        with io.TextIOWrapper(open_binary(path, root=path.parent), encoding="utf-8", newline="") as file:
            rows = csv.reader(file, strict=True)
            if tuple(next(rows, ())) != writer.OP_COLUMNS:
                yield f"its columns are not {', '.join(writer.OP_COLUMNS)}"
                return
            for line, row in enumerate(rows, 2):
                if len(row) != len(writer.OP_COLUMNS) or any(
                    writer.parsed_number(cell) is None for cell in row[2:]
                ):
                    yield f"line {line} is no row of values"
                    return
    except (OSError, ValueError, csv.Error) as error:
        yield f"cannot be read: {error}"


def _trace(path: Path) -> Iterator[str]:
    with open_binary(path, root=path.parent) as file:
        size = os.fstat(file.fileno()).st_size
        if size > writer.MOST_TRACE_BYTES + _EDGE_BYTES:
            yield f"has {size:,} bytes: more than a viewer opens"
            return
        if size > _MOST_PARSED_BYTES:
            head = file.read(_EDGE_BYTES)
            file.seek(size - _EDGE_BYTES)
            if f'"{writer.ABOUT}"'.encode() not in head or not file.read().rstrip().endswith(b"}"):
                yield "does not say what it was made from, or is cut off"
            return
        try:
            document = parse_json(file.read(_MOST_PARSED_BYTES))
        except ValueError as error:
            yield f"cannot be read: {error}"
            return
    trace = mapping(document)
    events = trace.get("traceEvents")
    if not isinstance(events, list) or not events:
        yield "has no events"
    elif writer.ABOUT not in trace:
        yield "does not say what it was made from"


def _identities(summary: Document, read: Mapping[str, Document]) -> Iterator[Fault]:
    for name, document in read.items():
        for key in ("run_id", "rank", "attempt"):
            expected, found = summary.get(key), document.get(key)
            if expected != found:
                yield Fault(name, f"{key} is {found!r}; that of {SUMMARY} is {expected!r}")


def _agreement(summary: Document, read: Mapping[str, Document]) -> Iterator[Fault]:
    rows = {_key(row): row for row in summary["stages"]}
    if (times := read.get(STAGE_TIMES)) is not None:
        totals = {_key(row): row for row in times["totals"]}
        for key in sorted(rows.keys() | totals.keys()):
            for field in ("count", "inclusive_seconds", "self_seconds"):
                expected, found = ((table.get(key) or {}).get(field) for table in (rows, totals))
                if not _same(expected, found):
                    name = " · ".join(filter(None, key))
                    yield Fault(STAGE_TIMES, f"{field} of {name} is {found}; in {SUMMARY} {expected}")
        yield from _steps(summary, times)
    if (timer := read.get(BY_STAGE)) is not None:
        yield from _timer(rows, timer)
    if (metrics := read.get(METRICS)) is not None and summary.get("ended") and metrics["metrics"]:
        yield from _metrics(rows, metrics)


def _key(row: Document) -> tuple[str, ...]:
    return tuple(str(row[word]) for word in writer.WORDS)


def _steps(summary: Document, times: Document) -> Iterator[Fault]:
    rows = times["per_step"]
    if any(after["step"] - before["step"] != 1 for before, after in pairwise(rows)):
        yield Fault(STAGE_TIMES, "the steps of per_step do not follow one another")
    for row in (*rows, *times["per_epoch"]):
        if not _same(sum(row["stages"].values()), row["seconds"]):
            name = f"step {row['step']}" if "step" in row else f"epoch {row['epoch']}"
            yield Fault(STAGE_TIMES, f"the stages of {name} do not add up to its seconds")
    by_epoch = defaultdict[int, list[float]](list)
    for row in rows:
        by_epoch[row["epoch"]].append(row["seconds"])
    for row in times["per_epoch"]:
        in_epoch_s = by_epoch[row["epoch"]]
        if len(in_epoch_s) == row["steps"] and not _same(sum(in_epoch_s), row["seconds"]):
            yield Fault(STAGE_TIMES, f"the steps of epoch {row['epoch']} do not add up to its seconds")
    counted = (summary.get("steps") or {}).get("train")
    if times["whole"] and counted is not None and counted != times["steps_on_file"]:
        yield Fault(STAGE_TIMES, f"has {times['steps_on_file']} steps; {SUMMARY} counts {counted}")
    trained = [row["total_seconds"] for row in summary.get("step_durations", ()) if row["phase"] == "train"]
    spent_s = sum(row["seconds"] for row in times["per_epoch"])
    steps_s = None if not trained or None in trained else sum(trained)
    if times["whole"] and summary.get("ended") and steps_s is not None and not _same(steps_s, spent_s):
        yield Fault(STAGE_TIMES, f"its epochs took {spent_s} s; {SUMMARY} says {steps_s} s of training steps")


def _timer(rows: Mapping[tuple[str, ...], Document], timer: Document) -> Iterator[Fault]:
    stages = timer["stages"]
    for stage in sorted({key[-1] for key in rows} | set(stages)):
        expected = sum(row["self_seconds"] or 0.0 for key, row in rows.items() if key[-1] == stage)
        found = (stages.get(stage) or {}).get("self_seconds")
        if not _same(expected, found):
            yield Fault(BY_STAGE, f"self_seconds of {stage} is {found}; in {SUMMARY} {expected}")


def _metrics(rows: Mapping[tuple[str, ...], Document], metrics: Document) -> Iterator[Fault]:
    """Yields differences between the calls in the metrics and in the summary, by phase: loaders may be ``_OTHER`` in metrics."""
    exported = defaultdict[str, int](int)
    for row in metrics["metrics"]:
        if row["name"] == c.STAGE_DURATION.name:
            exported[row["attributes"].get(c.PHASE.name, "")] += row["count"]
    for phase, count in sorted(exported.items()):
        expected = sum(row["count"] or 0 for key, row in rows.items() if key[0] == phase)
        if expected != count:
            yield Fault(METRICS, f"has {count} calls in phase {phase or 'none'}; {SUMMARY} has {expected}")


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=1e-8)


LINES = {EVENTS_FILE: "files/event", METRICS_FILE: "files/metrics", SPANS_FILE: "files/spans"}
"""Schema of a line, by file."""

_LINES_NAMED = 3
"""Most lines of a file whose wrong values are reported."""


def check_run(run: Path, in_order: Callable[..., Iterable[list[Fault]]] = map) -> list[Fault]:
    """Returns the faults of a run directory and of the artifacts in it: missing, damaged and inconsistent files.

    Args:
        run: the run directory.
        in_order: applies a function to each rank, as ``map`` does; may use several processes.
    """
    faults = list(_document(run / RUN_FILE, "files/run", RUN_FILE))
    faults += _captures(run / CAPTURES_FOLDER)
    problems = rank_problems(run)
    faults += (Fault(f"rank{rank}", f"cannot be read: {problem}") for rank, problem in problems.items())
    ranks = [rank for rank in rank_folders(run) if rank not in problems]
    if not ranks and not problems:
        faults.append(Fault(str(run), "there is no rank folder"))
    for found in in_order(partial(_faults_of_rank, run), ranks):
        faults += found
    return faults


def _captures(folder: Path) -> Iterator[Fault]:
    """Yields the faults of the metadata of captures, and of the traces that they name."""
    if problem := folder_problem(folder):
        yield Fault(folder.name, f"cannot be read: {problem}")
        return
    for name in names_in(folder):
        if not name.endswith(METADATA_SUFFIX):
            continue
        found = list(_document(folder / name, "files/capture", f"{folder.name}/{name}"))
        yield from found
        metadata = {} if found else read_metadata(folder / name)
        trace = metadata.get("file")
        if not trace:  # the metadata says why none was written
            continue
        if problem := "its name is a path" if "/" in trace else problem_of(folder / trace):
            yield Fault(f"{folder.name}/{trace}", problem)
        elif metadata.get("bytes") is not None:
            yield from _size(folder / trace, f"{folder.name}/{trace}", metadata, name)


def _size(path: Path, file: str, entry: Document, source: str) -> Iterator[Fault]:
    size, expected = path.stat().st_size, entry.get("bytes")
    if size != expected:
        yield Fault(file, f"has {size:,} bytes; {source} says {expected}")


def _faults_of_rank(run: Path, rank: int) -> list[Fault]:
    return list(_rank(run, rank))


def _rank(run: Path, rank: int) -> Iterator[Fault]:
    folder = run / f"rank{rank}"
    try:
        reader = read_run(run, rank)
    except RunDirectoryError as error:
        yield Fault(folder.name, str(error))
        return
    summary = f"{folder.name}/{SUMMARY_FILE}"
    yield from _document(folder / SUMMARY_FILE, "summary", summary)
    if reader.summary and not reader.ended:
        yield Fault(summary, "the end of the run was not recorded")
    settings = present(reader.about.get("settings") or {})[0]
    for key, expected, source in (
        ("run_id", reader.about.get("run_id"), RUN_FILE),
        ("rank", rank, f"the folder {folder.name}"),
    ):
        if reader.summary and expected is not None and reader.summary.get(key) != expected:
            found = shown(reader.summary.get(key))
            yield Fault(summary, f"{key} is {found}; that of {source} is {shown(expected)}")
    telemetry = mapping(reader.summary.get("telemetry"))
    is_empty = telemetry.get("records") == 0 and not problem_of(folder / FLIGHT_FILE)
    if reader.flight is None and settings.get("flight_recorder", True) and not is_empty:
        yield Fault(f"{folder.name}/{FLIGHT_FILE}", "is missing, cannot be read, or holds nothing")
    for warning in reader.warnings:
        if REMEDY not in warning:  # else it is about wrong values, which _document reports one by one
            yield Fault(folder.name, warning)
    # The setting max_run_dir_bytes of this run may allow more.
    most_bytes = max(_MOST_LINES_BYTES, whole(settings.get("max_run_dir_bytes")) or 0)
    for name, schema in LINES.items():
        yield from _lines(folder / name, schema, most_bytes)
    yield from _laws(summary, reader.summary)
    home = writer.artifact_folder(run, rank)
    if problem := folder_problem(home):
        yield Fault(str(home.relative_to(run)), f"cannot be read: {problem}")
    elif any(os.path.lexists(home / name) for name in (SUMMARY, writer.MARK)):
        yield from (
            Fault(f"{home.relative_to(run)}/{fault.file}", fault.what) for fault in check_artifacts(home)
        )


def _document(path: Path, schema: str, name: str) -> Iterator[Fault]:
    try:
        document = read_json(path)
    except RunDirectoryError as error:
        yield Fault(name, "is missing" if not os.path.lexists(path) else str(error))
        return
    complete = not is_former(document)
    for wrong in wrong_values(current_document(document), schema, complete=complete):
        yield Fault(name, wrong)


def _lines(path: Path, schema: str, most_bytes: int) -> Iterator[Fault]:
    """Yields the faults of a file of lines: complete lines must be JSON objects of the schema; a crash may cut off the last one."""
    for part in parts_of(path):
        name, broken, wrong = f"{part.parent.name}/{part.name}", 0, 0
        try:
            with open_binary(part) as file:
                if (size := os.fstat(file.fileno()).st_size) > most_bytes:
                    problem = f"has {size:,} bytes, more than a run writes"
                    yield Fault(name, f"{problem} ({most_bytes:,}): its lines were not checked")
                    continue
                for number, line in enumerate(lines_of(file), 1):
                    value = parse_line(line)
                    broken += value is None and (line.endswith(b"\n") or len(line) == MOST_LINE_BYTES)
                    found = [] if value is None else wrong_values(value, schema)
                    wrong += bool(found)
                    if found and wrong <= _LINES_NAMED:
                        yield from (Fault(name, f"line {number}: {each}") for each in found)
        except OSError as error:
            yield Fault(name, error.strerror or str(error))
            continue
        if wrong > _LINES_NAMED:
            yield Fault(name, f"{wrong - _LINES_NAMED} more lines have wrong values")
        if broken:
            problem = "is not a JSON object" if broken == 1 else "are not JSON objects"
            yield Fault(name, f"{plural(broken, 'line')} {problem}")


def _laws(name: str, summary: Mapping[str, Any]) -> Iterator[Fault]:
    """Yields violated rules, and lost records. A rule that needs a missing key is skipped: the schema reports that key."""
    for law in applicable(summary) if summary else ():
        with suppress(KeyError):
            try:
                yield from (Fault(name, broken) for broken in law())
            except TypeError as error:  # the schema allows null where the rule needs a number
                yield Fault(name, f"{law.func.__name__.replace('_', ' ')}: a value is null ({error})")
    lost = (summary.get("telemetry") or {}).get("records_lost")
    if lost:
        yield Fault(name, f"{lost} records were lost: what happened in them is in no metric")
