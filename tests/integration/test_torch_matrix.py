"""A loop that is compiled and scaled, bare and instrumented, on the versions of torch and Python that we say we support."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOOP = Path(__file__).parent / "matrix" / "loop.py"
VERSIONS = {"2.4.1": "3.12", "2.7.1": "3.10", "2.10.0": "3.11", "": "3.15 3.14 3.13"}
"""Of torch: oldest, the last whose compiler calls back without an argument, one between, newest. Of Python: each one, of which the oldest
has no extension in C; the first that is there."""
OLDEST = next(iter(VERSIONS))

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]


def uv(*arguments: str) -> None:
    """Run the uv that ``make setup`` uses."""
    program = shutil.which("uv") or str(ROOT / ".uv/bin/uv")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def interpreter(version: str) -> str | None:
    """A Python of this version: pyenv's, or that of PATH, which may be a script of pyenv's for none; None if there is none."""
    below = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    asks = "import sys; print('%d.%d' % sys.version_info[:2])"
    for program in (sys.executable, *map(str, below.glob(f"{version}.*/bin/python")), f"python{version}"):
        with contextlib.suppress(OSError):
            done = subprocess.run([program, "-c", asks], capture_output=True, text=True, check=False)
            if done.stdout.strip() == version:
                return program
    return None


def python_with(torch: str, base: str, folder: Path) -> str:
    """An interpreter with a version of torch and this checkout."""
    python = str(folder / "bin" / "python")
    uv("venv", "--quiet", "--python", base, str(folder))
    wanted = [f"torch=={torch}" if torch else "torch", "numpy<2" if torch == OLDEST else "numpy"]
    # The compiler imports setuptools.
    uv("pip", "install", "--quiet", "--python", python, *wanted, "setuptools", str(ROOT))
    return python


def run(python: str, how: str, folder: Path) -> dict[str, Any]:
    """What the loop prints."""
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    command = [python, str(LOOP), how, str(folder / "runs")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "failed; training goes on" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("torch", VERSIONS, ids=[version or "newest" for version in VERSIONS])
def test_training_is_the_same_and_counted_right(torch: str, tmp_path: Path) -> None:
    """Weights to the bit; steps and calls as the loop makes them. Without its Python a version of torch is tested on this one."""
    environment, base = tmp_path / "venv", next(filter(None, map(interpreter, VERSIONS[torch].split())), None)
    try:
        python = python_with(torch, base or sys.executable, environment)
        bare, instrumented = run(python, "bare", tmp_path), run(python, "instrumented", tmp_path)
    finally:
        shutil.rmtree(environment, ignore_errors=True)  # five gigabytes

    assert instrumented["torch"].startswith(torch)
    assert instrumented["weights"] == bare["weights"]
    assert instrumented["steps"] == {"train": 24, "eval": 6}
    assert instrumented["faults"] == {}
    assert instrumented["calls"] == {
        "train/data": 24,
        "train/forward": 24,
        "train/backward": 24,
        "train/optimizer": 24,
        "eval/data": 6,
        "eval/forward": 6,
    }
    if base is None:
        pytest.skip(f"passed on {sys.version.split()[0]}: there is no Python {VERSIONS[torch]} here")
    assert instrumented["python"] in VERSIONS[torch].split()
