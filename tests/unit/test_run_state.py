"""The account of a run: threads, step numbers, spans, events, state."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest

from otel_train import catalog as c
from otel_train.accounting.types import Activity, StepSource
from otel_train.aggregation.metrics import MetricBuilder, RunMetrics
from otel_train.aggregation.run_state import ThreadState
from otel_train.datamodel import HistogramPoint
from otel_train.recording.events import Op, SourceKind
from tests.support.edges import Tape
from tests.support.runs import ANCHOR, Run

NS_PER_S = 10**9


def steps(tape: Tape, number: int, loader: str = "code") -> Tape:
    for _ in range(number):
        tape.step(loader)
    return tape


def numbers(run: Run) -> list[Any]:
    return [span.attributes[c.STEP_NUMBER.name] for span in run.named(c.RANK_STEP_SPAN.name)]


# --- steps and their numbers ----------------------------------------------------------------------


@pytest.mark.parametrize("slice_", [1, 3, 7, 1000])
def test_steps_are_numbered_from_zero_however_they_are_read(slice_: int) -> None:
    """A step's number is its identity over ranks, traces and logs."""
    tape = steps(Tape(), 12).stop()
    run = Run().feed(tape, slice_=slice_).close(tape.now_ns)

    assert numbers(run) == list(range(12))
    assert run.account.step_number == 12
    assert run.account.steps_ended() == (12, tape.now_ns - 5)  # at the request that found no further batch
    assert run.account.step_source is StepSource.UPDATE


def test_a_resumed_run_goes_on_counting_where_it_stopped() -> None:
    """``step(start=5000)``: the number is the user's, not that of this attempt."""
    tape = Tape().mark(5000)
    for _ in range(3):
        tape.micro().update().mark()
    run = Run().feed(tape).close(tape.now_ns)

    assert numbers(run) == [5000, 5001, 5002]
    assert run.account.step_number == 5003


@pytest.mark.parametrize("slice_", [1, 2, 5, 1000])
def test_a_kept_step_has_all_its_stages_however_it_is_read(slice_: int) -> None:
    """A step that was read in two pieces must not lose the first half of its picture."""
    tape = steps(Tape(), 12).stop()
    run = Run().feed(tape, slice_=slice_).close(tape.now_ns)
    step = run.named(c.RANK_STEP_SPAN.name)[10]
    inside = [span for span in run.spans if span.parent_id == step.span_id]

    assert [span.attributes[c.SPAN_STAGE.name] for span in inside] == [
        "data",
        "forward",
        "backward",
        "optimizer",
    ]
    assert all(
        step.start_unix_ns <= span.start_unix_ns <= span.end_unix_ns <= step.end_unix_ns for span in inside
    )


def test_a_step_of_very_many_stages_is_cut() -> None:
    """An inner loop with thousands of forwards must not make a trace that is too large to open."""
    tape = Tape()
    for _ in range(2):
        tape.ask()
        for _ in range(500):
            tape.forward()
        tape.backward().update()
    run = Run().feed(tape.stop()).close(tape.now_ns)
    step = run.named(c.RANK_STEP_SPAN.name)[0]

    assert len([span for span in run.spans if span.parent_id == step.span_id]) == 64


def test_two_training_threads_do_not_share_span_ids() -> None:
    """Two spans with one id are one span to a back end, with the children of both."""
    one, two = steps(Tape(), 12).stop(), steps(Tape(), 12, "other").stop("other")
    run = Run().feed(one).feed(two, main=False, name="second").close(max(one.now_ns, two.now_ns))
    ids = [(span.trace_id, span.span_id) for span in run.spans]

    assert len(run.named(c.RANK_STEP_SPAN.name)) == 24
    assert len(set(ids)) == len(ids)


def test_time_after_the_last_training_thread_is_accounted_for() -> None:
    """The ledger goes on to the end, or the run would seem to be over before it is."""
    tape = steps(Tape(), 12).stop()
    run = Run().feed(tape, main=False, name="fold")
    run.account.end_thread(id(tape))
    run.close(tape.now_ns + 9000)

    assert run.account.final_ns == run.account.totals.activity_ns.sum() == tape.now_ns + 9000


def ledger(run: Run) -> dict[str, int]:
    """Time by activity, without zeros."""
    return {a.name.lower(): int(ns) for a in Activity if (ns := run.account.totals.activity_ns[a])}


def evaluated_and_trained(*, later_ns: int, look: bool = False) -> Run:
    """The main thread evaluates for 69, and another trains from ``later_ns`` on; perhaps with a snapshot in between."""
    main = Tape().validate(4)
    training = steps(Tape().spend(later_ns), 12).stop()
    run = Run().feed(main)
    if look:
        run.account.totals.publish()
    return run.feed(training, main=False, name="trainer").close(training.now_ns)


def test_time_before_a_thread_that_trains_began_is_that_of_the_thread_that_led() -> None:
    """The main thread tries the model, then starts a thread."""
    assert ledger(evaluated_and_trained(later_ns=100)) == {
        "init": 31, "eval": 69, "data_wait": 65, "productive": 684,
    }  # fmt: skip


def test_a_thread_that_trains_brings_its_own_time() -> None:
    """It says what the time of the run is for, from its beginning on."""
    assert ledger(evaluated_and_trained(later_ns=10)) == {"init": 10, "data_wait": 65, "productive": 684}


def test_time_that_was_published_is_not_taken_back_when_another_thread_leads() -> None:
    """``rate()`` takes a counter that falls for one that began anew, and adds all of it once more."""
    found = ledger(evaluated_and_trained(later_ns=10, look=True))

    assert found["eval"] == 69
    assert sum(found.values()) == 10 + 65 + 684


def test_a_thread_that_began_before_the_leading_one_ended_does_not_go_on_from_there() -> None:
    """It was read later; its time is its own from the beginning of the run."""
    first, second = steps(Tape(), 12).stop(), steps(Tape().spend(100), 20).stop()
    run = Run().feed(first, main=False, name="one")
    run.account.end_thread(id(first))
    run.feed(second, main=False, name="two").close(second.now_ns)

    assert run.account.totals.steps_by_phase() == {"train": 32}
    assert sum(ledger(run).values()) == second.now_ns
    durations = [row.self_s * NS_PER_S for row in run.account.totals.rows() if row.key.stage == "backward"]
    assert round(sum(durations)) == 32 * 30


def test_of_threads_that_have_ended_the_state_of_the_last_one_alone_stays_in_memory() -> None:
    """A program with a thread per epoch or trial has thousands of them, and each remembers its backward passes."""

    def states() -> int:
        gc.collect()
        return sum(type(each) is ThreadState for each in gc.get_objects())

    before, run, folds = states(), Run(), [Tape()]
    for _ in range(5):
        folds.append(steps(Tape(started_ns=folds[-1].now_ns), 12).stop())
        run.feed(folds[-1], main=False, name="fold")
        run.account.end_thread(id(folds[-1]))

    assert states() - before == 1
    assert run.close(folds[-1].now_ns).account.totals.steps_by_phase() == {"train": 60}
    assert sum(ledger(run).values()) == folds[-1].now_ns


@pytest.mark.parametrize("order", [True, False])
def test_a_thread_that_trains_after_another_has_ended_keeps_the_time_before(*, order: bool) -> None:
    """Two threads begin after the first has ended; it does not matter which is read first."""
    first = steps(Tape(), 12).stop()
    run = Run().feed(first, main=False, name="fold")
    run.account.end_thread(id(first))
    evaluating = Tape(started_ns=first.now_ns).validate(2)
    training = steps(Tape(started_ns=first.now_ns).spend(50), 12).stop()
    folds = [("train", training), ("eval", evaluating)]
    for name, tape in folds if order else reversed(folds):
        run.feed(tape, main=False, name=name)
    run.close(training.now_ns)

    assert sum(ledger(run).values()) == training.now_ns
    assert ledger(run)["productive"] == 2 * 12 * 57


def test_steps_are_counted_by_the_same_where_a_thread_evaluates_after_the_one_that_trained() -> None:
    """A pool runs an epoch and then an evaluation: `step_source` was "none" beside the steps."""
    training = steps(Tape(), 12).stop()
    run = Run().feed(training, main=False, name="pool_0")
    run.account.end_thread(id(training))
    evaluating = Tape(started_ns=training.now_ns).validate(2)
    run.feed(evaluating, main=False, name="pool_1").close(evaluating.now_ns)

    assert run.account.step_source is StepSource.UPDATE


@pytest.mark.parametrize("published", [False, True])
def test_time_in_which_another_thread_works_while_the_leading_one_waits_is_that_ones(
    *, published: bool
) -> None:
    """An executor trains, and the main thread evaluates in between: a third of the run was outside."""
    main, training = Tape(), Tape().spend(10)
    run = Run()
    for _ in range(3):
        steps(training, 10).stop()
        main.spend(training.now_ns + 20 - main.now_ns).validate(4)
        training.spend(main.now_ns + 5 - training.now_ns)
        run.feed(main).feed(training, main=False, name="pool_0").account.check_stalls(training.now_ns)
        if published:
            run.account.totals.publish()
    run.close(training.now_ns)

    assert ledger(run) == {
        "init": 10, "productive": 3 * 10 * 57, "data_wait": 3 * 10 * 5 + 3 * 5,
        "eval": 3 * (4 * 16 + 5), "outside": 3 * (20 + 5),
    }  # fmt: skip


# --- exemplars ------------------------------------------------------------------------------------


def zipped() -> Tape:
    """Two loaders asked in every step, one slow, and a validation in between."""
    tape = Tape()
    for _ in range(10):
        tape.ask("code", 5).ask("prose", 500).forward().backward().update()
    tape.stop("code").stop("prose").validate(3)
    for _ in range(5):
        tape.ask("code", 5).ask("prose", 500).forward().backward().update()
    return tape.stop("code")


def test_an_exemplar_is_one_of_the_values_of_its_series_and_points_to_a_span_that_is_sent() -> None:
    """A click on the slow bucket of ``prose`` must open neither a fast ask of ``code`` nor nothing."""
    tape = zipped()
    run = Run().feed(tape).close(tape.now_ns)
    builder = MetricBuilder()
    RunMetrics(run.account, max_loaders=16, max_stages=8).write(builder)
    sent = {(span.trace_id, span.span_id) for span in run.spans}
    points = [point for family in builder.families() for point in family.points]
    exemplars = [(e, point) for point in points if isinstance(point, HistogramPoint) for e in point.exemplars]

    assert len(exemplars) > 5
    for exemplar, point in exemplars:
        assert point.min * (1 - 1e-9) <= exemplar.value <= point.max * (1 + 1e-9), point.attributes
        assert (exemplar.trace_id, exemplar.span_id) in sent


# --- what else is reported ------------------------------------------------------------------------


def test_an_evaluation_is_one_span() -> None:
    """A thousand validation batches are one line in a trace view."""
    tape = steps(Tape(), 12).stop().validate(5)
    steps(tape, 2).stop()
    run = Run().feed(tape).close(tape.now_ns)
    [span] = run.named(c.EVAL_SPAN.name)

    assert span.attributes[c.SPAN_LOADER.name] == "val"
    assert span.attributes[c.BATCH_COUNT.name] == 5


def test_evaluations_of_a_thread_that_does_not_lead_are_spans() -> None:
    """An executor trains, the main thread evaluates: `train.eval.duration` had no evaluation after the first."""
    run, training = Run(), steps(Tape(), 12).stop()
    run.feed(training, main=False, name="pool_0")
    main = Tape(started_ns=training.now_ns).validate(3).spend(100).validate(2)
    run.feed(main).close(main.now_ns)

    assert [span.attributes[c.BATCH_COUNT.name] for span in run.named(c.EVAL_SPAN.name)] == [3, 2]
    assert run.account.evals.durations.count(0) == 2


def test_a_checkpoint_is_a_span_and_a_failed_one_is_an_error() -> None:
    """The next crash loses what was not saved."""
    tape = steps(Tape(), 12).run(SourceKind.CHECKPOINT, "checkpoint", 50)
    steps(tape, 2).run(SourceKind.CHECKPOINT, "checkpoint", 70, end=Op.FAIL)
    run = Run().feed(tape).close(tape.now_ns)
    saved, failed = run.named(c.CHECKPOINT_SAVE_SPAN.name)

    assert saved.end_unix_ns - saved.start_unix_ns == 50
    assert (saved.error, bool(failed.error)) == ("", True)
    assert run.account.checkpoints.failures == 1
    assert run.account.checkpoints.last_ns == saved.end_unix_ns - ANCHOR.unix_ns


def test_the_end_of_a_loader_is_an_event() -> None:
    """Epochs on the time line, and loaders that end too soon."""
    tape = steps(Tape(), 12).stop()
    run = Run().feed(tape).close(tape.now_ns)

    assert [(e.name, e.attributes[c.SPAN_LOADER.name]) for e in run.events] == [
        (c.LOADER_EXHAUSTED_EVENT.name, "code")
    ]
    assert run.events[0].attributes[c.SPAN_EXHAUSTION_REASON.name] == "epoch_end"
    assert run.account.totals.loaders.endings == {("code", "epoch_end"): 1}


def test_a_failed_ask_is_an_error_of_its_loader() -> None:
    """And no batch."""
    tape = steps(Tape(), 12).ask(op=Op.FAIL)
    run = Run().feed(tape).close(tape.now_ns)

    assert run.account.loader_errors == {"code": 1}
    assert run.account.totals.by_loader(run.account.totals.batches) == {"code": 12}


def test_ctrl_c_in_an_ask_is_no_error_of_its_loader() -> None:
    """The alert on errors of loaders is about storage, not about who stops a run."""
    tape = steps(Tape(), 12).begin(SourceKind.DATA, "code").end(SourceKind.DATA, "code", op=Op.FAIL)
    run = Run().feed(tape).close(tape.now_ns)

    assert run.account.loader_errors == {}


def test_a_hang_is_reported_while_it_hangs() -> None:
    """A run that never comes back can send nothing afterwards."""
    tape = steps(Tape(), 12).begin(SourceKind.DATA, "code")
    run = Run(stall_after_s=1.0).feed(tape)
    run.account.check_stalls(tape.now_ns + NS_PER_S - 1)
    assert run.account.state() == "training"
    run.account.check_stalls(tape.now_ns + NS_PER_S)
    run.feed(tape)

    assert run.account.state() == "stalled"
    [span] = run.named(c.STALL_SPAN.name)
    assert (span.attributes[c.SPAN_STAGE.name], span.attributes[c.SPAN_LOADER.name]) == ("data", "code")
    assert run.account.stalls.events == {"data": 1}


def test_only_the_time_of_the_hang_is_stalled() -> None:
    """The steps that were read together with the end of the hang were not hanging."""
    tape = steps(Tape(), 12).begin(SourceKind.DATA, "code").spend(2 * NS_PER_S)
    run = Run(stall_after_s=1.0).feed(tape)
    run.account.check_stalls(tape.now_ns)
    tape.end(SourceKind.DATA, "code").forward().backward().update()
    steps(tape, 100).stop()
    run.feed(tape).close(tape.now_ns)

    stalled_ns = run.account.totals.activity_ns[Activity.STALLED]
    assert stalled_ns <= 2 * NS_PER_S
    assert stalled_ns >= NS_PER_S
    assert run.account.totals.activity_ns.sum() == tape.now_ns


def test_the_state_follows_the_run() -> None:
    """What the state timeline draws."""
    tape = Tape()
    run = Run()
    assert run.account.state() == "initializing"
    steps(tape, 12)
    assert run.feed(tape).account.state() == "training"
    tape.stop().begin(SourceKind.CHECKPOINT, "checkpoint")
    assert run.feed(tape).account.state() == "checkpointing"
    tape.end(SourceKind.CHECKPOINT, "checkpoint").validate(3).ask("val")
    assert run.feed(tape).account.state() == "evaluating"


def test_open_stages_are_listed_outermost_first() -> None:
    """A post-mortem says where it was."""
    tape = steps(Tape(), 12).ask().begin(SourceKind.FORWARD, "model", flags=3)
    tape.begin(SourceKind.STAGE, "attention")
    run = Run().feed(tape)

    assert run.account.open_stages() == ["forward", "attention"]


def test_backwards_of_forwards_that_cannot_be_seen_are_steps_beside_a_thread_that_only_loads() -> None:
    """A thread that makes gradients alone is a part of another thread's steps only if that one runs a model."""
    training, loading = Tape(), Tape()
    for _ in range(310):
        training.spend(1).backward()
        loading.ask("code", 10)
    run = Run().feed(loading, main=False, name="prefetch").feed(training).close(training.now_ns)

    assert run.account.totals.steps_by_phase() == {"train": 310}
    assert run.account.step_source is StepSource.BACKWARD


def test_a_thread_that_waits_for_its_part_of_a_step_is_in_no_stage_meanwhile() -> None:
    """A pool makes the gradients: the time between them was `other` of training, and a finding named it."""
    leads, part = Tape(), Tape()
    for _ in range(12):
        leads.ask().forward().spend(40).update()
        part.spend(42).backward()
    run = Run().feed(leads).feed(part, main=False, name="pool_0").close(leads.now_ns)
    totals = run.account.totals
    spent_ns: Counter[str] = Counter()
    for key, ns in zip(totals.names.keys, totals.self_ns, strict=False):
        spent_ns[key.stage] += int(ns)

    assert totals.steps_by_phase() == {"train": 12}
    assert (spent_ns["backward"], spent_ns["other"]) == (12 * 30, 12 * 40)
    assert {totals.names.sources[after].name for after in totals.other_after} == {"model"}


def marked() -> Tape:
    """Ten steps that the program marks, each with a stage of its own."""
    tape = Tape()
    for _ in range(10):
        tape.run(SourceKind.STAGE, "work", 5).mark()
    return tape


def test_the_thread_of_the_session_does_not_train_if_it_only_reads_a_loader_for_another() -> None:
    """`otel-train run` begins a session where a loader is asked first, which may be a thread that fetches ahead."""
    reads, trains = Tape(), Tape()
    for _ in range(12):
        reads.ask("code", 10)
        trains.spend(1).forward().backward().update()
    reads.stop()
    run = Run().feed(reads, main=True, name="Thread-7 (fetch)").feed(trains, main=False)

    assert run.account.loader_threads == ["Thread (fetch)"]
    run.account.end_thread(id(reads))
    assert run.account.loader_threads == ["Thread (fetch)"]
    run.close(trains.now_ns)
    totals = run.account.totals
    phases = {
        key.phase for n, key in enumerate(totals.names.keys) if key.stage == "data" and totals.stages.count(n)
    }
    assert phases == {""}


def test_a_thread_that_asked_an_iterator_of_the_training_thread_is_named_after_its_end() -> None:
    """`BackgroundGenerator(super().__iter__())` in a loader: the training thread makes iterators and asks none."""
    reads, trains = Tape(), Tape().start("code")
    for _ in range(12):
        reads.ask("code", 10)
        trains.spend(1).forward().backward().update()
    run = Run().feed(trains).feed(reads.stop(), main=False, name="Thread-7")
    run.account.end_thread(id(reads))

    assert run.account.loader_threads == ["Thread"]


def test_steps_that_are_marked_on_another_thread_than_the_main_one_are_counted() -> None:
    """A program without torch trains on a thread that did not call ``instrument``."""
    tape = marked()
    run = Run().feed(tape, main=False, name="worker").close(tape.now_ns)

    assert run.account.totals.steps_by_phase() == {"train": 10}
    assert run.account.step_source is StepSource.MANUAL
    assert ledger(run) == {"productive": 50}


def test_steps_that_a_thread_marks_while_another_trains_are_not_counted_twice() -> None:
    """Such as a thread that logs: the steps are those of the thread that makes updates."""
    tape = steps(Tape(), 12).stop()
    run = Run().feed(tape).feed(marked(), main=False, name="logger").close(tape.now_ns)

    assert run.account.totals.steps_by_phase() == {"train": 12}


def test_updates_of_gradients_that_a_thread_made_which_has_ended_are_no_steps_of_their_own() -> None:
    """A parameter server: replicas make gradients in threads and end; the main thread updates."""
    worker, server = Tape(), Tape()
    for _ in range(4):
        worker.ask().forward().backward()
    worker.stop()
    run = Run().feed(worker, main=False, name="worker")
    run.account.end_thread(id(worker))
    for _ in range(12):
        server.update()
    run.feed(server).close(max(worker.now_ns, server.now_ns))

    assert run.account.totals.step_counts.sum() == 4
    assert run.account.totals.updates == 12
