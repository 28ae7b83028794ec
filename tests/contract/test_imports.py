"""What the training process imports of otel_train: recording, and what carries it to the agent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from otel_train.instrumentation.manager import find_driver
from tests.support.zero_code import printed_by

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import torch
import torch.utils.data
before = set(sys.modules)
import otel_train
loader = torch.utils.data.DataLoader([torch.zeros(4)] * 8)
with otel_train.instrument(torch.nn.Linear(4, 2), {"train": loader}, run_dir=sys.argv[1], prometheus=False) as session:
    assert session.run_directory  # the agent runs, and has answered
    for _ in loader:
        pass
    session.log({"loss": 1.0})
    print("imported", *(set(sys.modules) - before))
"""

ALLOWED = {
    "_edges", "agent", "api", "config", "console", "datamodel", "errors", "exit_hook", "fast_classes", "instrumentation", "recording", "resource", "safety",
    "session",
}  # fmt: skip
"""Packages, and modules of the package itself."""

ALLOWED_OF = {
    "agent": {"client", "messages", "lazy_components", "process", "reports"},
    "console": set[str](),
}
"""Modules of packages of which most belong to the agent."""

FOREIGN = ("grpc", "http.server", "opentelemetry", "prometheus_client", "psutil", "pynvml")
"""What otel_train imports in the agent alone."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Modules that a training process has after ``instrument()`` and before the end, beyond torch's."""
    folder: Path = tmp_path_factory.mktemp("runs")
    said = printed_by("-c", PROGRAM, folder, environ={**os.environ, "PYTHONPATH": str(ROOT)}, folder=folder)
    (line,) = [line for line in said.splitlines() if line.startswith("imported ")]
    return set(line.split()[1:])


def test_the_training_process_imports_only_what_records_and_reports(imported: set[str]) -> None:
    """Every module costs ``instrument()`` a third of a millisecond, and imports hold the interpreter lock."""
    ours = [name.split(".")[1:] for name in imported if name.startswith("otel_train.")]
    packages = {parts[0] for parts in ours}
    assert packages <= ALLOWED, packages - ALLOWED
    for package, allowed in ALLOWED_OF.items():
        found = {parts[1] for parts in ours if parts[0] == package and len(parts) > 1}
        assert found <= allowed, (package, found - allowed)


def test_the_training_process_imports_no_library_of_the_agent(imported: set[str]) -> None:
    """A library of telemetry would take memory in every rank."""
    assert not imported.intersection(FOREIGN)


OF_DEVICES = {"accelerator", "cuda_events", "device_copy"}
"""Modules of ``instrumentation``."""


@pytest.mark.skipif(find_driver(os.environ) is not None, reason="this machine has an accelerator")
def test_the_modules_for_devices_are_imported_only_where_there_is_one(imported: set[str]) -> None:
    """They take 2 ms of ``instrument()``."""
    assert not imported.intersection(f"otel_train.instrumentation.{name}" for name in OF_DEVICES)


WITHOUT_TORCH = """
import sys
import otel_train
with otel_train.instrument(run_dir=sys.argv[1], agent="process", prometheus=False) as session:
    for _ in otel_train.watch([1, 2, 3], name="rows"):
        with otel_train.stage("work"):
            otel_train.end(otel_train.begin("load"))
        otel_train.log(loss=0.5)
        otel_train.event("fed", rows=3)
        otel_train.step()
    session.report()
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""


def test_a_program_without_torch_does_not_get_numpy(tmp_path: Path) -> None:
    """Its import takes a tenth of a second, and holds the interpreter lock."""
    assert printed_by("-c", WITHOUT_TORCH, tmp_path, folder=ROOT) == "[]\n"
