"""Checks that a summary is consistent: laws between its values, and the rules by which the numbers of findings follow from its keys."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property, partial, reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from otel_train.catalog import STAGES
from otel_train.recording.events import WAIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Row = Mapping[str, Any]
TRAIN = "train"
_ENOUGH = 10
"""Batches whose wait a device has measured, needed to estimate those of all."""

_USUAL = 2.0
"""Ratio of the mean wait for first batches to that for the others up to which they are alike."""

CLOSE = 1e-6
"""Share by which a number may miss its rule: sums in another order."""

RUN_ACTIVITIES = ("outside", "eval", "compile", "checkpoint", "stalled")
"""Activities that a finding may be about; their shares are of the wall time."""


class Bounds(NamedTuple):
    """Bounds of a value. Both are equal if everything it is computed from is a key."""

    least: float
    most: float

    def __contains__(self, number: object) -> bool:
        """Returns whether a number lies there, rounding apart."""
        if not isinstance(number, (int, float)):
            return False
        slack = CLOSE * max(abs(self.least), abs(self.most), CLOSE)
        return self.least - slack <= number <= self.most + slack

    def __str__(self) -> str:
        """Returns one number, or both ends."""
        return f"{self.least}" if self.least == self.most else f"between {self.least} and {self.most}"


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
    def has_rates(self) -> bool:
        """Versions before the one table had no ``rates``, and other rules for their values."""
        return "rates" in self.document

    @cached_property
    def has_ended(self) -> bool:
        """The end of the run was recorded: no step is open, and all time is final."""
        return self.document.get("state", "finished") not in ("running", None)

    @cached_property
    def has_one_thread(self) -> bool:
        """One thread trains, in this version. The rows of several overlap; activities are those of the first."""
        return self.has_rates and int(self.document.get("training_threads", 2)) <= 1

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

    @cached_property
    def model_s(self) -> float:
        """Self time of the stages of the model, in training."""
        return sum(self.self_s(TRAIN, stage=stage) for stage in self.document["model_stages"])

    @cached_property
    def waits(self) -> list[Row]:
        """Rows in which training waits for a loader."""
        return [row for row in self.rows(TRAIN, stage="data") if row["loader"]]

    def loader(self, name: str) -> Row:
        """Returns what is known of a loader."""
        return next((row for row in self.document["loaders"] if row["loader"] == name), {})

    def start(self, name: str, field: str) -> Bounds:
        """Returns a field of `start` of a loader in training; an upper bound if it was read in other phases too."""
        start = self.loader(name).get("start") or {}
        number = start.get(field, 0)
        batches = [
            row for row in self.stages if row["stage"] == "data" and row["loader"] == name and row["count"]
        ]
        if any(row["phase"] != TRAIN for row in batches):
            return Bounds(0.0, number)
        known = 0 if field != "making_seconds" and self._starts_as_usual(name) else number
        return Bounds(known, known)

    def _starts_as_usual(self, name: str) -> bool:
        """Returns whether the first batch of a pass is waited for like any other: without workers, unless it takes longer."""
        loader, rows = self.loader(name), self.rows(TRAIN, stage="data", loader=name)
        start = loader.get("start")
        if loader.get("workers") != 0 or not start or not rows:
            return False
        others = sum(row["count"] or 0 for row in rows) - start["count"]
        called_s = sum((row["avg"] or 0.0) * (row["count"] or 0) for row in rows)
        first_s = start["first_batch_seconds"]
        return bool(others <= 0 or first_s * others <= _USUAL * start["count"] * (called_s - first_s))

    def starts(self, *names: str) -> Bounds:
        """Returns what the beginning of all passes of training over these loaders has cost."""
        fields = ("making_seconds", "first_batch_seconds")
        parts = [self.start(name, field) for name in names for field in fields]
        return Bounds(sum(part.least for part in parts), sum(part.most for part in parts))

    def ends(self, *names: str) -> Bounds:
        """Returns what requests without a batch at the ends of all training passes over these loaders have cost, with workers."""
        least = most = 0.0
        for name in (name for name in names if self.loader(name).get("workers")):
            made = self.start(name, "making_seconds")
            for row in self.rows(TRAIN, stage="data", loader=name):
                rest_s = row["inclusive_seconds"] - (row["avg"] or 0.0) * (row["count"] or 0)
                least += max(0.0, rest_s - made.most)
                most += max(0.0, rest_s - made.least)
        return Bounds(least, most)

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Seconds that the device waited for each loader; empty unless that is known for all of them."""
        found = {}
        for row in (row for row in self.waits if row["count"]):
            measured = row.get("device_count") or 0
            if measured < min(_ENOUGH, row["count"] / 2):
                return {}
            exposed_s = row["device_seconds"] * row["count"] / measured
            found[row["loader"]] = min(row["inclusive_seconds"], exposed_s)
        return found

    def steady_wait(self, name: str) -> Bounds:
        """Returns the wait for a loader in mid-pass."""
        if name in self.exposed:
            spent_s, start = self.exposed[name], self.start(name, "first_batch_seconds")
        else:
            spent_s = self.self_s(TRAIN, stage="data", loader=name)
            start, end = self.starts(name), self.ends(name)
            start = Bounds(start.least + end.least, start.most + end.most)
        return Bounds(max(0.0, spent_s - start.most), max(0.0, spent_s - start.least))

    def batches(self, name: str) -> int:
        """Returns the batches of training that a loader gave."""
        return sum(row["count"] for row in self.waits if row["loader"] == name)


Finding = Mapping[str, Any]
Rule = Callable[[Summary, Finding], Any]
"""Gives a number, or the bounds of one."""


def _steady_ratio(summary: Summary, _: Finding) -> Bounds:
    parts = [summary.steady_wait(row["loader"]) for row in summary.waits]
    least, most = (sum(ends) / summary.training_s for ends in zip(*parts, strict=True))
    return Bounds(min(1.0, least), min(1.0, most))


def _waited_per_batch(summary: Summary, finding: Finding) -> Bounds:
    name = finding["loader"]
    wait, passes, batches = summary.steady_wait(name), summary.start(name, "count"), summary.batches(name)
    return Bounds(wait.least / (batches - passes.least), wait.most / max(1, batches - passes.most))


def _repeated(summary: Summary, cost_of: Callable[..., Bounds], whole_s: float = 1.0) -> Bounds:
    names = {row["loader"] for row in summary.waits}
    again = [name for name in names if summary.start(name, "count").least > 1]
    perhaps = [name for name in names if summary.start(name, "count").most > 1]
    return Bounds(cost_of(*again).least / whole_s, cost_of(*perhaps).most / whole_s)


def _dispatch(summary: Summary) -> tuple[float, float]:
    """Medians of a call of a whole update, and of the wait for it."""
    names = set(summary.document["model_stages"]) - {"forward", "backward", "optimizer", "loss", WAIT}
    calls = [row for row in summary.rows(TRAIN) if row["stage"] in names]
    call = max(calls, key=lambda row: row["inclusive_seconds"])
    waits = summary.rows(TRAIN, stage=WAIT, loader=call["loader"])
    return call["p50"], max(waits, key=lambda row: row["inclusive_seconds"])["p50"]


def _key(*path: str) -> Rule:
    return lambda summary, _: reduce(getitem, path, summary.document)


def _of_wall(activity: str) -> Rule:
    return lambda summary, _: summary.activities[activity] / summary.wall_s


RULES: dict[str, Rule] = {
    "training_seconds": lambda summary, _: summary.training_s,
    **{f"{name}_seconds": _key("activities", name) for name in RUN_ACTIVITIES},
    **{f"{name}_ratio": _of_wall(name) for name in RUN_ACTIVITIES},
    "model_seconds": lambda summary, _: summary.model_s,
    "model_ratio": lambda summary, _: summary.model_s / summary.training_s,
    "other_seconds": lambda summary, _: summary.self_s(TRAIN, stage="other"),
    "other_ratio": lambda summary, _: summary.self_s(TRAIN, stage="other") / summary.training_s,
    "data_wait_seconds": lambda summary, _: sum(row["self_seconds"] for row in summary.waits),
    "data_wait_ratio": lambda summary, _: sum(row["self_seconds"] for row in summary.waits) / summary.training_s,
    "data_without_loader_seconds": lambda summary, _: summary.self_s(TRAIN, stage="data", loader=""),
    "pass_start_seconds": lambda summary, _: summary.starts(*(row["loader"] for row in summary.waits)),
    "pass_end_seconds": lambda summary, _: summary.ends(*(row["loader"] for row in summary.waits)),
    "repeated_start_seconds": lambda summary, _: _repeated(summary, summary.starts),
    "repeated_start_ratio": lambda summary, _: _repeated(summary, summary.starts, summary.training_s),
    "repeated_end_seconds": lambda summary, _: _repeated(summary, summary.ends),
    "making_seconds": lambda summary, finding: summary.start(finding["loader"], "making_seconds"),
    "first_batch_seconds": lambda summary, finding: summary.start(finding["loader"], "first_batch_seconds"),
    "ending_seconds": lambda summary, finding: summary.ends(finding["loader"]),
    "passes": lambda summary, finding: summary.start(finding["loader"], "count"),
    "device_wait_seconds": lambda summary, _: sum(summary.exposed.values()),
    "steady_wait_ratio": _steady_ratio,
    "wait_per_batch_seconds": _waited_per_batch,
    "batches": lambda summary, finding: summary.batches(finding["loader"]),
    "steps": lambda summary, _: summary.document["steps"].get(TRAIN, 0),
    "build_p50_seconds": lambda summary, finding: summary.loader(finding["loader"])["build"]["p50"],
    "build_p99_seconds": lambda summary, finding: summary.loader(finding["loader"])["build"]["p99"],
    "ask_interval_seconds": lambda summary, finding: (
        (summary.training_s - summary.self_s(TRAIN, stage="data")) / summary.batches(finding["loader"])
    ),
    "recompile_ratio": lambda summary, _: min(1.0, summary.document["recompile_seconds"] / summary.training_s),
    "call_p50_seconds": lambda summary, _: _dispatch(summary)[0],
    "dispatch_p50_seconds": lambda summary, _: _dispatch(summary)[0] - _dispatch(summary)[1],
    "dispatch_ratio": lambda summary, _: 1 - _dispatch(summary)[1] / _dispatch(summary)[0],
    "other_after_seconds": lambda summary, _: max(summary.document["other_after"].values()),
    **{name: _key(name) for name in ("wall_seconds", "recompiles", "recompile_seconds")},
    **{name: _key("device_pace", name) for name in (
        "device_steps", "least_lag_seconds", "most_lag_seconds", "device_idle_ratio", "launch_idle_ratio",
    )},
    **{name: _key("ranks", "straggler", name) for name in ("rank", "excess_s", "step_s", "windows")},
    "others_wait_s": _key("ranks", "straggler", "waits_s"),
}  # fmt: skip
"""What each number is, from the summary and the finding that has it."""


def rule_of(name: str, summary: Summary) -> Rule | None:
    """Returns the rule of a number; those about one loader or one stage have its name in theirs."""
    if name in RULES:
        return RULES[name]
    loader, stage = name.removesuffix(".wait_seconds"), name.removesuffix("_ratio")
    if loader != name and loader in {row["loader"] for row in summary.waits}:
        return lambda summary, _: summary.steady_wait(loader)
    if stage != name and summary.rows(TRAIN, stage=stage):
        return lambda summary, _: summary.self_s(TRAIN, stage=stage) / summary.training_s
    return None


def numbers_of(summary: Summary, finding: Finding) -> Iterator[str]:
    """Yields which numbers of a finding do not follow from keys."""
    for name, number in finding["evidence"].items():
        rule = rule_of(name, summary)
        about = f"findings: {name} of {finding['name']} is {number}"
        try:
            value = rule(summary, finding) if rule else None
        except (KeyError, TypeError, ValueError, ZeroDivisionError):  # a key that it follows from is absent
            value = None
        if value is None:
            yield f"{about}: no key has it, and it follows from none"
        elif number not in (bounds := value if isinstance(value, Bounds) else Bounds(value, value)):
            yield f"{about}; by the keys that it follows from it is {bounds}"


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
