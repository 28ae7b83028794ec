"""The Lightning callbacks in a real Trainer: counted as without them, and the earlier callbacks' files."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from otel_train.errors import ConfigError
from tests.support.loop_table import counted
from tests.support.zero_code import environment, launched, run_zero_code, summaries_below

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).parent / "callbacks" / "lightning_program.py"
WAYS = ("plain", "accumulated", "several", "manual", "limited", "saved", "failing", "logged", "hydra")


class Done:
    """A program that has ended.

    Args:
        folder: what it left.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: dict[str, Any] = json.loads((folder / "said.json").read_text(encoding="utf-8"))

    def summary(self, way: str) -> dict[str, Any]:
        [summary] = summaries_below(self.folder / way / "runs")
        return summary

    def printed(self, way: str) -> str:
        text: str = self.said[way]["printed"]
        return text


def run(folder: Path, *ways: str, how: str = "callback", package: str = "lightning") -> Done:
    """The program in a process of its own."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'otel-train[frameworks]'")
    folder.mkdir(exist_ok=True)
    environ = environment(TEST_OBSERVED_BY=how, TEST_FOLDER=str(folder), CUDA_VISIBLE_DEVICES="")
    done: subprocess.CompletedProcess[str]
    if how == "callback":
        done = launched([sys.executable, PROGRAM, package, ",".join(ways)], environ, folder)
    else:
        done = run_zero_code([PROGRAM, package, ",".join(ways)], folder / "runs", environ=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return Done(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(tmp_path_factory.mktemp("callbacks"), *WAYS)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(tmp_path_factory.mktemp("bare"), *WAYS, how="nothing")


def test_nothing_is_counted_that_is_not_counted_without_a_callback(trained: Done, bare: Done) -> None:
    """A translation adds no values of its own: all ways together are what the launcher counts of them."""
    [whole] = summaries_below(bare.folder / "runs")
    parts = [counted(trained.summary(each)) for each in WAYS]

    assert {name: sum(part[name] or 0 for part in parts) for name in parts[0]} == counted(whole)


def test_the_weights_are_those_without_us(trained: Done, bare: Done) -> None:
    """A callback that changes what is learnt is worse than none."""
    assert {each: trained.said[each]["weights"] for each in WAYS} == {
        each: bare.said[each]["weights"] for each in WAYS
    }


@pytest.mark.parametrize(
    ("way", "steps", "batches"),
    [
        # Two batches of each validation loader come first, to be sure that it works.
        ("plain", {"train": 20, "eval": 10}, {"train": 20, "val": 10}),
        ("accumulated", {"train": 10}, {"train": 18}),
        ("several", {"train": 12, "eval": 14}, {"code": 12, "prose": 12, "val_0": 6, "val_1": 8}),
        ("manual", {"train": 10}, {"train": 10}),
        ("limited", {"train": 12, "eval": 14}, {"train": 12, "val": 14}),
        ("saved", {"train": 8}, {"train": 8}),
    ],
)
def test_a_way_of_use_is_counted_right(
    trained: Done, way: str, steps: dict[str, int], batches: dict[str, int]
) -> None:
    """Accumulation, several loaders, the check of sanity, validation, manual optimization: called manually, and by name."""
    summary = trained.summary(way)

    assert summary["steps"] == steps
    assert summary["batches"] == batches
    assert summary["state"] == "finished"
    assert summary["telemetry"]["faults"] == {}
    assert summary["instrumentation_gaps"] == []


def test_what_the_trainer_saves_is_a_checkpoint(trained: Done) -> None:
    """Otherwise its seconds would be a step's."""
    assert trained.summary("saved")["checkpoints"]["count"] == 2
    assert trained.summary("plain")["activities"]["checkpoint"] == 0


def test_a_run_that_fails_says_so(trained: Done) -> None:
    """No teardown comes after an exception."""
    summary = trained.summary("failing")

    assert (summary["state"], summary["steps"]) == ("failed", {"train": 13})
    assert trained.printed("failing").count("failed\n") == 1


@pytest.mark.parametrize(("way", "epochs"), [("plain", 2), ("limited", 3), ("hydra", 3)])
def test_every_epoch_of_the_trainer_prints_one_block(trained: Done, way: str, epochs: int) -> None:
    """Its epochs, from 1: a limit on batches ends no pass of a loader, and three callbacks print no block thrice."""
    blocks = [line for line in trained.printed(way).splitlines() if line.startswith("[Throughput]")]

    assert blocks == [f"[Throughput] Epoch {number}:" for number in range(1, epochs + 1)]


def test_the_chosen_epochs_leave_a_trace_each(trained: Done) -> None:
    """Epochs 1 and 2 of 3, by Hydra, into the folder and under the names that the earlier callback used."""
    traces = sorted((trained.folder / "hydra" / "traces").glob("*.json"))

    assert [trace.name for trace in traces] == ["epoch_1.json", "epoch_2.json"]
    for number, trace in enumerate(traces):
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        steps = [e["name"] for e in events if str(e.get("name", "")).startswith("ProfilerStep#")]
        # Skip 10, wait 5, warm up 2: the first step that is recorded is the 18th of 30.
        assert sorted(set(steps)) == [f"ProfilerStep#{30 * number + 17 + step}" for step in range(4)]
        assert any("Input Dims" in event.get("args", {}) for event in events)


def test_captures_of_epochs_are_the_run_s_captures(trained: Done) -> None:
    """They are found where all captures are, with epoch and steps, and without a problem."""
    captures = trained.summary("hydra")["captures"]
    folder = next((trained.folder / "hydra" / "runs").glob("*/captures"))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.record.json"))]

    assert captures
    assert [(r["epoch"], r["steps"], r["problem"]) for r in records] == [(1, [17, 20], ""), (2, [47, 50], "")]


def test_what_we_log_goes_where_the_trainer_logs(trained: Done) -> None:
    """The run of its MLflow logger is active on no thread, and its TensorBoard folder is not ours."""
    said = trained.said["logged"]

    assert said["at"] == [10, 20]
    assert "profile/train/dl_train/time_forward_ms" in said["keys"]
    [events] = (trained.folder / "tensorboard").rglob("events.out.tfevents.*")
    assert b"samples_per_second" in events.read_bytes()


@pytest.mark.parametrize(
    ("callback", "given", "message"),
    [
        ("ProfilerCallback", {"log_top_k_ops": 101}, "expected a whole number from 0 to 100"),
        (
            "ProfilerCallback",
            {"profile_steps": "ten"},
            "profile_steps='ten': expected a whole number from 1 on",
        ),
        ("ProfilerCallback", {"enabled": "False"}, "enabled='False': expected True or False"),
        ("ProfilerCallback", {"output_dir": 5}, "output_dir=5: expected the path of a folder"),
        ("ThroughputMonitorCallback", {"track_memory": None}, "track_memory=None: expected True or False"),
        ("OtelTrainCallback", {"model": 5}, "expected a torch.nn.Module"),
        ("OtelTrainCallback", {"loaders": 5}, "expected a DataLoader"),
        ("OtelTrainCallback", {"run_nam": "x"}, "Did you mean run_name"),
    ],
)
def test_a_wrong_argument_is_refused_where_the_callback_is_made(
    callback: str, given: dict[str, Any], message: str
) -> None:
    """Not when ``fit`` begins, and no other value in its place."""
    pytest.importorskip("lightning", reason="pip install 'otel-train[frameworks]'")
    from otel_train.integrations import lightning

    assert lightning.ProfilerCallback(log_top_k_ops=15).settings["profiler_top"] == 15
    with pytest.raises(ConfigError, match=message):
        getattr(lightning, callback)(**given)


def test_the_older_package_is_served_as_well(tmp_path: Path) -> None:
    """``pytorch_lightning`` has a Callback class of its own, and a Trainer that asks for it."""
    done = run(tmp_path, "plain", package="pytorch_lightning")

    assert done.summary("plain")["steps"] == {"train": 20, "eval": 10}
    assert done.printed("plain").count("[Throughput]") == 2


def test_two_processes_are_two_ranks_of_one_run(tmp_path: Path) -> None:
    """Lightning starts the second process itself, from the first: no launcher has given them a run id in common."""
    done = run(tmp_path, "ddp")
    [directory] = (tmp_path / "ddp" / "runs").glob("*/run.json")
    summaries = summaries_below(tmp_path / "ddp" / "runs")

    assert directory.is_file()
    assert [(s["rank"], s["world_size"]) for s in summaries] == [(0, 2), (1, 2)]
    assert [s["steps"] for s in summaries] == [{"train": 12, "eval": 6}] * 2
    assert [s["updates"] for s in summaries] == [12, 12]
    assert done.printed("ddp").count("[Throughput]") == 2
