"""Checks that the artifacts and files of a run are complete and consistent."""

from __future__ import annotations

import csv
import io
import math
import os
from collections import defaultdict
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.artifacts import writer
from otel_train.artifacts.finding_evidence import CLOSE, TRAIN, Summary, numbers_of
from otel_train.artifacts.writer import BY_STAGE, CAPTURES, CONFIG, METRICS, OPS, STAGE_TIMES, SUMMARY, TRACE
from otel_train.catalog import STAGES
from otel_train.config.deprecated import present
from otel_train.datamodel import CAPTURES_FOLDER
from otel_train.errors import RunDirectoryError
from otel_train.exporters.spool import parts_of
from otel_train.files import (
    MOST_LINE_BYTES,
    lines_of,
    names_in,
    open_binary,
    parse_json,
    parse_line,
    problem_of,
    rank_folders,
    read_json,
)
from otel_train.profiler.storage import METADATA_SUFFIX
from otel_train.rundata.files import ABOUT, FLIGHT, current_document, is_former, mapping
from otel_train.rundata.files import METRICS as RUN_METRICS
from otel_train.rundata.files import SUMMARY as RUN_SUMMARY
from otel_train.rundata.run import read_run
from otel_train.rundata.schemas import REMEDY, wrong_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    Document = Mapping[str, Any]


_SCHEMAS = {CONFIG: "config", METRICS: "metrics", STAGE_TIMES: "stage_times", BY_STAGE: "by_stage"}
_MOST_PARSED_BYTES = 256 << 20
"""A larger trace is looked at by its beginning and its end: parsed, it would take ten times its size in memory."""

_EDGE_BYTES = 4096


class Fault(NamedTuple):
    """One fault: the file and what is wrong."""

    file: str
    what: str


def check(folder: Path) -> list[Fault]:
    """Returns everything that is missing or does not agree in a folder of artifacts; empty when all is well."""
    try:
        summary = _read(folder, SUMMARY, "profiler_summary")
    except RunDirectoryError as error:
        return [Fault(SUMMARY, str(error))]
    listed = mapping(summary.get("artifacts"))
    faults = list(_presence(folder, listed))
    faults += [Fault(SUMMARY, said) for said in wrong_values(summary, "artifacts/profiler_summary")]
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
        wrong = [Fault(name, said) for said in wrong_values(document, f"artifacts/{schema}")]
        faults += wrong
        if not wrong:
            read[name] = document
    for name, check_file in ((OPS, _operations), (TRACE, _trace)):
        if name not in broken and "absent" not in (listed.get(name) or {}):
            faults += [Fault(name, said) for said in check_file(folder / name)]
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
        elif (size := (folder / name).stat().st_size) != entry.get("bytes"):
            yield Fault(name, f"has {size:,} bytes; {SUMMARY} says {entry.get('bytes')}")


def _operations(path: Path) -> Iterator[str]:
    try:
        with io.TextIOWrapper(open_binary(path, root=path.parent), encoding="utf-8", newline="") as file:
            rows = csv.reader(file, strict=True)
            if tuple(next(rows, ())) != writer.OP_COLUMNS:
                yield f"its columns are not {', '.join(writer.OP_COLUMNS)}"
                return
            for line, row in enumerate(rows, 2):
                if len(row) != len(writer.OP_COLUMNS) or any(writer.number(cell) is None for cell in row[2:]):
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
            mine, theirs = summary.get(key), document.get(key)
            if mine != theirs:
                yield Fault(name, f"{key} is {theirs!r}; that of {SUMMARY} is {mine!r}")


def _agreement(summary: Document, read: Mapping[str, Document]) -> Iterator[Fault]:
    rows = {_key(row): row for row in summary["stages"]}
    if (times := read.get(STAGE_TIMES)) is not None:
        there = {_key(row): row for row in times["totals"]}
        for key in sorted(rows.keys() | there.keys()):
            for field in ("count", "inclusive_seconds", "self_seconds"):
                mine, theirs = ((of.get(key) or {}).get(field) for of in (rows, there))
                if not _same(mine, theirs):
                    what = " · ".join(filter(None, key))
                    yield Fault(STAGE_TIMES, f"{field} of {what} is {theirs}; in {SUMMARY} {mine}")
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
            what = f"step {row['step']}" if "step" in row else f"epoch {row['epoch']}"
            yield Fault(STAGE_TIMES, f"the stages of {what} do not add up to its seconds")
    by_epoch = defaultdict[int, list[float]](list)
    for row in rows:
        by_epoch[row["epoch"]].append(row["seconds"])
    for row in times["per_epoch"]:
        mine = by_epoch[row["epoch"]]
        if len(mine) == row["steps"] and not _same(sum(mine), row["seconds"]):
            yield Fault(STAGE_TIMES, f"the steps of epoch {row['epoch']} do not add up to its seconds")
    counted = (summary.get("steps") or {}).get("train")
    if times["whole"] and counted is not None and counted != times["steps_on_file"]:
        yield Fault(STAGE_TIMES, f"has {times['steps_on_file']} steps; {SUMMARY} counts {counted}")
    trained = [row["total_seconds"] for row in summary.get("step_durations", ()) if row["phase"] == "train"]
    spent_s, steps_s = sum(row["seconds"] for row in times["per_epoch"]), sum(trained)
    if times["whole"] and summary.get("ended") and trained and not _same(steps_s, spent_s):
        yield Fault(STAGE_TIMES, f"its epochs took {spent_s} s; {SUMMARY} says {steps_s} s of training steps")


def _timer(rows: Mapping[tuple[str, ...], Document], timer: Document) -> Iterator[Fault]:
    stages = timer["stages"]
    for stage in sorted({key[-1] for key in rows} | set(stages)):
        mine = sum(row["self_seconds"] or 0.0 for key, row in rows.items() if key[-1] == stage)
        theirs = (stages.get(stage) or {}).get("self_seconds")
        if not _same(mine, theirs):
            yield Fault(BY_STAGE, f"self_seconds of {stage} is {theirs}; in {SUMMARY} {mine}")


def _metrics(rows: Mapping[tuple[str, ...], Document], metrics: Document) -> Iterator[Fault]:
    """Yields what is wrong in the metrics. Loader names may be ``_OTHER`` there, so phases are compared."""
    exported = defaultdict[str, int](int)
    for row in metrics["metrics"]:
        if row["name"] == "train.stage.duration":
            exported[row["attributes"].get("train.phase", "")] += row["count"]
    for phase, count in sorted(exported.items()):
        mine = sum(row["count"] or 0 for key, row in rows.items() if key[0] == phase)
        if mine != count:
            yield Fault(METRICS, f"has {count} calls in phase {phase or 'none'}; {SUMMARY} has {mine}")


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=CLOSE, abs_tol=1e-8)


EVALUATING = ("eval", "test", "predict")
ROUNDED_S = 1e-6
"""What may be lost between two ways to add up the same nanoseconds."""

ROUNDED = 1e-9
"""Share that may be lost there, and in a product of a rate and its time."""

BEHIND = 1e-3
"""Share of the wall time, and seconds, by which the activities of a run that goes on may miss it: the clock is read a
moment after they became final."""


def laws_of(summary: Mapping[str, Any]) -> list[str]:
    """Returns what is broken in ``summary``, from ``session.summary()`` or ``summary.json``; empty when every law holds.

    A KeyError, TypeError or ArithmeticError where a value has the wrong type.
    """
    return [broken for law in applicable(summary) for broken in law()]


def applicable(summary: Mapping[str, Any]) -> Iterator[partial[Iterable[str]]]:
    """Yields the laws that hold for a summary of its kind, each to be called for what is broken."""
    checked = Summary(summary)
    return (partial(law, checked) for needs, law in LAWS if not needs or getattr(checked, needs))


def activities_add_up(summary: Summary) -> Iterator[str]:
    """Demands that the activities add up to the wall time.

    Of a run that goes on to a thousandth: the clock is read a moment later.
    """
    for name, seconds in summary.activities.items():
        if seconds < 0:
            yield f"activities.{name} is {seconds} s: less than nothing"
    exact = summary.has_rates and summary.has_ended
    spent_s, wall_s = sum(summary.activities.values()), summary.wall_s
    if not near(spent_s, wall_s, share=ROUNDED if exact else BEHIND, slack=ROUNDED_S if exact else BEHIND):
        yield f"activities add up to {spent_s} s, wall_seconds is {wall_s} s"


def self_is_within_inclusive(summary: Summary) -> Iterator[str]:
    """Demands that time in which a stage was innermost is time in which it was open.

    The time of a call of a user stage, or of an update in which loaders are asked, is in the row of the call, and its
    self time where it was spent, so such a stage is looked at as a whole, once its calls have ended.
    """
    own_by_stage: dict[str, float] = defaultdict(float)
    open_by_stage: dict[str, float] = defaultdict(float)
    for row in summary.stages:
        own_s, open_s = row["self_seconds"] or 0.0, row["inclusive_seconds"]
        if own_s < 0:
            yield f"stages: self_seconds of {name_of(row)} is {own_s} s: less than nothing"
        whole = row["stage"] == "optimizer" or row["stage"] not in (*STAGES, "checkpoint")
        if whole and open_s is not None:
            own_by_stage[row["stage"]] += own_s
            open_by_stage[row["stage"]] += open_s
        elif row["stage"] != "other" and open_s is not None and own_s > open_s + ROUNDED_S:
            yield f"stages: self_seconds of {name_of(row)} is {own_s} s, its inclusive_seconds {open_s} s"
    for stage, own_s in own_by_stage.items() if summary.has_ended else ():
        if own_s > open_by_stage[stage] + slack(own_s):
            yield f"stages: self_seconds of all rows of {stage} are {own_s} s, inclusive_seconds {open_by_stage[stage]} s"


def quantiles_are_in_order(summary: Summary) -> Iterator[str]:
    """Demands an order from min to max, with the average between them, and no quantiles of what did not occur."""
    where = [("stages", row) for row in summary.stages]
    where += [("step_durations", row) for row in summary.document["step_durations"]]
    for key, row in where:
        order = {name: row[name] for name in ("min", "p50", "p95", "p99", "max")}
        values, mean_s = list(order.values()), row["avg"]
        if not row["count"]:
            if any(value is not None for value in (*values, mean_s)):
                yield f"{key}: {name_of(row)} has count {row['count']} and quantiles {order}, avg {mean_s}"
            continue
        if None not in values and values != sorted(values):
            yield f"{key}: quantiles of {name_of(row)} are out of order: {order}"
        if mean_s is not None and not row["min"] - 1e-9 <= mean_s <= row["max"] + 1e-9:
            yield f"{key}: avg of {name_of(row)} is {mean_s} s, min {row['min']} s and max {row['max']} s"


def steps_are_counted_once(summary: Summary) -> Iterator[str]:
    """Demands a duration for every counted step."""
    counts = defaultdict[str, int](int)
    for row in summary.document["step_durations"]:
        counts[row["phase"]] += row["count"]
    steps = {phase: count for phase, count in summary.document["steps"].items() if count}
    if steps != counts:
        yield f"steps are {steps}, the counts of step_durations {dict(counts)}"


def rows_add_up_to_activities(summary: Summary) -> Iterator[str]:
    """Demands that self times of a phase are its activities, so that shares of a phase sum to one.

    One training thread. What a compiler or a stall took is in both the stage in which it happened and an activity of
    its own.
    """
    taken_s = sum(summary.activities.get(name, 0.0) for name in ("compile", "stalled"))
    waited_s = summary.self_s(TRAIN, stage="data")
    pairs = {
        "data_wait": ("phase train, stage data", waited_s),
        "productive": ("phase train, all but stage data", summary.self_s(TRAIN) - waited_s),
        "eval": (f"phases {', '.join(EVALUATING)}", summary.self_s(*EVALUATING)),
    }
    for activity, (rows, rows_s) in pairs.items():
        spent_s = summary.activities[activity]
        if not -slack(rows_s) <= rows_s - spent_s <= taken_s + slack(rows_s):
            yield f"activities.{activity} is {spent_s} s, self_seconds of its rows ({rows}) are {rows_s} s"


def steps_are_in_their_phase(summary: Summary) -> Iterator[str]:
    """Demands that steps fill their phase, but for asks that gave no batch or an unused one, and for what is left of a step.

    One training thread. What is missing is looked for in phase train, of a run that has ended and left no step
    unfinished, with steps counted by updates.
    """
    for phase in (TRAIN, *EVALUATING):
        rows = [row for row in summary.document["step_durations"] if row["phase"] == phase]
        steps_s, phase_s = sum(row["total_seconds"] or 0.0 for row in rows), summary.self_s(phase)
        what = f"step_durations.total_seconds of phase {phase} is {steps_s} s, self_seconds of its stages {phase_s} s"
        if steps_s > phase_s + slack(phase_s):
            yield what
        whole = phase == TRAIN and summary.has_ended and summary.document["step_source"] == "update"
        if whole and not summary.document["partial_steps"]:
            most_s = summary.self_s(TRAIN, stage="data")
            if phase_s - steps_s > most_s + slack(phase_s):
                yield f"{what}; no step is partial, and all waiting for data took {most_s} s"


def waits_are_data_rows(summary: Summary) -> Iterator[str]:
    """Demands that the wait for a loader is its rows of stage data, of all phases."""
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for row in summary.stages:
        if row["stage"] == "data":
            counts[row["loader"]] += row["count"]
            seconds[row["loader"]] += row["inclusive_seconds"]
    for loader in summary.document["loaders"]:
        wait, name = loader["wait"], loader["loader"]
        had = f"count {counts.get(name, 0)} and inclusive_seconds {seconds.get(name, 0.0)} s"
        if wait is None:
            if counts.get(name):
                yield f"loaders: {name} has no wait; its rows of stage data have {had}"
        elif wait["count"] != counts[name] or not near(wait["total_seconds"], seconds[name]):
            yield (
                f"loaders: wait of {name} has count {wait['count']} and total_seconds {wait['total_seconds']} s; "
                f"its rows of stage data have {had}"
            )


def rates_are_of_counts(summary: Summary) -> Iterator[str]:
    """Demands that a rate times its time is a count: of every batch in a phase, and of no more batches than the loader gave.

    Batches that were fetched in no phase, as in a checkpoint, are in no rate.
    """
    found: dict[str, dict[str, int]] = {"batches": defaultdict(int), "samples": defaultdict(int)}
    for row in summary.document["rates"]:
        seconds, name = row["seconds"], name_of(row)
        for unit in ("batches", "samples", "tokens"):
            rate, count = row[f"{unit}_per_second"], row[unit]
            if unit in found:
                found[unit][row["loader"]] += count or 0
            if rate is None:
                if count and seconds:
                    yield f"rates: {name} has {count} {unit} in {seconds} s, and no {unit}_per_second"
            elif not near(rate * seconds, count or 0):
                yield f"rates: {unit}_per_second of {name} is {rate} over seconds {seconds} s, {unit} is {count}"
        asked = sum(each["count"] for each in summary.rows(row["phase"], stage="data", loader=row["loader"]))
        if row["batches"] < asked:
            yield f"rates: batches of {name} are {row['batches']}, count of its rows of stage data is {asked}"
    for unit, by_loader in found.items():
        for loader, count in by_loader.items():
            if (whole := summary.document[unit].get(loader, 0)) < count:
                yield f"rates: {unit} of {loader} are {count} in all phases, {unit}.{loader} is {whole}"


def rates_are_over_the_time_of_batches(summary: Summary) -> Iterator[str]:
    """Demands a rate over what the loader's batches took: its rows, perhaps without asks that gave none; more only with others.

    Others are those that are asked together with it, as by ``zip``: the rows of the batch are of the last that was asked.
    """
    for row in summary.document["rates"]:
        phase, loader, seconds = row["phase"], row["loader"], row["seconds"]
        own_s, phase_s = summary.self_s(phase, loader=loader), summary.self_s(phase)
        asked_s = sum(each["inclusive_seconds"] for each in summary.rows(phase, stage="data", loader=loader))
        if seconds and not own_s - asked_s - slack(own_s) <= seconds <= phase_s + slack(phase_s):
            yield (
                f"rates: seconds of {name_of(row)} is {seconds} s, self_seconds of its stages {own_s} s "
                f"({asked_s} s of waiting included), those of phase {phase} {phase_s} s"
            )


def throughput_is_over_the_wall(summary: Summary) -> Iterator[str]:
    """Demands training counts over the wall time."""
    throughput, trained = summary.document["throughput"], defaultdict[str, int](int)
    wall_s = throughput["wall_seconds"]
    if not near(wall_s, summary.wall_s):
        yield f"throughput.wall_seconds is {wall_s} s, wall_seconds is {summary.wall_s} s"
    for row in summary.document["rates"]:
        for unit in ("batches", "samples"):
            trained[unit] += (row[unit] or 0) if row["phase"] == TRAIN else 0
    trained["steps"] = summary.document["steps"].get(TRAIN, 0)
    for unit in ("steps", "batches", "samples"):
        rate = throughput[f"{unit}_per_second"]
        if unit != "steps" and "" in summary.document["batches"]:
            continue  # of a batch without a loader there is no rate
        count = trained[unit]
        if rate is not None and not near(rate * wall_s, count):
            yield f"throughput.{unit}_per_second is {rate} over {wall_s} s, training has {count} {unit}"


def findings_follow_from_keys(summary: Summary) -> Iterator[str]:
    """Demands that every number beside a finding is a key, or follows from keys; docs/howto/fix-a-bottleneck.md has the rules."""
    loaders = {row["loader"] for row in summary.stages} | set(summary.document["batches"])
    waits = any(row["loader"] for row in summary.rows(TRAIN, stage="data"))
    for finding in summary.document["findings"]:
        name, share, seconds = finding["name"], finding["share"], finding["seconds"]
        if finding["loader"] and finding["loader"] not in loaders:
            yield f"findings: {name} is about loader {finding['loader']}: no value is of it"
        if name == "input_bound" and not waits:
            yield f"findings: {name} has share {share}, and no row of stage data in phase train has a loader"
        if not 0.0 <= share <= 1.0 + ROUNDED:
            yield f"findings: share {share} of {name} is not between 0 and 1"
        of = "training_seconds" if finding["phase"] == TRAIN else "wall_seconds"
        of_s = summary.training_s if finding["phase"] == TRAIN else sum(summary.activities.values())
        if not near(min(seconds, of_s), share * of_s):
            yield f"findings: share {share} of {name} is of {of} {of_s} s, its seconds are {seconds} s"
        yield from numbers_of(summary, finding)


def near(one: float, other: float, *, share: float = ROUNDED, slack: float = ROUNDED_S) -> bool:
    """Returns whether two values are the same within a share of the larger, or within ``slack``."""
    return math.isclose(one, other, rel_tol=share, abs_tol=slack)


def slack(seconds: float) -> float:
    """Returns what two sums of so many seconds may differ by."""
    return max(ROUNDED_S, ROUNDED * abs(seconds))


def name_of(row: Mapping[str, Any]) -> str:
    """Returns what a row is about."""
    return " ".join(filter(None, (row["phase"], row["loader"], row.get("stage", ""), row.get("model", ""))))


LAWS: tuple[tuple[str, Callable[[Summary], Iterable[str]]], ...] = (
    ("", activities_add_up),
    ("", self_is_within_inclusive),
    ("has_rates", quantiles_are_in_order),
    ("has_rates", steps_are_counted_once),
    ("has_one_thread", rows_add_up_to_activities),
    ("has_one_thread", steps_are_in_their_phase),
    ("has_rates", waits_are_data_rows),
    ("has_rates", rates_are_of_counts),
    ("has_one_thread", rates_are_over_the_time_of_batches),
    ("has_rates", throughput_is_over_the_wall),
    ("has_rates", findings_follow_from_keys),
)
"""Each law, and the property of the summaries to which it applies."""


LINES = {"events.jsonl": "files/event", RUN_METRICS: "files/metrics", "spans.otlp.jsonl": "files/spans"}
"""Files of lines, and the schema of a line."""

_LINES_NAMED = 3
"""Lines of a file whose wrong values are named."""


def check_run(run: Path) -> list[Fault]:
    """Returns everything that is missing or does not agree in a run directory and in the artifacts in it."""
    faults = list(_document(run / ABOUT, "files/run", ABOUT))
    for name in names_in(run / CAPTURES_FOLDER):
        if name.endswith(METADATA_SUFFIX):
            faults += _document(run / CAPTURES_FOLDER / name, "files/capture", f"{CAPTURES_FOLDER}/{name}")
    ranks = rank_folders(run)
    if not ranks:
        faults.append(Fault(str(run), "there is no folder of a rank"))
    for rank in ranks:
        faults += _rank(run, rank)
    return faults


def _rank(run: Path, rank: int) -> Iterator[Fault]:
    folder = run / f"rank{rank}"
    try:
        left = read_run(run, rank)
    except RunDirectoryError as error:
        yield Fault(folder.name, str(error))
        return
    summary = f"{folder.name}/{RUN_SUMMARY}"
    yield from _document(folder / RUN_SUMMARY, "summary", summary)
    if left.summary and not left.ended:
        yield Fault(summary, "the end of the run was not recorded")
    settings = present(left.about.get("settings") or {})[0]
    if left.timeline is None and settings.get("flight_recorder", True):
        yield Fault(f"{folder.name}/{FLIGHT}", "is missing, cannot be read, or holds nothing")
    for said in left.warnings:
        if REMEDY not in said:  # a message about wrong values, which are listed by file
            yield Fault(folder.name, said)
    for name, schema in LINES.items():
        yield from _lines(folder / name, schema)
    yield from _laws(summary, left.summary)
    home = writer.artifact_folder(run, rank)
    if (home / SUMMARY).exists():
        yield from (Fault(f"{home.relative_to(run)}/{fault.file}", fault.what) for fault in check(home))


def _document(path: Path, schema: str, name: str) -> Iterator[Fault]:
    try:
        document = read_json(path)
    except RunDirectoryError as error:
        yield Fault(name, "is missing" if not os.path.lexists(path) else str(error))
        return
    complete = not is_former(document)
    for said in wrong_values(current_document(document), schema, complete=complete):
        yield Fault(name, said)


def _lines(path: Path, schema: str) -> Iterator[Fault]:
    """Demands that complete lines are JSON of their schema; the last one may be cut by a crash."""
    for part in parts_of(path):
        name, broken, wrong = f"{part.parent.name}/{part.name}", 0, 0
        try:
            with open_binary(part) as file:
                for number, line in enumerate(lines_of(file), 1):
                    value = parse_line(line)
                    broken += value is None and (line.endswith(b"\n") or len(line) == MOST_LINE_BYTES)
                    found = [] if value is None else wrong_values(value, schema)
                    wrong += bool(found)
                    if found and wrong <= _LINES_NAMED:
                        yield from (Fault(name, f"line {number}: {said}") for said in found)
        except OSError as error:
            yield Fault(name, error.strerror or str(error))
            continue
        if wrong > _LINES_NAMED:
            yield Fault(name, f"{wrong - _LINES_NAMED} more lines have wrong values")
        if broken:
            yield Fault(name, f"{broken} lines are no JSON objects")


def _laws(name: str, summary: Mapping[str, Any]) -> Iterator[Fault]:
    """Yields violated laws, and lost records. A law about a key that is missing, which is a fault of its own, is passed over."""
    for law in applicable(summary) if summary else ():
        with suppress(KeyError):
            try:
                yield from (Fault(name, broken) for broken in law())
            except TypeError as error:  # the schema allows null where a law needs a number
                yield Fault(name, f"{law.func.__name__.replace('_', ' ')}: a value is null ({error})")
    lost = (summary.get("telemetry") or {}).get("records_lost")
    if lost:
        yield Fault(name, f"{lost} records were lost: what happened in them is in no metric")
