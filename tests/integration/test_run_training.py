"""Real trainings below ``otel-train run``: one process, workers, ranks, forks, and what is left when they are killed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import written
from tests.support.ranks import free_port
from tests.support.receiver import Received, http_receiver
from tests.support.waiting import until
from tests.support.zero_code import ROOT, counts_of, environment, launched, run_zero_code, summaries_below

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAINING = """
    import os, sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def train(steps, model=None):
        torch.manual_seed(0)
        model = model or torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_loader = DataLoader(TensorDataset(torch.randn(4 * steps, 4), torch.arange(4 * steps) % 2), batch_size=4)
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return loss.item(), model.state_dict()
"""

RANKS = """
    import torch.distributed as dist

    def rank(number=None, world=None, port=None):
        if number is not None:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("gloo", rank=number, world_size=world)
        else:
            dist.init_process_group("gloo")
        train(6, torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2)))
        if "dies" in sys.argv and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()
        dist.destroy_process_group()

    if __name__ == "__main__":
        if "spawn" in sys.argv:
            import torch.multiprocessing as mp
            mp.spawn(rank, args=(2, int(sys.argv[2])), nprocs=2)
        else:
            rank()
"""


def test_output_and_weights_are_those_of_a_bare_run(tmp_path: Path) -> None:
    """To the last digit; and its metrics are there."""
    script = written(tmp_path / "script.py", TRAINING, "print(train(20)); print(torch.rand(2), sys.argv)")
    bare = launched([sys.executable, script, "a"], environment())
    runs = tmp_path / "runs"

    ours = run_zero_code([script, "a"], runs)

    assert (ours.returncode, ours.stdout, ours.stderr) == (0, bare.stdout, bare.stderr)
    [summary] = summaries_below(runs)
    assert (summary["state"], summary["steps"], summary["batches"]) == (
        "finished",
        {"train": 20},
        {"train_loader": 20},
    )


def test_an_import_of_torch_is_no_training(tmp_path: Path) -> None:
    """Launchers and tools leave no run behind."""
    done = run_zero_code(
        [written(tmp_path / "script.py", "import torch; print(torch.ones(2).sum().item())")],
        tmp_path / "runs",
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_loader_workers_are_silent(context: str, tmp_path: Path) -> None:
    """A worker that trains a little to make its batches is no rank."""
    script = written(
        tmp_path / "script.py",
        f"import sys; sys.path.insert(0, {str(ROOT)!r})",
        TRAINING,
        f"""
        from tests.integration.loops.decoding import Decoded
        if __name__ == "__main__":
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(Decoded(16, updates=True), batch_size=4, num_workers=2, multiprocessing_context={context!r})
            for _ in range(2):
                for x, y, _ in loader:
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
        """,
    )
    summary = counts_of(script, runs=tmp_path / "runs")

    assert summary["steps"] == {"train": 8}
    assert summary["batches"] == {"loader": 8}


def steps_in(received: Received) -> float:
    """Steps in the last metrics that a collector got."""
    if not received.metrics:
        return 0.0
    [steps] = received.points()["train.steps"].sum.data_points
    return float(steps.as_double)


def test_a_killed_training_is_exported_to_its_last_step(tmp_path: Path) -> None:
    """Sent to the collector by the agent, while the launcher dies as the program died."""
    script = written(tmp_path / "script.py", TRAINING, "train(500); os.kill(os.getpid(), 9)")
    with http_receiver() as received:
        environ = environment(OTEL_EXPORTER_OTLP_ENDPOINT=received.endpoint)
        done = run_zero_code(
            [script], tmp_path / "runs", environ=environ, otlp="auto", export_interval_s="0.2"
        )
        assert until(lambda: any(span.name == "train.run.end" for span in received.spans()))
        assert until(lambda: steps_in(received) == 500)
        ends = [span.status.message for span in received.spans() if span.name == "train.run.end"]
    [summary] = summaries_below(tmp_path / "runs")

    assert done.returncode == -signal.SIGKILL
    assert "rank 0 was killed" in done.stderr
    assert "otel-train postmortem" in done.stderr
    assert (summary["state"], summary["steps"]) == ("killed", {"train": 500})
    assert ends == ["SIGKILL"]


def test_of_a_killed_training_without_a_flight_recorder_the_summary_is_named(tmp_path: Path) -> None:
    """``otel-train postmortem`` has nothing to read there."""
    script = written(tmp_path / "script.py", TRAINING, "train(5); os.kill(os.getpid(), 9)")

    done = run_zero_code([script], tmp_path / "runs", flight_recorder="false")

    [folder] = (tmp_path / "runs").glob("*/rank0")
    assert f"otel-train: more: otel-train summary {folder}\n" in done.stderr
    assert "otel-train postmortem" not in done.stderr


@pytest.mark.parametrize("before", [0, 3], ids=["parent not yet trained", "parent has trained"])
def test_a_forked_training_is_a_run_of_its_own(before: int, tmp_path: Path) -> None:
    """Neither counts what the other does."""
    script = written(
        tmp_path / "script.py",
        TRAINING,
        f"""
        {before} and train({before})
        pid = os.fork()
        if pid == 0:
            train(5)
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        train(7)
        """,
    )
    # From Python 3.12 on os.fork() warns of each thread of the program: here of the service thread.
    quiet = environment(PYTHONWARNINGS="ignore::DeprecationWarning")
    done = run_zero_code([script], tmp_path / "runs", environ=quiet)
    found = [
        json.loads(path.read_text(encoding="utf-8"))["steps"]["train"]
        for path in (tmp_path / "runs").rglob("summary.json")
    ]

    assert (done.returncode, done.stderr) == (0, "")
    # One after the other they are two trainings of one run; side by side they are two runs.
    assert sorted(found) == ([5, 10] if before else [5, 7])


@pytest.mark.parametrize("way", ["torchrun above", "a launcher per rank", "spawn"])
def test_ranks_are_one_run(way: str, tmp_path: Path) -> None:
    """However they are started."""
    script, runs = written(tmp_path / "script.py", TRAINING, RANKS), tmp_path / "runs"
    elastic = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    words: list[Any] = {
        "torchrun above": ["-m", *elastic, script],
        "a launcher per rank": ["-m", *elastic, "-m", "otel_train", "run", script],
        "spawn": [script, "spawn", str(free_port())],
    }[way]

    done = run_zero_code(words, runs)
    summaries = summaries_below(runs)

    assert done.returncode == 0, done.stderr
    assert [(s["rank"], s["world_size"], s["steps"], s["state"]) for s in summaries] == [
        (rank, 2, {"train": 6}, "finished") for rank in range(2)
    ]
    assert len({s["run_id"] for s in summaries}) == 1


def test_a_rank_that_was_killed_is_distinguished_from_the_one_that_was_not(tmp_path: Path) -> None:
    """Only the launcher of all is left to say it."""
    script, runs = written(tmp_path / "script.py", TRAINING, RANKS), tmp_path / "runs"

    done = run_zero_code([script, "spawn", str(free_port()), "dies"], runs)
    summaries = {summary["rank"]: summary for summary in summaries_below(runs)}
    [folder] = runs.glob("*/rank1")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]

    assert done.returncode == 1
    assert "rank 1 was killed" in done.stderr
    assert (summaries[1]["state"], summaries[1]["steps"]) == ("killed", {"train": 6})
    assert summaries[0]["state"] != "killed"
    assert events[-1]["name"] == "train.run.killed"
