"""The scripts for Slurm, with the environment that slurmd gives them and a run on the node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from otel_train.stack.ports import free_ports
from tests.support.stack import ROOT, environ_of, program, running, stack, value, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

SLURM = ROOT / "deploy" / "slurm"
UNREACHABLE = "http://127.0.0.1:9"


def script(name: str, *words: str, **environ: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(SLURM / name), *words],
        env={**os.environ, "PATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def node(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What slurmd tells the prolog of job 77, and where its Collector listens."""
    ports = free_ports()
    told = {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_GID": str(os.getgid()),
        "OTELCOL": program("collector"),
        "OTELCOL_CONFIG": str(SLURM / "collector.yaml"),
        "OTELCOL_STATE": str(tmp_path / "spool"),
        "OTELCOL_PROLOG_LOG": str(tmp_path / "prolog.log"),
        "COLLECTOR_HTTP": f"127.0.0.1:{ports.otlp_http}",
        "COLLECTOR_GRPC": f"127.0.0.1:{ports.otlp_grpc}",
        "COLLECTOR_HEALTH": f"127.0.0.1:{ports.collector_health}",
    }
    yield told
    script("epilog.sh", **told)


def test_a_job_arrives_through_its_node_or_by_replay(tmp_path: Path, node: dict[str, str]) -> None:
    """With a Collector from the prolog, or on a node that reaches nobody: the spool on the shared file system."""
    runs = tmp_path / "runs"
    with stack(tmp_path / "state", "prometheus", "collector") as made:
        gateway = f"http://127.0.0.1:{made.ports.otlp_http}"
        script("prolog.sh", **node, GATEWAY=gateway)
        pid = int((tmp_path / "spool" / "77" / "pid").read_text())
        endpoints = {"through-node": f"http://{node['COLLECTOR_HTTP']}", "offline": UNREACHABLE}
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


def test_a_prolog_without_a_collector_does_not_drain_the_node(tmp_path: Path, node: dict[str, str]) -> None:
    """Slurm takes a node out of service when its prolog fails."""
    script("prolog.sh", **{**node, "OTELCOL": str(tmp_path / "absent")})

    assert "no Collector on this node" in (tmp_path / "prolog.log").read_text()
