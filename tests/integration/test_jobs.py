"""Real jobs of several gloo ranks: who is slow, who hangs, who was killed, and what is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from otel_train.cli.main import main
from otel_train.distributed.hang import suspects_after
from otel_train.rundata.flight import read_postmortem
from tests.support.json_lines import last_points
from tests.support.ranks import arguments, environment, events, free_port, job, summary, whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def stalls(runs: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Suspects that a rank has named."""
    return [
        event["attributes"]
        for event in events(runs, rank)
        if event["name"] == "train.stall" and event["attributes"].get("train.stall.suspect")
    ]


def main_finding(runs: Path) -> dict[str, Any]:
    """The leading finding of rank 0."""
    found: dict[str, Any] = summary(runs)["findings"][0]
    return found


@pytest.mark.parametrize(("world_size", "steps", "stage"), [(2, 500, "data"), (4, 400, "other")])
def test_a_slowed_rank_is_named_with_its_stage(
    tmp_path: Path, world_size: int, steps: int, stage: str
) -> None:
    """Every rank takes equally long for a step: only the others' records tell rank 0 which rank it waits for."""
    # A window of a second is nearer to the usual five than FAST: a busy machine makes the steps of a shorter one unequal.
    settings = {"tuning": {"rank_report_interval_s": 1.0, "poll_interval_s": 0.05}}
    whole(tmp_path, world_size, steps=steps, slow_s={stage: 0.05}, settings=settings)
    found, ranks = main_finding(tmp_path), summary(tmp_path)["ranks"]

    assert found["name"] == "straggler_bound", found
    assert found["evidence"]["rank"] == 1
    assert (ranks["straggler"]["rank"], ranks["straggler"]["stage"]) == (1, stage)
    assert 0.03 < ranks["straggler"]["excess_s"] < 0.2
    reported = [event["attributes"] for event in events(tmp_path) if event["name"] == "train.straggler"]
    assert [(event["train.rank"], event["train.stage"]) for event in reported] == [(1, stage)]
    of_all = [
        found["evidence"]["rank"]
        for rank in range(world_size)
        for found in summary(tmp_path, rank)["findings"]
        if found["name"] == "straggler_bound"
    ]
    assert of_all == [1] * world_size


def test_a_rank_that_evaluates_is_not_called_slow(tmp_path: Path) -> None:
    """Rank 0 evaluates every few steps, the others wait for it: it is busy."""
    whole(tmp_path, 2, steps=150, rank=0, eval_every=5)

    assert summary(tmp_path)["steps"]["eval"] > 0
    assert summary(tmp_path)["ranks"]["straggler"] is None
    assert "straggler_bound" not in [found["name"] for found in summary(tmp_path)["findings"]]


@pytest.mark.parametrize(
    ("world_size", "options", "place"),
    [
        (2, {"hang_in": "data"}, ("data", "train")),
        (4, {"hang_in": "forward", "rank": 2, "interrupted": True}, ("forward", "")),
        (2, {"hang_in": "other", "rank": 0, "interrupted": True}, ("other", "")),
    ],
)
def test_a_hung_rank_is_named_with_its_stage(
    tmp_path: Path, world_size: int, options: dict[str, Any], place: tuple[str, str]
) -> None:
    """While it hangs, within the stall threshold: later the job is killed or interrupted, and no process can answer."""
    settings = {"stall_after_s": 4.0}
    culprit = options.get("rank", 1)
    with job(tmp_path, world_size, steps=3000, hang_at=50, settings=settings, **options) as started:
        started.until(lambda: stalls(tmp_path))
        hung_s = float(started.out(culprit).split()[1])
        (named,) = stalls(tmp_path)
        reported_s = next(
            event["time_unix_ns"] / 1e9
            for event in events(tmp_path)
            if event["attributes"].get("train.stall.suspect")
        )
        if "interrupted" in options:
            started.interrupt()

    (found,) = suspects_after(
        [read_postmortem(tmp_path / "job" / f"rank{rank}") for rank in range(world_size)]
    )
    assert (found.rank, found.stage) == (culprit, place[0])
    assert named["train.rank"] == culprit
    assert (named["train.stage"], named["train.loader"]) == place
    # The threshold, one poll (2 s), two records; and a machine that is busy with other things.
    assert 4.0 <= reported_s - hung_s < 4.0 + 15


@pytest.mark.parametrize("how", ["kill_at", "stop_at"])
def test_a_rank_that_falls_silent_is_named_and_leaves_its_last_steps(tmp_path: Path, how: str) -> None:
    """Killed or stopped, it cannot speak: the others know where it was, and its flight file can be read."""
    # Who is stopped before its agent has left a first record was never heard of.
    hung = {"kill_at": 60} if how == "kill_at" else {"stop_at": 4000}
    # A gloo rank whose peer died fails at once; one whose peer stands still waits.
    with job(tmp_path, 2, steps=9000, **hung) as started:
        if how == "kill_at":
            assert started.wait() == {0: 1, 1: -signal.SIGKILL}
            assert "Connection" in started.err(0)
            assert summary(tmp_path)["state"] == "failed"
        else:
            started.until(lambda: stalls(tmp_path))
            assert [named["train.rank"] for named in stalls(tmp_path)] == [1]
    report = read_postmortem(tmp_path / "job" / "rank1")

    assert report["rank"] == 1
    assert report["state"] in (("killed",) if how == "kill_at" else (None, "running", "killed"))
    assert report["steps_in_file"] >= 60


def test_the_ranks_end_and_train_as_without_us(tmp_path: Path) -> None:
    """Same weights to the bit, same exit; and no key of otel_train is left in the job's store."""
    bare = whole(tmp_path / "bare", 2, steps=3000, bare=True)
    instrumented = whole(tmp_path / "instrumented", 2, steps=3000)
    late = whole(tmp_path / "late", 2, steps=3000, group_first=False)

    assert bare == instrumented == late
    assert "weights" in bare[0]
    assert bare[0].endswith("left [False, False]\n")
    assert summary(tmp_path / "instrumented")["telemetry"]["faults"] == {}
    assert summary(tmp_path / "late")["ranks"]["world_size"] == 2


ONE_RANK = """
import os, sys, torch, otel_train
session = otel_train.instrument(run_dir=sys.argv[1], prometheus=False, console=False)
session.close()
sys.exit(int(sys.argv[2] == "fails" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"))
"""


def torchrun_on_two_hosts(folder: Path, port: int, *words: str) -> set[str]:
    """Two hosts, played by two torchruns, of one rank each; the runs that they leave."""
    program = folder / "program.py"
    program.write_text(ONE_RANK)
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1",
             "--max-restarts=1", "--monitor-interval=0.1", "--master-addr=127.0.0.1", f"--master-port={port}",
             str(program), str(folder), *words],
            env=environment(), stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    said = [host.communicate(timeout=120)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    return {found.parent.parent.name for found in folder.glob("*/rank*/summary.json")}


HOST = (
    "unshare",
    "--uts",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "sh",
    "-c",
    'hostname "$0" && exec "$@"',
)
"""A command on a host of the name that follows: it has a table of processes of its own, which ends with its first."""

TWO_RANKS = """
import os, sys, time, torch, otel_train
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.utils.data.DataLoader(torch.randn(8000, 4), batch_size=4)
otel_train.instrument(model, {"train": batches}, run_dir=sys.argv[1], run_id="job", prometheus=False, console=False)
for number, batch in enumerate(batches):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    if number == 200:
        print("trains", flush=True)
"""


def test_the_host_that_is_gone_is_named_by_the_post_mortem_on_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent went with it, so no file has how its rank ended; the rank here lost the connection."""
    if subprocess.run([*HOST, "node-b", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs host names and tables of processes of its own (unshare)")
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    here, there = (
        subprocess.Popen(
            [*HOST, f"node-{'ab'[rank]}", sys.executable, "-c", TWO_RANKS, str(tmp_path)],
            env=environment() | where | {"RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    )  # fmt: skip
    assert there.stdout is not None
    assert there.stdout.readline() == "trains\n", there.communicate()
    there.kill()
    there.communicate(timeout=60)
    here.communicate(timeout=60)

    assert (summary(tmp_path)["state"], summary(tmp_path, 1)["state"]) == ("failed", "running")
    later_s = time.time() + 20.0
    monkeypatch.setattr("time.time", lambda: later_s)
    main(["postmortem", str(tmp_path / "job")])
    said = " ".join(capsys.readouterr().out.split())
    assert "Rank 1 on node-b is silent since" in said
    assert "and the others went no further: that host or container is gone" in said


def test_each_start_of_torchrun_on_several_hosts_is_a_run_and_its_restarts_are_not(tmp_path: Path) -> None:
    """The same address, port and size, by the same account: nothing in the environment of a rank tells them apart."""
    port = free_port()
    first = torchrun_on_two_hosts(tmp_path, port, "ends")
    both = torchrun_on_two_hosts(tmp_path, port, "fails")

    assert len(first) == 1, first
    assert len(both) == 2, both
    [one], [other] = first, both - first
    for run, attempt in ((one, 0), (other, 1)):
        found = [json.loads(path.read_text()) for path in sorted((tmp_path / run).glob("rank*/summary.json"))]
        assert [(ended["rank"], ended["attempt"]) for ended in found] == [(0, attempt), (1, attempt)]


def test_torchrun_starts_again_and_the_restart_is_counted_and_timed(tmp_path: Path) -> None:
    """A job that dies and comes back by itself burns its allocation silently."""
    # A store shared with the agent keeps gloo's addresses of the first attempt, and the second may dial them.
    environ = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
        *arguments(tmp_path, {"steps": 40, "kill_at": 20, "settings": {"run_id": "job"}}),
    ]  # fmt: skip
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr

    for rank in range(2):
        found = summary(tmp_path, rank)
        assert (found["attempt"], found["state"], found["steps"]) == (1, "finished", {"train": 40})
        assert (tmp_path / "job" / f"rank{rank}" / "flight-0.bin").exists()
    # Rank 1 was killed in training: between its last edge and the next start lies the whole restart.
    assert 0.1 < summary(tmp_path, 1)["restart_seconds"] < 200
    points = last_points(tmp_path / "job" / "rank0")
    assert points["train.run.restarts"][0]["value"] == 1
    spent = {point["labels"]["train.run.activity"]: point["value"] for point in points["train.run.time"]}
    assert spent["restart"] == pytest.approx(summary(tmp_path)["restart_seconds"] or 0.0)  # the only one
