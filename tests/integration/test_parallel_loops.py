"""Loops of several processes are counted, in each of them, as they count themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.loop_table import check_row, counted, rows
from tests.support.ranks import free_port, two_ranks
from tests.support.summary_laws import laws_of
from tests.support.zero_code import environment, launched, quiet_settings, run_zero_code, summaries_below

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
LOOPS = ROOT / "tests" / "integration" / "loops"
NAMES = (
    "data_parallel",
    "data_parallel_around_an_instrumented_model",
    "data_parallel_compiled",
    "data_parallel_evaluated_inside",
    "fully_sharded",
    "fully_sharded_after_the_session",
    "pipeline",
    "tensor_parallel",
)


ELASTIC = "torch.distributed.run"
WAYS = {
    "data_parallel": "-m torch.distributed.run",
    "data_parallel_around_an_instrumented_model": "a launcher per rank",
    "data_parallel_compiled": "torchrun",
    "data_parallel_evaluated_inside": "torchrun",
    "fully_sharded": "a launcher per rank",
    "fully_sharded_after_the_session": "-m torch.distributed.run",
    "pipeline": "torchrun",
    "tensor_parallel": "a launcher per rank",
}
"""How an unchanged program is started: every way with more than one program."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks counted and found, by program."""
    folder = tmp_path_factory.mktemp("parallel")
    two_ranks(str(LOOPS / "parallel.py"), str(folder), timeout_s=350)
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def test_every_program_ran(ranks: list[dict[str, Any]]) -> None:
    """A program that is not compared proves nothing."""
    assert [sorted(rank) for rank in ranks] == [sorted(NAMES)] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_is_counted_as_it_counts_itself(name: str, ranks: list[dict[str, Any]]) -> None:
    """Wrappers for many processes call the model from inside, change its class, or cut it in pieces."""
    for rank in ranks:
        row = dict(rank[name])
        assert row["in_code"] == row["program"]
        assert row.pop("same_weights")
        assert row.pop("faults") == {}
        assert row.pop("instrumentation_gaps") == []
        assert row.pop("laws") == []
        check_row("processes", name, row)


def start(way: str, words: list[str], runs: Path) -> subprocess.CompletedProcess[str]:
    """Two ranks of a program below ``otel-train run``."""
    elastic = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    if way == "torchrun":
        return run_zero_code([Path(sys.executable).with_name("torchrun"), *elastic, *words], runs)
    if way == "-m torch.distributed.run":
        return run_zero_code(["-m", ELASTIC, *elastic, *words], runs)
    launcher = ["-m", "otel_train", "run", *quiet_settings(runs)]
    return launched([sys.executable, "-m", ELASTIC, *elastic, *launcher, *words], environment())


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_of_an_unchanged_program_is_counted_the_same(name: str, tmp_path: Path) -> None:
    """Who starts a job by `torchrun` must not need a line in the code to get its metrics."""
    done = start(WAYS[name], [str(LOOPS / "parallel.py"), str(tmp_path), name], tmp_path / "runs")
    assert done.returncode == 0, done.stderr[-3000:]

    summaries = summaries_below(tmp_path / "runs")
    assert [(s["rank"], s["world_size"], s["state"]) for s in summaries] == [
        (0, 2, "finished"), (1, 2, "finished")
    ]  # fmt: skip
    assert len({summary["run_id"] for summary in summaries}) == 1
    for summary in summaries:
        said = json.loads((tmp_path / f"rank{summary['rank']}.json").read_text(encoding="utf-8"))
        assert summary["telemetry"]["faults"] == {}
        assert said[name] == rows()["processes"][name]["program"]
        assert counted(summary) == rows()["processes"][name]["in_code"]
        assert laws_of(summary) == []
        check_row("processes", name, {"zero_code": counted(summary), "why": ""})


def test_every_process_that_shares_a_model_is_found(tmp_path: Path) -> None:
    """Hogwild below `otel-train run`: the parent, which trains nothing, is no rank."""
    done = run_zero_code([LOOPS / "hogwild.py", tmp_path, "bare"], tmp_path / "runs")
    assert done.returncode == 0, done.stderr[-3000:]

    summaries = summaries_below(tmp_path / "runs")
    assert [(s["rank"], s["world_size"], s["state"]) for s in summaries] == [
        (0, 2, "finished"), (1, 2, "finished")
    ]  # fmt: skip
    for summary in summaries:
        assert counted(summary) == rows()["processes"]["hogwild"]["program"]
        check_row("processes", "hogwild", {"zero_code": counted(summary), "why": ""})


def test_every_process_that_shares_a_model_is_counted(tmp_path: Path) -> None:
    """Hogwild: the parent trains nothing, its children have sessions of their own, and weights stay shared."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run(
        [sys.executable, str(LOOPS / "hogwild.py"), str(tmp_path)],
        env={**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=True, timeout=350,
    )  # fmt: skip
    for number in range(2):
        said = json.loads((tmp_path / f"child{number}.json").read_text(encoding="utf-8"))
        assert said.pop("faults") == {}
        assert said["in_code"] == said["program"]
        description = "Two processes train one shared model without locks; each has a session of its own."
        check_row("processes", "hogwild", {"shape": "hogwild", "description": description, **said})
