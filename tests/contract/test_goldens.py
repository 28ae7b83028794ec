"""What ten training loops on a frozen machine say in public, compared as a whole with ``tests/golden/loops``."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.contract.goldens.loops import LOOPS
from tests.support.zero_code import printed_by

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "loops"
FILES = (
    "spent.json",
    "summary.json",
    "summary_running.json",
    "run_summary.txt",
    "metrics.txt",
    "metrics.otlp.jsonl",
    "spans.otlp.jsonl",
    "events.jsonl",
    "report.txt",
    "postmortem.txt",
    "postmortem_killed.txt",
)
pytestmark = pytest.mark.timeout(300)  # a busy machine makes it slow, not different

MOST_LINES = 60
"""Lines of a difference that are shown."""

REWRITE = f"""\
If the change is meant, rewrite them, read what changed, and say why in the commit:
  GOLDEN=write {Path(sys.executable).name} -m pytest -q {Path(__file__).relative_to(ROOT)}
  git diff tests/golden/loops"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a fresh process has written, with the clocks stopped before it imports us."""
    folder = tmp_path_factory.mktemp("loops")
    printed_by("-m", "tests.contract.goldens", folder, folder=ROOT)
    if os.environ.get("GOLDEN") == "write":
        shutil.rmtree(GOLDEN, ignore_errors=True)
        shutil.copytree(folder, GOLDEN)
    return folder


def text_of(folder: Path, loop: str, file: str) -> str:
    """What ``file`` holds; nothing where a loop has none."""
    path = folder / loop / file
    return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_loop_says_is_what_was_approved(written: Path, loop: str, file: str) -> None:
    """A refactoring changes no output by accident; the times are exact, so every change shows."""
    approved, found = text_of(GOLDEN, loop, file), text_of(written, loop, file)
    if approved == found:
        return
    names = (f"{(GOLDEN / loop / file).relative_to(ROOT)}", "now")
    lines = list(difflib.unified_diff(approved.splitlines(), found.splitlines(), *names, lineterm="", n=1))
    more = [f"... and {len(lines) - MOST_LINES} lines more"] if len(lines) > MOST_LINES else []
    pytest.fail("\n".join([*(line[:300] for line in lines[:MOST_LINES]), *more, "", REWRITE]), pytrace=False)


def test_every_golden_is_compared(written: Path) -> None:
    """A file that no loop writes any more, or that no test reads, approves of nothing."""
    kept, made = (
        {str(path.relative_to(folder)) for path in folder.rglob("*.*")} for folder in (GOLDEN, written)
    )

    assert kept == made
    assert {Path(name).name for name in made} == set(FILES)
