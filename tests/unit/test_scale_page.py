"""The page about scale; what it measures is not tested by the clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import Machine
from benchmarks.scale.ranks import SimulatedRanks
from benchmarks.scale.sweep import BEGIN, CASES, CHOSEN, END, PAGE, Row, as_table, result_of, write_page
from otel_train.config import Config
from otel_train.datamodel import Anchor

MACHINE = Machine(
    date="2030-01-02T03:04:05+00:00", cpu="Example CPU", cores=2, system="Linux 6 x86_64", python="3.11.0",
    torch="", load_1min=3.25,
)  # fmt: skip


def row(ranks: int, profile: str) -> Row:
    return Row(
        ranks=ranks, profile=profile, window_s=15.0, senders=ranks, series=ranks * 10, samples_per_s=5.0,
        sent_per_s=4.0, kbytes_per_s=3.0, collector_cpu=0.25, collector_mib=60.0, prometheus_cpu=0.5,
        prometheus_mib=99.0, simulator_cpu=0.1, queued=7, failures=0, latest_s=0.5, load_1min=2.0,
    )  # fmt: skip


def test_every_value_of_a_row_is_in_the_table_under_its_head() -> None:
    """A column too few and every value stands for another."""
    head, ruler, line = (text.count("|") for text in as_table([row(4096, "reduced")]).splitlines())

    assert head == ruler == line
    assert "| 4,096 | `reduced` | 4,096 | 40,960 | 10.0 | 4 | 5 | 3 | 25%, 60 MiB |" in as_table(
        [row(4096, "reduced")]
    )


def test_only_what_was_measured_is_replaced(tmp_path: Path) -> None:
    """The rest of the page is written by people."""
    page = tmp_path / "scale.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")

    write_page(page, MACHINE, "new")
    write_page(page, MACHINE, "newer")

    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\nMeasured 2030-01-02 on Example CPU")
    assert text.endswith(f"\n\nnewer\n{END}\nafter\n")
    assert "load before the start 3.2" in text


def test_the_page_has_the_rows_that_are_measured() -> None:
    """A page whose table was lost looks finished."""
    text = PAGE.read_text(encoding="utf-8")

    assert [case for case in CASES if f"| {case[0]:,} | `{case[1]}`" not in text] == []


def test_the_rows_that_are_said_to_be_chosen_are_what_a_run_chooses() -> None:
    """Or people size a stack for a profile that their run does not have."""
    chosen = {
        (
            ranks,
            SimulatedRanks(
                ranks, per_node=ranks, config=Config(run_id="r"), anchor=Anchor(0, 0), steps_per_s=1
            )
            .ranks[0]
            .profile.name,
        )
        for ranks, _ in CASES
    }

    assert chosen == CHOSEN


def test_a_simulator_that_could_not_start_is_reported_with_its_exit_code() -> None:
    """It prints the reason on stderr and nothing on stdout, which is no JSON."""
    command = [sys.executable, "-c", "raise SystemExit(2)"]
    simulator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with pytest.raises(RuntimeError, match="the simulator ended with 2"):
        result_of(simulator)
