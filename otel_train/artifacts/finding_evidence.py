"""The numbers beside a finding, recomputed from the keys of a summary: the rules of docs/howto/fix-a-bottleneck.md."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.recording.events import WAIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

TRAIN = "train"
_ENOUGH = 10
"""Batches whose wait a device has measured, needed to estimate those of all."""

CLOSE = 1e-6
"""Share by which a number may miss its rule: sums in another order."""

RUN_ACTIVITIES = ("outside", "eval", "compile", "checkpoint")
"""Activities that a finding may be about; their shares are of the wall time."""


class Bounds(NamedTuple):
    """Between what a number must lie. Where all that it is made of is a key, both ends are the same."""

    least: float
    most: float

    @classmethod
    def of(cls, number: float) -> Bounds:
        """Exactly this."""
        return cls(number, number)

    def over(self, whole: float) -> Bounds:
        """Both ends as shares of ``whole``."""
        return Bounds(self.least / whole, self.most / whole)

    def __contains__(self, number: object) -> bool:
        """Whether a number lies there, rounding apart."""
        if not isinstance(number, (int, float)):
            return False
        slack = CLOSE * max(abs(self.least), abs(self.most), CLOSE)
        return self.least - slack <= number <= self.most + slack

    def __str__(self) -> str:
        """One number, or both ends."""
        return f"{self.least}" if self.least == self.most else f"between {self.least} and {self.most}"


class SummaryValues:
    """A summary, and sums of its rows.

    Args:
        document: the summary.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    @cached_property
    def stages(self) -> list[Mapping[str, Any]]:
        """The stage table."""
        return list(self.document["stages"])

    @cached_property
    def activities(self) -> Mapping[str, float]:
        """Seconds by activity."""
        found: Mapping[str, float] = self.document["activities"]
        return found

    @property
    def wall_s(self) -> float:
        """Wall time of the run."""
        return float(self.document["wall_seconds"])

    @cached_property
    def training_s(self) -> float:
        """Self time of phase train."""
        return self.self_s(TRAIN)

    def rows(
        self, *phases: str, stage: str | None = None, loader: str | None = None
    ) -> list[Mapping[str, Any]]:
        """Rows of these phases; of one stage, of one loader where they are given."""
        return [
            row
            for row in self.stages
            if row["phase"] in phases
            and (stage is None or row["stage"] == stage)
            and (loader is None or row["loader"] == loader)
        ]

    def self_s(self, *phases: str, stage: str | None = None, loader: str | None = None) -> float:
        """Self time of those rows."""
        return float(
            sum(row["self_seconds"] or 0.0 for row in self.rows(*phases, stage=stage, loader=loader))
        )

    @cached_property
    def model_s(self) -> float:
        """Self time of the stages of the model, in training."""
        return sum(self.self_s(TRAIN, stage=stage) for stage in self.document["model_stages"])

    @cached_property
    def waits(self) -> list[Mapping[str, Any]]:
        """Rows in which training waits for a loader."""
        return [row for row in self.rows(TRAIN, stage="data") if row["loader"]]

    def loader(self, name: str) -> Mapping[str, Any]:
        """What is known of a loader."""
        found = (row for row in self.document["loaders"] if row["loader"] == name)
        return next(found, {})

    def start(self, name: str, field: str) -> Bounds:
        """A field of `start` of a loader in training; an upper bound if it was read in other phases too."""
        start = self.loader(name).get("start") or {}
        number = start.get(field, 0)
        phases = {row["phase"] for row in self.stages if row["stage"] == "data" and row["loader"] == name}
        return Bounds.of(number) if phases <= {TRAIN, ""} else Bounds(0.0, number)

    def starts(self, *names: str) -> Bounds:
        """What the beginning of all passes of training over these loaders has cost."""
        parts = [
            self.start(name, field) for name in names for field in ("making_seconds", "first_batch_seconds")
        ]
        return Bounds(sum(part.least for part in parts), sum(part.most for part in parts))

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
        """The wait for a loader in mid-pass."""
        if name in self.exposed:
            spent_s, start = self.exposed[name], self.start(name, "first_batch_seconds")
        else:
            spent_s, start = self.self_s(TRAIN, stage="data", loader=name), self.starts(name)
        return Bounds(max(0.0, spent_s - start.most), max(0.0, spent_s - start.least))

    def batches(self, name: str) -> int:
        """Batches of training that a loader gave."""
        return sum(row["count"] for row in self.waits if row["loader"] == name)


def _steady_ratio(summary: SummaryValues, _: Mapping[str, Any]) -> Bounds:
    parts = [summary.steady_wait(row["loader"]) for row in summary.waits]
    least, most = (sum(ends) / summary.training_s for ends in zip(*parts, strict=True))
    return Bounds(min(1.0, least), min(1.0, most))


def _waited_per_batch(summary: SummaryValues, finding: Mapping[str, Any]) -> Bounds:
    name = finding["loader"]
    wait, passes, batches = summary.steady_wait(name), summary.start(name, "count"), summary.batches(name)
    return Bounds(wait.least / (batches - passes.least), wait.most / (batches - passes.most))


def _repeated(summary: SummaryValues, _: Mapping[str, Any]) -> Bounds:
    names = {row["loader"] for row in summary.waits}
    again = [name for name in names if summary.start(name, "count").least > 1]
    perhaps = [name for name in names if summary.start(name, "count").most > 1]
    return Bounds(summary.starts(*again).least, summary.starts(*perhaps).most)


def _dispatch(summary: SummaryValues, _: Mapping[str, Any]) -> tuple[float, float]:
    """Medians of a call of a whole update, and of the wait for it."""
    built_in = ("forward", "backward", "optimizer", "loss", WAIT)
    calls = [row for row in summary.rows(TRAIN) if row["stage"] in summary.document["model_stages"]]
    call = max(
        (row for row in calls if row["stage"] not in built_in), key=lambda row: row["inclusive_seconds"]
    )
    waits = summary.rows(TRAIN, stage=WAIT, loader=call["loader"])
    return call["p50"], max(waits, key=lambda row: row["inclusive_seconds"])["p50"]


def _key(name: str, *path: str) -> Callable[[SummaryValues, Mapping[str, Any]], Bounds]:
    """A number that is a key."""

    def found(summary: SummaryValues, _: Mapping[str, Any]) -> Bounds:
        value: Any = summary.document
        for part in (*path, name):
            value = value[part]
        return Bounds.of(value)

    return found


def _of_wall(activity: str) -> Callable[[SummaryValues, Mapping[str, Any]], Bounds]:
    """The share of an activity."""
    return lambda summary, _: Bounds.of(summary.activities[activity] / summary.wall_s)


def _of_loader(field: str) -> Callable[[SummaryValues, Mapping[str, Any]], Bounds]:
    return lambda summary, finding: summary.start(finding["loader"], field)


def _build(field: str) -> Callable[[SummaryValues, Mapping[str, Any]], Bounds]:
    return lambda summary, finding: Bounds.of(summary.loader(finding["loader"])["build"][field])


RULES: dict[str, Callable[[SummaryValues, Mapping[str, Any]], Bounds]] = {
    "training_seconds": lambda summary, _: Bounds.of(summary.training_s),
    "wall_seconds": _key("wall_seconds"),
    **{f"{name}_seconds": _key(name, "activities") for name in RUN_ACTIVITIES},
    **{f"{name}_ratio": _of_wall(name) for name in RUN_ACTIVITIES},
    "model_seconds": lambda summary, _: Bounds.of(summary.model_s),
    "model_ratio": lambda summary, _: Bounds.of(summary.model_s / summary.training_s),
    "other_seconds": lambda summary, _: Bounds.of(summary.self_s(TRAIN, stage="other")),
    "data_wait_seconds": lambda summary, _: Bounds.of(sum(row["self_seconds"] for row in summary.waits)),
    "data_wait_ratio": lambda summary, _: Bounds.of(sum(row["self_seconds"] for row in summary.waits) / summary.training_s),
    "data_without_loader_seconds": lambda summary, _: Bounds.of(summary.self_s(TRAIN, stage="data", loader="")),
    "pass_start_seconds": lambda summary, _: summary.starts(*(row["loader"] for row in summary.waits)),
    "repeated_start_seconds": _repeated,
    "repeated_start_ratio": lambda summary, finding: _repeated(summary, finding).over(summary.training_s),
    "making_seconds": _of_loader("making_seconds"),
    "first_batch_seconds": _of_loader("first_batch_seconds"),
    "passes": _of_loader("count"),
    "device_wait_seconds": lambda summary, _: Bounds.of(sum(summary.exposed.values())),
    "steady_wait_ratio": _steady_ratio,
    "wait_per_batch_seconds": _waited_per_batch,
    "batches": lambda summary, finding: Bounds.of(summary.batches(finding["loader"])),
    "steps": lambda summary, _: Bounds.of(summary.document["steps"].get(TRAIN, 0)),
    "build_p50_seconds": _build("p50"),
    "build_p99_seconds": _build("p99"),
    "ask_interval_seconds": lambda summary, finding: Bounds.of(
        (summary.training_s - summary.self_s(TRAIN, stage="data")) / summary.batches(finding["loader"])
    ),
    "recompiles": _key("recompiles"),
    "recompile_seconds": _key("recompile_seconds"),
    "recompile_ratio": lambda summary, _: Bounds.of(min(1.0, summary.document["recompile_seconds"] / summary.training_s)),
    **{
        name: _key(name, "device_pace")
        for name in (
            "device_steps", "least_lag_seconds", "most_lag_seconds", "device_idle_ratio", "launch_idle_ratio",
        )
    },
    "call_p50_seconds": lambda summary, finding: Bounds.of(_dispatch(summary, finding)[0]),
    "dispatch_p50_seconds": lambda summary, finding: Bounds.of(
        _dispatch(summary, finding)[0] - _dispatch(summary, finding)[1]
    ),
    "dispatch_ratio": lambda summary, finding: Bounds.of(
        1 - _dispatch(summary, finding)[1] / _dispatch(summary, finding)[0]
    ),
    "rank": _key("rank", "ranks", "straggler"),
    "excess_s": _key("excess_s", "ranks", "straggler"),
    "others_wait_s": _key("waits_s", "ranks", "straggler"),
    "step_s": _key("step_s", "ranks", "straggler"),
    "windows": _key("windows", "ranks", "straggler"),
}  # fmt: skip
"""What each number is, from the summary and the finding that has it."""


def rule_of(name: str, summary: SummaryValues) -> Callable[[SummaryValues, Mapping[str, Any]], Bounds] | None:
    """The rule of a number; those about one loader or one stage have its name in theirs."""
    if name in RULES:
        return RULES[name]
    loader, stage = name.removesuffix(".wait_seconds"), name.removesuffix("_ratio")
    if loader != name and loader in {row["loader"] for row in summary.waits}:
        return lambda summary, _: summary.steady_wait(loader)
    if stage != name and summary.rows(TRAIN, stage=stage):
        return lambda summary, _: Bounds.of(summary.self_s(TRAIN, stage=stage) / summary.training_s)
    return None


def numbers_of(summary: SummaryValues, finding: Mapping[str, Any]) -> Iterator[str]:
    """Which numbers of a finding do not follow from keys."""
    for name, number in finding["evidence"].items():
        rule = rule_of(name, summary)
        try:
            found = rule(summary, finding) if rule else None
        except (
            KeyError,
            TypeError,
            ValueError,
            ZeroDivisionError,
        ):  # the keys that it follows from are absent
            found = None
        about = f"verdicts: {name} of {finding['name']} is {number}"
        if found is None:
            yield f"{about}: no key has it, and it follows from none"
        elif number not in found:
            yield f"{about}; by the keys that it follows from it is {found}"
