"""Laws that hold in every summary, whatever the loop: what is wrong with one, as sentences."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

TRAIN = "train"
EVALUATING = ("eval", "test", "predict")
ROUNDED_S = 1e-6
"""What may be lost between two ways to add up the same nanoseconds."""

NEAR = 0.001
"""Share of the wall time by which activities may miss it."""

STEPS_NEAR = 0.005
"""Share of the training time by which its steps may miss it."""

SLACK_S = 0.001
"""What figures may differ by, however small they are."""


def laws_of(summary: dict[str, Any], *, threads: int = 1) -> list[str]:
    """What is broken in ``summary``; empty when every law holds.

    Args:
        summary: as ``session.summary()`` gives it, or as ``summary.json`` holds it.
        threads: threads that wrote edges. The times of several overlap, so that some laws hold for one only.
    """
    laws: list[Callable[[dict[str, Any]], Iterable[str]]] = [
        _activities_tile_the_run,
        _self_is_within_inclusive,
        _quantiles_are_in_order,
        _steps_are_counted_once,
        _waits_are_data_rows,
        _rates_follow_from_counts,
        _throughput_follows_from_counts,
        _verdicts_have_their_figures,
    ]
    if threads == 1:
        laws += [_rows_are_activities, _steps_tile_training]
    return [broken for law in laws for broken in law(summary)]


def near(one: float, other: float, *, share: float = NEAR, slack: float = SLACK_S) -> bool:
    """Whether two figures are the same within a share of the larger, or within ``slack``."""
    return abs(one - other) <= max(slack, share * max(abs(one), abs(other)))


def self_seconds(summary: dict[str, Any], *phases: str, stage: str = "") -> float:
    """Self time of the rows of these phases; of one stage when one is given."""
    rows = [row for row in summary["stages"] if row["phase"] in phases and row["stage"] != "checkpoint"]
    return float(sum(row["self_seconds"] or 0.0 for row in rows if stage in {"", row["stage"]}))


def _activities_tile_the_run(summary: dict[str, Any]) -> Iterator[str]:
    activities, wall_s = summary["activities"], summary["wall_seconds"]
    for name, seconds in activities.items():
        if seconds < 0:
            yield f"activity {name} lasts {seconds} s: less than nothing"
    if not near(total := sum(activities.values()), wall_s):
        yield f"activities add up to {total} s, the run lasted {wall_s} s"


def _rows_are_activities(summary: dict[str, Any]) -> Iterator[str]:
    activities = summary["activities"]
    if activities.get("compile") or activities.get("stalled"):
        return  # taken out of the activity in which they happened
    waited_s = self_seconds(summary, TRAIN, stage="data")
    pairs = {
        "data_wait": waited_s,
        "productive": self_seconds(summary, TRAIN) - waited_s,
        "eval": self_seconds(summary, *EVALUATING),
    }
    for activity, rows in pairs.items():
        if not near(activities[activity], rows):
            yield f"activity {activity} lasts {activities[activity]} s, its rows {rows} s"


def _self_is_within_inclusive(summary: dict[str, Any]) -> Iterator[str]:
    for row in summary["stages"]:
        own, whole = row["self_seconds"] or 0.0, row["inclusive_seconds"]
        if own < 0:
            yield f"{_name(row)}: self {own} s is less than nothing"
        if row["stage"] != "other" and whole is not None and own > whole + ROUNDED_S:
            yield f"{_name(row)}: self {own} s is more than inclusive {whole} s"


def _quantiles_are_in_order(summary: dict[str, Any]) -> Iterator[str]:
    for row in [*summary["stages"], *summary["step_durations"]]:
        order = [row[name] for name in ("min", "p50", "p95", "p99", "max")]
        if None not in order and order != sorted(order):
            yield f"{_name(row)}: quantiles {order} are out of order"
        if (
            row["count"]
            and row["avg"] is not None
            and not row["min"] - 1e-9 <= row["avg"] <= row["max"] + 1e-9
        ):
            yield f"{_name(row)}: average {row['avg']} s is outside {row['min']} to {row['max']} s"


def _steps_are_counted_once(summary: dict[str, Any]) -> Iterator[str]:
    counts: dict[str, int] = defaultdict(int)
    for row in summary["step_durations"]:
        counts[row["phase"]] += row["count"]
    steps = {phase: count for phase, count in summary["steps"].items() if count}
    if steps != {phase: count for phase, count in counts.items() if count}:
        yield f"steps are {steps}, their durations {dict(counts)}"


def _steps_tile_training(summary: dict[str, Any]) -> Iterator[str]:
    """Training time is in steps, but for the asks that find the end of a loader and what is left at the close."""
    steps_s = sum(row["total_seconds"] or 0.0 for row in summary["step_durations"] if row["phase"] == TRAIN)
    train_s = self_seconds(summary, TRAIN)
    if steps_s > train_s + ROUNDED_S:
        yield f"training steps last {steps_s} s, all of training {train_s} s"
    whole = summary["step_source"] == "update" and not summary["partial_steps"]
    ends_s = self_seconds(
        summary, TRAIN, stage="data"
    )  # at most: how long the last asks took is in no figure
    if whole and train_s - steps_s > STEPS_NEAR * train_s + ends_s + SLACK_S:
        yield f"no step is partial, but training steps last {steps_s} s and all of training {train_s} s"


def _waits_are_data_rows(summary: dict[str, Any]) -> Iterator[str]:
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for row in summary["stages"]:
        if row["stage"] == "data":
            counts[row["loader"]] += row["count"]
            seconds[row["loader"]] += row["inclusive_seconds"]
    for loader in summary["loaders"]:
        wait, name = loader["wait"], loader["loader"]
        if wait is None:
            if counts.get(name):
                yield f"loader {name} has {counts[name]} waits in the stages and none of its own"
        elif wait["count"] != counts[name] or not near(wait["total_seconds"], seconds[name]):
            yield (
                f"loader {name} was waited for {wait['count']} times, {wait['total_seconds']} s; "
                f"its data rows say {counts[name]} times, {seconds[name]} s"
            )


def _rates_follow_from_counts(summary: dict[str, Any]) -> Iterator[str]:
    rows = summary.get("rates", [])
    phases: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        phases[row["loader"]].add(row["phase"])
    for row in rows:
        seconds, name = row["seconds"], _name(row)
        own = sum(
            s["self_seconds"] or 0.0
            for s in summary["stages"]
            if (s["phase"], s["loader"]) == (row["phase"], row["loader"])
        )
        waits_s = sum(s["self_seconds"] or 0.0 for s in summary["stages"] if s["stage"] == "data")
        if seconds is not None and seconds < own * (1 - NEAR) - max(SLACK_S, waits_s):
            yield f"{name}: the rate is over {seconds} s, its own rows are {own} s"
        if len(phases[row["loader"]]) > 1:
            continue  # counts of a loader are of all phases
        for rate, count in (
            (row["batches_per_second"], summary["batches"].get(row["loader"])),
            (row["samples_per_second"], summary["samples"].get(row["loader"])),
        ):
            if (
                rate is not None
                and seconds
                and count is not None
                and not near(rate * seconds, count, slack=0.01)
            ):
                yield f"{name}: {rate} per second over {seconds} s is not {count}"


def _throughput_follows_from_counts(summary: dict[str, Any]) -> Iterator[str]:
    throughput = summary.get("throughput")
    if not throughput:
        return
    wall_s = throughput["wall_seconds"]
    if not near(wall_s, summary["wall_seconds"]):
        yield f"throughput is over {wall_s} s, the run lasted {summary['wall_seconds']} s"
    rate, steps = throughput["steps_per_second"], summary["steps"].get(TRAIN, 0)
    if rate is not None and not near(rate * wall_s, steps, slack=0.01):
        yield f"{rate} steps per second over {wall_s} s are not {steps} steps"


def _verdicts_have_their_figures(summary: dict[str, Any]) -> Iterator[str]:
    loaders = {row["loader"] for row in summary["stages"]} | set(summary["batches"])
    for verdict in summary["verdicts"]:
        name, share, seconds = verdict["name"], verdict["share"], verdict["seconds"]
        if share is not None and not 0.0 <= share <= 1.0 + 1e-9:
            yield f"verdict {name}: share {share} is not between 0 and 1"
        if seconds is not None and seconds > summary["wall_seconds"] * (1 + NEAR) + SLACK_S:
            yield f"verdict {name}: {seconds} s in a run of {summary['wall_seconds']} s"
        if verdict["loader"] and verdict["loader"] not in loaders:
            yield f"verdict {name}: no figure is of loader {verdict['loader']}"


def _name(row: dict[str, Any]) -> str:
    return " ".join(filter(None, (row["phase"], row["loader"], row.get("stage", ""), row.get("model", ""))))
