"""Flat names: what every key means, on streams small enough to add up by head."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_train.bottleneck.dataloader import LoaderFacts
from otel_train.collectors.process import MEMORY_KEYS
from otel_train.datamodel import Anchor, DeviceTimes, Pace
from otel_train.recording.events import Ending, Op, SourceKind, code
from otel_train.trackers.metrics import EpochWindow, FlatMetrics, FlatRow, SafeNames
from tests.support.edges import Tape
from tests.support.runs import run_state

MS = 10**6
ANCHOR = Anchor(clock_ns=0, unix_ns=0)


class Rows:
    """What a tape comes to in rows for trackers."""

    def __init__(
        self, *, every_steps: int = 2, every_epochs: int = 1, workers: int | None = None, **settings: Any
    ) -> None:
        self.account = run_state(ANCHOR, stall_after_s=1e9)
        self.facts = {"code": LoaderFacts(workers=workers)}
        self.account.epochs.loaders = lambda: self.facts
        epochs = EpochWindow(self.account.totals, lambda: self.facts, **settings)
        self.metrics = FlatMetrics(
            self.account.names, epochs, every_steps=every_steps, every_epochs=every_epochs, unix=ANCHOR.unix
        )
        self.rows: list[FlatRow] = []
        self.account.on_closed_steps = lambda *facts: self.rows.extend(self.metrics.take(*facts))

    def play(self, tape: Tape, cuts: Sequence[int] = ()) -> list[FlatRow]:
        times, codes = np.array(tape.times, dtype=np.int64), np.array(tape.codes, dtype=np.int64)
        self.account.learn(tape.sources)
        bounds = [0, *cuts, len(times)]
        for begin, end in itertools.pairwise(bounds):
            self.account.feed(1, times[begin:end], codes[begin:end], name="main", main=True)
        self.account.close(tape.now_ns)
        return self.rows

    def play_out(self, tape: Tape, cuts: Sequence[int] = ()) -> list[FlatRow]:
        """As above, with the rows that the end of the session brings."""
        return [*self.play(tape, cuts), *self.metrics.finish(self.account.epochs.close())]


def test_stage_times_are_means_since_the_last_log() -> None:
    """Old charts show the present, not an average that flattens over the days."""
    tape = Tape()
    for factor in (1, 1, 3, 3):
        tape.ask(ns=5 * MS * factor).forward(20 * MS * factor).backward(30 * MS).update(7 * MS)

    first, second = Rows().play(tape.stop())[:2]

    assert (first.step, second.step) == (2, 4)
    assert first.values["profile/train/dl_code/time_data_ms"] == pytest.approx(5)
    assert second.values["profile/train/dl_code/time_data_ms"] == pytest.approx(15)
    assert second.values["profile/train/dl_code/time_forward_ms"] == pytest.approx(60)
    assert second.values["profile/train/dl_code/time_backward_ms"] == pytest.approx(30)
    assert second.values["profile/train/dl_code/time_optimizer_ms"] == pytest.approx(7)


def tape(rounds: int, part: Callable[[Tape], object]) -> Tape:
    return Tape().repeat(rounds, part)


@pytest.mark.parametrize(("played", "every_steps", "expected"), [
    # 5 ms in next(), and the 2 + 4 ms that the program spends around it.
    pytest.param(
        tape(4, lambda t: t.spend(2 * MS).ask(ns=5 * MS).spend(4 * MS).forward(MS).backward(MS).update(MS)), 4,
        {"profile/train/dl_code/time_batch_wait_ms": 11},
        id="batch wait runs from the last stage of the batch before to the forward"),
    # Each loader's clock runs from its own last batch; for a: b's 1 + 1 + 1 + 3, then a's next().
    pytest.param(
        tape(4, lambda t: t.ask("a", MS).forward(MS).backward(MS).ask("b", MS).forward(MS).backward(MS)
             .update(3 * MS)), 4,
        {"profile/train/dl_a/time_batch_wait_ms": 7, "profile/train/dl_b/time_batch_wait_ms": 4,
         "profile/train/dl_b/time_optimizer_ms": 3, "profile/train/dl_a/time_optimizer_ms": None},
        id="with two loaders the wait covers the work on the other one"),
    # The four derived ones and the user's own.
    pytest.param(
        tape(4, lambda t: t.ask(ns=5 * MS).forward(20 * MS).backward(30 * MS).run(SourceKind.STAGE, "clip", 3 * MS)
             .update(7 * MS)), 4,
        {f"profiling/{name}_{what}": value
         for name, s in {"data_batch_production": 0.005, "loss_fn_computation": 0.050, "training_step": 0.060,
                         "make_step_total": 0.060, "clip": 0.003}.items()
         for what, value in {"avg_time": s, "total_time": 4 * s, "count": 4}.items()},
        id="operations are seconds since the start"),
    # An optimizer that calls the model itself (LBFGS) holds forward and backward inside.
    pytest.param(
        tape(2, lambda t: t.ask(ns=5 * MS).begin(SourceKind.OPTIMIZER, "LBFGS").forward(20 * MS).backward(30 * MS)
             .spend(7 * MS).end(SourceKind.OPTIMIZER, "LBFGS")), 2,
        {"profiling/training_step_avg_time": 0.057, "profiling/loss_fn_computation_avg_time": 0.050},
        id="what a closure computes is not counted twice"),
    # It runs between the forward and the backward, in no stage, and may take longer than both.
    pytest.param(
        tape(4, lambda t: t.spend(MS).ask(ns=5 * MS).spend(2 * MS).forward(20 * MS).spend(40 * MS).backward(30 * MS)
             .spend(3 * MS).update(7 * MS).spend(6 * MS)), 4,
        {"profiling/loss_fn_computation_avg_time": 0.090, "profiling/loss_fn_computation_count": 4,
         "profiling/training_step_avg_time": 0.100, "profiling/training_step_count": 4},
        id="the loss function is part of the loss computation and of the training step"),
    # Gradient accumulation: a step of two micro-batches contains the wait for the second one.
    pytest.param(
        tape(2, lambda t: t.repeat(2, lambda t: t.ask(ns=5 * MS).forward(20 * MS).spend(MS).backward(30 * MS))
             .update(7 * MS)), 2,
        {"profiling/loss_fn_computation_count": 4, "profiling/loss_fn_computation_avg_time": 0.051,
         "profiling/training_step_count": 2, "profiling/training_step_avg_time": 0.114,
         "profiling/data_batch_production_count": 4, "profiling/make_step_total_avg_time": 0.109},
        id="every micro-batch has a loss computation, and their step is one"),
    # Manual steps have a duration; nothing in them was timed, so there is no zero to average.
    pytest.param(
        tape(4, lambda t: t.ask(ns=5 * MS).spend(20 * MS).mark()), 2,
        {"profiling/make_step_total_count": 2, "profiling/training_step_count": None,
         "profiling/training_step_avg_time": None, "profiling/loss_fn_computation_avg_time": None},
        id="a step of which no call was seen has no training step"),
    pytest.param(
        tape(2, lambda t: t.ask(ns=5 * MS).run(SourceKind.STAGE, "loss", 20 * MS)
             .run(SourceKind.OPTIMIZER, "optimizer", 4 * MS)), 2,
        {"profiling/loss_fn_computation_avg_time": 0.020, "profiling/loss_fn_computation_count": 2,
         "profiling/loss_avg_time": 0.020, "profiling/training_step_avg_time": 0.024,
         "profiling/training_step_count": 2, "profiling/make_step_total_avg_time": 0.024},
        id="a program of JAX has the old operations: the loss where it is a call of its own"),
    pytest.param(
        tape(2, lambda t: t.ask(ns=5 * MS).run(SourceKind.WHOLE, "make_step", 30 * MS)), 2,
        {"profiling/training_step_avg_time": 0.030, "profiling/data_batch_production_avg_time": 0.005,
         "profile/train/dl_code/time_batch_wait_ms": 5, "profiling/loss_fn_computation_avg_time": None},
        id="a program of JAX has the old operations: a whole update is the step"),
    # Of torch the forward and the backward are known: what lies between them counts once, named or not.
    pytest.param(
        tape(2, lambda t: t.ask(ns=5 * MS).forward(20 * MS).run(SourceKind.STAGE, "loss", 3 * MS).backward(30 * MS)
             .update(MS)), 2,
        {"profiling/loss_fn_computation_avg_time": 0.053, "profiling/loss_fn_computation_count": 2,
         "profiling/loss_avg_time": 0.003},
        id="a stage called loss beside a backward is only a stage"),
])  # fmt: skip
def test_values_of_a_row_are_what_they_add_up_to(
    played: Tape, every_steps: int, expected: dict[str, float | None]
) -> None:
    """The names that old charts ask for, with seconds and counts one can add up."""
    values = Rows(every_steps=every_steps).play(played.stop(), cuts=[3, 5, 7])[0].values

    assert {name: values.get(name) for name in expected} == pytest.approx(expected)


def test_phase_eval_is_called_val_and_has_data_and_forward_only() -> None:
    """The names that old charts ask for."""
    tape = Tape()
    for _ in range(2):
        tape.step()
    tape.stop().validate(3)
    for _ in range(2):
        tape.step()

    second = [row for row in Rows().play(tape.stop()) if not row.of_epoch][1].values

    assert {key for key in second if "/val/" in key} == {
        "profile/val/dl_val/time_data_ms", "profile/val/dl_val/time_forward_ms"
    }  # fmt: skip
    assert second["profile/val/dl_val/time_forward_ms"] == pytest.approx(11e-6)


def test_a_reset_begins_the_totals_anew() -> None:
    """The old profiler's reset()."""
    rows = Rows(every_steps=1)
    rows.play(Tape().step().step().stop())
    assert rows.rows[-2].values["profiling/training_step_count"] == 2

    rows.metrics.reset()

    assert rows.metrics._operations.values() == {}


def epochs(*, samples: int = 8, count: int = 2) -> Tape:
    tape = Tape()
    for _ in range(count):
        for _ in range(5):
            tape.ask(ns=20 * MS, samples=samples).forward(30 * MS).backward(40 * MS).update(10 * MS)
        tape.stop(ns=0)
    return tape


def test_throughput_is_reported_once_per_pass_of_the_training_loader() -> None:
    """5 batches of 8 in 0.5 s, twice."""
    rows = [row for row in Rows(every_steps=0).play(epochs()) if row.of_epoch]

    assert [(row.epoch, row.step) for row in rows] == [(1, 5), (2, 10)]
    for row in rows:
        assert row.values["samples_per_second"] == pytest.approx(80)
        assert row.values["batches_per_second"] == pytest.approx(10)
        assert row.values["batch_load_time_ms_avg"] == pytest.approx(20)
        assert row.values["batch_load_time_ms_p99"] == pytest.approx(20)


def test_every_other_epoch_is_every_other_epoch() -> None:
    """``log_every_epochs=2``."""
    rows = Rows(every_steps=0, every_epochs=2).play(epochs(count=5))

    assert [row.epoch for row in rows] == [2, 4]


def test_samples_that_cannot_be_counted_give_no_rate() -> None:
    """A batch without a length: absent, not zero."""
    row = Rows(every_steps=0).play(epochs(samples=-1))[0]

    assert "samples_per_second" not in row.values
    assert row.values["batches_per_second"] == pytest.approx(10)


def test_efficiency_compares_with_the_slower_of_loading_and_computing_alone() -> None:
    """Without workers 20 ms of loading and 80 ms of computing take turns; computing alone would take 80 of 100."""
    row = Rows(every_steps=0, workers=0).play(epochs())[0]

    assert row.values["throughput_efficiency"] == pytest.approx(0.8)
    assert row.values["batch_transform_time_ms_avg"] == pytest.approx(20)


def test_efficiency_is_absent_until_build_times_are_known() -> None:
    """Workers that have reported nothing may be fast or slow."""
    row = Rows(every_steps=0, workers=2).play(epochs())[0]

    assert not {key for key in row.values if key.startswith(("throughput_eff", "batch_transform"))}


def test_epochs_that_are_accounted_at_once_each_have_the_builds_of_their_batches() -> None:
    """Epochs of half a second end four to a look; what is built ahead belongs to no epoch yet."""
    rows = Rows(every_steps=0, workers=2)
    built_ms = [10] * 5 + [30] * 5 + [90] * 3
    rows.account.totals.loaders.add_builds("code", np.array(built_ms) * 1_000_000, 0)

    averages = [row.values["batch_transform_time_ms_avg"] for row in rows.play(epochs()) if row.of_epoch]

    assert averages == [pytest.approx(10), pytest.approx(30)]
    assert rows.account.totals.loaders.take_builds("code", 9).tolist() == [90_000_000] * 3


def test_memory_of_an_epoch_is_asked_for_at_its_end() -> None:
    """Of the loaders it trained with; what is read later is the next one's."""
    asked: list[tuple[list[str], int]] = []

    def memory(loaders: Iterable[str], at_ns: int) -> dict[str, float]:
        asked.append((list(loaders), at_ns))
        return {"memory_peak_mb": 300.0 + len(asked)}

    rows = Rows(every_steps=0, memory=memory).play(epochs())

    assert [row.values["memory_peak_mb"] for row in rows] == [301, 302]
    assert asked == [(["code"], row.unix_ns) for row in rows]


def test_computing_alone_leaves_out_only_the_wait_that_the_device_felt() -> None:
    """A device with work queued does not notice that the host waits: of 100 ms, 5 and not 20 were lost."""
    rows = Rows(every_steps=0, workers=0)
    tape = epochs(count=1)
    rows.account.learn(tape.sources)
    data = next(number for number, source in enumerate(tape.sources) if source.stage == "data")
    begun = [at for at, word in zip(tape.times, tape.codes, strict=True) if word == code(Op.BEGIN, data)]
    asks = np.array(begun[:5], dtype=np.int64)
    rows.account.device.add(
        DeviceTimes(np.full(5, data), asks + 1, asks + 20 * MS - 1, np.full(5, 5 * MS), tape.now_ns, Pace())
    )

    (row,) = rows.play(tape)

    assert row.values["throughput_efficiency"] == pytest.approx(0.95)


def test_several_training_loaders_have_keys_of_their_own() -> None:
    """All together first, then one by one."""
    tape = Tape()
    for _ in range(4):
        tape.ask("a", MS, samples=2).forward(MS).backward(MS).ask("b", MS, samples=6).forward(MS).backward(MS)
        tape.update(4 * MS)
    rows = Rows(every_steps=0)
    values = rows.play_out(tape.stop("a", ns=0).stop("b", ns=0))[-1].values

    assert values["samples_per_second"] == pytest.approx(800)
    assert values["dl_a/samples_per_second"] == pytest.approx(2 / 0.003)  # over the time of its own batches
    assert values["dl_b/samples_per_second"] == pytest.approx(6 / 0.007)
    assert values["dl_b/batch_load_time_ms_p50"] == pytest.approx(1)


def of_epochs(tape: Tape, cuts: Sequence[int] = ()) -> list[tuple[float, ...]]:
    """Of every epoch its number, the steps up to its end, batches of ``a`` in it, and of ``b``; each step is 62 ns."""
    return [
        (row.epoch, row.step, *(row.values.get(f"dl_{name}/batches_per_second", 0.0) for name in "ab"))
        for row in Rows(every_steps=0).play_out(tape, cuts)
        if row.of_epoch
    ]


def steps(tape: Tape, loaders: str) -> Tape:
    for loader in loaders:
        tape.step(loader)
    return tape


def zipped(tape: Tape, count: int) -> Tape:
    for _ in range(count):
        tape.ask("a").ask("b").forward().backward().update()
    return tape


def test_loaders_in_turn_are_one_epoch() -> None:
    """Its row has both: not one row that ends with the first loader, and one with the rest and the next first."""
    tape = Tape()
    for _ in range(3):
        steps(tape, "aa").stop("a", ns=0)
        steps(tape, "bbb").stop("b", ns=0).validate()

    rows = of_epochs(tape)

    assert [row[:2] for row in rows] == [(1, 5), (2, 10), (3, 15)]
    per_batch = 1e9 / 62  # over the time of its own batches
    assert [row[2:] for row in rows] == [pytest.approx((per_batch, per_batch))] * 3
    for every in (1, 3, 7):  # however the stream is cut
        assert of_epochs(tape, range(every, len(tape.times), every)) == rows


def beside_a_short_one(long: int) -> Tape:
    """Three passes over a loader, with two batches at a time of another that begins again."""
    tape, left = Tape(), 2
    for _ in range(3):
        for _ in range(long):
            tape.ask("a")
            if not left:
                tape.stop("b", ns=0)
                left = 2
            left -= 1
            tape.ask("b").forward().backward().update()
        tape.stop("a", ns=0)
    return tape


@pytest.mark.parametrize(("tape", "ends"), [
    # One of them runs out before the others, now this one and now that.
    pytest.param(
        steps(steps(steps(steps(Tape(), "abab").stop("a", ns=0), "bbb").stop("b", ns=0), "bbbbba").stop("b", ns=0), "a")
        .stop("a", ns=0), [7, 14], id="an epoch of loaders drawn by weight ends when all have run out"),
    # Where the first runs out, the iterators of the others are disposed of.
    pytest.param(
        tape(3, lambda t: zipped(t, 4).stop("a", ns=0).stop("b", ns=0, why=Ending.UNKNOWN)), [4, 8, 12],
        id="an epoch of zip ends with the shortest"),
    # Labelled rows beside many unlabelled ones: an epoch is a pass over the long loader.
    *(pytest.param(beside_a_short_one(long), [long, 2 * long, 3 * long],
                   id=f"a short loader that begins again ends no epoch of {long}") for long in (5, 6, 9)),
    # ``break`` or ``islice`` after so many batches, where the loader has more.
    pytest.param(
        tape(3, lambda t: steps(t, "aaa").stop("a", ns=0, why=Ending.UNKNOWN)), [3, 6, 9],
        id="passes of so many batches are epochs"),
    # The loop begins again, and that pass counts.
    pytest.param(
        steps(steps(Tape(), "aa").ask("a", op=Op.FAIL), "aaa").stop("a", ns=0), [5], id="a pass that fails is no epoch"),
    # Early stopping, or an exception in the loop: the rates of half an epoch are those of no epoch.
    pytest.param(
        steps(steps(Tape(), "aaa").stop("a", ns=0), "aa").stop("a", ns=0, why=Ending.UNKNOWN), [3],
        id="a pass that is broken off for good is no epoch"),
    pytest.param(
        steps(steps(Tape(), "aa").stop("a", ns=0), "a").spend(MS), [2], id="an epoch that is not over is none"),
    # Many scripts measure accuracy on the training data after each epoch.
    pytest.param(
        tape(3, lambda t: steps(t, "aa").stop("a", ns=0).validate(2, "a")), [2, 4, 6],
        id="evaluation on the training loader is no epoch"),
])  # fmt: skip
def test_an_epoch_ends_after_its_last_step(tape: Tape, ends: list[int]) -> None:
    """Epochs are numbered from 1."""
    assert [row[:2] for row in of_epochs(tape)] == list(enumerate(ends, 1))


@pytest.mark.parametrize("tape", [
    beside_a_short_one(5),
    tape(3, lambda t: zipped(t, 4).stop("a", ns=0).stop("b", ns=0, why=Ending.UNKNOWN)),
    tape(3, lambda t: steps(t, "aab").stop("a", ns=0).spend(MS).stop("b", ns=0).validate(2, "a")),
    tape(3, lambda t: steps(t, "aaa").stop("a", ns=0, why=Ending.UNKNOWN)),
])  # fmt: skip
def test_a_capture_is_of_the_epoch_whose_row_covers_it(tape: Tape) -> None:
    """One rule for both: a loader that begins again, or the first of two, made another epoch of a capture."""
    rows = Rows(every_steps=0)
    ends = [row.unix_ns for row in rows.play_out(tape) if row.of_epoch]

    assert [rows.account.epochs.at(end - 1) for end in ends[:2]] == [1, 2]
    assert [rows.account.epochs.at(end + 1) for end in ends[:2]] == [2, 3]


def test_the_first_epoch_of_loaders_that_were_given_is_known_at_its_end() -> None:
    """A row before evaluation, not after it; a given loader that was not used yet may still come in this epoch."""
    rows = Rows(every_steps=0)
    rows.facts = {"a": LoaderFacts(), "b": LoaderFacts(), "val": LoaderFacts()}
    tape = Tape()
    for name in ("a", "b", "val"):
        tape.source(SourceKind.DATA, name)

    made = rows.play(steps(steps(tape, "aa").stop("a", ns=0), "b").stop("b", ns=0))

    assert [(row.epoch, row.step) for row in made] == [(1, 3)]
    assert [row for row in rows.metrics.finish(rows.account.epochs.close()) if row.of_epoch] == []


def test_an_evaluation_after_the_last_row_is_in_a_row_of_its_own() -> None:
    """It is often the one that counts: the last step has its row, and the session ends."""
    rows = Rows(every_steps=2)
    made = len(rows.play(Tape().step().step().stop().validate(3)))

    (last,) = [row for row in rows.metrics.finish(rows.account.epochs.close()) if not row.of_epoch]

    assert made
    assert last.step == 2
    assert last.values["profile/val/dl_val/time_forward_ms"] == pytest.approx(11e-6)
    assert rows.metrics.so_far() == []


def test_a_session_that_only_evaluates_has_a_row() -> None:
    """As after `trainer.validate()`."""
    rows = Rows()
    rows.play(Tape().validate(3))

    assert [row.step for row in rows.metrics.so_far()] == [0]


def test_a_report_is_a_row_of_what_was_up_to_there() -> None:
    """The step that had its update is in it: the program said "now" between two steps."""
    tape = rounds(Tape(), 3).report(1)
    played = Rows(every_steps=0)
    rows = played.play(rounds(tape, 2).spend(MS))

    assert [(row.step, row.of_epoch) for row in rows] == [(3, False)]
    assert rows[0].values["profiling/training_step_count"] == 3
    assert played.metrics.report(1, 0) == []
    (late,) = played.metrics.report(2, 0)
    assert (late.step, late.values["profiling/training_step_count"]) == (5, 5)


def test_a_report_where_a_row_is_due_is_that_row() -> None:
    """Asked for after every 50th step, beside a schedule of 50: one line in the chart, not two."""
    rows = Rows(every_steps=3).play(rounds(rounds(Tape(), 3).report(1), 1).spend(MS))

    assert [row.step for row in rows] == [3]


def rounds(tape: Tape, count: int) -> Tape:
    """Steps over two loaders that never end: 10 samples and 100 ms each."""
    for _ in range(count):
        tape.ask("a", 10 * MS, samples=4).ask("b", 10 * MS, samples=6)
        tape.forward(30 * MS).backward(40 * MS).update(10 * MS)
    return tape


def marked() -> Tape:
    """Two manual epochs, of 5 and 3 steps, with work in between that belongs to none."""
    tape = rounds(Tape().epoch(1), 5).epoch_over()
    rounds(tape.spend(900 * MS), 2).validate()
    return rounds(tape.epoch(2), 3).epoch_over().spend(MS)


def test_epochs_that_are_marked_are_the_programs_own() -> None:
    """A loop over several loaders that never end has no pass to count."""
    rows = [row for row in Rows(every_steps=0).play(marked()) if row.of_epoch]

    assert [(row.epoch, row.step) for row in rows] == [(1, 5), (2, 10)]
    for row in rows:
        assert row.values["samples_per_second"] == pytest.approx(100)
        assert row.values["dl_b/samples_per_second"] == pytest.approx(60)


def test_where_epochs_are_marked_the_ends_of_loaders_are_none() -> None:
    """A short loader that begins again within the epoch would make two of it."""
    tape = rounds(Tape().epoch(7), 2).stop("a", ns=0)
    rounds(tape, 2).stop("a", ns=0).stop("b", ns=0)

    rows = Rows(every_steps=0).play(rounds(tape.epoch(8), 1).epoch_over().spend(MS))

    assert [row.epoch for row in rows if row.of_epoch] == [7, 8]


def test_the_last_epoch_marked_ends_with_the_session() -> None:
    """``epoch()`` at the top of the loop has no later call that ends the last one."""
    rows = Rows(every_steps=0).play_out(rounds(Tape().epoch(1), 4))

    assert [(row.epoch, row.of_epoch) for row in rows] == [(1, False), (1, True)]


def test_a_marked_epoch_that_an_exception_ends_is_none() -> None:
    """Nor is what came before the first one: a warm-up, say."""
    tape = rounds(Tape(), 2)
    rounds(tape.epoch(1), 2).epoch_over(broken=True)
    rows = Rows(every_steps=0).play(rounds(tape.epoch(2), 2).epoch_over().spend(MS))

    assert [row.epoch for row in rows if row.of_epoch] == [2]
    assert rows[-1].values["batches_per_second"] == pytest.approx(20)


def test_epochs_are_counted_without_a_tracker() -> None:
    """A run of W&B may open in the third epoch."""
    rows = Rows(every_steps=0)
    rows.account.on_closed_steps = lambda *facts: rows.metrics.skip(*facts[2:])

    rows.play(rounds(Tape().epoch(3), 2).epoch_over().spend(MS))

    assert rows.metrics.epoch == 3


@pytest.mark.parametrize(("tape", "every_steps"), [(epochs(), 2), (marked(), 3)], ids=["passes", "marks"])
@given(cuts=st.lists(st.integers(1, 100), max_size=6, unique=True).map(sorted))
@settings(max_examples=40, deadline=None)
def test_rows_do_not_depend_on_how_the_edges_were_sliced(
    tape: Tape, every_steps: int, cuts: list[int]
) -> None:
    """The agent reads when it can: what is logged at step 4 is what happened up to step 4, or up to a mark."""
    assert len(tape.times) > 80

    whole = Rows(every_steps=every_steps, workers=0).play(tape)
    sliced = Rows(every_steps=every_steps, workers=0).play(tape, [c for c in cuts if c < len(tape.times)])

    assert [row[:4] for row in sliced] == [row[:4] for row in whole]
    for ours, theirs in zip(sliced, whole, strict=True):
        assert ours.values == pytest.approx(theirs.values)


def test_names_are_made_safe_and_stay_apart(caplog: pytest.LogCaptureFixture) -> None:
    """``a b`` and ``a/b`` would draw one line over the other."""
    safe = SafeNames()

    with caplog.at_level(logging.WARNING, "otel_train"):
        assert [safe(name) for name in ("train set", "train/set", "a.b-c_d", "train set", "train_set")] == [
            "train_set", "train_set_2", "a.b-c_d", "train_set", "train_set_3"
        ]  # fmt: skip

    assert len(caplog.records) == 1


def test_a_stage_of_the_program_is_not_added_to_an_operation_of_the_same_name() -> None:
    """Forty calls of 20 training steps would be neither."""
    safe = SafeNames()

    assert [safe(name) for name in ("training_step", "training step")] == [
        "training_step_2",
        "training_step_3",
    ]


def test_no_name_is_folded_however_many_there_are() -> None:
    """A tracker's chart costs nothing: ``_OTHER`` is for OTLP and Prometheus, where a series does."""
    tape = Tape()
    for number in range(80):
        tape.ask(f"loader{number}", MS).forward(MS).backward(MS).update(MS)

    row = Rows(every_steps=80).play(tape.stop())[0]

    loaders = {key.split("/")[2] for key in row.values if key.startswith("profile/")}
    assert loaders == {f"dl_loader{number}" for number in range(80)}


def test_every_key_is_on_the_reference_page() -> None:
    """The meaning of a chart has to be documented."""
    page = (Path(__file__).parents[2] / "docs/reference/flat-names.md").read_text(encoding="utf-8")
    tape = Tape()
    for _ in range(2):
        for _ in range(4):
            tape.ask("code", MS, samples=2).run(SourceKind.STAGE, "mine", 1).forward().backward().update()
        tape.stop().validate()
    rows = Rows(workers=0, memory=lambda *_: dict.fromkeys(MEMORY_KEYS, 1.0)).play(tape)
    keys = {key for row in rows for key in row.values}
    on_page = {key.replace("dl_code", "dl_{loader}").replace("dl_val", "dl_{loader}") for key in keys}

    missing = [key for key in on_page if not key.startswith("profiling/") and f"`{key}`" not in page]
    operations = {
        key.removeprefix("profiling/").removesuffix("_count") for key in keys if key.endswith("_count")
    }

    assert missing == []
    assert {name for name in operations if f"`{name}`" not in page} == {"mine"}
    assert len(keys) > 20
    assert set(MEMORY_KEYS) <= keys
