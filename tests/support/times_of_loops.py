"""Times of a summary against what a program measured around its own sleeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.integration.loops.truth import Attribution, Truth, Watch

WITHIN = 0.15
"""Share by which a time may miss the truth."""

SLACK_S = 0.005
"""What a time may miss the truth by, however small the truth is."""

ABSENT = ("other", "compile", "stalled", "restart")
"""Activities that no program here has."""

AROUND = ("init", "outside")
"""Activities that opening and closing a session are part of."""

ACTIVITIES = ("init", "outside", "eval", "checkpoint", "data_wait", "productive")


def times_of(summary: dict[str, Any], truth: Truth, watch: Watch) -> list[str]:
    """Which times of ``summary`` are not what the program measured; empty when all are.

    A program attributes the time of its sleeps and no other. So a value is at least what was attributed to it,
    and at most that and all time without an attribution: the loop's own work and, on a busy machine, the
    time in which it did not run.
    """
    return [wrong for check in CHECKS for wrong in check(summary, _Times(truth, watch))]


class _Times:
    """What a program attributed, added up."""

    def __init__(self, truth: Truth, watch: Watch) -> None:
        self.truth = truth
        self.wall_s = watch.closing[0] - watch.opening[1]
        self.opening_s = watch.opening[1] - watch.opening[0]
        self.closing_s = watch.closing[1] - watch.closing[0]
        self.unattributed_s = max(0.0, self.wall_s - self.of(lambda each: each.activity != ""))

    def of(self, which: Callable[[Attribution], bool]) -> float:
        """Seconds of the attributions for which ``which`` is true."""
        return sum(seconds for each, seconds in self.truth.seconds.items() if which(each))

    def differ(self, what: str, value: float | None, truth_s: float, *, more_s: float = 0.0) -> Iterator[str]:
        """What is wrong with ``value``; ``more_s``: what else it may contain."""
        least = truth_s * (1 - WITHIN) - SLACK_S
        most = truth_s * (1 + WITHIN) + SLACK_S + self.unattributed_s + more_s
        if value is None and truth_s > SLACK_S:
            yield f"{what} is not known; it lasts {truth_s:.3f} s"
        elif value is not None and not least <= value <= most:
            yield f"{what} is {value:.3f} s, not {truth_s:.3f} s (at most {most:.3f} s)"


def _wall(summary: dict[str, Any], times: _Times) -> Iterator[str]:
    wall_s = summary["wall_seconds"]
    if not times.wall_s - SLACK_S <= wall_s <= times.wall_s + times.opening_s + times.closing_s + SLACK_S:
        yield f"the run lasts {wall_s:.3f} s, not {times.wall_s:.3f} s"


def _activities(summary: dict[str, Any], times: _Times) -> Iterator[str]:
    around_s = max(0.0, summary["wall_seconds"] - times.wall_s)  # spent in opening and closing the session
    for activity in ACTIVITIES:
        attributed_s = times.of(lambda each, activity=activity: each.activity == activity)  # type: ignore[misc]
        more_s = around_s if activity in AROUND else 0.0
        value = summary["activities"].get(activity)
        yield from times.differ(f"activity {activity}", value, attributed_s, more_s=more_s)
    absent_s = sum(summary["activities"].get(activity, 0.0) for activity in ABSENT)
    yield from times.differ("other activities", absent_s, 0.0, more_s=around_s)


def _rows(summary: dict[str, Any], times: _Times) -> Iterator[str]:
    found: dict[tuple[str, str, str, str], float] = defaultdict(float)
    for row in summary["stages"]:
        for loader in {row["loader"], ""}:
            for column in ("self_seconds", "inclusive_seconds"):
                found[row["phase"], loader, row["stage"], column] += row[column] or 0.0
    keys = {(each.phase, _named(each), each.stage) for each in times.truth.seconds if each.stage}
    keys = {key for key in keys if not key[1] or (key[0], "", key[2]) not in keys}
    for phase, loader, stage in sorted(keys):
        truth_s = times.of(
            lambda c, key=(phase, loader, stage): (c.phase, c.stage) == key[::2] and key[1] in {"", _named(c)}  # type: ignore[misc]
        )
        columns = ("self_seconds",) if stage == "other" else ("self_seconds", "inclusive_seconds")
        for column in columns:
            what = f"{column} of {phase} {loader or 'all loaders'} {stage}"
            yield from times.differ(what, found[phase, loader, stage, column], truth_s)


def _waits(summary: dict[str, Any], times: _Times) -> Iterator[str]:
    for loader in {each.loader for each in times.truth.seconds if each.stage == "data"} - {"", "?"}:
        truth_s = times.of(lambda c, loader=loader: (c.stage, c.loader) == ("data", loader))  # type: ignore[misc]
        waits = [row["wait"] for row in summary["loaders"] if row["loader"] == loader]
        wait_s = waits[0]["total_seconds"] if waits and waits[0] else None
        yield from times.differ(f"wait for loader {loader}", wait_s, truth_s)


def _steps(summary: dict[str, Any], times: _Times) -> Iterator[str]:
    if times.truth.partial != 0 or times.truth.threads > 1:
        return  # what is left unfinished is in no step
    attributed_s = times.of(lambda each: each.activity in {"data_wait", "productive"})
    steps_s = sum(row["total_seconds"] for row in summary["step_durations"] if row["phase"] == "train")
    yield from times.differ("sum of all training steps", steps_s, attributed_s)


def _rates(summary: dict[str, Any], times: _Times) -> Iterator[str]:
    truth = times.truth
    for loader, phase in truth.rated.items():
        # Loaders that are asked together share their time.
        owners = {loader} if truth.owners else {"", *truth.rated}
        truth_s = times.of(lambda c, phase=phase, owners=owners: c.phase == phase and c.loader in owners)  # type: ignore[misc]
        rows = [row for row in summary.get("rates", []) if (row["phase"], row["loader"]) == (phase, loader)]
        if len(rows) != 1:
            yield f"{len(rows)} rates of {phase} {loader}"
            continue
        [row] = rows
        yield from times.differ(f"time of the batches of {phase} {loader}", row["seconds"], truth_s)
        samples = truth.samples[loader] if truth.samples is not None else None
        for rate, count in (("batches_per_second", truth.batches[loader]), ("samples_per_second", samples)):
            if count is not None and abs((row[rate] or 0.0) * (row["seconds"] or 0.0) - count) > 0.01 * count:
                yield f"{rate} of {phase} {loader} is {row[rate]} over {row['seconds']} s, not of {count}"


def _throughput(summary: dict[str, Any], times: _Times) -> Iterator[str]:
    throughput = summary.get("throughput")
    if throughput is None:
        yield "there is no throughput"
        return
    for wrong in _wall({"wall_seconds": throughput["wall_seconds"]}, times):
        yield f"throughput: {wrong}"
    truth = times.truth
    counts = {"steps": truth.steps["train"]}
    if "train" in truth.rated.values() and truth.samples is not None:
        trained = [loader for loader, phase in truth.rated.items() if phase == "train"]
        counts["batches"] = sum(truth.batches[loader] for loader in trained)
        counts["samples"] = sum(truth.samples[loader] for loader in trained)
    for unit, count in counts.items():
        found = (throughput[f"{unit}_per_second"] or 0.0) * throughput["wall_seconds"]
        if abs(found - count) > 0.01 * max(1, count):
            yield f"throughput is of {found} {unit}, not {count}"


def _named(each: Attribution) -> str:
    """The loader of an attribution; "" where the program did not name it."""
    return each.loader if each.loader != "?" else ""


CHECKS: list[Callable[[dict[str, Any], _Times], Iterable[str]]] = [
    _wall, _activities, _rows, _waits, _steps, _rates, _throughput,
]  # fmt: skip
