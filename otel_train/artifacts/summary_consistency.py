"""Checks that a summary is consistent: laws between its values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

from otel_train.catalog import STAGES

Row = Mapping[str, Any]
TRAIN = "train"
CLOSE = 1e-6
"""Share by which a number may miss its rule: sums in another order."""


class Summary:
    """A summary, and sums of its rows."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    @cached_property
    def stages(self) -> Sequence[Row]:
        """Its rows; a KeyError where it has none, as of ``activities`` and ``wall_s``."""
        return list(self.document["stages"])

    @cached_property
    def activities(self) -> Mapping[str, float]:
        """Seconds by activity."""
        return cast("Mapping[str, float]", self.document["activities"])

    @cached_property
    def wall_s(self) -> float:
        """Seconds of the run."""
        return float(self.document["wall_seconds"])

    @cached_property
    def has_ended(self) -> bool:
        """The end of the run was recorded: no step is open, and all time is final."""
        return self.document.get("state", "finished") not in ("running", None)

    @cached_property
    def has_one_thread(self) -> bool:
        """One thread trains. The rows of several overlap; activities are those of the first."""
        return int(self.document.get("training_threads", 2)) <= 1

    @cached_property
    def training_s(self) -> float:
        """Self time of phase train."""
        return self.self_s(TRAIN)

    def rows(self, *phases: str, stage: str | None = None, loader: str | None = None) -> list[Row]:
        """Returns the rows of these phases; of one stage, of one loader where they are given."""
        return [
            row
            for row in self.stages
            if row["phase"] in phases
            and (stage is None or row["stage"] == stage)
            and (loader is None or row["loader"] == loader)
        ]

    def self_s(self, *phases: str, stage: str | None = None, loader: str | None = None) -> float:
        """Returns the self time of those rows."""
        rows = self.rows(*phases, stage=stage, loader=loader)
        return float(sum(row["self_seconds"] or 0.0 for row in rows))


EVALUATING = ("eval", "test", "predict")
ROUNDED_S = 1e-6
"""What may be lost between two ways to add up the same nanoseconds."""

ROUNDED = 1e-9
"""Share that may be lost there, and in a product of a rate and its time."""

BEHIND = 1e-3
"""Share of the wall time, and seconds, by which the activities of a run that goes on may miss it: the clock is read a
moment after they became final."""


CLOCK_SLACK_S = 1.0
"""What the system clock may be off before its time is taken over: see ``Anchor.renewed``."""


def applicable(summary: Mapping[str, Any]) -> Iterator[partial[Iterable[str]]]:
    """Yields the laws that hold for a summary of its kind, each to be called for what is broken."""
    checked = Summary(summary)
    return (partial(law, checked) for law in LAWS if checked.has_one_thread or law not in _OF_ONE_THREAD)


def activities_add_up(summary: Summary) -> Iterator[str]:
    """Demands that the activities add up to the wall time.

    Of a run that goes on to a thousandth: the clock is read a moment later.
    """
    for name, seconds in summary.activities.items():
        if seconds < 0:
            yield f"activities.{name} is {seconds} s: less than nothing"
    share, slack_s = (ROUNDED, ROUNDED_S) if summary.has_ended else (BEHIND, BEHIND)
    spent_s, wall_s = sum(summary.activities.values()), summary.wall_s
    if not is_close(spent_s, wall_s, share=share, slack=slack_s):
        yield f"activities add up to {spent_s} s, wall_seconds is {wall_s} s"


def the_wall_time_has_passed(summary: Summary) -> Iterator[str]:
    """Demands that the run took no longer than from its start to the instant up to which it counts; more passes while the machine sleeps."""
    begun_s, until_s = map(summary.document.get, ("started_unix_s", "until_unix_s"))
    if begun_s is None or until_s is None:  # of a former version
        return
    if until_s - begun_s < summary.wall_s - CLOCK_SLACK_S:
        yield f"wall_seconds is {summary.wall_s} s, and until_unix_s is {until_s - begun_s} s after started_unix_s"


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
            yield f"stages: self_seconds of {row_name(row)} is {own_s} s: less than nothing"
        whole = row["stage"] == "optimizer" or row["stage"] not in (*STAGES, "checkpoint")
        if whole and open_s is not None:
            own_by_stage[row["stage"]] += own_s
            open_by_stage[row["stage"]] += open_s
        elif row["stage"] != "other" and open_s is not None and own_s > open_s + ROUNDED_S:
            yield f"stages: self_seconds of {row_name(row)} is {own_s} s, its inclusive_seconds {open_s} s"
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
                yield f"{key}: {row_name(row)} has count {row['count']} and quantiles {order}, avg {mean_s}"
            continue
        if None not in values and values != sorted(values):
            yield f"{key}: quantiles of {row_name(row)} are out of order: {order}"
        if mean_s is not None and not row["min"] - 1e-9 <= mean_s <= row["max"] + 1e-9:
            yield f"{key}: avg of {row_name(row)} is {mean_s} s, min {row['min']} s and max {row['max']} s"


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
            # With what runs inside: a forward inside a request that gives no batch is of no step either.
            most_s = float(sum(row["inclusive_seconds"] or 0.0 for row in summary.rows(TRAIN, stage="data")))
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
        elif wait["count"] != counts[name] or not is_close(wait["total_seconds"], seconds[name]):
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
        seconds, name = row["seconds"], row_name(row)
        for unit in ("batches", "samples", "tokens"):
            rate, count = row[f"{unit}_per_second"], row[unit]
            if unit in found:
                found[unit][row["loader"]] += count or 0
            if rate is None:
                if count and seconds:
                    yield f"rates: {name} has {count} {unit} in {seconds} s, and no {unit}_per_second"
            elif not is_close(rate * seconds, count or 0):
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
                f"rates: seconds of {row_name(row)} is {seconds} s, self_seconds of its stages {own_s} s "
                f"({asked_s} s of waiting included), those of phase {phase} {phase_s} s"
            )


def throughput_is_over_the_wall(summary: Summary) -> Iterator[str]:
    """Demands training counts over the wall time."""
    throughput, trained = summary.document["throughput"], defaultdict[str, int](int)
    wall_s = throughput["wall_seconds"]
    if not is_close(wall_s, summary.wall_s):
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
        if rate is not None and not is_close(rate * wall_s, count):
            yield f"throughput.{unit}_per_second is {rate} over {wall_s} s, training has {count} {unit}"


def findings_are_shares_of_time(summary: Summary) -> Iterator[str]:
    """Demands that a finding is about a known loader, and that its share and its seconds are the same time."""
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
        if not is_close(min(seconds, of_s), share * of_s):
            yield f"findings: share {share} of {name} is of {of} {of_s} s, its seconds are {seconds} s"


def is_close(one: float, other: float, *, share: float = ROUNDED, slack: float = ROUNDED_S) -> bool:
    """Returns whether two values are the same within a share of the larger, or within ``slack``."""
    return math.isclose(one, other, rel_tol=share, abs_tol=slack)


def slack(seconds: float) -> float:
    """Returns what two sums of so many seconds may differ by."""
    return max(ROUNDED_S, ROUNDED * abs(seconds))


def row_name(row: Mapping[str, Any]) -> str:
    """Returns what a row is about."""
    return " ".join(filter(None, (row["phase"], row["loader"], row.get("stage", ""), row.get("model", ""))))


LAWS: tuple[Callable[[Summary], Iterable[str]], ...] = (
    activities_add_up,
    the_wall_time_has_passed,
    self_is_within_inclusive,
    quantiles_are_in_order,
    steps_are_counted_once,
    rows_add_up_to_activities,
    steps_are_in_their_phase,
    waits_are_data_rows,
    rates_are_of_counts,
    rates_are_over_the_time_of_batches,
    throughput_is_over_the_wall,
    findings_are_shares_of_time,
)
_OF_ONE_THREAD = (rows_add_up_to_activities, steps_are_in_their_phase, rates_are_over_the_time_of_batches)
