"""Laws that hold in every summary, whatever the loop: what is wrong with one, as sentences.

``otel-train check`` and the tests of loops use them. Each law says when it applies; a summary to which a law does not
apply is not called broken. Windows of a session have the figures of steps that began before them: no law is for those.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from otel_train.artifacts.verdict_evidence import Figures, numbers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

TRAIN = "train"
EVALUATING = ("eval", "test", "predict")
ROUNDED_S = 1e-6
"""What may be lost between two ways to add up the same nanoseconds."""

ROUNDED = 1e-9
"""Share that may be lost there, and in a product of a rate and its time."""

BEHIND = 1e-3
"""Share of the wall time, and seconds, by which the activities of a run that goes on may miss it: the clock is read a
moment after they were settled."""


def laws_of(summary: Mapping[str, Any]) -> list[str]:
    """What is broken in ``summary``; empty when every law that applies to it holds.

    Args:
        summary: as ``session.summary()`` gives it, or as ``summary.json`` holds it.

    Raises:
        KeyError: or TypeError, or ArithmeticError: a figure has not the shape it should have.
    """
    told = Summary(summary)
    return [broken for applies, law in LAWS if applies(told) for broken in law(told)]


class Summary(Figures):
    """A summary, and which laws apply to it."""

    @cached_property
    def has_rates(self) -> bool:
        """Versions before the one table had no ``rates``, and other rules for their figures."""
        return "rates" in self.document

    @cached_property
    def has_ended(self) -> bool:
        """Somebody wrote down how the run ended: no step is open, and all time is settled."""
        return self.document.get("state", "finished") not in ("running", None)

    @cached_property
    def has_one_thread(self) -> bool:
        """One thread trains. The rows of several overlap; activities are those of the first."""
        return int(self.document.get("training_threads", 2)) <= 1


def always(_: Summary) -> bool:
    """Summaries of every version and state."""
    return True


def this_version(told: Summary) -> bool:
    """Summaries that have ``rates``; also those of a run that goes on, or was killed."""
    return told.has_rates


def one_thread(told: Summary) -> bool:
    """The same, of a run in which one thread trains."""
    return told.has_rates and told.has_one_thread


def activities_add_up(told: Summary) -> Iterator[str]:
    """The activities add up to the wall time. Of a run that goes on to a thousandth: the clock is read a moment later."""
    for name, seconds in told.activities.items():
        if seconds < 0:
            yield f"activities.{name} is {seconds} s: less than nothing"
    exact = told.has_rates and told.has_ended
    spent_s, wall_s = sum(told.activities.values()), told.wall_s
    if not near(spent_s, wall_s, share=ROUNDED if exact else BEHIND, slack=ROUNDED_S if exact else BEHIND):
        yield f"activities add up to {spent_s} s, wall_seconds is {wall_s} s"


def self_is_within_inclusive(told: Summary) -> Iterator[str]:
    """Time in which a stage was innermost is time in which it was open."""
    for row in told.stages:
        own_s, open_s = row["self_seconds"] or 0.0, row["inclusive_seconds"]
        if own_s < 0:
            yield f"stages: self_seconds of {name_of(row)} is {own_s} s: less than nothing"
        if row["stage"] != "other" and open_s is not None and own_s > open_s + ROUNDED_S:
            yield f"stages: self_seconds of {name_of(row)} is {own_s} s, its inclusive_seconds {open_s} s"


def quantiles_are_in_order(told: Summary) -> Iterator[str]:
    """From min to max, with the average between them; none of what did not occur."""
    where = [("stages", row) for row in told.stages]
    where += [("step_durations", row) for row in told.document["step_durations"]]
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


def steps_are_counted_once(told: Summary) -> Iterator[str]:
    """Every counted step has a duration."""
    counts: dict[str, int] = defaultdict(int)
    for row in told.document["step_durations"]:
        counts[row["phase"]] += row["count"]
    steps = {phase: count for phase, count in told.document["steps"].items() if count}
    if steps != dict(counts):
        yield f"steps are {steps}, the counts of step_durations {dict(counts)}"


def rows_add_up_to_activities(told: Summary) -> Iterator[str]:
    """Self times of a phase are its activities, so that shares of a phase sum to one.

    One training thread. What a compiler or a stall took is in both the stage in which it happened and an activity of
    its own.
    """
    taken_s = sum(told.activities.get(name, 0.0) for name in ("compile", "stalled"))
    waited_s = told.self_s(TRAIN, stage="data")
    pairs = {
        "data_wait": ("phase train, stage data", waited_s),
        "productive": ("phase train, all but stage data", told.self_s(TRAIN) - waited_s),
        "eval": (f"phases {', '.join(EVALUATING)}", told.self_s(*EVALUATING)),
    }
    for activity, (rows, rows_s) in pairs.items():
        spent_s = told.activities[activity]
        if not -slack(rows_s) <= rows_s - spent_s <= taken_s + slack(rows_s):
            yield f"activities.{activity} is {spent_s} s, self_seconds of its rows ({rows}) are {rows_s} s"


def steps_are_in_their_phase(told: Summary) -> Iterator[str]:
    """Steps tile their phase, but for asks that gave no batch or one that was not used, and for what is left of a step.

    One training thread. What is missing is looked for in phase train, of a run that has ended and left no step
    unfinished, with steps counted by updates.
    """
    for phase in (TRAIN, *EVALUATING):
        rows = [row for row in told.document["step_durations"] if row["phase"] == phase]
        steps_s, phase_s = sum(row["total_seconds"] or 0.0 for row in rows), told.self_s(phase)
        what = f"step_durations.total_seconds of phase {phase} is {steps_s} s, self_seconds of its stages {phase_s} s"
        if steps_s > phase_s + slack(phase_s):
            yield what
        whole = phase == TRAIN and told.has_ended and told.document["step_source"] == "update"
        if whole and not told.document["partial_steps"]:
            most_s = told.self_s(TRAIN, stage="data")
            if phase_s - steps_s > most_s + slack(phase_s):
                yield f"{what}; no step is partial, and all waiting for data took {most_s} s"


def waits_are_data_rows(told: Summary) -> Iterator[str]:
    """The wait for a loader is its rows of stage data, of all phases."""
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for row in told.stages:
        if row["stage"] == "data":
            counts[row["loader"]] += row["count"]
            seconds[row["loader"]] += row["inclusive_seconds"]
    for loader in told.document["loaders"]:
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


def rates_are_of_counts(told: Summary) -> Iterator[str]:
    """A rate times its time is a count: of every batch in a phase, and of no more batches than the loader gave.

    Batches that were fetched in no phase, as in a checkpoint, are in no rate.
    """
    found: dict[str, dict[str, int]] = {"batches": defaultdict(int), "samples": defaultdict(int)}
    for row in told.document["rates"]:
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
        asked = sum(each["count"] for each in told.rows(row["phase"], stage="data", loader=row["loader"]))
        if row["batches"] < asked:
            yield f"rates: batches of {name} are {row['batches']}, count of its rows of stage data is {asked}"
    for unit, by_loader in found.items():
        for loader, count in by_loader.items():
            if (whole := told.document[unit].get(loader, 0)) < count:
                yield f"rates: {unit} of {loader} are {count} in all phases, {unit}.{loader} is {whole}"


def rates_are_over_the_time_of_batches(told: Summary) -> Iterator[str]:
    """A rate is over what the loader's batches took: its rows, perhaps without asks that gave none; more only with others.

    Others are those that are asked together with it, as by ``zip``: the rows of the batch are of the last that was asked.
    """
    for row in told.document["rates"]:
        phase, loader, seconds = row["phase"], row["loader"], row["seconds"]
        own_s, phase_s = told.self_s(phase, loader=loader), told.self_s(phase)
        asked_s = sum(each["inclusive_seconds"] for each in told.rows(phase, stage="data", loader=loader))
        if seconds and not own_s - asked_s - slack(own_s) <= seconds <= phase_s + slack(phase_s):
            yield (
                f"rates: seconds of {name_of(row)} is {seconds} s, self_seconds of its stages {own_s} s "
                f"({asked_s} s of waiting included), those of phase {phase} {phase_s} s"
            )


def throughput_is_over_the_wall(told: Summary) -> Iterator[str]:
    """Training counts, over the wall time."""
    throughput, trained = told.document["throughput"], defaultdict[str, int](int)
    wall_s = throughput["wall_seconds"]
    if not near(wall_s, told.wall_s):
        yield f"throughput.wall_seconds is {wall_s} s, wall_seconds is {told.wall_s} s"
    for row in told.document["rates"]:
        for unit in ("batches", "samples"):
            trained[unit] += (row[unit] or 0) if row["phase"] == TRAIN else 0
    trained["steps"] = told.document["steps"].get(TRAIN, 0)
    for unit in ("steps", "batches", "samples"):
        rate = throughput[f"{unit}_per_second"]
        if unit != "steps" and "" in told.document["batches"]:
            continue  # of a batch without a loader there is no rate
        if rate is not None and not near(rate * wall_s, trained[unit]):
            yield (
                f"throughput.{unit}_per_second is {rate} over {wall_s} s, training has {trained[unit]} {unit}"
            )


def verdicts_follow_from_keys(told: Summary) -> Iterator[str]:
    """Every number beside a verdict is a key, or follows from keys; docs/howto/from-figure-to-fix.md has the rules."""
    loaders = {row["loader"] for row in told.stages} | set(told.document["batches"])
    waits = any(row["loader"] for row in told.rows(TRAIN, stage="data"))
    for verdict in told.document["verdicts"]:
        name, share, seconds = verdict["name"], verdict["share"], verdict["seconds"]
        if verdict["loader"] and verdict["loader"] not in loaders:
            yield f"verdicts: {name} is about loader {verdict['loader']}: no figure is of it"
        if name == "input_bound" and not waits:
            yield f"verdicts: {name} has share {share}, and no row of stage data in phase train has a loader"
        if not 0.0 <= share <= 1.0 + ROUNDED:
            yield f"verdicts: share {share} of {name} is not between 0 and 1"
        of = "training_seconds" if verdict["phase"] == TRAIN else "wall_seconds"
        of_s = told.training_s if verdict["phase"] == TRAIN else sum(told.activities.values())
        if not near(min(seconds, of_s), share * of_s):
            yield f"verdicts: share {share} of {name} is of {of} {of_s} s, its seconds are {seconds} s"
        yield from numbers_of(told, verdict)


def near(one: float, other: float, *, share: float = ROUNDED, slack: float = ROUNDED_S) -> bool:
    """Whether two figures are the same within a share of the larger, or within ``slack``."""
    return abs(one - other) <= max(slack, share * max(abs(one), abs(other)))


def slack(seconds: float) -> float:
    """What two sums of so many seconds may differ by."""
    return max(ROUNDED_S, ROUNDED * abs(seconds))


def name_of(row: Mapping[str, Any]) -> str:
    """What a row is about."""
    return " ".join(filter(None, (row["phase"], row["loader"], row.get("stage", ""), row.get("model", ""))))


LAWS: tuple[tuple[Callable[[Summary], bool], Callable[[Summary], Iterable[str]]], ...] = (
    (always, activities_add_up),
    (always, self_is_within_inclusive),
    (this_version, quantiles_are_in_order),
    (this_version, steps_are_counted_once),
    (one_thread, rows_add_up_to_activities),
    (one_thread, steps_are_in_their_phase),
    (this_version, waits_are_data_rows),
    (this_version, rates_are_of_counts),
    (one_thread, rates_are_over_the_time_of_batches),
    (this_version, throughput_is_over_the_wall),
    (this_version, verdicts_follow_from_keys),
)
"""Each law, and to which summaries it applies."""
