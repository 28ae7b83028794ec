"""Dataclasses, named tuples and enumerations that are quick to define are like any others."""

from __future__ import annotations

import copy
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, replace
from enum import IntEnum
from inspect import signature
from typing import Any, NamedTuple

import pytest

from otel_train.fast_classes import FastIntEnum, FastNamedTuple, _new, fast_dataclass


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


class FastPoint(FastNamedTuple):
    """With a default, a property and a method."""

    x: int
    y: int = 2

    @property
    def sum(self) -> int:
        """Of both."""
        return self.x + self.y


class Point(NamedTuple):
    """The same."""

    x: int
    y: int = 2

    @property
    def sum(self) -> int:
        """Of both."""
        return self.x + self.y


def test_a_named_tuple_has_values_defaults_and_text_of_a_generated_one() -> None:
    """Facts are compared with tuples, unpacked, and shown in messages."""
    ours, theirs = FastPoint(1), Point(1)

    assert tuple(ours) == tuple(theirs) == (1, 2)
    assert list(signature(FastPoint).parameters) == list(signature(Point).parameters)
    assert repr(ours) == repr(theirs).replace("Point", "FastPoint")
    assert (ours._fields, ours._asdict(), ours.sum) == (theirs._fields, theirs._asdict(), 3)
    assert ours._replace(x=5) == FastPoint(y=2, x=5) == FastPoint._make([5, 2])
    assert FastPoint.__match_args__ == Point.__match_args__


def test_copies_and_pickles_of_a_named_tuple_are_equal_also_where_it_has_no_value_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent reads pickles of classes of which it has made no value."""
    dumped = pickle.dumps(FastPoint(1, 3))
    monkeypatch.setattr(FastPoint, "__new__", _new)  # as in a process that has just imported it

    assert pickle.loads(dumped) == copy.deepcopy(FastPoint(1, 3)) == FastPoint(1, 3)
    assert type(pickle.loads(dumped)) is FastPoint


@pytest.mark.parametrize("make", [lambda kind: kind(), lambda kind: kind(1, 2, 3), lambda kind: kind(1, z=3)])
def test_wrong_arguments_of_a_named_tuple_are_refused(make: Callable[[Any], object]) -> None:
    """As those of a generated one are."""
    for kind in (FastPoint, Point):
        with pytest.raises(TypeError):
            make(kind)
    with pytest.raises(TypeError, match="Expected 2 arguments"):
        FastPoint._make([1])
    wrong: dict[str, Any] = {"z": 1}
    with pytest.raises(ValueError, match="unexpected field names"):
        FastPoint(1)._replace(**wrong)


AT_EXIT = """
from __future__ import annotations
import atexit
from dataclasses import field
from otel_train.fast_classes import FastNamedTuple, fast_dataclass

class Point(FastNamedTuple):
    x: int

@fast_dataclass(frozen=True, kw_only=True)
class Values:
    each: list = field(default_factory=list)

atexit.register(lambda: (Point(1), Values()))
raise KeyboardInterrupt
"""


def test_a_first_value_that_is_made_at_the_exit_leaves_the_exit_code_of_ctrl_c() -> None:
    """``eval`` of a text makes Python exit with 1, and a scheduler then reads a failure."""
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


class FastCode(FastIntEnum):
    """Two members."""

    BEGIN = 1
    END = 3


class Code(IntEnum):
    """The same."""

    BEGIN = 1
    END = 3


def test_a_fast_enumeration_is_as_any_other() -> None:
    """The words that are recorded are made of them."""
    for ours, theirs in zip(FastCode, Code, strict=True):
        assert (int(ours), ours.name, ours.value, str(ours), f"{ours}", hash(ours)) == (
            int(theirs), theirs.name, theirs.value, str(theirs), f"{theirs}", hash(theirs),
        )  # fmt: skip
        assert repr(ours) == repr(theirs).replace("Code", "FastCode")
    assert FastCode(3) is FastCode.END
    assert pickle.loads(pickle.dumps(FastCode.END)) is FastCode.END
    assert copy.deepcopy(FastCode.END) is FastCode.END
    with pytest.raises(ValueError, match="2 is not a valid FastCode"):
        FastCode(2)


def test_what_python_itself_puts_into_a_class_is_no_member() -> None:
    """Python 3.13 writes the number of the first line there: an integer, as members are."""
    space = {"__module__": __name__, "__firstlineno__": 7, "BEGIN": 1, "__static_attributes__": ()}
    kind: Any = type(FastCode)

    assert [member.name for member in kind("Made", (FastIntEnum,), space)] == ["BEGIN"]
