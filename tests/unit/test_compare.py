"""What changed between two recordings, how sure that is, and what is not compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otel_train import ComparisonError
from otel_train.compare import Sample, Side, compare, is_slower, of_values, ratio, together
from tests.support.command_line import Cli
from tests.support.made_trace import MadeTrace


def side(*seconds: float, name: str = "a", kind: str = "run", **must_match: object) -> Side:
    return Side(name=name, kind=kind, samples={"step": of_values(seconds)}, must_match=must_match)


def test_a_ratio_of_means_has_its_interval() -> None:
    """Means 2 and 3, four values each, all 0.5 from their mean: worked out below, step by step."""
    before, after = of_values([1.5, 2.5, 1.5, 2.5]), of_values([2.5, 3.5, 2.5, 3.5])

    found = ratio(before, after)

    # Of each side: the spread of 4 values that lie 0.5 from their mean, over 3, by the mean.
    own = (1 / 3 / 2**2, 1 / 3 / 3**2)
    a, b = own[0] / 4, sum(own) / 2 / 4  # of its mean: the second side scatters less than both do together
    freedom = (a + b) ** 2 / (a**2 / 3 + b**2 / 3)
    assert freedom == pytest.approx(5.85, abs=0.01)
    student = 2.466  # two-sided 95 % at 5.85 degrees, between the table's 2.571 at 5 and 2.447 at 6
    assert found.value == pytest.approx(1.5)
    assert found.high - found.value == pytest.approx(1.5 * student * math.sqrt(a + b), rel=0.02)


def test_the_interval_of_a_quantile_holds_it_most_of_the_time() -> None:
    """95 of 100; the law is checked on 400 draws of 200 values with a known median."""
    random = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        found = of_values(random.exponential(1.0, 200)).quantile(0.5)
        hits += found.low <= math.log(2) <= found.high

    assert 370 <= hits <= 400


def test_a_quantile_between_two_values_lies_between_them() -> None:
    """The median of 6 steps was the third, whatever the fourth: `otel-train summary` said 49 ms, and this 26 ms."""
    values = [1.4, 21.8, 25.3, 72.4, 76.6, 98.2]

    assert of_values(values).quantile(0.5).value == pytest.approx(np.median(values))
    assert of_values(values).quantile(0.95).value == pytest.approx(np.quantile(values, 0.95))


def in_buckets(values: Any) -> Sample:  # Any: float64[occurrence]
    """As a run keeps them."""
    edges = 2.0 ** (np.arange(-200, 50) / 16)
    number = np.bincount(np.digitize(values, edges), minlength=edges.size + 1)
    used = np.flatnonzero(number)
    return Sample(edges[used - 1], edges[used], number[used], float(values.sum()))


def test_buckets_and_values_agree_within_a_bucket() -> None:
    """Runs keep histograms; what they say must be what the values would have said."""
    values = np.random.default_rng(3).lognormal(-4, 0.3, 5000)
    buckets, exact = in_buckets(values), of_values(values)

    assert buckets.mean == pytest.approx(exact.mean)
    assert buckets.variance_of_mean == pytest.approx(exact.variance_of_mean, rel=0.05)
    assert buckets.quantile(0.95).value == pytest.approx(exact.quantile(0.95).value, rel=0.045)
    assert buckets.quantile(0.5).low <= exact.quantile(0.5).value <= buckets.quantile(0.5).high


@pytest.mark.parametrize("spread", [0.0005, 0.005, 0.02, 0.1])
@pytest.mark.parametrize("place", [1.0, 1.02, 1.035])
def test_alike_runs_differ_in_at_most_5_of_100(spread: float, place: float) -> None:
    """Steps that are alike lie in one bucket, which hides how much they scatter: that is no certainty."""
    random = np.random.default_rng(5)
    found = [ratio(*(in_buckets(random.normal(place, spread * place, 50)) for _ in "ab")) for _ in range(300)]

    assert sum(not each.low <= 1 <= each.high for each in found) <= 0.09 * len(found)  # 5 %, and chance


@pytest.mark.parametrize("steps", [(20, 500), (500, 20), (20, 20)])
def test_a_few_steps_without_a_rare_long_one_are_not_called_faster(steps: tuple[int, int]) -> None:
    """One step in a hundred saves a checkpoint: a short run that has none knows nothing of how much means differ."""
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(200):
        values = [np.where(random.random(n) < 0.01, 5.0, 1.0) * random.normal(1, 0.02, n) for n in steps]
        estimate = ratio(*map(of_values, values))
        wrong += not estimate.low <= 1 <= estimate.high

    assert wrong <= 10


def test_samples_put_together_are_one_sample() -> None:
    """Several loaders, one step."""
    both = together([of_values([3.0, 1.0]), of_values([2.0])])

    assert both.low.tolist() == [1.0, 2.0, 3.0]
    assert (both.size, both.mean) == (3, 2.0)


def test_too_few_occurrences_have_no_interval() -> None:
    """Three steps say what they took and not how sure that is."""
    document = compare(side(1.0, 1.1), side(2.0, 2.1))

    assert document["rows"][0]["ratio"] == pytest.approx(2.05 / 1.05)
    assert document["rows"][0]["low"] is None
    assert document["rows"][0]["conclusion"] == "not known"
    assert is_slower(document, 0.05) is None


@pytest.mark.parametrize(
    ("after", "conclusion", "slower"),
    [
        ((1.20, 1.21, 1.19, 1.20, 1.20), "slower", True),
        ((1.001, 1.0, 0.999, 1.0, 1.0), "no difference shown", False),
        ((0.8, 0.81, 0.8, 0.79, 0.8), "faster", False),
        ((1.0, 1.4, 0.9, 1.1, 1.3), "no difference shown", None),
    ],
)
def test_slower_means_beyond_doubt(after: tuple[float, ...], conclusion: str, slower: bool | None) -> None:
    """A limit that fails on noise is switched off within a week."""
    document = compare(side(1.0, 1.01, 0.99, 1.0, 1.0), side(*after))

    assert document["rows"][0]["conclusion"] == conclusion
    assert is_slower(document, 0.05) is slower


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (side(1, 1), side(1, 1, kind="trace"), "two of a kind"),
        (side(1, 1, ranks=1), side(1, 1, name="b", ranks=8), "ranks differ: 1 in a, 8 in b"),
        (side(1, 1), side(1, name="b"), "b has 1 steps"),
        (side(1e200, 1e200), side(1, 1, name="b"), "a has durations of step that no run can have"),
    ],
)
def test_what_is_not_comparable_is_refused_with_its_reason(before: Side, after: Side, says: str) -> None:
    """A number would be believed."""
    with pytest.raises(ComparisonError, match=says):
        compare(before, after)


def trace(path: Path, *, step: float, kernels: bool = True) -> str:
    made = MadeTrace()
    for number in range(6):
        start = number * step
        made.step(number, start, step - number)
        made.note("otel_train:forward", start, step / 2)
        made.op("aten::mm", start, step / 4)
        if kernels:
            made.kernel("gemm", start + 10, step / 2, launched=start)
    return str(made.write(path))


def test_traces_are_compared_step_by_step(tmp_path: Path, cli: Cli) -> None:
    """1,000 and 1,200 us, of which forward is half."""
    one, two = trace(tmp_path / "a.json", step=1000), trace(tmp_path / "b.json", step=1200)
    rows = {row["name"]: row for row in json.loads(cli("compare", one, two, "--json").printed)["rows"]}

    assert next(iter(rows)) == "step"
    assert rows["step"]["ratio"] == pytest.approx(1.2, rel=0.01)
    assert rows["stage forward"]["ratio"] == pytest.approx(1.2)
    assert rows["op aten::mm"]["ratio"] == pytest.approx(1.2)
    assert rows["step"]["conclusion"] == "slower"


def test_a_limit_fails_a_build_that_is_slower(tmp_path: Path, cli: Cli) -> None:
    """Code 1 for slower, 0 for not, 2 for not comparable: CI tells them apart."""
    one, two = trace(tmp_path / "a.json", step=1000), trace(tmp_path / "b.json", step=1200)
    host = trace(tmp_path / "c.json", step=1000, kernels=False)
    slower, faster, other = (
        cli("compare", *pair, "--fail-if-slower", "5%") for pair in ((one, two), (two, one), (one, host))
    )

    assert (slower.code, faster.code) == (1, 0)
    assert "1.201 times as long" in slower.out
    assert "is slower by more than 5.0 %" in slower.err
    assert "not comparable: what ran on a device differ" in other.refused


def a_run(
    folder: Path,
    *,
    seconds: float,
    ranks: int = 1,
    torch: str = "2.9",
    workers: int = 0,
    size: int = 32,
    **settings: object,
) -> str:
    """A run of 100 steps, all of one length, in the buckets of scale 4."""
    rank = folder / "rank0"
    rank.mkdir(parents=True)
    summary = {
        "schema": "otel_train.summary/2", "world_size": ranks, "step_source": "update", "batches": {"train": 100},
        "samples": {"train": 100 * size}, "loaders": [{"loader": "train", "workers": workers, "prefetch_factor": None}],
        "steps": {"train": 100}, "wall_seconds": 100.0, "activities": {"data_wait": 10.0},
        "stages": [
            {"stage": "other", "loader": "train", "phase": "train", "self_seconds": 50 * seconds},
            {"stage": "other", "loader": "", "phase": "", "self_seconds": 3.0},
        ],
    }  # fmt: skip
    (rank / "summary.json").write_text(json.dumps(summary))
    (folder / "run.json").write_text(
        json.dumps({"settings": {"run_id": folder.name, "flops": "given", **settings}})
    )

    def point(**labels: str) -> dict[str, Any]:
        index = math.ceil(math.log2(seconds) * 16) - 1
        return {
            "attributes": [{"key": f"train.{key}", "value": {"stringValue": value}} for key, value in labels.items()],
            "count": "100", "sum": 100 * seconds, "scale": 4, "zeroCount": "0", "min": seconds * 0.99, "max": seconds * 1.01,
            "positive": {"offset": index, "bucketCounts": ["100"]},
        }  # fmt: skip

    metrics = [
        {"name": "train.step.duration", "exponentialHistogram": {"dataPoints": [point(loader="train", phase="train"), point(phase="eval")]}},
        {"name": "train.stage.duration", "exponentialHistogram": {"dataPoints": [point(stage="data", loader="train", phase="train")]}},
        {"name": "train.steps", "sum": {"dataPoints": []}},
    ]  # fmt: skip
    resource = {"attributes": [{"key": "train.torch.version", "value": {"stringValue": torch}}]}
    line = {"resourceMetrics": [{"resource": resource, "scopeMetrics": [{"metrics": metrics}]}]}
    (rank / "metrics.otlp.jsonl").write_text(json.dumps(line) + '\n{"resourceMetrics": [{"res')
    return str(folder)


def test_runs_are_compared_by_their_histograms(tmp_path: Path, cli: Cli) -> None:
    """10 and 11 ms per step. The line that a crash tore off is skipped."""
    one, two = a_run(tmp_path / "a", seconds=0.010), a_run(tmp_path / "b", seconds=0.011, torch="2.10")
    code, out, _ = cli("compare", one, two, "--json", "--fail-if-slower", "0.05")

    assert code == 1
    document = json.loads(out)
    rows = {row["name"]: row for row in document["rows"]}
    assert set(rows) == {"step", "stage data · train", "stage other · train"}
    assert rows["step"]["before"]["count"] == 100
    assert rows["step"]["ratio"] == pytest.approx(1.1)
    other = rows["stage other · train"]  # in no histogram: its time alone is known
    assert (other["before"]["mean"], other["after"]["mean"]) == pytest.approx((0.005, 0.0055))
    assert (other["ratio"], other["low"], other["conclusion"]) == (pytest.approx(1.1), None, "not known")
    assert "torch: 2.9 → 2.10" in document["differences"]


def test_steps_that_took_no_time_have_no_ratio(tmp_path: Path, cli: Cli) -> None:
    """A clock of low resolution may say so; the command ended in an unexpected error."""
    one, two = a_run(tmp_path / "a", seconds=0.010), a_run(tmp_path / "b", seconds=0.011)
    path = Path(one) / "rank0/metrics.otlp.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    for metric in line["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][:2]:
        for point in metric["exponentialHistogram"]["dataPoints"]:
            empty = {"offset": 0, "bucketCounts": []}
            point |= {"sum": 0.0, "min": 0.0, "max": 0.0, "zeroCount": "100", "positive": empty}
    path.write_text(json.dumps(line) + "\n")

    assert "There is no ratio: the steps of the first took no time." in cli("compare", one, two).printed


def test_runs_say_how_their_loaders_and_settings_differ(tmp_path: Path, cli: Cli) -> None:
    """What was changed on purpose is read first; what one of them does not have, as a loader, is no change from None."""
    one = a_run(tmp_path / "a", seconds=0.010, cuda_timing="events", former=1)
    two = a_run(tmp_path / "b", seconds=0.009, cuda_timing="off", workers=4, size=64)
    path = Path(two) / "rank0" / "summary.json"
    summary = json.loads(path.read_text())
    summary["batches"]["val"] = 1
    summary["loaders"].append({**summary["loaders"][0], "loader": "val"})
    path.write_text(json.dumps(summary))

    assert json.loads(cli("compare", one, two, "--json").printed)["differences"] == [
        "loaders: train → train, val",
        "workers of train: 0 → 4",
        "samples per batch of train: 32.0 → 64.0",
        "setting cuda_timing: events → off",
    ]


def test_durations_that_no_run_can_have_are_refused_without_a_warning_of_numpy(
    tmp_path: Path, cli: Cli
) -> None:
    """Their squares overflowed: two warnings, then an unexpected OverflowError."""
    one, damaged = a_run(tmp_path / "a", seconds=0.01), a_run(tmp_path / "damaged", seconds=0.01)
    path = Path(damaged) / "rank0" / "metrics.otlp.jsonl"
    path.write_text(path.read_text().replace("0.0099", "1.7e308").replace("0.0101", "1.7e308"))

    for pair in ((one, damaged), (damaged, one)):
        refused = cli("compare", *pair).refused
        assert refused.startswith(f"otel-train: not comparable: {damaged} has durations of step")


def test_the_folder_of_a_rank_is_that_rank(tmp_path: Path, cli: Cli) -> None:
    """As of every command that reads a run: two ranks of one run are compared so."""
    run, other = (a_run(tmp_path / name, seconds=s) for name, s in (("a", 0.010), ("b", 0.011)))
    (Path(other) / "rank0").rename(Path(run) / "rank1")

    [row, *_] = json.loads(cli("compare", f"{run}/rank0", f"{run}/rank1", "--json").printed)["rows"]
    assert row["ratio"] == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("a nowhere", "neither a run directory"),
        ("a a --rank 5", "has no rank 5"),
        ("a many", "ranks differ: 1 in"),
        ("a empty", "Has training begun"),
    ],
)
def test_runs_that_cannot_be_compared_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, words: str, *, says: str
) -> None:
    """One line, code 2."""
    monkeypatch.chdir(tmp_path)
    for name, ranks in (("a", 1), ("many", 8), ("empty", 1)):
        a_run(tmp_path / name, seconds=0.01, ranks=ranks)
    (tmp_path / "empty/rank0/metrics.otlp.jsonl").unlink()

    assert says in cli("compare", *words.split()).refused


@pytest.mark.parametrize("text", ["fast", "-5%", "2000%"])
def test_a_limit_that_is_no_share_is_refused(text: str, cli: Cli) -> None:
    """`--fail-if-slower 5` would never fail."""
    assert (
        "expected a share such as 5% or 0.05" in cli("compare", "a", "b", f"--fail-if-slower={text}").refused
    )


def test_rows_are_in_the_order_of_their_change_per_step_though_one_run_is_longer() -> None:
    """Of totals, the row that takes most time would be first, although only the other one has changed."""
    sides = [
        Side(name="a", kind="run", samples={
            "step": of_values([1.1] * steps), "stage forward": of_values([1.0] * steps),
            "stage data": of_values([data] * steps),
        })
        for steps, data in ((10, 0.1), (100, 0.3))
    ]  # fmt: skip

    assert [row["name"] for row in compare(*sides)["rows"]] == ["step", "stage data", "stage forward"]
