"""Checks that the values of a summary are consistent with each other. Each rule is a function, listed in ``LAWS``."""

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
"""Relative tolerance between artifacts: floating-point sums in different order."""


class Summary:
    """A summary, and sums of its rows."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    @cached_property
    def stages(self) -> Sequence[Row]:
        """Rows of stages. A missing key raises KeyError, as it does in ``activities`` and ``wall_s``."""
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
        """Whether the end of the run was recorded: then no step is open, and all time is final."""
        return self.document.get("state", "finished") not in ("running", None)

    @cached_property
    def has_one_thread(self) -> bool:
        """Whether one thread trains. Rows of several threads overlap, and activities are those of the first thread."""
        return int(self.document.get("training_threads", 2)) <= 1

    @cached_property
    def training_s(self) -> float:
        """Seconds of self time in phase train."""
        return self.self_s(TRAIN)

    def rows(self, *phases: str, stage: str | None = None, loader: str | None = None) -> list[Row]:
        """Returns the rows of these phases, and if given of this stage and of this loader."""
        return [
            row
            for row in self.stages
            if row["phase"] in phases
            and (stage is None or row["stage"] == stage)
            and (loader is None or row["loader"] == loader)
        ]

    def self_s(self, *phases: str, stage: str | None = None, loader: str | None = None) -> float:
        """Returns the sum of the self times of ``rows``, in seconds."""
        rows = self.rows(*phases, stage=stage, loader=loader)
        return float(sum(row["self_seconds"] or 0.0 for row in rows))


EVALUATING = ("eval", "test", "predict")
ROUNDED_S = 1e-6
"""Absolute tolerance, in seconds, between two sums of the same nanoseconds."""

ROUNDED = 1e-9
"""Relative tolerance of such sums, and of the product of a rate and its time."""

BEHIND = 1e-3
"""Tolerance, relative and in seconds, between activities and wall time of a live run: the clock is read a moment later."""


CLOCK_SLACK_S = 1.0
"""Largest change of the system clock, in seconds, that the run does not take over: see ``Anchor.renewed``."""


def applicable(summary: Mapping[str, Any]) -> Iterator[partial[Iterable[str]]]:
    """Yields the rules that apply to a summary, as functions without arguments that yield the violations."""
    checked = Summary(summary)
    return (partial(law, checked) for law in LAWS if checked.has_one_thread or law not in _OF_ONE_THREAD)


def activities_add_up(summary: Summary) -> Iterator[str]:
    """Requires that the activities add up to the wall time: within ``BEHIND`` if the run is live."""
    for name, seconds in summary.activities.items():
        if seconds < 0:
            yield f"activities.{name} is {seconds} s: less than nothing"
    share, slack_s = (ROUNDED, ROUNDED_S) if summary.has_ended else (BEHIND, BEHIND)
    spent_s, wall_s = sum(summary.activities.values()), summary.wall_s
    if not is_close(spent_s, wall_s, share=share, slack=slack_s):
        yield f"activities add up to {spent_s} s, wall_seconds is {wall_s} s"


def the_wall_time_has_passed(summary: Summary) -> Iterator[str]:
    """Requires that the wall time is at most the time from ``started_unix_s`` to ``until_unix_s``, which counts suspend as well."""
    started_s, until_s = map(summary.document.get, ("started_unix_s", "until_unix_s"))
    if started_s is None or until_s is None:  # a summary of a former version
        return
    if until_s - started_s < summary.wall_s - CLOCK_SLACK_S:
        yield f"wall_seconds is {summary.wall_s} s, and until_unix_s is {until_s - started_s} s after started_unix_s"


def self_is_within_inclusive(summary: Summary) -> Iterator[str]:
    """Requires that the self time of a stage is at most its inclusive time.

    A call of a user stage, or of an optimizer that fetches batches, has its inclusive time in one row, but self time in
    the rows of the batches in which it was spent. So rows of such a stage are summed, once its calls have ended.
    """
    self_by_stage: dict[str, float] = defaultdict(float)
    inclusive_by_stage: dict[str, float] = defaultdict(float)
    for row in summary.stages:
        self_s, inclusive_s = row["self_seconds"] or 0.0, row["inclusive_seconds"]
        if self_s < 0:
            yield f"stages: self_seconds of {row_name(row)} is {self_s} s: less than nothing"
        is_summed = row["stage"] == "optimizer" or row["stage"] not in (*STAGES, "checkpoint")
        if is_summed and inclusive_s is not None:
            self_by_stage[row["stage"]] += self_s
            inclusive_by_stage[row["stage"]] += inclusive_s
        elif row["stage"] != "other" and inclusive_s is not None and self_s > inclusive_s + ROUNDED_S:
            yield f"stages: self_seconds of {row_name(row)} is {self_s} s, its inclusive_seconds {inclusive_s} s"
    for stage, self_s in self_by_stage.items() if summary.has_ended else ():
        if self_s > inclusive_by_stage[stage] + slack(self_s):
            yield f"stages: self_seconds of all rows of {stage} are {self_s} s, inclusive_seconds {inclusive_by_stage[stage]} s"


def quantiles_are_in_order(summary: Summary) -> Iterator[str]:
    """Requires min <= p50 <= p95 <= p99 <= max, the average between min and max, and nulls if the count is 0."""
    rows = [("stages", row) for row in summary.stages]
    rows += [("step_durations", row) for row in summary.document["step_durations"]]
    for key, row in rows:
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
    """Requires that ``step_durations`` counts every step of ``steps``."""
    counts = defaultdict[str, int](int)
    for row in summary.document["step_durations"]:
        counts[row["phase"]] += row["count"]
    steps = {phase: count for phase, count in summary.document["steps"].items() if count}
    if steps != counts:
        yield f"steps are {steps}, the counts of step_durations {dict(counts)}"


def rows_add_up_to_activities(summary: Summary) -> Iterator[str]:
    """Requires that the self times of a phase add up to its activity, so that shares of a phase sum to one.

    For one training thread. They may exceed it by the time of compiling and stalls, which are activities of their own and
    also in the stage in which they happened.
    """
    reclaimed_s = sum(summary.activities.get(name, 0.0) for name in ("compile", "stalled"))
    waited_s = summary.self_s(TRAIN, stage="data")
    pairs = {
        "data_wait": ("phase train, stage data", waited_s),
        "productive": ("phase train, all but stage data", summary.self_s(TRAIN) - waited_s),
        "eval": (f"phases {', '.join(EVALUATING)}", summary.self_s(*EVALUATING)),
    }
    for activity, (rows, rows_s) in pairs.items():
        spent_s = summary.activities[activity]
        if not -slack(rows_s) <= rows_s - spent_s <= reclaimed_s + slack(rows_s):
            yield f"activities.{activity} is {spent_s} s, self_seconds of its rows ({rows}) are {rows_s} s"


def steps_are_in_their_phase(summary: Summary) -> Iterator[str]:
    """Requires that the steps of a phase take no longer than its stages, and in phase train not much less.

    For one training thread. Time of no step is waiting for data that gave no batch, or an unused one, and partial steps.
    So the second is required if the run has ended, no step is partial, and steps are counted by updates.
    """
    for phase in (TRAIN, *EVALUATING):
        rows = [row for row in summary.document["step_durations"] if row["phase"] == phase]
        steps_s, phase_s = sum(row["total_seconds"] or 0.0 for row in rows), summary.self_s(phase)
        what = f"step_durations.total_seconds of phase {phase} is {steps_s} s, self_seconds of its stages {phase_s} s"
        if steps_s > phase_s + slack(phase_s):
            yield what
        is_complete = phase == TRAIN and summary.has_ended and summary.document["step_source"] == "update"
        if is_complete and not summary.document["partial_steps"]:
            # Inclusive time: a forward inside a request that gives no batch is of no step either.
            most_s = float(sum(row["inclusive_seconds"] or 0.0 for row in summary.rows(TRAIN, stage="data")))
            if phase_s - steps_s > most_s + slack(phase_s):
                yield f"{what}; no step is partial, and all waiting for data took {most_s} s"


def waits_are_data_rows(summary: Summary) -> Iterator[str]:
    """Requires that the wait for a loader has the count and the time of its rows of stage data, in all phases."""
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for row in summary.stages:
        if row["stage"] == "data":
            counts[row["loader"]] += row["count"]
            seconds[row["loader"]] += row["inclusive_seconds"]
    for loader in summary.document["loaders"]:
        wait, name = loader["wait"], loader["loader"]
        sums = f"count {counts.get(name, 0)} and inclusive_seconds {seconds.get(name, 0.0)} s"
        if wait is None:
            if counts.get(name):
                yield f"loaders: {name} has no wait; its rows of stage data have {sums}"
        elif wait["count"] != counts[name] or not is_close(wait["total_seconds"], seconds[name]):
            yield (
                f"loaders: wait of {name} has count {wait['count']} and total_seconds {wait['total_seconds']} s; "
                f"its rows of stage data have {sums}"
            )


def rates_are_of_counts(summary: Summary) -> Iterator[str]:
    """Requires that a rate times its seconds is its count: at least all batches of the phase, at most those of the loader.

    Batches that were fetched in no phase, as in a checkpoint, are in no rate.
    """
    counted: dict[str, dict[str, int]] = {"batches": defaultdict(int), "samples": defaultdict(int)}
    for row in summary.document["rates"]:
        seconds, name = row["seconds"], row_name(row)
        for unit in ("batches", "samples", "tokens"):
            rate, count = row[f"{unit}_per_second"], row[unit]
            if unit in counted:
                counted[unit][row["loader"]] += count or 0
            if rate is None:
                if count and seconds:
                    yield f"rates: {name} has {count} {unit} in {seconds} s, and no {unit}_per_second"
            elif not is_close(rate * seconds, count or 0):
                yield f"rates: {unit}_per_second of {name} is {rate} over seconds {seconds} s, {unit} is {count}"
        waits = sum(each["count"] for each in summary.rows(row["phase"], stage="data", loader=row["loader"]))
        if row["batches"] < waits:
            yield f"rates: batches of {name} are {row['batches']}, count of its rows of stage data is {waits}"
    for unit, by_loader in counted.items():
        for loader, count in by_loader.items():
            if (total := summary.document[unit].get(loader, 0)) < count:
                yield f"rates: {unit} of {loader} are {count} in all phases, {unit}.{loader} is {total}"


def rates_are_over_the_time_of_batches(summary: Summary) -> Iterator[str]:
    """Requires that a rate is over the time of the loader's batches: at least its stages less its waits, at most the phase.

    Waits that gave no batch may be left out. It is more than the time of its stages if loaders are iterated together, as by
    ``zip``: then the stages of a batch are in the rows of the loader that was called last.
    """
    for row in summary.document["rates"]:
        phase, loader, seconds = row["phase"], row["loader"], row["seconds"]
        own_s, phase_s = summary.self_s(phase, loader=loader), summary.self_s(phase)
        waited_s = sum(each["inclusive_seconds"] for each in summary.rows(phase, stage="data", loader=loader))
        if seconds and not own_s - waited_s - slack(own_s) <= seconds <= phase_s + slack(phase_s):
            yield (
                f"rates: seconds of {row_name(row)} is {seconds} s, self_seconds of its stages {own_s} s "
                f"({waited_s} s of waiting included), those of phase {phase} {phase_s} s"
            )


def throughput_is_over_the_wall(summary: Summary) -> Iterator[str]:
    """Requires that throughput times wall time gives the counts of training."""
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
            continue  # batches without a loader are in no rate
        count = trained[unit]
        if rate is not None and not is_close(rate * wall_s, count):
            yield f"throughput.{unit}_per_second is {rate} over {wall_s} s, training has {count} {unit}"


def findings_are_shares_of_time(summary: Summary) -> Iterator[str]:
    """Requires that the loader of a finding is known, and that its share of the time it is about equals its seconds."""
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
    """Returns whether two values are equal within a share of the larger one, or within ``slack``."""
    return math.isclose(one, other, rel_tol=share, abs_tol=slack)


def slack(seconds: float) -> float:
    """Returns the tolerance between two sums of that many seconds."""
    return max(ROUNDED_S, ROUNDED * abs(seconds))


def row_name(row: Mapping[str, Any]) -> str:
    """Returns phase, loader, stage and model of a row as one text."""
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
