"""The line on how training goes, and the run summary that is shown only where it is asked for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import otel_train
from otel_train.console.summary import Progress
from otel_train.console.text import TextLayout

PAGE = TextLayout(100, color=False, unicode=True)
LINE = re.compile(
    r"otel_train: step [\d,]+ · [\d.,]+ steps/s · [\d.,]+ samples/s · [<\d.]+ % waiting for data"
)


def summary(steps: int, samples: int, waited_s: float, wall_s: float) -> dict[str, Any]:
    """The keys of ``summary.json`` that a line is made of."""
    return {
        "steps": {"train": steps, "eval": 7},
        "samples": {"train": samples, "val": 999},
        "activities": {"data_wait": waited_s, "productive": wall_s - waited_s},
        "wall_seconds": wall_s,
        "stages": [
            {"stage": "data", "phase": "train", "loader": "train"},
            {"stage": "data", "phase": "eval", "loader": "val"},
        ],
        "findings": [{"name": "input_bound"}, {"name": "compute_bound"}],
    }


def test_rates_are_those_since_the_line_before() -> None:
    """An average over ten hours hides that training has become slow."""
    progress = Progress()
    first = progress.line(PAGE, summary(100, 3200, 1.0, 10.0), 100)
    second = progress.line(PAGE, summary(150, 4800, 9.0, 20.0), 150)

    assert first == (
        "otel_train: step 100 · 10 steps/s · 320 samples/s · 10.0 % waiting for data · finding: input_bound\n"
    )
    assert second == (
        "otel_train: step 150 · 5 steps/s · 160 samples/s · 80.0 % waiting for data · finding: input_bound\n"
    )


def test_what_is_not_known_is_not_in_the_line() -> None:
    """No loader was seen: its wait is not 0, it is not known."""
    bare = {**summary(100, 0, 0.0, 10.0), "stages": [], "samples": {}, "findings": []}

    assert Progress().line(PAGE, bare, 100) == "otel_train: step 100 · 10 steps/s\n"


def test_a_line_is_ascii_where_nothing_else_can_be_written() -> None:
    """Logs of batch systems are often in ASCII."""
    line = Progress().line(TextLayout(80, color=False, unicode=False), summary(1, 1, 0.5, 1.0), 1)

    assert line.isascii()
    assert line.count("\n") == 1


def train(until: Callable[[], bool]) -> None:
    """A loop that goes on until it has been seen to."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4)
    ends_s = time.monotonic() + 30
    while not until() and time.monotonic() < ends_s:
        for rows in loader:
            optimizer.zero_grad()
            model(rows).sum().backward()
            optimizer.step()
            time.sleep(0.001)


def test_progress_is_one_line_and_the_run_summary_comes_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``log_every_steps=50`` printed sixty lines of run summary every fifty steps."""
    said: list[str] = []

    def seen() -> bool:
        said.append(capsys.readouterr().err)
        return "".join(said).count("otel_train: step") >= 3

    quiet: dict[str, Any] = {
        "run_dir": str(tmp_path),
        "prometheus": False,
        "otlp": "off",
        "flight_recorder": False,
    }
    with otel_train.instrument(log_every_steps=5, tuning={"poll_interval_s": 0.02}, **quiet):
        train(seen)
    lines = "".join(said).splitlines()
    at_the_end = capsys.readouterr().err

    assert len([line for line in lines if LINE.match(line)]) >= 2, lines
    assert "where the time went" not in "".join(said)
    assert at_the_end.count("where the time went") == 1


def test_a_report_that_is_asked_for_has_the_run_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who asks in the middle wants to see everything."""
    said: list[str] = []

    def seen() -> bool:
        said.append(capsys.readouterr().err)
        session.report()
        return "where the time went" in "".join(said)

    quiet: dict[str, Any] = {
        "run_dir": str(tmp_path),
        "prometheus": False,
        "otlp": "off",
        "flight_recorder": False,
    }
    with otel_train.instrument(tuning={"poll_interval_s": 0.02}, **quiet) as session:
        train(seen)

    assert "where the time went" in "".join(said)
