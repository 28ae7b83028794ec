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
from otel_train.console.summary import StepWindow, progress_line
from otel_train.console.text import TextLayout

QUIET: dict[str, Any] = {"prometheus": False, "otlp": "off", "flight_recorder": False}
PAGE = TextLayout(100, color=False, unicode=True)
LINE = re.compile(
    r"otel_train: step [\d,]+ · [\d.,]+ steps/s · [\d.,]+ samples/s · [<\d.]+ % waiting for data"
)


def summary(*findings: str) -> dict[str, Any]:
    """The key of ``summary.json`` that a line is made of."""
    return {"findings": [{"name": name} for name in findings]}


def test_rates_are_those_of_the_steps_of_the_line_and_the_finding_is_of_the_run() -> None:
    """An average over ten hours hides that training has become slow; 4 % of waiting stood beside ``input_bound``."""
    window = StepWindow(last=150, steps=50, seconds=10.0, samples=1600, waited_s=0.4)

    assert progress_line(PAGE, window, summary("input_bound", "compute_bound")) == (
        "otel_train: step 150 · 5 steps/s · 160 samples/s · 4.0 % waiting for data · finding so far: input_bound\n"
    )


def test_what_is_not_known_is_not_in_the_line() -> None:
    """No loader was seen: its wait is not 0, it is not known."""
    window = StepWindow(last=100, steps=100, seconds=10.0, samples=None, waited_s=None)

    assert progress_line(PAGE, window, summary()) == "otel_train: step 100 · 10 steps/s\n"


def test_a_line_is_ascii_where_nothing_else_can_be_written() -> None:
    """Logs of batch systems are often in ASCII."""
    window = StepWindow(last=1, steps=1, seconds=1.0, samples=1, waited_s=0.5)
    line = progress_line(TextLayout(80, color=False, unicode=False), window, summary("input_bound"))

    assert line.isascii()
    assert line.count("\n") == 1


def test_a_line_is_of_every_so_many_steps_however_seldom_the_agent_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``log_every_steps=50`` lines were printed at steps 87, 100, 162, 200, 300 and 393."""
    with otel_train.instrument(log_every_steps=5, run_dir=tmp_path, **QUIET):
        passes = iter((False, False, True))
        train(lambda: next(passes))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("otel_train: step")]
    steps = [int(line.split()[2]) for line in lines]
    rates = [[float(word.replace(",", "")) for word in line.split()[4:8:3]] for line in lines]

    assert steps == [5, 10, 15, 20, 25, 30]  # of 32
    assert [samples for _, samples in rates] == pytest.approx([4 * each for each, _ in rates], rel=0.01)


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

    with otel_train.instrument(
        log_every_steps=5, tuning={"poll_interval_s": 0.02}, run_dir=tmp_path, **QUIET
    ):
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

    with otel_train.instrument(tuning={"poll_interval_s": 0.02}, run_dir=tmp_path, **QUIET) as session:
        train(seen)

    assert "where the time went" in "".join(said)
