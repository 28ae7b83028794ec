"""Loops of several processes are counted, in each of them, as they count themselves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.loop_table import settle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
LOOPS = ROOT / "tests" / "integration" / "loops"
NAMES = (
    "data_parallel",
    "data_parallel_around_a_watched_model",
    "data_parallel_compiled",
    "fully_sharded",
    "fully_sharded_after_the_session",
    "pipeline",
    "tensor_parallel",
)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks counted and found, by program."""
    folder = tmp_path_factory.mktemp("parallel")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(LOOPS / "parallel.py"), str(folder)],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [process.communicate(timeout=350) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ends
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def test_every_program_ran(ranks: list[dict[str, Any]]) -> None:
    """A program that nobody compares proves nothing."""
    assert [sorted(rank) for rank in ranks] == [sorted(NAMES)] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_is_counted_as_it_counts_itself(name: str, ranks: list[dict[str, Any]]) -> None:
    """Wrappers for many processes call the model from inside, change its class, or cut it in pieces."""
    for rank in ranks:
        row = dict(rank[name])
        assert row["in_code"] == row["program"]
        assert row.pop("same_weights")
        assert row.pop("faults") == {}
        assert row.pop("unobserved") == []
        settle("processes", name, row)


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
        settle("processes", "hogwild", {"shape": "hogwild", "description": description, **said})
