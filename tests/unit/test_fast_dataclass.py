"""A dataclass whose methods are shared is one like any other."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, replace
from typing import Any

import pytest

from otel_train.fast_dataclass import fast_dataclass


@fast_dataclass(frozen=True, kw_only=True)
class Fast:
    """Of each kind one field."""

    name: str
    count: int = 2
    labels: tuple[str, ...] = ()
    made: int = field(default_factory=lambda: 7)


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The same."""

    name: str
    count: int = 2
    labels: tuple[str, ...] = ()
    made: int = field(default_factory=lambda: 7)


def test_values_defaults_and_text_are_those_of_a_generated_one() -> None:
    """Reports of faults print settings, and exporters read fields."""
    ours, theirs = Fast(name="a", labels=("x",)), Generated(name="a", labels=("x",))

    assert asdict(ours) == asdict(theirs)
    assert repr(ours) == repr(theirs).replace("Generated", "Fast")
    assert hash(ours) == hash(theirs)


def test_equal_is_what_has_equal_values_and_the_same_class() -> None:
    """Settings that go through the environment are compared with those before."""
    assert Fast(name="a") == Fast(count=2, name="a")
    assert Fast(name="a") != Fast(name="b")
    others: list[object] = [Generated(name="a"), None]
    assert Fast(name="a") not in others


def test_copies_and_pickles_are_equal() -> None:
    """Settings travel to the agent as a pickle."""
    value = Fast(name="a", count=3)

    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
    assert replace(value, count=2) == Fast(name="a")


def test_nothing_can_be_changed() -> None:
    """Several threads read one object."""
    value = Fast(name="a")

    with pytest.raises(FrozenInstanceError):
        value.count = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del value.name
    assert value == Fast(name="a")


@pytest.mark.parametrize("given", [{}, {"name": "a", "other": 1}, {"other": 1}])
def test_a_missing_or_unknown_field_is_refused(given: dict[str, Any]) -> None:
    """A misspelt setting fails at the call."""
    with pytest.raises(TypeError, match=r"Fast\(\): missing or unknown: "):
        Fast(**given)
