"""What other people's scripts call. A change here is a line in the changelog."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re
from pathlib import Path

import pytest

import otel_train
from otel_train import testing
from otel_train.config.sources import resolve
from tests.support.zero_code import printed_by

JAX = (otel_train.jax.make_step, otel_train.jax.stage)
GOLDEN = Path(__file__).parents[1] / "golden/public_surface.txt"
ROOT = Path(__file__).parents[2]


def described(name: str, thing: object) -> list[str]:
    """One line per name, with its signature; for a class also its public members."""
    if not inspect.isclass(thing):
        return [f"{name}{signature(thing)}" if callable(thing) else name]
    if issubclass(thing, BaseException):
        return [f"{name}({', '.join(base.__name__ for base in thing.__bases__)})"]
    lines = [f"{name}{signature(thing)}"]
    if dataclasses.is_dataclass(thing):
        lines += [
            f"{name}.{field.name}: {field.type} = {field.default!r}" for field in dataclasses.fields(thing)
        ]
    for member, value in sorted(vars(thing).items()):
        if (
            member.startswith("_")
            or isinstance(value, (str, type(None)))
            or inspect.ismemberdescriptor(value)
        ):
            continue
        if isinstance(value, property):
            lines.append(f"{name}.{member}")
        elif callable(value) or isinstance(value, (classmethod, staticmethod)):
            lines.append(f"{name}.{member}{signature(getattr(thing, member))}")
    return lines


def signature(thing: object) -> str:
    whole = inspect.signature(thing)  # type: ignore[arg-type]  # callable by its callers' check
    parameters = [
        parameter.replace(default=shown(parameter.default)) for parameter in whole.parameters.values()
    ]
    text = str(whole.replace(parameters=parameters))
    return re.sub(r"ForwardRef\('([^']*)'\)|'([^']*)'(?= =|,|\)|$)", r"\1\2", text)


class Shown:
    """A default value that reads as it is written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def shown(default: object) -> object:
    """As ``ruff format`` writes it."""
    if default is inspect.Parameter.empty:
        return default
    return Shown(repr(default).replace("'", '"'))


def surface() -> str:
    lines = [line for name in otel_train.__all__ for line in described(name, getattr(otel_train, name))]
    lines += [
        line for name in testing.__all__ for line in described(f"testing.{name}", getattr(testing, name))
    ]
    lines += [f"jax.{function.__name__}{signature(function)}" for function in JAX]
    return "\n".join(lines) + "\n"


def test_the_public_surface_is_what_it_was() -> None:
    """``python -m tests.contract.test_public_surface`` writes it anew; the difference goes into the changelog."""
    found = surface()

    assert found == GOLDEN.read_text(encoding="utf-8")


def test_every_public_name_says_what_it_is_for() -> None:
    """``help(otel_train.watch)`` is where people look first."""
    for name in otel_train.__all__:
        thing = getattr(otel_train, name)
        assert inspect.getdoc(thing), name
        members = vars(thing).items() if inspect.isclass(thing) else ()
        for member, value in members:
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_help_does_not_print_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has tokens and passwords; a signature prints its defaults."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cr3t")

    shown = [pydoc.render_doc(thing) for thing in (otel_train, testing, *JAX, inspect.getmodule(resolve))]

    assert not [text for text in shown if "s3cr3t" in text]


def test_importing_the_package_imports_neither_torch_nor_opentelemetry() -> None:
    """``import otel_train`` stands at the top of scripts that only ask for ``--help``."""
    heavy = ("torch", "numpy", "opentelemetry", "prometheus_client", "psutil")
    program = f"import otel_train, sys; print([m for m in {heavy!r} if m in sys.modules])"

    assert printed_by("-c", program, folder=ROOT) == "[]\n"


def test_every_public_name_can_be_listed_and_no_other_be_had() -> None:
    """Names are loaded when they are first used; a wrong one is an AttributeError like any other."""
    assert set(otel_train.__all__) <= set(dir(otel_train))
    assert not hasattr(otel_train, "instrumnet")


if __name__ == "__main__":
    GOLDEN.write_text(surface(), encoding="utf-8")
