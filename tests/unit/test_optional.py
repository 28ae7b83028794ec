"""Packages that are not required."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from otel_train.errors import MissingExtraError
from otel_train.optional import imported, require

if TYPE_CHECKING:
    from pathlib import Path


def test_a_module_that_is_there_is_imported() -> None:
    """Nothing stands between the caller and the real module."""
    assert require("json", extra="demo") is json


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.part"])
def test_a_missing_package_names_the_command_that_installs_it(module: str) -> None:
    """A remedy one can paste is worth more than a traceback."""
    with pytest.raises(MissingExtraError, match=r"pip install 'otel-train\[demo\]'") as caught:
        require(module, extra="demo")

    assert caught.value.name == module


def test_a_failure_inside_a_package_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken build is not a missing package; installing it again would not help."""
    (tmp_path / "broken_build_of_ours.py").write_text("import a_library_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ModuleNotFoundError, match="a_library_it_needs") as caught:
        require("broken_build_of_ours", extra="demo")

    assert not isinstance(caught.value, MissingExtraError)
    assert "broken_build_of_ours" not in sys.modules


def test_a_module_whose_import_is_not_over_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that begins with JAX imports torch later, for seconds, while our thread looks for devices."""
    name = "slow_import_of_ours"
    (tmp_path / f"{name}.py").write_text(
        f"from otel_train.optional import imported\nduring = imported({name!r})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert imported(name) is None
    module = import_module(name)

    assert module.during is None
    assert imported(name) is module
    monkeypatch.delitem(sys.modules, name)
