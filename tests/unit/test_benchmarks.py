"""The arithmetic and the words of the benchmark; what it measures is not tested by the clock."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cli
from benchmarks.captures import LOADS, Cost, rows_of
from benchmarks.machine import Machine
from benchmarks.plan import Bench
from benchmarks.processes import numbers_of
from benchmarks.row import Row, Status, failed
from benchmarks.spread import differences, fastest_mean, percent_more, slope, spread_of
from benchmarks.step_cost import _reported_row
from benchmarks.table import begin_mark, cells_of, end_mark, markdown_table, number, page_with, plain_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)
MACHINE = Machine(
    date="2030-01-02T03:04:05+00:00", cpu="Example CPU @ 1 GHz", cores=2, system="Linux 6 x86_64", python="3.11.0", torch="2.5"
)  # fmt: skip


def row(*values: float, budget: float | None = 15.0, **more: Any) -> Row:
    return Row(name="step.median", what="cost per step", unit="µs", values=values, budget=budget, **more)


def test_quartiles_of_five_values_are_the_second_third_and_fourth() -> None:
    """The table quotes them: they must be the ordinary ones. Nothing measured must never look like zero."""
    assert spread_of([5.0, 1.0, 4.0, 2.0, 3.0]) == (2.0, 3.0, 4.0, 5)
    with pytest.raises(ValueError, match="measure at least once"):
        spread_of([])


@given(VALUES)
def test_the_median_lies_between_the_quartiles_and_they_within_the_values(values: list[float]) -> None:
    """A spread that does not contain its own median says nothing."""
    spread = spread_of(values)

    assert min(values) <= spread.q1 <= spread.median <= spread.q3 <= max(values)


@pytest.mark.parametrize(
    ("values", "mean"),
    [([20, 10, *range(100, 138)], 15.0), ([30, 10, 20], 10.0)],
    ids=["5 % of 40", "of few"],
)
def test_the_fastest_share_is_the_mean_of_the_smallest_values(values: list[int], mean: float) -> None:
    """Two of forty are 5 %: 10 and 20. A short block still has a fastest step."""
    assert fastest_mean(np.array(values)) == mean


def test_pairs_are_subtracted_within_their_round() -> None:
    """Drift of the machine between rounds must cancel: 11 - 10 and 22 - 20, not 22 - 10."""
    assert differences([11.0, 22.0], [10.0, 20.0]) == [1.0, 2.0]


def test_percent_more_is_relative_to_the_bare_loop() -> None:
    """5.1 ms instead of 5 ms is 2 % more."""
    assert percent_more([5.1], [5.0]) == [pytest.approx(2.0)]


def test_unpaired_blocks_are_refused() -> None:
    """A round that lacks its partner compares strangers."""
    with pytest.raises(ValueError, match="shorter"):
        differences([1.0, 2.0], [1.0])


def test_the_slope_of_a_straight_line_is_its_rise_per_value() -> None:
    """Growth of memory is read from it: 3 MB more at every look."""
    assert slope([10.0, 13.0, 16.0, 19.0]) == pytest.approx(3.0)


@given(st.floats(-1e3, 1e3), st.integers(1, 30))
def test_flat_memory_has_no_slope(level: float, count: int) -> None:
    """A constant footprint must not be called a leak."""
    assert slope([level] * count) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "budget", "status", "excess"),
    [
        ((14.0, 15.0, 15.0, 15.0, 90.0), 15.0, Status.MET, 0.0),
        ((14.0, 18.5, 18.6), 15.0, Status.MISSED, 3.5),
        ((99.0,), None, Status.NO_BUDGET, 0.0),
        ((), 15.0, Status.NOT_MEASURED, 0.0),
        ((), None, Status.NOT_MEASURED, 0.0),
    ],
)
def test_the_median_alone_decides(
    values: tuple[float, ...], budget: float | None, status: Status, excess: float
) -> None:
    """One outlier on a shared machine must not fail a budget, and one lucky round must not save it."""
    assert (row(*values, budget=budget).status, row(*values, budget=budget).excess) == (status, excess)


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({}, Status.TOO_BUSY),
        ({"budget": 62.5}, Status.MET),
        ({"budget": 0.0, "most_width": 125.0}, Status.MISSED),
    ],
    ids=["twice the budget", "wider budget", "own limit"],
)
def test_a_row_whose_quartiles_are_too_far_apart_decides_nothing(
    more: dict[str, float], status: Status
) -> None:
    """Quartiles of -6 and 119 µs, as other programs caused them, neither keep a budget of 15 µs nor miss it."""
    noisy = row(-131.0, -6.0, 26.0, 119.0, 300.0, **more)

    assert noisy.status is status
    assert failed([noisy]) == (status is not Status.MET)


def test_the_reported_overhead_is_not_compared_with_a_cost_that_varies_too_much() -> None:
    """The median of such a cost is no reference: 61 % off a mean between -19 and 97 µs says nothing of the estimate."""
    bare = [np.array([1000.0]) for _ in range(5)]

    def reported(*cost_us: float) -> Row:
        blocks = {"bare": bare, "instrumented": [np.array([1000.0 + each * 1e3]) for each in cost_us]}
        return _reported_row(blocks, [12.0])

    assert list(reported(8, 9, 10, 11, 12).values) == [pytest.approx(20.0)]
    assert cells_of(reported(-40, -19, 48, 97, 120))[3] == "not measured: the cost varied too much"


def test_what_was_not_measured_fails_and_values_without_a_budget_never_do() -> None:
    """No value is no proof that a budget is kept; those without one explain the others."""
    assert failed([row(1.0), row(reason="no device")])
    assert not failed([row(1.0), row(99.0, budget=None)])


@pytest.mark.parametrize(
    ("value", "text"),
    [(123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123"), (-12.34, "-12.3"), (0.0, "0.000")],
)
def test_numbers_keep_three_digits(value: float, text: str) -> None:
    """More digits than the spread carries would be lies."""
    assert number(value) == text


def test_a_line_says_budget_spread_and_status() -> None:
    """It is quoted in reviews. One value has no spread, and a GPU row on a machine without one must not look like a success."""
    line = cells_of(row(16.0, 17.0, 18.0))

    assert line == ("cost per step", "≤ 15 µs", "17.0 [16.5 .. 17.5] µs", "missed by 2.00 µs")
    assert cells_of(row(3.0))[2] == "3.00 µs"
    reason = "torch finds no CUDA device here"
    assert cells_of(row(reason=reason))[2:] == ("-", f"not measured: {reason}")


def test_the_terminal_table_is_aligned() -> None:
    """Every status starts in the same column."""
    lines = plain_table([row(1.0), row(100.0)]).splitlines()

    assert len(lines) == 4
    assert lines[0].index("status") == lines[2].index("met") == lines[3].index("missed")


def test_a_missed_budget_stands_out_on_the_page() -> None:
    """It is what the reader came for."""
    table = markdown_table([row(1.0), row(18.5)])

    assert "**missed by 3.50 µs**" in table
    assert "| met |" in table


def test_a_new_page_has_the_table_the_machine_and_space_for_the_reasons() -> None:
    """A value without its machine and date cannot be compared with anything."""
    page = page_with([row(1.0)], MACHINE, device="cpu", page="")

    assert page.index(begin_mark("cpu")) < page.index("cost per step") < page.index(end_mark("cpu"))
    assert "Measured 2030-01-02 on Example CPU @ 1 GHz, 2 cores" in page
    assert page.index(end_mark("cpu")) < page.index("## What is missed, and why")


def test_what_people_wrote_stays_and_the_same_values_change_nothing() -> None:
    """The reasons are written manually; a table that drifts with every run cannot be reviewed."""
    page = page_with([row(1.0)], MACHINE, device="cpu", page="") + "Because of the moon.\n"
    again = page_with([row(2.0)], MACHINE, device="cpu", page=page)

    assert page_with([row(1.0)], MACHINE, device="cpu", page=page) == page
    assert again.endswith("Because of the moon.\n")
    assert "2.00 µs" in again
    assert "1.00 µs" not in again


def test_a_second_device_gets_a_table_of_its_own() -> None:
    """Numbers of a GPU machine must not replace those of the laptop."""
    page = page_with([row(1.0)], MACHINE, device="cpu", page="")

    both = page_with([row(7.0)], MACHINE, device="cuda", page=page)

    assert "1.00 µs" in both
    assert both.index(begin_mark("cuda")) < both.index("7.00 µs") < both.index(end_mark("cuda"))
    assert both.index(end_mark("cuda")) < both.index("## What is missed, and why")


def test_a_busy_machine_is_said_on_the_page() -> None:
    """On a shared machine the other programs are measured: such results must not be quoted."""
    busy = replace(MACHINE, load_1min=3.0)

    assert "too busy to quote" in busy.sentence()
    assert "too busy to quote" not in MACHINE.sentence()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, list[str]]]:
    """Runs one benchmark under the given load; returns the page and the names of the results files."""
    page = tmp_path / "overhead.md"
    page.write_text("# Overhead\n", encoding="utf-8")
    monkeypatch.setattr(cli, "PAGE", page)
    monkeypatch.setattr(cli, "RESULTS", tmp_path)

    def run(values: tuple[float, ...], *arguments: str, load: float) -> tuple[str, list[str]]:
        monkeypatch.setattr(cli, "BENCHES", (Bench("step", "what", lambda _: [row(*values)]),))
        monkeypatch.setattr(cli, "this_machine", lambda **_: replace(MACHINE, load_1min=load))
        cli.main([*arguments, "--report-only"])
        return page.read_text(encoding="utf-8"), [file.name for file in tmp_path.glob("*.json")]

    return run


@pytest.mark.parametrize(
    ("load", "values", "arguments"),
    [(0.3, (1.0, 2.0), ()), (3.0, (-90.0, 1.0, 90.0), ("--write-busy",))],
    ids=["quiet", "asked for"],
)
def test_a_complete_run_writes_the_table(
    bench: Callable[..., tuple[str, list[str]]],
    load: float,
    values: tuple[float, ...],
    arguments: tuple[str, ...],
) -> None:
    """On a quiet machine, or on request; the results file has the name that the page is compared with."""
    page, results = bench(values, *arguments, load=load)

    assert "cost per step" in page
    assert results == [f"2030-01-02-{MACHINE.kind}.json"]


@pytest.mark.parametrize(
    ("load", "values"), [(3.0, (1.0, 2.0)), (0.3, (-90.0, 1.0, 90.0))], ids=["before", "during"]
)
def test_a_run_on_a_busy_machine_does_not_replace_the_table(
    bench: Callable[..., tuple[str, list[str]]], load: float, values: tuple[float, ...]
) -> None:
    """Its missed budgets say nothing of the product. Its numbers are kept, under a name that no page is compared with."""
    page, results = bench(values, load=load)

    assert page == "# Overhead\n"
    assert results == [f"2030-01-02-{MACHINE.kind}-busy.json"]


def test_the_kind_of_machine_fits_into_a_file_name() -> None:
    """Results are stored under it."""
    assert set(MACHINE.kind) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    assert MACHINE.kind.endswith("2cores")


def test_results_can_be_read_back_as_json() -> None:
    """They are compared across commits by programs."""
    stored = json.loads(json.dumps(row(16.0, 17.0, 18.0).as_json()))

    assert stored["spread"] == {"q1": 16.5, "median": 17.0, "q3": 17.5, "repeats": 3}
    assert (stored["status"], stored["excess"]) == ("missed", 2.0)


def test_a_capture_is_measured_beside_the_profiler_alone() -> None:
    """20 ms bare, 22 with torch's profiler, 23.1 with ours: 10 % are torch's and 5 % of that ours; 20 products share 2 ms."""
    found = {
        name: [Cost(wall=wall_ms * 1e6, cpu=cpu_ms * 1e6)]
        for name, wall_ms, cpu_ms in (("alone", 20.0, 20.0), ("torch", 23.0, 22.0), ("ours", 24.0, 23.1))
    }
    rows = rows_of(LOADS[0], 20, found)

    numbers = {row.name.removeprefix("capture.active.large"): round(row.values[0], 6) for row in rows}
    assert numbers == {"": 20.0, ".cpu": 15.5, ".torch": 10.0, ".own": 5.0}
    assert rows[0].status is Status.MISSED
    assert rows[0].detail["torch_us_each"] == pytest.approx(100.0)
    assert "torch_us_each" not in rows_of(LOADS[0], 0, found)[0].detail


def test_a_child_that_fails_ends_the_others() -> None:
    """Seven ranks that train on would disturb the benchmarks after it."""
    codes = "raise SystemExit(3)", "import time; time.sleep(60)"
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for code in codes
    ]

    with pytest.raises(RuntimeError, match="a child ended with 3"):
        numbers_of(children)

    assert [child.returncode for child in children] == [3, -9]
