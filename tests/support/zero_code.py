"""Runs programs that do not import otel_train: in a process of their own, or right here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import otel_train
from otel_train.autoinstrument.attach import TrainingDetector

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
"""A busy machine takes long to import torch in two processes at once."""

QUIET = {"prometheus": "false", "console": "false", "otlp": "off", "flight_recorder_events": "16384"}


def environment(**more: str) -> dict[str, str]:
    """The environment of a program: ours without settings of otel_train, and this checkout to import."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**ours, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def run_zero_code(
    words: Sequence[str | Path], runs: Path, *, environ: Mapping[str, str] | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """``otel-train run`` with these words.

    Args:
        words: a program and its arguments, or ``-m``, a module and its arguments.
        runs: folder that gets the run directory.
        environ: of the program; as bare as possible when not given.
        **settings: over those that keep a test quiet.
    """
    command = [sys.executable, "-m", "otel_train", "run", *quiet_settings(runs, **settings), *map(str, words)]
    return launched(command, environ or environment())


def quiet_settings(runs: Path, **settings: str) -> list[str]:
    """Options of ``otel-train run`` for a test; as above."""
    return [f"--set={name}={value}" for name, value in {**QUIET, "run_dir": str(runs), **settings}.items()]


def launched(
    command: Sequence[str | Path], environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with what it printed."""
    return subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def ended_well(
    command: Sequence[str | Path], environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The same of a command that must end with 0."""
    done = launched(command, environ, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def printed_by(
    *words: str | Path, environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> str:
    """What an interpreter of its own prints for these words; it must end well."""
    return ended_well([sys.executable, *words], environ, folder).stdout


def summaries_below(runs: Path) -> list[dict[str, Any]]:
    """What every rank wrote about itself, by run and rank."""
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(runs.glob("*/rank*/summary.json"))
    ]


def counts_of(program: Path, *arguments: str, runs: Path, **settings: str) -> dict[str, Any]:
    """The summary of a program that is run zero-code, in a process of its own, and ends well with one rank."""
    done = run_zero_code([program, *arguments], runs, environ=None, **settings)
    assert done.returncode == 0, done.stderr
    [summary] = summaries_below(runs)
    return summary


@contextmanager
def zero_code(folder: Path, **settings: Any) -> Iterator[list[Any]]:
    """Wait for the first sign of training in this process, as a program below ``otel-train run`` does.

    Yields:
        The session, once there is one. It is closed at the end of the block.
    """
    sessions: list[Any] = []

    def start() -> None:
        session = otel_train.instrument(run_dir=str(folder), **settings)
        session.find_models(evidence.finder)
        sessions.append(session)

    evidence = TrainingDetector(start)
    evidence.wait()
    try:
        yield sessions
    finally:
        evidence.stop()
        evidence.finder.remove()
        for session in sessions:
            session.close()
