"""Spans made after the fact, and ids that every rank works out by itself."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from otel_train import catalog
from otel_train.aggregation.spans import Ids
from otel_train.datamodel import Span
from otel_train.recording.events import Op, SourceKind
from tests.support.edges import TRAINING, Tape
from tests.support.runs import KEEP_ALL, Run, run_state

RUN = st.text(min_size=1, max_size=20)


def traced(tape: Tape, *, rank: int = 0) -> list[Span]:
    """The spans of the steps on a tape."""
    run = Run()
    run.account = run_state(rank=rank, rules=KEEP_ALL)
    return run.feed(tape, slice_=8).close(tape.now_ns).spans


def one_step(*, rank: int = 0) -> list[Span]:
    """The spans of a step: data from 0 to 5, forward to 25, backward to 55, update to 62."""
    return traced(Tape().step(), rank=rank)


@given(RUN, st.integers(0, 9), st.integers(0, 10**12), st.integers(1, 512))
def test_a_step_is_one_trace_on_all_ranks(run: str, attempt: int, step: int, rank: int) -> None:
    """Ranks join a trace without a collective, and no span stands for two."""
    first, other = Ids(run, attempt, 0), Ids(run, attempt, rank)

    assert first.trace("step", step) == other.trace("step", step)
    assert first.span("step", step) == other.span("step", step)
    assert first.own("step", step) != other.own("step", step)


@given(RUN, st.integers(0, 9), st.integers(0, 10**12), st.integers(0, 512))
def test_ids_fit_and_are_never_zero(run: str, attempt: int, step: int, rank: int) -> None:
    """Zero means "no id" to every back end."""
    ids = Ids(run, attempt, rank)

    assert 0 < ids.trace("step", step) < 1 << 128
    assert 0 < ids.own("step", step) < 1 << 64


@given(RUN, st.integers(0, 9), st.integers(0, 10**6), st.integers(0, 10**6))
def test_another_step_attempt_or_run_is_another_trace(run: str, attempt: int, one: int, two: int) -> None:
    """A restarted run repeats step numbers; its traces must not run into the old ones."""
    ids = Ids(run, attempt, 0)

    assert (ids.trace("step", one) == ids.trace("step", two)) == (one == two)
    assert ids.trace("step", one) != Ids(run, attempt + 1, 0).trace("step", one)
    assert ids.trace("step", one) != Ids(run + "x", attempt, 0).trace("step", one)


def test_making_ids_draws_no_random_numbers() -> None:
    """A draw would change the user's training, and equal seeds would give equal ids."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global generator is the one that must stay
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002 - as above
    traced(Tape().step().stop().validate())

    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]  # noqa: NPY002 - as above


def test_a_step_is_a_tree() -> None:
    """Root, this rank's part, its stages: what a trace view draws."""
    root, own, *stages = one_step()

    assert [span.name for span in (root, own)] == [catalog.STEP_SPAN.name, catalog.RANK_STEP_SPAN.name]
    assert [span.attributes[catalog.SPAN_STAGE.name] for span in stages] == [
        "data", "forward", "backward", "optimizer"
    ]  # fmt: skip
    assert (root.parent_id, own.parent_id) == (0, root.span_id)
    assert {span.parent_id for span in stages} == {own.span_id}
    assert {span.trace_id for span in (root, own, *stages)} == {root.trace_id}
    assert len({span.span_id for span in (root, own, *stages)}) == 6


def test_times_of_spans_are_wall_time() -> None:
    """The monotonic clock means nothing outside of this machine."""
    _, own, data, *_ = one_step()

    assert (own.start_unix_ns, own.end_unix_ns) == (10**18, 10**18 + 62)
    assert (data.start_unix_ns, data.end_unix_ns) == (10**18, 10**18 + 5)


def test_only_rank_zero_sends_the_root() -> None:
    """The same root sent by every rank would be as many spans with one id."""
    own, *stages = one_step(rank=3)

    assert own.name == catalog.RANK_STEP_SPAN.name
    assert own.parent_id == one_step()[0].span_id
    assert catalog.STEP_SPAN.name not in {span.name for span in stages}


def test_a_step_says_what_it_is() -> None:
    """Number, reason, loader, size, and what it was compared with: what a search asks for."""
    tape = Tape().repeat(21, lambda tape: tape.ask(samples=4).forward().backward().update())
    own = [span for span in traced(tape) if span.name == catalog.RANK_STEP_SPAN.name][-1]

    assert own.attributes[catalog.STEP_NUMBER.name] == 20
    assert own.attributes[catalog.KEEP_REASON.name] == "warmup"
    assert own.attributes[catalog.SPAN_LOADER.name] == "code"
    assert own.attributes[catalog.BATCH_SIZE.name] == 4
    assert own.attributes[catalog.STEP_BASELINE.name] == 62e-9
    listed = {attribute.name for attribute in catalog.RANK_STEP_SPAN.attributes}
    assert listed - {catalog.SPAN_ERROR_TYPE.name} == set(own.attributes)


def test_what_is_not_known_is_left_out() -> None:
    """Zero for "not measured" is a wrong value."""
    own, forward, *_ = traced(Tape().forward().backward().update(), rank=1)

    absent = {catalog.SPAN_LOADER.name, catalog.BATCH_SIZE.name, catalog.STEP_BASELINE.name}
    assert absent.isdisjoint(own.attributes)
    assert catalog.STAGE_DEVICE_TIME.name not in forward.attributes


def test_a_failed_stage_fails_its_step() -> None:
    """Errors are searched for by status, on the stage and on the step."""
    tape = Tape().ask().run(SourceKind.FORWARD, "model", 20, flags=TRAINING, end=Op.FAIL).micro().update()
    root, own, data, forward, *_ = traced(tape)

    assert (data.error, forward.error, own.error) == ("", "forward failed", "forward failed")
    assert root.error == ""


def test_every_trace_leads_back_to_the_start_of_the_run() -> None:
    """There is no run-long span, so the link is the only way from a step to its run."""
    run = run_state(rules=KEEP_ALL)
    run.spans.start(0, 5)
    run.spans.checkpoint((1, 2), 0, failed=False)
    run.spans.end(9, 3)
    (start, *linked), _ = run.spans.drain()
    linked += one_step()[:2]

    assert start.links == ()
    assert {(link.trace_id, link.span_id) for span in linked for link in span.links} == {
        (start.trace_id, start.span_id)
    }


def test_every_pass_is_a_trace_of_its_own() -> None:
    """Two evaluations, or one on each of two ranks, are not one."""
    tape = Tape().step().stop().validate().step().stop().validate()
    made = [
        span for rank in (0, 1) for span in traced(tape, rank=rank) if span.name == catalog.EVAL_SPAN.name
    ]

    assert len(made) == 4
    assert len({span.trace_id for span in made}) == 4
    assert len({span.span_id for span in made}) == 4
