"""One process of a local stack: started, found again by its pid file, stopped."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import psutil

from otel_train.errors import StackError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from otel_train.stack.parts import Part

STOP_WITHIN_S = 20.0
SAME_START_S = 1.0
"""How far two readings of a process's start may lie apart. Pids come back; start times do not."""


def start(state: Path, part: Part, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a part with its output in its log, and write its pid file.

    It gets a session of its own, so that Ctrl-C reaches us and we stop it in order.

    Raises:
        StackError: the program cannot be executed.
    """
    for folder in ("log", "pid", "data"):
        (state / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    log = log_file(state, part.name)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    try:
        with log.open("wb") as out:
            child = subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**environ, **part.environ},
                start_new_session=True,
            )
    except OSError as error:
        raise StackError(f"{part.name}: {part.command[0]} cannot be started: {error.strerror}") from error
    began_s = psutil.Process(child.pid).create_time()
    text = json.dumps({"pid": child.pid, "began_s": began_s})
    _pid_file(state, part.name).write_text(f"{text}\n", encoding="utf-8")
    return child


def running(state: Path, name: str) -> Any | None:
    """The psutil.Process of a part, or None when it does not run."""
    try:
        noted = json.loads(_pid_file(state, name).read_text(encoding="utf-8"))
        process = psutil.Process(noted["pid"])
        alive = process.status() != psutil.STATUS_ZOMBIE
        same = abs(process.create_time() - noted["began_s"]) < SAME_START_S
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return None
    return process if alive and same else None


def stop(state: Path, name: str) -> bool:
    """Ask a part to end, and end it when it does not in time; whether it was running."""
    process = running(state, name)
    if process is not None:
        try:
            process.terminate()
            try:
                process.wait(STOP_WITHIN_S)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(STOP_WITHIN_S)
        except psutil.NoSuchProcess:
            pass  # it ended by itself meanwhile, which is what was asked for
    _pid_file(state, name).unlink(missing_ok=True)
    return process is not None


def log_file(state: Path, name: str) -> Path:
    """Where the output of a part goes."""
    return state / "log" / f"{name}.log"


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a text file, [] if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            return file.read().decode("utf-8", "replace").splitlines()[-count:]
    except OSError:
        return []


def _pid_file(state: Path, name: str) -> Path:
    return state / "pid" / f"{name}.json"
