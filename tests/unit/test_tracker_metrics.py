"""Flat names: what every key means, on streams small enough to add up by head."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MS = 10**6
ANCHOR = Anchor(clock_ns=0, unix_ns=0)


class Rows:
    """What a tape comes to in rows for trackers."""

    def __init__(
        self, *, every_steps: int = 2, every_epochs: int = 1, workers: int | None = None, **settings: Any
    ) -> None:
        self.account = run_state(ANCHOR, stall_after_s=1e9)
        self.facts = {"code": LoaderFacts(workers=workers)}
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


def test_batch_wait_runs_from_the_last_stage_of_the_batch_before_to_the_forward() -> None:
    """5 ms in next(), and the 2 + 4 ms that the program spends around it."""
    tape = Tape()
    for _ in range(4):
        tape.spend(2 * MS).ask(ns=5 * MS).spend(4 * MS).forward(MS).backward(MS).update(MS)

    rows = Rows(every_steps=4).play(tape.stop())

    assert rows[0].values["profile/train/dl_code/time_batch_wait_ms"] == pytest.approx(11)


def test_with_two_loaders_the_wait_covers_the_work_on_the_other_one() -> None:
    """Each loader's clock runs from its own last batch; an optimizer stage belongs to the loader fetched last."""
    tape = Tape()
    for _ in range(4):
        tape.ask("a", MS).forward(MS).backward(MS).ask("b", MS).forward(MS).backward(MS).update(3 * MS)

    values = Rows(every_steps=4).play(tape.stop("a"))[0].values

    assert values["profile/train/dl_a/time_batch_wait_ms"] == pytest.approx(
        7
    )  # b: 1 + 1 + 1 + 3, then a's next()
    assert values["profile/train/dl_b/time_batch_wait_ms"] == pytest.approx(4)
    assert values["profile/train/dl_b/time_optimizer_ms"] == pytest.approx(3)
    assert "profile/train/dl_a/time_optimizer_ms" not in values


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


def test_operations_are_seconds_since_the_start() -> None:
    """The four derived ones and the user's own, with average, total and count."""
    tape = Tape()
    for _ in range(4):
        tape.ask(ns=5 * MS).forward(20 * MS).backward(30 * MS).run(SourceKind.STAGE, "clip", 3 * MS).update(
            7 * MS
        )

    values = Rows().play(tape.stop())[1].values

    expected = {
        "data_batch_production": 0.005, "loss_fn_computation": 0.050, "training_step": 0.060,
        "make_step_total": 0.060, "clip": 0.003,
    }  # fmt: skip
    for name, seconds in expected.items():
        assert values[f"profiling/{name}_avg_time"] == pytest.approx(seconds), name
        assert values[f"profiling/{name}_total_time"] == pytest.approx(4 * seconds), name
        assert values[f"profiling/{name}_count"] == 4, name


def test_what_a_closure_computes_is_not_counted_twice() -> None:
    """An optimizer that calls the model itself (LBFGS) holds forward and backward inside."""
    tape = Tape()
    for _ in range(2):
        tape.ask(ns=5 * MS).begin(SourceKind.OPTIMIZER, "LBFGS").forward(20 * MS).backward(30 * MS)
        tape.spend(7 * MS).end(SourceKind.OPTIMIZER, "LBFGS")

    values = Rows().play(tape.stop())[0].values

    assert values["profiling/training_step_avg_time"] == pytest.approx(0.057)
    assert values["profiling/loss_fn_computation_avg_time"] == pytest.approx(0.050)


def test_the_loss_function_is_part_of_the_loss_computation_and_of_the_training_step() -> None:
    """It runs between the forward and the backward, in no stage, and may take longer than both."""
    tape = Tape()
    for _ in range(4):
        tape.spend(MS).ask(ns=5 * MS).spend(2 * MS).forward(20 * MS).spend(40 * MS).backward(30 * MS)
        tape.spend(3 * MS).update(7 * MS).spend(6 * MS)

    values = Rows(every_steps=4).play(tape.stop(), cuts=[3, 9, 10, 17])[0].values

    assert values["profiling/loss_fn_computation_avg_time"] == pytest.approx(0.090)
    assert values["profiling/loss_fn_computation_count"] == 4
    assert values["profiling/training_step_avg_time"] == pytest.approx(0.100)
    assert values["profiling/training_step_count"] == 4


def test_every_micro_batch_has_a_loss_computation_and_their_step_is_one() -> None:
    """Gradient accumulation: a step of two micro-batches contains the wait for the second one."""
    tape = Tape()
    for _ in range(2):
        for _ in range(2):
            tape.ask(ns=5 * MS).forward(20 * MS).spend(MS).backward(30 * MS)
        tape.update(7 * MS)

    values = Rows().play(tape.stop())[0].values

    assert values["profiling/loss_fn_computation_count"] == 4
    assert values["profiling/loss_fn_computation_avg_time"] == pytest.approx(0.051)
    assert values["profiling/training_step_count"] == 2
    assert values["profiling/training_step_avg_time"] == pytest.approx(0.114)
    assert values["profiling/data_batch_production_count"] == 4
    assert values["profiling/make_step_total_avg_time"] == pytest.approx(0.109)


def test_a_step_of_which_no_call_was_seen_has_no_training_step() -> None:
    """Manual steps have a duration; nothing in them was timed, so there is no zero to average."""
    tape = Tape()
    for _ in range(4):
        tape.ask(ns=5 * MS).spend(20 * MS).mark()

    values = Rows().play(tape.stop())[0].values

    assert values["profiling/make_step_total_count"] == 2
    assert not [key for key in values if "training_step" in key or "loss_fn" in key]


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
    rows.play(tape.stop("a", ns=0).stop("b", ns=0))
    values = rows.metrics.finish()[-1].values

    assert values["samples_per_second"] == pytest.approx(800)
    assert values["dl_a/samples_per_second"] == pytest.approx(2 / 0.003)  # over the time of its own batches
    assert values["dl_b/samples_per_second"] == pytest.approx(6 / 0.007)
    assert values["dl_b/batch_load_time_ms_p50"] == pytest.approx(1)


def of_epochs(tape: Tape, cuts: Sequence[int] = ()) -> list[tuple[float, ...]]:
    """Of every epoch its number, the steps up to its end, batches of ``a`` in it, and of ``b``; each step is 62 ns."""
    rows = Rows(every_steps=0)
    made = [*rows.play(tape, cuts), *rows.metrics.finish()]
    return [
        (row.epoch, row.step, *(row.values.get(f"dl_{name}/batches_per_second", 0.0) for name in "ab"))
        for row in made
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


def test_an_epoch_of_loaders_drawn_by_weight_ends_when_all_have_run_out() -> None:
    """One of them runs out before the others, now this one and now that."""
    tape = Tape()
    steps(steps(tape, "abab").stop("a", ns=0), "bbb").stop("b", ns=0)
    steps(steps(tape, "bbbbba").stop("b", ns=0), "a").stop("a", ns=0)

    assert [row[:2] for row in of_epochs(tape)] == [(1, 7), (2, 14)]


def test_an_epoch_of_zip_ends_with_the_shortest() -> None:
    """Where the first runs out, the iterators of the others are disposed of."""
    tape = Tape()
    for _ in range(3):
        zipped(tape, 4).stop("a", ns=0).stop("b", ns=0, why=Ending.UNKNOWN)

    assert [row[:2] for row in of_epochs(tape)] == [(1, 4), (2, 8), (3, 12)]


@pytest.mark.parametrize("long", [5, 6, 9])
def test_a_short_loader_that_begins_again_ends_no_epoch(long: int) -> None:
    """Labelled rows beside many unlabelled ones: an epoch is a pass over the long loader."""
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

    assert [row[:2] for row in of_epochs(tape)] == [(1, long), (2, 2 * long), (3, 3 * long)]


def test_passes_of_so_many_batches_are_epochs() -> None:
    """``break`` or ``islice`` after so many batches, where the loader has more."""
    tape = Tape()
    for _ in range(3):
        steps(tape, "aaa").stop("a", ns=0, why=Ending.UNKNOWN)

    assert [row[:2] for row in of_epochs(tape)] == [(1, 3), (2, 6), (3, 9)]


def test_a_pass_that_fails_is_no_epoch() -> None:
    """The loop begins again, and that pass counts."""
    tape = steps(Tape(), "aa").ask("a", op=Op.FAIL)
    steps(tape, "aaa").stop("a", ns=0)

    assert [row[:2] for row in of_epochs(tape)] == [(1, 5)]


def test_a_pass_that_is_broken_off_for_good_is_no_epoch() -> None:
    """Early stopping, or an exception in the loop: the rates of half an epoch are those of no epoch."""
    tape = steps(Tape(), "aaa").stop("a", ns=0)
    steps(tape, "aa").stop("a", ns=0, why=Ending.UNKNOWN)

    assert [row[:2] for row in of_epochs(tape)] == [(1, 3)]


def test_evaluation_on_the_training_loader_is_no_epoch() -> None:
    """Many scripts measure accuracy on the training data after each epoch."""
    tape = Tape()
    for _ in range(3):
        steps(tape, "aa").stop("a", ns=0)
        tape.validate(2, "a")

    assert [row[:2] for row in of_epochs(tape)] == [(1, 2), (2, 4), (3, 6)]


def test_the_first_epoch_of_loaders_that_were_given_is_known_at_its_end() -> None:
    """A row before evaluation, not after it; a given loader that was not used yet may still come in this epoch."""
    rows = Rows(every_steps=0)
    rows.facts = {"a": LoaderFacts(), "b": LoaderFacts(), "val": LoaderFacts()}
    tape = Tape()
    for name in ("a", "b", "val"):
        tape.source(SourceKind.DATA, name)

    made = rows.play(steps(steps(tape, "aa").stop("a", ns=0), "b").stop("b", ns=0))

    assert [(row.epoch, row.step) for row in made] == [(1, 3)]
    assert [row for row in rows.metrics.finish() if row.of_epoch] == []


def test_an_epoch_that_is_not_over_is_none() -> None:
    """The rates of half an epoch are those of no epoch."""
    tape = steps(Tape(), "aa").stop("a", ns=0)

    assert [row[:2] for row in of_epochs(steps(tape, "a").spend(MS))] == [(1, 2)]


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
    played = Rows(every_steps=0)
    rows = played.play(rounds(Tape().epoch(1), 4))

    assert [(row.epoch, row.of_epoch) for row in played.metrics.finish()] == [(1, False), (1, True)]
    assert rows == []


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
    rows.account.on_closed_steps = rows.metrics.skip

    rows.play(rounds(Tape().epoch(3), 2).epoch_over().spend(MS))

    assert rows.metrics.epoch == 4


@given(cuts=st.lists(st.integers(1, 100), max_size=6, unique=True).map(sorted))
@settings(max_examples=40, deadline=None)
def test_rows_of_marked_epochs_do_not_depend_on_how_the_edges_were_sliced(cuts: list[int]) -> None:
    """What lies before a mark is of the epoch before it, whenever the agent reads it."""
    tape = marked()
    assert len(tape.times) > 100

    whole, sliced = Rows(every_steps=3).play(tape), Rows(every_steps=3).play(tape, cuts)

    assert [row[:3] for row in sliced] == [row[:3] for row in whole]
    for ours, theirs in zip(sliced, whole, strict=True):
        assert ours.values == pytest.approx(theirs.values)


@given(cuts=st.lists(st.integers(1, 87), max_size=6, unique=True).map(sorted))
@settings(max_examples=40, deadline=None)
def test_rows_do_not_depend_on_how_the_edges_were_sliced(cuts: list[int]) -> None:
    """The agent reads when it can; what is logged at step 4 is what happened up to step 4."""
    tape = epochs()
    assert len(tape.times) > 80

    whole, sliced = (
        Rows(workers=0).play(tape),
        Rows(workers=0).play(tape, [c for c in cuts if c < len(tape.times)]),
    )

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


def test_a_program_of_jax_has_the_old_operations() -> None:
    """Their charts had these names: the loss where it is a call of its own, the step as it is."""
    tape = Tape()
    for _ in range(2):
        tape.ask(ns=5 * MS).run(SourceKind.STAGE, "loss", 20 * MS).run(
            SourceKind.OPTIMIZER, "optimizer", 4 * MS
        )
    values = Rows().play(tape.stop())[0].values
    tape = Tape()
    for _ in range(2):
        tape.ask(ns=5 * MS).run(SourceKind.WHOLE, "make_step", 30 * MS)
    whole = Rows().play(tape.stop())[0].values

    assert values["profiling/loss_fn_computation_avg_time"] == pytest.approx(0.020)
    assert values["profiling/loss_fn_computation_count"] == 2
    assert values["profiling/loss_avg_time"] == pytest.approx(0.020)
    assert values["profiling/training_step_avg_time"] == pytest.approx(0.024)
    assert values["profiling/training_step_count"] == 2
    assert values["profiling/make_step_total_avg_time"] == pytest.approx(0.024)
    assert whole["profiling/training_step_avg_time"] == pytest.approx(0.030)
    assert whole["profiling/data_batch_production_avg_time"] == pytest.approx(0.005)
    assert whole["profile/train/dl_code/time_batch_wait_ms"] == pytest.approx(5)
    assert "profiling/loss_fn_computation_avg_time" not in whole


def test_a_stage_called_loss_beside_a_backward_is_only_a_stage() -> None:
    """Of torch the forward and the backward are known: what lies between them counts once, named or not."""
    tape = Tape()
    for _ in range(2):
        tape.ask(ns=5 * MS).forward(20 * MS).run(SourceKind.STAGE, "loss", 3 * MS).backward(30 * MS).update(
            MS
        )

    values = Rows().play(tape.stop())[0].values

    assert values["profiling/loss_fn_computation_avg_time"] == pytest.approx(0.053)
    assert values["profiling/loss_fn_computation_count"] == 2
    assert values["profiling/loss_avg_time"] == pytest.approx(0.003)
