"""How many files it takes to add something: each is added to a copy of the package, and used from outside."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.zero_code import printed_by

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


DUMMY_RULE = """\
    Rule("dummy_bound", "there is a step", ("steps",), "nothing", lambda run: training_finding(
        "dummy_bound", "A finding of a test.", advice="None.", evidence={"steps": float(run.steps)})),
    *RUN_RULES[1:],
"""

DUMMY_METRIC = """\
DUMMY: Final = Metric(name="train.dummy", unit="{step}", kind=Kind.GAUGE, meaning="A metric of a test.")
ALL: Final = """

DUMMY_EXPORTER = """\
from pathlib import Path


class DummyExporter:
    def __init__(self, resource):
        self.run_id = resource["train.run.id"]

    def export(self, batch):
        with Path("exported.txt").open("a") as file:
            for family in batch.snapshot.families if batch.snapshot else ():
                file.write(f"{self.run_id} {family.metric.name}\\n")

    def close(self, timeout_s):
        Path("closed.txt").touch()
"""

DUMMY_INSTRUMENTATION = """\
import statistics

from otel_train.safety import replace
from otel_train.recording.events import SourceKind, begin_end_fail


def instrument(recorder):
    begin, end, _ = begin_end_fail(recorder.source(SourceKind.DUMMY, "dummy"))

    def made(original):
        def timed(data):
            recorder.edge(begin)
            try:
                return original(data)
            finally:
                recorder.edge(end)

        return timed

    return replace(statistics, "median", made)
"""

LOOP = """\
import statistics, otel_train
with otel_train.instrument(prometheus=False, console=False, run_id="dummy", **SETTINGS):
    for _ in otel_train.watch(range(30), name="numbers", phase="train"):
        statistics.median(range(20_000))
        otel_train.step()
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
    variables = {**os.environ, "PYTHONPATH": str(copy.parent), **environ}
    return printed_by("-c", program, environ=variables, folder=copy.parent)


@pytest.mark.timeout(150)
def test_a_setting_is_one_file(copy: Path) -> None:
    """Default, rule and meaning stand together; environment, files and messages follow."""
    change(copy / "config/settings.py", "    disabled: bool", DUMMY_SETTING)
    (copy.parent / "pyproject.toml").write_text("[tool.otel_train]\ndummy_limit = 8\n", encoding="utf-8")

    said = run(
        copy,
        "import otel_train\n"
        "from otel_train.config.sources import resolve\n"
        "print(otel_train.Config.from_env().dummy_limit, resolve(environ={}).config.dummy_limit)\n"
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


def summary(copy: Path) -> dict[str, Any]:
    """The summary of the run of ``LOOP``."""
    found: dict[str, Any] = json.loads((copy.parent / "runs/dummy/rank0/summary.json").read_text())
    return found


@pytest.mark.timeout(150)
def test_a_finding_is_one_file(copy: Path) -> None:
    """A row in the table of rules: the summary has it, and the page of findings is made from the table."""
    change(copy / "bottleneck/rules.py", "    *RUN_RULES[1:],\n", DUMMY_RULE)

    run(copy, LOOP.replace("**SETTINGS", ""))

    found = {finding["name"]: finding for finding in summary(copy)["findings"]}
    assert found["dummy_bound"]["evidence"] == {"steps": 30.0}


@pytest.mark.timeout(150)
def test_a_metric_is_two_files(copy: Path) -> None:
    """Its name, unit and meaning in the catalog, and the line that gives its value."""
    change(copy / "catalog.py", "ALL: Final = ", DUMMY_METRIC)
    change(
        copy / "aggregation/metrics.py",
        "        builder.put(c.STEP_INDEX, self._run.step_number)\n",
        "        builder.put(c.STEP_INDEX, self._run.step_number)\n        builder.put(c.DUMMY, 7)\n",
    )

    run(copy, LOOP.replace("**SETTINGS", ""))

    lines = (copy.parent / "runs/dummy/rank0/metrics.otlp.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = json.loads(lines[-1])["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    (dummy,) = (metric for metric in metrics if metric["name"] == "train.dummy")
    assert (dummy["unit"], dummy["description"]) == ("{step}", "A metric of a test.")
    assert (
        float(dummy["gauge"]["dataPoints"][0].get("asInt", dummy["gauge"]["dataPoints"][0].get("asDouble")))
        == 7
    )


@pytest.mark.timeout(150)
def test_an_exporter_is_a_module_and_an_entry_point(copy: Path) -> None:
    """No file of the package: an exporter is installed beside it."""
    (copy.parent / "dummy.py").write_text(DUMMY_EXPORTER, encoding="utf-8")
    installed = copy.parent / "dummy-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: dummy\nVersion: 1.0\n", encoding="utf-8"
    )
    (installed / "entry_points.txt").write_text(
        "[otel_train.exporters]\ndummy = dummy:DummyExporter\n", encoding="utf-8"
    )

    run(copy, LOOP.replace("**SETTINGS", 'exporters="dummy"'))

    assert "dummy train.steps\n" in (copy.parent / "exported.txt").read_text(encoding="utf-8")
    assert (copy.parent / "closed.txt").exists()


@pytest.mark.timeout(150)
def test_a_stage_is_a_row_of_the_table_and_the_module_that_records_it(copy: Path) -> None:
    """Three files: the table, the instrumentation, and the manager that installs it."""
    (copy / "instrumentation/dummy.py").write_text(DUMMY_INSTRUMENTATION, encoding="utf-8")
    change(copy / "recording/events.py", "    MARK = 9\n", "    MARK = 9\n    DUMMY = 11\n")
    change(
        copy / "recording/events.py",
        '    BuiltInStage("forward"',
        '    BuiltInStage("dummy", (SourceKind.DUMMY,), is_local=True),\n    BuiltInStage("forward"',
    )
    manager = copy / "instrumentation/manager.py"
    change(
        manager,
        "        self._follow_imports_in_training()\n        with Guard",
        "        self._undo = instrument(self.recorder)\n        with Guard",
    )
    change(
        manager,
        "        self.transfers.remove()\n",
        "        self.transfers.remove()\n        self._undo()\n",
    )
    change(
        manager,
        "from otel_train.instrumentation.logged_values",
        "from otel_train.instrumentation.dummy import instrument\nfrom otel_train.instrumentation.logged_values",
    )

    said = run(copy, LOOP.replace("**SETTINGS", "") + "print(statistics.median.__module__)")

    (row,) = (row for row in summary(copy)["stages"] if row["stage"] == "dummy")
    assert (row["count"], row["phase"], row["loader"]) == (30, "train", "numbers")
    assert said == "statistics\n"
