"""Several ranks of a real job, as processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "integration" / "jobs" / "train.py"
FAST = {
    "tuning": {"rank_report_interval_s": 0.3, "poll_interval_s": 0.05},
    "stall_after_s": 3.0,
    "console": False,
    "run_id": "job",
}


PATIENCE_S = 300
"""For a whole job on a machine that is busy with other things."""


def free_port() -> int:
    """A port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    """Of a rank, without what this machine may have set."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def arguments(runs: Path, options: dict[str, Any]) -> list[str]:
    """What to start, with the settings of ``FAST`` under those of ``options``."""
    settings = FAST | options.get("settings", {})
    return [str(SCRIPT), str(runs), json.dumps(options | {"settings": settings})]


def of_job(world_size: int) -> dict[str, str]:
    """What tells a rank where its job meets."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
    }


def two_ranks(*command: str, timeout_s: float, **more: str) -> list[str]:
    """Run a script as the two ranks of a job to its end; what each printed."""
    environ = environment() | of_job(2) | more
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ends
    return [output for output, _ in ends]


class Job:
    """Ranks that run; what they print and how they end is read from files."""

    def __init__(self, runs: Path, world_size: int, options: dict[str, Any]) -> None:
        self.runs, self.world_size = runs, world_size
        runs.mkdir(exist_ok=True)
        self.launcher = subprocess.Popen(
            [sys.executable, *arguments(runs, options)],
            env=environment() | of_job(world_size),
            start_new_session=True,
        )

    def out(self, rank: int) -> str:
        """What a rank has printed."""
        path = self.runs / f"out{rank}"
        return path.read_text() if path.exists() else ""

    def err(self, rank: int) -> str:
        """What a rank has said on standard error."""
        path = self.runs / f"err{rank}"
        return path.read_text() if path.exists() else ""

    def codes(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended; of one killed by a signal its number, negative."""
        found = {rank: self.runs / f"code{rank}" for rank in range(self.world_size)}
        return {
            rank: int(path.read_text()) for rank, path in found.items() if path.exists() and path.read_text()
        }

    def until(self, true: Callable[[], object]) -> None:
        """Wait for something that happens while all ranks run."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            codes = self.codes()
            assert not codes, [(rank, code, self.err(rank)) for rank, code in codes.items()]
            assert time.monotonic() < deadline, f"it never happened: {self.err(0)}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        """Press Ctrl-C in the terminal of the job, and wait for the end of all ranks."""
        os.killpg(self.launcher.pid, signal.SIGINT)
        self.launcher.wait(PATIENCE_S)
        until(lambda: _is_gone(self.launcher.pid), "the end of all ranks")

    def wait(self) -> dict[int, int]:
        """Exit codes, once all ranks have ended."""
        self.launcher.wait(PATIENCE_S)
        return self.codes()


@contextmanager
def job(runs: Path, world_size: int, **options: Any) -> Iterator[Job]:
    """Start the ranks; whoever is left at the end is killed."""
    started = Job(runs, world_size, options)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.launcher.pid, signal.SIGKILL)
        started.launcher.wait()
        until(lambda: _is_gone(started.launcher.pid), "the end of all ranks")


def _is_gone(group: int) -> bool:
    """A rank that is still ending is alive for who reads its post-mortem: the other would be the one that vanished first."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def whole(runs: Path, world_size: int, **options: Any) -> list[str]:
    """Run a job to its end; what each rank printed."""
    with job(runs, world_size, **options) as started:
        codes = started.wait()
        assert codes == dict.fromkeys(range(world_size), 0), [started.err(rank) for rank in codes]
        return [started.out(rank) for rank in range(world_size)]


def summary(runs: Path, rank: int = 0) -> dict[str, Any]:
    """What a rank's ``summary.json`` says."""
    found: dict[str, Any] = json.loads((runs / "job" / f"rank{rank}" / "summary.json").read_text())
    return found


def events(runs: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The events that a rank has written so far."""
    path = runs / "job" / f"rank{rank}" / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
