"""Every feature of the systems that people come from is proved by a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.coming_from_rows import NUMBERS, ROWS, SYSTEMS, Row

ROOT = Path(__file__).parents[2]


def name_of(row: Row) -> str:
    return f"{row.system}{row.number}"


def test_no_feature_is_passed_over() -> None:
    """A row that is missing is a feature that somebody loses without a word."""
    expected = {(letter, number) for letter in SYSTEMS for number in range(1, NUMBERS[letter] + 1)}

    assert {(row.system, row.number) for row in ROWS} == expected


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_row_says_what_to_write_and_what_proves_it(row: Row) -> None:
    """A promise without a test is a wish."""
    assert row.feature
    assert row.write
    assert row.tests


def test_every_test_that_proves_a_row_is_collected() -> None:
    """A test that was renamed or taken away proves nothing any more."""
    named = sorted({test for row in ROWS for test in row.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]

    done = subprocess.run(
        [*command, *named], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )

    found = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    assert set(named) - found == set(), done.stderr
    assert done.returncode == 0, done.stdout


def test_the_page_is_fresh() -> None:
    """It is generated; a stale one sends people to what is no longer there."""
    script = ROOT / "tools" / "coming_from_page.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
