"""The laws of a summary, and the rules by which the numbers of its findings follow from its keys: docs/howto/fix-a-bottleneck.md has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.artifacts.summary_consistency import CLOSE, TRAIN, Row, Summary, applicable
from otel_train.recording.events import WAIT

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENOUGH = 10
"""Batches whose wait a device has measured, needed to estimate those of all."""

_USUAL = 2.0
"""Ratio of the mean wait for first batches to that for the others up to which they are alike."""

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


class EvidenceSummary(Summary):
    """A summary, and what the numbers of its findings are made of."""

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
Rule = Callable[[EvidenceSummary, Finding], Any]
"""Gives a number, or the bounds of one."""


def _steady_ratio(summary: EvidenceSummary, _: Finding) -> Bounds:
    parts = [summary.steady_wait(row["loader"]) for row in summary.waits]
    least, most = (sum(ends) / summary.training_s for ends in zip(*parts, strict=True))
    return Bounds(min(1.0, least), min(1.0, most))


def _waited_per_batch(summary: EvidenceSummary, finding: Finding) -> Bounds:
    name = finding["loader"]
    wait, passes, batches = summary.steady_wait(name), summary.start(name, "count"), summary.batches(name)
    return Bounds(wait.least / (batches - passes.least), wait.most / max(1, batches - passes.most))


def _repeated(summary: EvidenceSummary, cost_of: Callable[..., Bounds], whole_s: float = 1.0) -> Bounds:
    names = {row["loader"] for row in summary.waits}
    again = [name for name in names if summary.start(name, "count").least > 1]
    perhaps = [name for name in names if summary.start(name, "count").most > 1]
    return Bounds(cost_of(*again).least / whole_s, cost_of(*perhaps).most / whole_s)


def _dispatch(summary: EvidenceSummary) -> tuple[float, float]:
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
    "cpu_wait_seconds": lambda summary, _: min(summary.document["cpu_wait_seconds"], summary.wall_s),
    "cpu_wait_ratio": lambda summary, _: min(1.0, summary.document["cpu_wait_seconds"] / summary.wall_s),
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


def rule_of(name: str, summary: EvidenceSummary) -> Rule | None:
    """Returns the rule of a number; those about one loader or one stage have its name in theirs."""
    if name in RULES:
        return RULES[name]
    loader, stage = name.removesuffix(".wait_seconds"), name.removesuffix("_ratio")
    if loader != name and loader in {row["loader"] for row in summary.waits}:
        return lambda summary, _: summary.steady_wait(loader)
    if stage != name and summary.rows(TRAIN, stage=stage):
        return lambda summary, _: summary.self_s(TRAIN, stage=stage) / summary.training_s
    return None


def numbers_of(summary: EvidenceSummary, finding: Finding) -> Iterator[str]:
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


def laws_of(document: Mapping[str, Any]) -> list[str]:
    """Returns what is broken in a summary, and numbers of its findings that do not follow from it; empty when every law holds."""
    summary = EvidenceSummary(document)
    broken = [broken for law in applicable(document) for broken in law()]
    return [*broken, *(wrong for finding in document["findings"] for wrong in numbers_of(summary, finding))]
