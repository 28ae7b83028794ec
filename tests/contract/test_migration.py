"""Every row of docs/reference/migration.md names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "migration.md"
ROWS = re.findall(
    r"^\| (?!Looked for|---)(.+?) \| (.+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


@cache
def functions_in(path: Path) -> frozenset[str]:
    """Names of the functions at the top level of a test file."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_the_page_has_a_row_per_feature() -> None:
    """A pattern that no longer fits the table would check nothing."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]

    assert len(ROWS) == len(lines) - 2 * PAGE.read_text(encoding="utf-8").count("\n## ")
    assert len(ROWS) >= 49


@pytest.mark.parametrize(("feature", "write", "proof"), ROWS, ids=[feature[:40] for feature, _, _ in ROWS])
def test_a_row_names_tests_that_exist(feature: str, write: str, proof: str) -> None:
    """A test that was renamed or removed proves nothing."""
    named = LINK.findall(proof)

    assert feature
    assert write
    assert named
    for words, link in named:
        path = (PAGE.parent / link).resolve()
        assert path.name.startswith("test_")
        assert f"test_{words.replace(' ', '_')}" in functions_in(path)
