"""What logging to each tracker costs the training thread."""

from __future__ import annotations

import time
from _thread import get_ident
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.loop import Loop, warm_up_of
from benchmarks.plan import say
from benchmarks.receiver import receiving
from benchmarks.row import Row
from benchmarks.spread import differences, spread_of
from benchmarks.variants import Instrumented, bare, no_garbage_collection
from otel_train.trackers.metrics import FlatRow
from otel_train.trackers.mlflow import MlflowTracker
from otel_train.trackers.schedule import EVERY_STEPS
from otel_train.trackers.tensorboard import TensorBoardTracker
from otel_train.trackers.wandb import WandbTracker

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.plan import Plan
    from benchmarks.variants import Variant
    from otel_train.trackers import Tracker

WHAT = (
    "Bare steps of 2 ms. Blocks of 3 seconds, bare, instrumented without a tracker, and with each that is installed (W&B"
    " offline, MLflow on sqlite, TensorBoard), a row every 50 steps, take turns; a block begins once the tracker is open."
    " Before that, rows are written to each, one after the other. Cost: mean step with the tracker less mean step without one in the same round."
)
STEP_MS, BLOCK_S = 2.0, 3.0
OPENING_S = 60.0
ROWS = 20

_NAMES = {"wandb": "W&B", "mlflow": "MLflow", "tensorboard": "TensorBoard"}
_OFF = dict.fromkeys(_NAMES, False)
_HAND_OVER = attrgetter("_service.hand_over")


def run(plan: Plan) -> list[Row]:
    """Measures one cost per tracker, and steps per second of every variant."""
    found = {name for name in _NAMES if find_spec(name) is not None}
    for name in set(_NAMES) - found:
        say(f"  {_NAMES[name]} is not installed: left out")
    loop = Loop(step_ms=STEP_MS)
    steps, rounds = loop.steps_in(BLOCK_S), plan.times(6, 1)
    say(f"  {rounds} rounds of {2 + len(found)} blocks of {steps} steps of {STEP_MS:g} ms")
    variants: dict[str, Variant] = {"bare": bare, "none": Instrumented(plan.folder, **_OFF)}
    for name in sorted(found):
        settings = {**_OFF, name: _settings(name, plan.folder), "exit_timeout_s": OPENING_S}
        variants[name] = Instrumented(plan.folder, **settings)
    with receiving():
        blocks = _measure(loop, variants, steps=steps, rounds=rounds)
    writes = [_write(name, plan) for name in sorted(found)]
    means = {name: [block.wall_us for block in found] for name, found in blocks.items()}
    busy = {name: [block.thread_us for block in found] for name, found in blocks.items()}
    return [
        *writes,
        *_costs(means, "cost", f"wall time of a mean {STEP_MS:g} ms step"),
        *_costs(busy, "thread", "processor time of the training thread"),
        *_rates(means),
    ]


def _settings(name: str, folder: Path) -> Any:
    """Returns settings of a run that sends nothing elsewhere."""
    if name == "wandb":
        return {"mode": "offline", "dir": str(folder), "settings": {"silent": True}}
    return {"tracking_uri": f"sqlite:///{folder}/mlflow.db"} if name == "mlflow" else True


def _write(name: str, plan: Plan) -> Row:
    """Measures the processor time per row of the thread that writes: the loop cannot wait longer than that for the GIL."""
    tracker, row, values = _tracker(name, plan.folder), _row_of_two_loaders(), []
    tracker.write(row, tracker.place())  # opens it
    for _ in range(plan.times(20, 3)):
        begun_ns = time.thread_time_ns()
        for _ in range(ROWS):
            tracker.write(row, tracker.place())
        values.append((time.thread_time_ns() - begun_ns) / ROWS / EVERY_STEPS / 1e3)
    tracker.close()
    return Row(
        name=f"trackers.write.{name}",
        what=f"processor time of the thread that writes to {_NAMES[name]}, per step at a row every {EVERY_STEPS}",
        unit="µs",
        values=tuple(values),
    )


def _tracker(name: str, folder: Path) -> Tracker:
    if name == "wandb":
        return WandbTracker(settings=_settings(name, folder))
    if name == "mlflow":
        return MlflowTracker(get_ident(), settings=_settings(name, folder))
    return TensorBoardTracker(folder / "tensorboard", asked=True)


def _row_of_two_loaders() -> FlatRow:
    """Returns a row with as many values as a run with two loaders, one of them for validation."""
    stages = ("data", "forward", "backward", "optimizer", "batch_wait")
    operations = ("data_batch_production", "loss_fn_computation", "training_step", "make_step_total")
    means = {f"profile/train/dl_{loader}/time_{stage}_ms": 1.0 for loader in "ab" for stage in stages}
    totals = {
        f"profiling/{operation}_{what}": 1.0
        for operation in operations
        for what in ("avg_time", "total_time", "count")
    }
    return FlatRow(time.time_ns(), EVERY_STEPS, 1, of_epoch=False, values={**means, **totals})


class _Block(NamedTuple):
    """Mean step of a block in microseconds: wall time, and processor time of the training thread."""

    wall_us: float
    thread_us: float


def _measure(loop: Loop, variants: dict[str, Variant], *, steps: int, rounds: int) -> dict[str, list[_Block]]:
    blocks: dict[str, list[_Block]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with variants[name](loop) as session:
                loop.run(warm_up_of(steps))
                if session is not None and not _HAND_OVER(session)():
                    raise RuntimeError(f"{name} has not opened in {OPENING_S / 2:g} s")
                with no_garbage_collection():
                    begun_ns = time.thread_time_ns()
                    wall_us = float(loop.run(steps).mean()) / 1e3
                    thread_us = (time.thread_time_ns() - begun_ns) / steps / 1e3
                blocks[name].append(_Block(wall_us, thread_us))
    return blocks


def _costs(means: dict[str, list[float]], key: str, what: str) -> list[Row]:
    return [
        Row(
            name=f"trackers.{key}.{name}",
            what=f"additional {what} with {_NAMES[name]}, against instrumented without a tracker",
            unit="µs",
            values=tuple(differences(found, means["none"])),
            detail={"bare_us": spread_of(means["bare"]).median},
        )
        for name, found in means.items()
        if name in _NAMES
    ]


def _rates(means: dict[str, list[float]]) -> list[Row]:
    labels = {"bare": "bare", "none": "instrumented, no tracker", **_NAMES}
    return [
        Row(
            name=f"trackers.rate.{name}",
            what=f"steps per second, {labels[name]}",
            unit="1/s",
            values=tuple(1e6 / mean_us for mean_us in found),
        )
        for name, found in means.items()
    ]
