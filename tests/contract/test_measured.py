"""What the pages promise of costs is what was measured last."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def medians() -> dict[str, float]:
    """The newest results of ``make bench`` on a processor, by row; captures may have been measured by themselves."""
    folder = ROOT / "benchmarks" / "results"
    files = sorted([*folder.glob("*cores.json"), *folder.glob("*cores-captures.json")])
    rows: list[dict[str, Any]] = [
        row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
    ]
    return {row["name"]: row["spread"]["median"] for row in rows if row["spread"] is not None}


def test_switched_off_a_stage_costs_next_to_nothing(medians: dict[str, float]) -> None:
    """0.3 µs: what may stay in the code of a loop for good."""
    assert medians["idle.disabled"] <= 0.3
    assert medians["idle.absent"] <= 0.3


def test_a_batch_costs_less_than_a_millisecond_and_a_step_of_50_ms_less_than_one_percent(
    medians: dict[str, float],
) -> None:
    """The budget of a throughput monitor whose users come here; ours are tighter, and the page says which are missed."""
    assert medians["step.mean"] < 1000  # µs
    assert medians["wall.50ms"] < 1  # %


def test_a_capture_of_large_operations_makes_a_step_less_than_five_percent_slower(
    medians: dict[str, float],
) -> None:
    """20 ms of few, large operations, without stacks, as the user's clock sees it."""
    assert medians["capture.active.large"] < 5


def test_the_page_shows_what_captures_cost(medians: dict[str, float]) -> None:
    """Also where it is much: thousands of small operations."""
    page = (ROOT / "docs" / "reference" / "overhead.md").read_text(encoding="utf-8")
    shown = {
        name: re.search(rf"^\| {what} \| ([\d.]+) \[", page, re.MULTILINE)
        for name, what in (
            ("large", "20 ms of few, large operations"),
            ("small", "20 ms of thousands of small ones"),
        )
    }

    for name, found in shown.items():
        assert found is not None
        assert float(found[1]) == pytest.approx(medians[f"capture.active.{name}"], rel=0.02)


def test_the_page_shows_the_values_that_were_measured(medians: dict[str, float]) -> None:
    """A page that was edited manually proves nothing."""
    page = (ROOT / "docs" / "reference" / "overhead.md").read_text(encoding="utf-8")
    shown = re.search(r"\| additional wall time of a 50 ms step \|[^|]*\| (-?[\d.]+) \[", page)

    assert shown is not None
    assert float(shown[1]) == pytest.approx(medians["wall.50ms"], rel=0.01)
