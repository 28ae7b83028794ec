"""What the metrics of compiled programs mean: recompiling, small calls, what fills the step."""

from __future__ import annotations

import pytest

from otel_train.aggregation.counters import Recompiled, StageTotals
from otel_train.aggregation.series_names import Key
from otel_train.bottleneck.device import Compiled, dispatch_bound, recompiling
from otel_train.bottleneck.rules import RuleInput, findings
from otel_train.datamodel import Finding
from otel_train.recording.events import WAIT

JAX = Compiled(calls=frozenset({"make_step"}))
NS_PER_S = 10**9


def row(
    name: str, self_s: float, p50_s: float = 0.0, *, count: int = 100, loader: str = "train"
) -> StageTotals:
    return StageTotals(Key(name, loader, "train", ""), count, 0, self_s, self_s, (0.0, p50_s, 0.0, 0.0, 0.0))


def findings_of(*rows: StageTotals, compiled: Compiled = JAX, compile_s: float = 0.0) -> list[Finding]:
    activities = {"productive": 10.0 - compile_s, "compile": compile_s}
    return findings(RuleInput(rows, 100, activities, {}, compiled=compiled))


@pytest.mark.parametrize(
    ("by_jax", "remedy"), [(3, "jax_explain_cache_misses"), (0, "TORCH_LOGS=recompiles")]
)
def test_compiling_again_and_again_is_the_main_finding(by_jax: int, remedy: str) -> None:
    """The commonest way to lose a day with JAX; nothing else is worth reading before that."""
    compiled = JAX._replace(recompiled=Recompiled(3, 4 * NS_PER_S, by_jax))
    first, *rest = findings_of(row("make_step", 10.0), compiled=compiled, compile_s=5.0)

    assert (first.name, first.severity, first.share, first.seconds) == ("recompiling", "warning", 0.4, 4.0)
    assert "3 times: 40% of training time" in first.summary
    assert remedy in first.advice
    assert rest == []


@pytest.mark.parametrize(("count", "seconds"), [(2, 5.0), (3, 0.9)])
def test_a_last_batch_and_an_evaluation_of_other_shapes_are_no_habit(count: int, seconds: float) -> None:
    """Each is compiled once. And what takes no time is no trouble."""
    assert recompiling(Recompiled(count, int(seconds * NS_PER_S)), 10.0) is None


def test_a_run_that_mostly_compiles_says_so() -> None:
    """Short runs do. That is no reason to call them busy."""
    first, second = findings_of(row("make_step", 6.0), row("other", 4.0), compile_s=4.0)

    assert (first.name, second.name) == ("compile_heavy", "unattributed")
    assert "jax_compilation_cache_dir" in first.advice


def test_a_call_that_is_mostly_dispatch_wants_a_larger_batch() -> None:
    """Every call costs the host about as much, however little there is to compute in it."""
    first = findings_of(row("make_step", 9.0, 0.4e-3, count=20_000), row(WAIT, 1.0, 0.1e-3, count=20_000))[0]

    assert (first.name, first.severity) == ("dispatch_bound", "warning")
    assert first.share == pytest.approx(0.6)
    assert "400 µs" in first.summary.replace("0.4 ms", "400 µs")
    assert "75%" in first.summary
    assert "larger batch" in first.advice
    assert "jax.lax.scan" in first.advice


@pytest.mark.parametrize(
    ("call_s", "wait_s", "count"),
    [
        (4e-3, 0.0, 2000),  # a processor may have computed in it
        (1e-3, 0.6e-3, 20_000),  # the device has enough to do
        (1e-3, 0.0, 500),  # too few of them to matter
        (0.0, 0.0, 500),
    ],
)
def test_a_call_with_enough_in_it_is_let_be(call_s: float, wait_s: float, count: int) -> None:
    """Advice that does not hold costs more than none."""
    rows = [row("make_step", 9.0, call_s, count=count), row(WAIT, 1.0, wait_s, count=count)]

    assert dispatch_bound(rows, JAX, 10.0) is None


def test_without_the_wait_nothing_is_said_of_the_dispatch() -> None:
    """``wait=False`` does not measure it; and a wait of another loader's is no measure."""
    step = row("make_step", 9.0, 1e-3, count=10_000)

    assert dispatch_bound([step], JAX, 10.0) is None
    assert dispatch_bound([step, row(WAIT, 1.0, 1e-4, loader="val")], JAX, 10.0) is None
    assert dispatch_bound([row("forward", 9.0, 1e-3), row(WAIT, 1.0, 1e-4)], JAX, 10.0) is None


@pytest.mark.parametrize(
    ("stage", "name", "advice"),
    [
        ("make_step", "compute_bound", "bfloat16"),
        (WAIT, "compute_bound", "bfloat16"),
        ("loss", "compute_bound", "as a call of their own: one jax.jit around loss, gradients and update"),
        ("augment", "unattributed", "`augment` runs outside the compiled step"),
        ("other", "unattributed", "What is in no stage runs outside the compiled step"),
    ],
)
def test_what_fills_the_step_of_a_jax_program_has_advice_of_its_own(
    stage: str, name: str, advice: str
) -> None:
    """The profiler of torch is no help there, and a loss outside the compiled step is a mistake one can see."""
    rows = [row(stage, 8.0, 5e-3), row(WAIT, 0.5, 4e-3) if stage != WAIT else row("data", 0.5)]
    first = findings_of(*rows)[0]

    assert first.name == name
    assert advice in first.advice
    assert first.evidence[f"{stage}_ratio"] == pytest.approx(8 / 8.5)


def test_a_program_of_torch_is_advised_to_capture() -> None:
    """As before."""
    assert "profiler capture" in findings_of(row("forward", 9.0), compiled=Compiled())[0].advice
