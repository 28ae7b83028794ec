"""The account of a run as metrics, and as the document of a summary."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it publishes no types
import numpy as np
import pytest

from otel_train import catalog as c
from otel_train.agent.summary import summary_values, with_straggler, with_suspects
from otel_train.aggregation.metrics import MetricBuilder, RunMetrics
from otel_train.aggregation.run_state import RunState
from otel_train.bottleneck.dataloader import LoaderFacts
from otel_train.console.summary import render_run_summary
from otel_train.console.text import TextLayout
from otel_train.datamodel import SUMMARY_SCHEMA
from otel_train.distributed.hang import HangSuspect
from otel_train.distributed.straggler import Straggler, straggler_finding
from otel_train.recording.events import Op, SourceKind
from tests.support.edges import Tape
from tests.support.runs import run_state

SCHEMA_FILE = Path(__file__).parents[2] / "otel_train/rundata/summary.schema.json"


def account(tape: Tape, *, close: bool = True, stall_after_s: float = 300.0) -> RunState:
    run = run_state(stall_after_s=stall_after_s)
    run.learn(tape.sources)
    times, codes = np.array(tape.times, dtype=np.int64), np.array(tape.codes, dtype=np.int64)
    run.feed(0, times, codes, name="MainThread", main=True)
    if close:
        run.close(tape.now_ns)
    return run


def published(
    run: RunState, *, max_loaders: int = 16, max_stages: int = 8
) -> dict[str, dict[tuple[str, ...], Any]]:
    builder = MetricBuilder()
    RunMetrics(run, max_loaders=max_loaders, max_stages=max_stages).write(builder)
    found: dict[str, dict[tuple[str, ...], Any]] = {}
    for family in builder.families():
        labels = [tuple(value for _, value in point.attributes) for point in family.points]
        assert len(set(labels)) == len(labels), f"{family.metric.name} has a series twice"
        found[family.metric.name] = dict(zip(labels, family.points, strict=True))
    return found


def run_of(loaders: int = 1, steps: int = 12) -> Tape:
    """Every loader trains, is validated, and the run is saved."""
    tape = Tape()
    for number in range(loaders):
        for _ in range(steps):
            tape.ask(f"loader{number}", samples=4).forward().backward().update()
        tape.stop(f"loader{number}").validate(3, f"val{number}").run(SourceKind.CHECKPOINT, "checkpoint", 9)
    return tape


def test_a_loaders_rate_on_a_page_is_the_summarys() -> None:
    """Samples over the time of the loader's own batches: an evaluation, or a pause, makes no loader slower."""
    run = account(run_of(2).spend(10**6).step("loader0").stop("loader0"))
    found = published(run)
    rates = summary_values(run.totals, wall_s=run.final_ns * 1e-9, source=run.step_source, loaders={})[
        "rates"
    ]
    spent = {labels: point.value for labels, point in found["train.batch.time"].items()}

    assert spent == {(row["loader"], row["phase"]): row["seconds"] for row in rates}
    assert len(spent) == 4
    assert spent["loader0", "train"] == pytest.approx(13 * 62e-9)


def test_many_loaders_fold_into_one_series_that_is_their_sum() -> None:
    """A hundred loaders must neither make a hundred series nor get lost, nor appear twice."""
    found = published(account(run_of(loaders=20)), max_loaders=4)
    steps = {labels: point.value for labels, point in found["train.steps"].items()}

    assert sum(value for (_, phase), value in steps.items() if phase == "train") == 20 * 12
    assert Counter(labels[0] for labels in found["train.eval.duration"])["_OTHER"] == 1
    assert sum(point.count for point in found["train.eval.duration"].values()) == 20
    assert len({labels[0] for labels in steps}) == 5


def test_own_stages_are_bounded_and_the_built_in_ones_are_not_counted() -> None:
    """A stage per layer would be a hundred histograms."""
    tape = Tape()
    for _ in range(12):
        tape.ask().forward()
        for number in range(6):
            tape.run(SourceKind.STAGE, f"own{number}", 3)
        tape.backward().update()
    found = published(account(tape.stop()), max_stages=2)["train.stage.duration"]

    assert {labels[0] for labels in found} == {
        "data", "forward", "backward", "optimizer", "own0", "own1", "_OTHER",
    }  # fmt: skip
    assert found["_OTHER", "code", "train"].count == 4 * 12


def test_what_was_folded_is_counted() -> None:
    """The summary has to say that a label was folded into ``_OTHER``."""
    run_metrics = RunMetrics(account(run_of(loaders=20)), max_loaders=4, max_stages=8)
    run_metrics.write(MetricBuilder())

    assert run_metrics.overflows() == {"train.loader": 36, "train.stage": 0}


def test_a_stall_in_a_stage_of_ones_own_is_counted() -> None:
    """A hang in ``augment`` is a hang."""
    tape = run_of().begin(SourceKind.STAGE, "augment")
    run = account(tape, close=False, stall_after_s=1.0)
    run.check_stalls(tape.now_ns + 10**10)
    found = published(run)["train.stall.events"]

    assert {labels: point.value for labels, point in found.items() if point.value} == {("augment",): 1}
    assert {(stage,) for stage in c.STAGES} <= set(found)


def test_a_counter_is_there_before_its_first_event() -> None:
    """``increase()`` of a counter that is born at 1 is 0: the alert would never fire."""
    found = published(account(run_of()))

    assert found["train.checkpoint.failures"]["save",].value == 0
    assert all(point.value == 0 for point in found["train.step.skips"].values())


def document(tape: Tape, **more: Any) -> dict[str, Any]:
    run = account(tape)
    given = {"wall_s": run.final_ns * 1e-9, "source": run.step_source, "loaders": {}, **more}
    return summary_values(run.totals, **given)


def test_a_summary_holds_the_values_by_name() -> None:
    """What a script asks a finished run."""
    found = document(run_of(2), loaders={"loader0": LoaderFacts(), "never": LoaderFacts()})

    assert found["steps"] == {"train": 24, "eval": 6}
    assert found["batches"] == {"loader0": 12, "never": 0, "val0": 3, "loader1": 12, "val1": 3}
    assert found["updates"] == 24
    assert found["step_source"] == "update"
    assert found["checkpoints"] == {"count": 2, "seconds": pytest.approx(18e-9)}
    assert sum(found["activities"].values()) == pytest.approx(found["wall_seconds"])


def test_updates_that_cannot_be_seen_are_unknown_and_not_none() -> None:
    """An optimizer that is none of torch's has made updates; before training, and in an evaluation alone, there is none."""
    unseen = document(
        Tape().repeat(12, lambda tape: tape.ask("loader0").forward().backward()).stop("loader0")
    )

    assert (unseen["steps"], unseen["updates"]) == ({"train": 12}, None)
    assert "no update seen" in render_run_summary(TextLayout(), unseen)
    assert document(Tape().spend(5))["updates"] == 0
    assert document(Tape().validate(12, "val0"))["updates"] == 0


def test_time_that_is_not_final_yet_is_in_the_ledger() -> None:
    """A summary in the middle of a long step adds up as well."""
    found = document(run_of(), wall_s=5.0)

    assert sum(found["activities"].values()) == pytest.approx(5.0)


def test_other_has_no_occurrences() -> None:
    """It is never called, so it has no count and no average; it has time."""
    tape = run_of().spend(50)
    other = [row for row in document(tape)["stages"] if row["stage"] == "other"]

    assert other
    assert all(row["count"] is None and row["avg"] is None and row["self_seconds"] > 0 for row in other)


@pytest.mark.parametrize(
    "tape", [Tape().spend(5), run_of(), run_of().ask(op=Op.FAIL)], ids=["empty", "run", "failed"]
)
def test_the_values_fit_the_published_schema(tape: Tape) -> None:
    """Scripts of other people read this file."""
    schema = json.loads(SCHEMA_FILE.read_text())
    found = json.loads(json.dumps({**document(tape), "schema": SUMMARY_SCHEMA}))
    properties = {name: schema["properties"][name] for name in found}

    jsonschema.validate(found, {**schema, "required": list(found), "properties": properties})
    assert set(found["steps"]) <= {"train", "eval", "test", "predict"}


def test_two_passes_of_one_loader_asked_together_take_their_time_once() -> None:
    """As ``zip(loader, loader)``: counted twice, the time of its batches would halve the rate."""
    tape = Tape()
    for _ in range(3):
        tape.ask(samples=4, iterator=1).ask(samples=4, iterator=2).forward().backward().update()

    [rate] = document(tape)["rates"]

    assert (rate["batches"], rate["samples"]) == (6, 24)
    assert rate["seconds"] == pytest.approx(3 * 67e-9)
    assert rate["batches_per_second"] == pytest.approx(6 / (3 * 67e-9))


def test_a_pass_that_ended_for_an_unknown_reason_is_a_pass_that_ended() -> None:
    """The reason is part of an edge, and an edge may be torn."""
    tape = Tape()
    tape.ask().forward().backward().update()
    source = tape.source(SourceKind.DATA, "code")
    tape.edge(Op.BEGIN, source)
    tape.spend(5).edge(Op.STOP, source, payload=6)

    assert account(tape).totals.loaders.endings == {("code", "epoch_end"): 1}


def test_a_stage_of_the_program_that_is_called_other_adds_nothing_to_what_is_in_no_stage() -> None:
    """Time in no stage has no calls, and so no quantiles."""
    tape = Tape()
    for _ in range(3):
        tape.ask().forward().run(SourceKind.STAGE, "other", 9).backward().update()

    [other] = [row for row in document(tape)["stages"] if row["stage"] == "other" and row["phase"]]

    assert other["self_seconds"] == pytest.approx(27e-9)
    assert {other[name] for name in ("count", "min", "avg", "p50", "max")} == {None}


@pytest.mark.parametrize(
    ("ranks", "loader", "said"),
    [
        ([3], "train", "Rank 3 on a held the others up the longest, in stage `data` of loader `train` of step 7."),
        ([4], "", "Rank 4 on a held the others up the longest, in stage `data` of step 7."),
        ([4, 5, 6], "", "Rank 4 on a and 2 more ranks held the others up the longest, in stage `data` of step 7."),
    ],
)  # fmt: skip
def test_the_finding_of_a_run_that_stood_still_names_the_rank_that_it_waited_for(
    ranks: list[int], loader: str, said: str
) -> None:
    """What else the run found stays as it is."""
    held_up = [HangSuspect(rank, "a", 7, "data", loader, 300.0, silent=False) for rank in ranks]
    found = [
        {"name": "input_bound", "summary": "It waits."},
        {"name": "stalled", "summary": "It stood still."},
    ]

    assert with_suspects(found, held_up) == [
        found[0],
        {"name": "stalled", "summary": f"It stood still. {said}"},
    ]
    assert with_suspects(found, []) == found


@pytest.mark.parametrize(
    ("rank", "excess_s", "stays"),
    [(0, 0.030, False), (0, 0.002, True), (1, 0.030, True)],
    ids=["it waits", "it waits little", "it is the slow one"],
)
def test_a_rank_that_waits_for_a_slow_one_is_not_compute_bound(
    rank: int, excess_s: float, *, stays: bool
) -> None:
    """It waits in backward. What else was found of it stays."""
    slow = straggler_finding(
        Straggler(1, "b", "other", excess_s, 0.033, excess_s, 4, 1), others=1, train_s=10.0
    )
    found = [
        {"name": "input_bound", "severity": "warning", "share": 0.01},
        {"name": "compute_bound", "severity": "ok", "share": 0.0, "evidence": {"model_ratio": 0.97}},
    ]

    names = [one["name"] for one in with_straggler(found, slow, rank=rank)]
    assert names == ["straggler_bound", "input_bound", *(["compute_bound"] if stays else [])]
