"""The scripts for Slurm, with the environment that slurmd gives them and a run on the node."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.stack import ROOT, environ_of, free_ports, program, running, stack, value, wait_for
from tests.support.zero_code import ended_well

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

SLURM = ROOT / "deploy" / "slurm"
UNREACHABLE = "http://127.0.0.1:9"


def script(name: str, *words: str, **environ: str) -> str:
    outer = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_EXPORTER")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return ended_well([SLURM / name, *words], {**outer, "PATH": path, **environ}).stdout


def task_variables(node: dict[str, str], **environ: str) -> dict[str, str]:
    """What the tasks of a job have in their environment after the TaskProlog."""
    lines = script("task_prolog.sh", **node, **environ).splitlines()
    assert all(line.startswith("export ") for line in lines)
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


def accepts(address: str) -> bool:
    """Whether a Collector takes an empty request there."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/metrics", data=b"{}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture
def node(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What slurmd tells the prolog of job 77."""
    variables = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_GID": str(os.getgid()),
        "OTELCOL": program("collector"),
        "OTELCOL_CONFIG": str(SLURM / "collector.yaml"),
        "OTELCOL_STATE": str(tmp_path / "spool"),
        "OTELCOL_PROLOG_LOG": str(tmp_path / "prolog.log"),
        "OTELCOL_FIRST_PORT": str(free_ports().otlp_http),
    }
    yield variables
    for job in (tmp_path / "spool").glob("*"):
        script("epilog.sh", **{**variables, "SLURM_JOB_ID": job.name})


def test_a_job_arrives_through_its_node_or_by_replay(tmp_path: Path, node: dict[str, str]) -> None:
    """With a Collector from the prolog, or on a node without a network: the spool on the shared file system."""
    runs = tmp_path / "runs"
    with stack(tmp_path / "state", "prometheus", "collector") as made:
        gateway = f"http://127.0.0.1:{made.ports.otlp_http}"
        script("prolog.sh", **node, GATEWAY=gateway)
        pid = int((tmp_path / "spool" / "77" / "pid").read_text())
        through = task_variables(node)["OTEL_EXPORTER_OTLP_ENDPOINT"]
        endpoints = {"through-node": through, "offline": UNREACHABLE}
        words = [
            json.dumps(
                {
                    "options": [],
                    "environ": {
                        **environ_of(made, runs, run_id=name),
                        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                    },
                }
            )
            for name, endpoint in endpoints.items()
        ]
        with running(
            runs, [str(ROOT / "tests" / "stack" / "trainers" / "troubled.py"), *words], {}
        ) as process:
            assert process.stdout is not None
            pids = json.loads(process.stdout.readline())
            wait_for(
                lambda: value(made, 'train_steps_total{train_run_id="through-node",train_phase="train"}'),
                timeout_s=240,
                what="the run behind the node's Collector",
            )
            for each in pids.values():
                os.kill(each, signal.SIGTERM)
            wait_for(lambda: not any(map(psutil.pid_exists, pids.values())), what="the end of the runs")
        offline = 'train_steps_total{train_run_id="offline",train_phase="train"}'
        assert value(made, offline) is None
        script("replay.sh", str(runs), gateway)
        summary = json.loads((runs / "offline" / "rank0" / "summary.json").read_text())
        wait_for(lambda: value(made, offline) == summary["steps"]["train"], what="every step, replayed")

        script("epilog.sh", **node)
        assert not psutil.pid_exists(pid)


def test_jobs_that_share_a_node_have_a_collector_each(tmp_path: Path, node: dict[str, str]) -> None:
    """The second could not listen, its ranks sent to the first's, and lost that when the first job ended."""
    jobs = [{**node, "SLURM_JOB_ID": number} for number in ("77", "78", "79")]
    prologs = [threading.Thread(target=script, args=("prolog.sh",), kwargs=job) for job in jobs]
    for prolog in prologs:
        prolog.start()
    for prolog in prologs:
        prolog.join()
    addresses = [task_variables(job)["OTEL_EXPORTER_OTLP_ENDPOINT"] for job in jobs]

    assert len(set(addresses)) == 3, (tmp_path / "prolog.log").read_text()
    assert all(accepts(address) for address in addresses)
    script("epilog.sh", **jobs[0])
    assert [accepts(address) for address in addresses] == [False, True, True]
    assert task_variables(jobs[0]) == {}
    assert all((tmp_path / "spool" / job["SLURM_JOB_ID"] / "queue").is_dir() for job in jobs)
    assert task_variables(jobs[1], OTEL_EXPORTER_OTLP_ENDPOINT="http://login1:4318") == {}


def test_a_prolog_without_a_collector_does_not_drain_the_node(tmp_path: Path, node: dict[str, str]) -> None:
    """Slurm takes a node out of service when its prolog fails."""
    script("prolog.sh", **{**node, "OTELCOL": str(tmp_path / "absent")})

    assert "no Collector on this node" in (tmp_path / "prolog.log").read_text()
