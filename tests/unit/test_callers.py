"""A look at the variables of the program leaves no trace in it."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from otel_train.instrumentation.naming import call_site_of, variables_of


class Thing:
    """Something large."""


def look_at_caller() -> list[Any]:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return list(variables_of(frame.f_back).values())


def test_what_a_variable_held_dies_when_the_program_lets_go_of_it() -> None:
    """A model of the fold before would stay in memory until the function around the folds returns."""
    thing = Thing()
    gone = weakref.ref(thing)
    seen = any(value is thing for value in look_at_caller())
    del thing

    assert seen
    assert gone() is None


def test_a_loader_is_named_and_what_is_beside_it_dies_when_the_program_lets_go_of_it() -> None:
    """The name is looked for in every function that calls, while the model of the fold is in a variable of one."""
    thing, train_loader = Thing(), Thing()
    gone = weakref.ref(thing)
    name = call_site_of(train_loader).name
    del thing

    assert name == "train_loader"
    assert gone() is None


def test_a_dict_of_locals_that_the_program_keeps_is_left_as_it_is() -> None:
    """Programs save their hyperparameters by ``locals()``."""
    rate = 0.1
    kept = locals()
    look_at_caller()

    assert kept["rate"] == rate
