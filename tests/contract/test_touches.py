"""How many files it takes to add something: each is added to a copy of the package, and used from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "otel_train"

DUMMY_SETTING = """\
    dummy_limit: int = setting(default=3, rule=Between(1, 9))
    \"\"\"A setting of a test.\"\"\"

    disabled: bool"""

DUMMY_TRACKER = """\
\"\"\"A tracker of a test: one line for each row.\"\"\"

from pathlib import Path

from otel_train.trackers import TrackerKind


class DummyTracker:
    name = "dummy"

    def wanted(self):
        return True

    def place(self):
        return "here"

    def write(self, row, place):
        with Path("rows.txt").open("a") as file:
            file.write(f"{sorted(row.values)}\\n")

    def close(self):
        Path("closed.txt").touch()


KIND = TrackerKind(
    setting="dummy", imports=(), attribute="dummy_run", named_by="name", expected="a dummy run",
    make=lambda opening: DummyTracker(),
)
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, where files may be changed."""
    shutil.copytree(PACKAGE, tmp_path / "otel_train", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "otel_train"


def change(path: Path, former: str, present: str) -> None:
    """Replace the one occurrence of a text."""
    text = path.read_text(encoding="utf-8")
    assert text.count(former) == 1, former
    path.write_text(text.replace(former, present), encoding="utf-8")


def run(copy: Path, program: str, **environ: str) -> str:
    """What a program prints that imports the copy."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=copy.parent, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(copy.parent), **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(150)
def test_a_setting_is_one_file(copy: Path) -> None:
    """Default, rule and meaning stand together; environment, files and messages follow."""
    change(copy / "config/settings.py", "    disabled: bool", DUMMY_SETTING)
    (copy.parent / "pyproject.toml").write_text("[tool.otel_train]\ndummy_limit = 8\n", encoding="utf-8")

    said = run(
        copy,
        "import otel_train\n"
        "from otel_train.config.sources import settle\n"
        "print(otel_train.Config.from_env().dummy_limit, settle(environ={}).config.dummy_limit)\n"
        "try:\n    otel_train.Config(dummy_limit=10)\nexcept otel_train.ConfigError as error:\n    print(error)",
        OTEL_TRAIN_DUMMY_LIMIT="7",
    )

    assert said == "7 8\ndummy_limit=10: expected 1 to 9. Leave it out for the default, 3\n"


@pytest.mark.timeout(150)
def test_a_tracker_is_its_module_a_setting_and_a_line_in_the_table(copy: Path) -> None:
    """Three files; what it is given, where it runs and when it is closed are the same for all of them."""
    (copy / "trackers/dummy.py").write_text(DUMMY_TRACKER, encoding="utf-8")
    (copy.parent / "dummy.py").touch()  # the library that it writes with
    change(
        copy / "trackers/manager.py", "mlflow, tensorboard, wandb\n", "dummy, mlflow, tensorboard, wandb\n"
    )
    change(copy / "trackers/manager.py", "tensorboard.KIND)", "tensorboard.KIND, dummy.KIND)")
    setting = DUMMY_SETTING.replace("dummy_limit: int", "dummy: str").replace(
        "default=3, rule=Between(1, 9)", 'default="auto", rule=TrackerChoice()'
    )
    change(copy / "config/settings.py", "    disabled: bool", setting)

    run(
        copy,
        "import otel_train\n"
        "with otel_train.instrument(dummy=True, prometheus=False, console=False, log_every_steps=1):\n"
        "    for _ in otel_train.watch([1, 2, 3], name='numbers', phase='train'):\n"
        "        otel_train.step()\n",
    )

    assert (copy.parent / "rows.txt").read_text(encoding="utf-8")
    assert (copy.parent / "closed.txt").exists()
