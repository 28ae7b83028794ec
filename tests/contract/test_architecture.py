"""What ARCHITECTURE.md names exists, and it names every package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "otel_train"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
HOPS = re.findall(r"^\| \d+ \| `([^`]+)`[^|]* \| `([^`]+)` \|", TEXT, re.MULTILINE)
PLACES = re.findall(r"`([a-z_]+(?:/|\.py))`", TEXT.split("## Packages")[1].split("Outside the package")[0])
MOST_HOPS = 14


def names_in(module: Path) -> set[str]:
    """Classes and functions of a module, nested ones too, and methods as ``Class.method``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)
            }
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
    return names


@pytest.mark.parametrize(("module", "name"), HOPS)
def test_a_hop_names_code_that_exists(module: str, name: str) -> None:
    """A reader who follows a data wait through the code must find each hop."""
    assert name in names_in(PACKAGE / module)


def test_a_data_wait_takes_few_hops() -> None:
    """Each hop is a module to open; ARCHITECTURE.md has to fit on one page."""
    assert 0 < len(HOPS) <= MOST_HOPS


def test_the_table_lists_every_package_once() -> None:
    """A package that is missing there is found only by those who know it."""
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}

    assert sorted(PLACES) == sorted(folders | modules)
