"""Spans made after the fact, and ids that every rank works out by itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from otel_train import catalog
from otel_train.aggregation.spans import ChildSpan, Ids, StepFacts, Tracer
from otel_train.datamodel import Anchor

ANCHOR = Anchor(unix_ns=1_000_000, clock_ns=0)
RUN = st.text(min_size=1, max_size=20)


def tracer(rank: int = 0, run: str = "run-1", attempt: int = 0) -> Tracer:
    return Tracer(Ids(run, attempt, rank), ANCHOR)


def facts(number: int = 7, children: tuple[ChildSpan, ...] = (), **more: Any) -> StepFacts:
    given_ = {"reason": "slow", "phase": "train", "loader": "code", "started_ns": 100, "ended_ns": 162}
    rest = {"duration_ns": 62, "baseline_ns": 31, "samples": 4}
    return StepFacts(number=number, children=children, **{**given_, **rest, **more})


FORWARD = ChildSpan("forward", "code", "model", 105, 125, failed=False)
DATA = ChildSpan("data", "code", "", 100, 105, failed=False)


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
    tracer().step(facts(children=(DATA, FORWARD)))
    tracer().pass_over(catalog.EVAL_SPAN, (0, 1), {}, trace_class="eval")

    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]  # noqa: NPY002 - as above


def test_a_step_is_a_tree() -> None:
    """Root, this rank's part, its stages: what a trace view draws."""
    spans, (trace, children, mine) = tracer().step(facts(children=(DATA, FORWARD)))
    root, own, data, forward = spans

    assert [span.name for span in spans[:2]] == [catalog.STEP_SPAN.name, catalog.RANK_STEP_SPAN.name]
    assert (root.parent_id, own.parent_id) == (0, root.span_id)
    assert {data.parent_id, forward.parent_id} == {own.span_id} == {mine}
    assert (data.span_id, forward.span_id) == children
    assert {span.trace_id for span in spans} == {trace}
    assert len({span.span_id for span in spans}) == 4


def test_times_of_spans_are_wall_time() -> None:
    """The monotonic clock means nothing outside of this machine."""
    _, own, _ = tracer().step(facts(children=(FORWARD,)))[0][:3]

    assert (own.start_unix_ns, own.end_unix_ns) == (1_000_100, 1_000_162)


def test_only_rank_zero_sends_the_root() -> None:
    """The same root sent by every rank would be as many spans with one id."""
    names = [span.name for span in tracer(rank=3).step(facts())[0]]

    assert names == [catalog.RANK_STEP_SPAN.name]
    [span] = tracer(rank=3).step(facts())[0]
    assert span.parent_id == tracer().step(facts())[0][0].span_id


def test_a_step_says_what_it_is() -> None:
    """Number, reason, loader, size, and what it was compared with: what a search asks for."""
    attributes = tracer().step(facts())[0][1].attributes

    assert attributes[catalog.STEP_NUMBER.name] == 7
    assert attributes[catalog.KEEP_REASON.name] == "slow"
    assert attributes[catalog.SPAN_LOADER.name] == "code"
    assert attributes[catalog.BATCH_SIZE.name] == 4
    assert attributes[catalog.STEP_BASELINE.name] == 31e-9


def test_a_step_carries_the_attributes_of_the_reference_page() -> None:
    """A search for one that no span has would find nothing; ``error.type`` is added to what has failed when it is exported."""
    child = FORWARD._replace(device_ns=5)
    spans, _ = tracer().step(facts(children=(child,)))

    for span, kind in zip(
        spans, (catalog.STEP_SPAN, catalog.RANK_STEP_SPAN, catalog.FORWARD_SPAN), strict=True
    ):
        listed = {attribute.name for attribute in kind.attributes}
        assert listed - {catalog.SPAN_ERROR_TYPE.name} == set(span.attributes)


def test_what_is_not_known_is_left_out() -> None:
    """Zero for "not measured" is a wrong value."""
    attributes = tracer().step(facts(samples=0, loader="", baseline_ns=0))[0][1].attributes

    absent = {catalog.SPAN_LOADER.name, catalog.BATCH_SIZE.name, catalog.STEP_BASELINE.name}
    assert absent.isdisjoint(attributes)


def test_a_failed_stage_fails_its_step() -> None:
    """Errors are searched for by status, on the stage and on the step."""
    failed = FORWARD._replace(failed=True)
    root, own, data, forward = tracer().step(facts(children=(DATA, failed)))[0]

    assert (data.error, forward.error, own.error) == ("", "forward failed", "forward failed")
    assert root.error == ""


def test_every_trace_leads_back_to_the_start_of_the_run() -> None:
    """There is no run-long span, so the link is the only way from a step to its run."""
    one = tracer()
    start = one.run_start(0, 5)
    linked = [
        *one.step(facts())[0],
        one.run_end(9, 3),
        one.pass_over(catalog.CHECKPOINT_SAVE_SPAN, (1, 2), {}, trace_class="checkpoint"),
    ]

    assert start.links == ()
    assert {(link.trace_id, link.span_id) for span in linked for link in span.links} == {
        (start.trace_id, start.span_id)
    }


def test_every_pass_is_a_trace_of_its_own() -> None:
    """Two evaluations, or one on each of two ranks, are not one."""
    made = [
        one.pass_over(catalog.EVAL_SPAN, (0, 1), {}, trace_class="eval")
        for one in (tracer(0), tracer(1))
        for _ in range(2)
    ]

    assert len({span.trace_id for span in made}) == 4
    assert len({span.span_id for span in made}) == 4
