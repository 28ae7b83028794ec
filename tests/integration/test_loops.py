"""What a loop counts about itself is what the summary says, whatever the shape of the loop."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from otel_train.agent.coverage import UPDATES_WITHOUT_FORWARD
from otel_train.console.summary import render_run_summary
from otel_train.console.text import TextLayout
from tests.contract.goldens import files
from tests.integration.loops import (  # noqa: F401 - each enters its programs in the table
    ahead,
    compiled,
    environments,
    epochs,
    evaluating,
    faults,
    gaps,
    gradients,
    homemade,
    kinds,
    manual,
    midway,
    models,
    phases,
    shapes,
    threads,
    unseen,
    updates,
)
from tests.integration.loops.truth import EAGER, LOOPS, TRAIN, Truth, Watch, loader, sgd
from tests.support.loop_table import check_row, counted, shape_of
from tests.support.metrics_shown import metric_differences, of_otlp
from tests.support.run_summary import run_summary_differences
from tests.support.summary_laws import laws_of

SLACK_S = 0.02
"""What may pass between two looks at the clock, on a busy machine, without a defect."""

EVALUATING = ("eval", "test", "predict")
OWN_STAGES = ("data", "h2d", "forward", "backward", "optimizer", "checkpoint", "other")


def run(name: str, folder: Path, **settings: Any) -> tuple[Truth, Watch]:
    """Run a program from the same seed; what it counted, and its ``Watch``."""
    watch = Watch(folder, **settings)
    torch.manual_seed(0)
    try:
        truth = LOOPS[name](watch)
    finally:
        watch.close()
    return truth, watch


def observe(name: str, folder: Path, **settings: Any) -> tuple[Truth, dict[str, Any]]:
    """Run a program; what it counted, and what was written about it."""
    truth, watch = run(name, folder, **settings)
    summary: dict[str, Any] = watch.sessions[-1].summary()
    return truth, summary


def some(counts: Any) -> dict[Any, Any]:
    """Counts without the zeros."""
    return {name: number for name, number in counts.items() if number}


def stage_counts(
    summary: dict[str, Any], stage: str, *, by: str = "phase", of: str = "count"
) -> Counter[Any]:
    """A column of the rows of ``stage``, summed."""
    counts: Counter[Any] = Counter()
    for row in summary["stages"]:
        if row["stage"] == stage:
            counts[row[by]] += row[of] or 0
    return counts


def expected(truth: Truth) -> dict[str, Any]:
    """The truth under the names used for comparison."""
    named = {model for model, _ in truth.forwards} != {"model"}
    forwards: Counter[Any] = Counter()
    for (model, phase), number in truth.forwards.items():
        forwards[model if named else "", phase if truth.phases else ""] += number
    values = {
        "steps": some(truth.steps),
        "batches": some(truth.batches),
        "data": some({name: n for name, n in truth.batches.items() if name not in truth.inside}),
        "forward": some(forwards),
        "backward": some(truth.backwards),
        "optimizer": truth.optimizer,
        "updates": truth.updates,
        "skipped": truth.skipped,
        "stages": some(truth.stages),
        "failed": some(truth.failed),
        "checkpoints": truth.checkpoints,
    }
    if truth.samples is not None:
        values["samples"] = some(truth.samples)
    if truth.source is not None:
        values["source"] = truth.source
    if truth.partial is not None:
        values["partial"] = some({TRAIN: truth.partial})
    if truth.names is not None:
        values["names"] = truth.names
    return {name: value for name, value in values.items() if name not in hidden(truth)}


def hidden(truth: Truth) -> set[str]:
    """The values that a shape cannot have."""
    optimizer = {"updates"} if "optimizer" in truth.unseen else set()
    return {*truth.unseen, *optimizer}


def found(summary: dict[str, Any], truth: Truth) -> dict[str, Any]:
    """What the summary says about everything that ``truth`` speaks of."""
    named = {model for model, _ in truth.forwards} != {"model"}
    forwards: Counter[Any] = Counter()
    failed: Counter[str] = Counter()
    for row in summary["stages"]:
        failed[row["stage"]] += row["failed"] or 0
        if row["stage"] == "forward":
            key = row["model"] if named else "", row["phase"] if truth.phases else ""
            forwards[key] += row["count"]
    own = {row["stage"] for row in summary["stages"]} - set(OWN_STAGES)
    values = {
        "steps": some(summary["steps"] if truth.phases else {TRAIN: summary["steps"].get(TRAIN, 0)}),
        "batches": some(by_loader(summary["batches"], truth)),
        "data": some(by_loader(stage_counts(summary, "data", by="loader"), truth)),
        "samples": some(by_loader(summary["samples"], truth)),
        "forward": some(forwards),
        "backward": some(stage_counts(summary, "backward")),
        "optimizer": stage_counts(summary, "optimizer").total(),
        "updates": summary["updates"] or 0,
        "skipped": summary["skipped_updates"] or 0,
        "stages": some({stage: stage_counts(summary, stage).total() for stage in own}),
        "failed": some(failed),
        "checkpoints": summary["checkpoints"]["count"],
        "source": summary["step_source"],
        "partial": some(summary["partial_steps"]),
        "names": len(some(summary["batches"])),
    }
    return {name: values[name] for name in expected(truth)}


def by_loader(counts: Any, truth: Truth) -> Counter[str]:
    """``counts``, with every loader that the program has not named under ``?``."""
    merged: Counter[str] = Counter()
    for name, number in counts.items():
        merged[name if name in truth.batches else "?"] += number
    return merged


def self_seconds(summary: dict[str, Any], *of: str) -> float:
    """Self time of the rows of these phases; of all rows when none is given."""
    rows = [row for row in summary["stages"] if not of or row["phase"] in of]
    return sum(row["self_seconds"] or 0.0 for row in rows)


SEEN_WHOLE = {"gradient_penalty"}
"""Until the first ``.backward()`` it is unknown that ``autograd.grad`` is not this loop's backward."""


BESIDE = sorted(LOOPS)[::5]
"""Loops that are also run with the agent in a process of its own; ``TEST_AGENT=process`` runs them all so."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_an_agent_in_a_process_counts_what_one_in_a_thread_counts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One code in two places: the same documents, but for times."""
    monkeypatch.setenv("OTEL_TRAIN_AGENT", "process")
    test_a_loop_is_counted_as_it_counts_itself(name, tmp_path)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_counted_as_it_counts_itself(name: str, tmp_path: Path) -> None:
    """A value that depends on how the loop is written cannot be trusted."""
    truth, watch = run(name, tmp_path, **({} if name in SEEN_WHOLE else EAGER))
    summary = watch.sessions[-1].summary()

    assert found(summary, truth) == expected(truth)
    assert summary["telemetry"]["records_lost"] == 0
    assert summary["telemetry"]["records"] > 0 or not truth.batches
    assert summary["telemetry"]["faults"] == {}
    broken = laws_of(summary)
    broken += run_summary_differences(render_run_summary(TextLayout(), summary), summary)
    broken += metric_differences(exported(tmp_path), summary)
    assert not broken, "\n".join(broken)
    assert_times_add_up(summary, truth)
    assert_absent_and_said(summary, truth)
    check_row("loops", name, row(truth, summary, LOOPS[name]))
    if truth.repeatable and LOOPS[name].__module__ != compiled.__name__:  # test_compiled.py compares those
        _, bare = run(name, tmp_path, disabled=True)
        assert watch.weights() == bare.weights()


def exported(folder: Path) -> dict[str, dict[tuple[str, ...], float]]:
    """The series of the newest run below a folder, as they were last pushed; none where it had no folder."""
    paths = sorted(folder.glob("*/rank0/metrics.otlp.jsonl"), key=lambda path: path.stat().st_mtime)
    return of_otlp(files.metrics(paths[-1].read_text(encoding="utf-8"))) if paths else {}


def row(truth: Truth, summary: dict[str, Any], program: Any) -> dict[str, Any]:
    """What the table in docs/reference/loops.md says about a program."""
    shape, description = shape_of(program)
    module = program.__module__.rpartition(".")[2]
    return {
        "shape": shape, "description": description, "module": module,
        "program": truth.counted(), "in_code": counted(summary), "unseen": list(truth.unseen),
    }  # fmt: skip


def assert_absent_and_said(summary: dict[str, Any], truth: Truth) -> None:
    """A stage that cannot be seen has no value, and an entry with its remedy, where anything could be seen."""
    said = {
        thing["name"] if thing["what"] == "stage" else "forward" for thing in summary["instrumentation_gaps"]
    }
    for stage in truth.unseen:
        assert stage_counts(summary, stage).total() == 0
        assert stage in said or truth.updates < UPDATES_WITHOUT_FORWARD
    assert not (summary["updates"] and "optimizer" in said)


def assert_times_add_up(summary: dict[str, Any], truth: Truth) -> None:
    """Self times add up to the time covered, activities to the run."""
    wall_s, activities = summary["wall_seconds"], summary["activities"]
    assert sum(activities.values()) == pytest.approx(wall_s, rel=0.01)
    for row in summary["stages"]:
        if row["count"] and row["inclusive_seconds"] is not None:
            assert (
                row["min"]
                <= row["p50"]
                <= row["p95"]
                <= row["p99"]
                <= row["max"]
                <= row["inclusive_seconds"] + 1e-9
            )
    if truth.threads > 1:
        return
    assert self_seconds(summary) == pytest.approx(wall_s, rel=0.01, abs=SLACK_S)
    if truth.phases:
        assert self_seconds(summary, *EVALUATING) == pytest.approx(activities["eval"], abs=1e-6)
    for phase in (TRAIN, *EVALUATING):
        rows = [row for row in summary["step_durations"] if row["phase"] == phase]
        assert self_seconds(summary, phase) >= sum(row["total_seconds"] or 0.0 for row in rows) - 1e-6


@pytest.mark.parametrize("name", ["plain", "validation_in_mid_group", "two_live_iterators_of_one_loader"])
def test_it_does_not_matter_how_often_the_agent_polls(name: str, tmp_path: Path) -> None:
    """A loop may end before the agent has polled once."""
    truth, summary = observe(name, tmp_path, tuning={"poll_interval_s": 10.0})

    assert found(summary, truth) == expected(truth)


def test_a_session_says_the_same_as_its_file(tmp_path: Path) -> None:
    """Tools read the file, notebooks ask the session."""
    watch = Watch(tmp_path)
    LOOPS["plain"](watch)
    watch.close()

    [path] = tmp_path.glob("*/rank0/summary.json")
    written = json.loads(path.read_text(encoding="utf-8"))
    said = watch.sessions[-1].summary()
    assert written["run_id"] == path.parent.parent.name
    for value in ("run_id", "state", "steps", "batches", "stages", "updates", "step_source"):
        assert written[value] == said[value]


ROUNDED_S = 1e-4
"""More than rounding can take off a value of a summary."""


def test_sleeping_stages_take_the_time_they_slept(tmp_path: Path) -> None:
    """Counts can be right and times wrong: a stage that sleeps for a known time is charged for it."""
    import time

    import otel_train
    from tests.integration.loops.truth import Net

    slept, around = defaultdict[str, float](float), defaultdict[str, float](float)

    def sleep(stage: str, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        slept[stage] += time.perf_counter() - began  # on a busy machine longer than it was asked for

    class Sleeping(Net):
        def forward(self, x: Any) -> Any:
            sleep("forward", 0.02)
            return super().forward(x)

    model, train, truth = Sleeping(), loader(6), Truth()
    optimizer = sgd(model)
    watch = Watch(tmp_path)
    session = watch(model, {"train": train})
    for batch in train:
        began = time.perf_counter()
        with otel_train.stage("augment"):
            sleep("augment", 0.01)
        around["augment"] += time.perf_counter() - began
        sleep("other", 0.005)
        began = time.perf_counter()
        truth.learn(model, optimizer, batch)
        around["forward"] += time.perf_counter() - began
    watch.close()
    summary = session.summary()

    for stage, most in around.items():
        for what in ("self_seconds", "inclusive_seconds"):
            assert (
                slept[stage] - ROUNDED_S <= stage_counts(summary, stage, of=what)[TRAIN] <= most + ROUNDED_S
            )
    assert stage_counts(summary, "other", of="self_seconds")[TRAIN] >= slept["other"] - ROUNDED_S
    assert torch.is_grad_enabled()
