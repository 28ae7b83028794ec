"""Programs that a test writes, begins and waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.support import waiting

ROOT = Path(__file__).parents[2]


def written(path: Path, *parts: str) -> Path:
    """A script of these parts, each with its indentation removed. One that has just been started still reads the former."""
    new = path.with_name(f"{path.name}.new")
    new.write_text("\n".join(textwrap.dedent(part) for part in parts), encoding="utf-8")
    return new.replace(path)


def command_of(folder: Path, *parts: str) -> list[str]:
    """A command that runs these parts as ``program.py``; its argument is the folder of runs, ``runs``."""
    return [sys.executable, str(written(folder / "program.py", *parts)), str(folder / "runs")]


def environ(**more: str) -> dict[str, str]:
    """The environment of programs that import this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def line(process: subprocess.Popen[str]) -> str:
    """The next line that the program prints."""
    assert process.stdout is not None
    text = process.stdout.readline().strip()
    assert text, process.stderr.read() if process.stderr else ""
    return text


def ended_summary(folder: Path, state: str) -> dict[str, Any]:
    """The summary of the only run, once it has ended, which it did in ``state``."""

    def ended() -> dict[str, Any] | None:
        for path in (folder / "runs").glob("*/rank0/summary.json"):
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found if found["state"] != "running" else None
        return None

    found: dict[str, Any] = waiting.until(ended, "a summary of a run that has ended", seconds=60.0)
    assert found["state"] == state
    return found
