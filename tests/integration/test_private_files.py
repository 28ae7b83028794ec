"""What a run writes is its owner's alone, and its token is in one file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import otel_train
from otel_train.cli.main import main
from tests.integration.loops.truth import Net, dataset, loss_of
from tests.support.receiver import refusing_address

TOKEN = "open-sesame-4711"


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    """A job whose umask lets every user write."""
    before = os.umask(0)
    yield
    os.umask(before)


def a_run(runs: Path, **settings: Any) -> Path:
    """Train a little, with every file that a run can leave; the run directory, before the session closes."""
    model, loader = Net(), DataLoader(dataset(8), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {
        "run_dir": str(runs),
        "run_id": "r",
        "prometheus_address": "127.0.0.1:0",
        "console": False,
        "artifacts": True,
        **settings,
    }
    with otel_train.instrument(model, loader, **settings) as session:
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
        otel_train.event("something")
        assert session.run_directory is not None
        files = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
        holders = [path.name for path, held in files.items() if TOKEN.encode() in held]
        assert holders == (["capture-token"] if "profiler_token" in settings else [])
        made = (runs / "r" / "rank0" / "capture-token").read_bytes().strip()
        assert [path.name for path, held in files.items() if made in held] == ["capture-token"]
        return session.run_directory


def test_every_file_and_folder_of_a_run_is_its_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say what is trained, on which machine, with which settings."""
    runs = tmp_path / "runs"
    with refusing_address() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        run = a_run(runs)
        a_run(runs)
    assert main(["report", str(run)]) == 0
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in [runs, *runs.rglob("*")]}

    open_to_others = {
        str(path.relative_to(tmp_path)): oct(mode) for path, mode in modes.items() if mode & 0o077
    }
    names = {path.name for path in modes}

    assert open_to_others == {}
    assert {
        "run.json",
        "summary.json",
        "events.jsonl",
        "metrics.otlp.jsonl",
        "flight.bin",
        "attempt",
    } <= names
    assert {"report.html", "artifacts", "training-1", "spool", "spans.otlp.jsonl", ".gitignore"} <= names


@pytest.mark.parametrize("settings", [{}, {"profiler_token": TOKEN}])
def test_the_token_that_arms_captures_is_in_its_own_file_and_in_no_other(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """``run.json`` is what one sends along with a bug report."""
    run = a_run(tmp_path / "runs", **settings)

    left = [path for path in run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]

    assert left == []
    assert f'"profiler_token": "{"(set)" if settings else ""}"' in (run / "run.json").read_text()


@pytest.mark.parametrize(
    "settings",
    [
        {"alertmanager_url": f"http://ann:{TOKEN}@127.0.0.1:9/"},
        {"alertmanager_url": "http://127.0.0.1:9", "alertmanager_headers": f"authorization={TOKEN}"},
    ],
)
def test_what_opens_an_alertmanager_is_in_no_file(settings: dict[str, Any], tmp_path: Path) -> None:
    """A bug report has ``run.json`` with it."""
    run = a_run(tmp_path / "runs", **settings)

    assert [path for path in run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()] == []
    assert '"alertmanager_url": "(set)"' in (run / "run.json").read_text()
