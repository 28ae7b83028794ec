"""A loop that does not import otel_train is counted like an instrumented one, whatever its shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import test_loops  # noqa: F401 - it enters the programs in the table
from tests.integration.loops import compiled, manual
from tests.integration.loops.truth import EAGER, LOOPS, QUIET, NoSession, Truth
from tests.support.loop_table import check_row, counted, rows
from tests.support.summary_laws import laws_of
from tests.support.zero_code import zero_code

NAMES_US = {
    "a_session_that_only_waits",
    "a_slow_loader_behind_a_queue",
    "nothing_at_all",
    "steps_marked_in_another_thread",
    "attack_under_a_declared_phase",
    "folds_under_the_same_names",
    "instrumented_twice",
    "trainings_one_after_the_other",
}
"""Programs about what is said to a session, or that never train: there is nothing to find."""

PROGRAMS = [
    name
    for name, program in LOOPS.items()
    if program.__module__ != manual.__name__ and name not in NAMES_US
]  # fmt: skip
NO_LOADER = "an iterable that is no DataLoader shows only to `watch`"
BEFORE = "what runs before the session receives a model counts too"
DIFFERS: dict[str, str] = {
    "a_plain_list": NO_LOADER,
    "an_instrumented_generator": NO_LOADER,
    "copies_are_not_the_model": "a copy that the loop calls is found as a model",
    "a_traced_model": BEFORE,
    "optimizer_subclass": BEFORE,
}
"""Where the values are not those of in-code, and why."""


def found(name: str, folder: Path) -> tuple[Truth, dict[str, Any]]:
    """Run a program that opens no session; what it counted, and the summary of the session that found it."""
    torch.manual_seed(0)
    with zero_code(folder, **QUIET, **EAGER) as sessions:
        truth = LOOPS[name](NoSession())  # type: ignore[arg-type]  # called like one
    [session] = sessions
    return truth, session.summary()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unchanged_loop_is_counted_the_same(name: str, tmp_path: Path) -> None:
    """Who cannot touch the code must not get other values."""
    _, summary = found(name, tmp_path)
    seen = counted(summary)

    assert summary["telemetry"]["faults"] == {}
    assert laws_of(summary) == []
    check_row("loops", name, {"zero_code": seen, "why": DIFFERS.get(name, "")})
    assert (seen == rows()["loops"][name]["in_code"]) == (name not in DIFFERS)


def test_programs_that_are_not_tried_are_few() -> None:
    """A list of exceptions that grows is a rule that does not hold."""
    assert len(PROGRAMS) >= 0.8 * len(LOOPS)
    assert set(DIFFERS) <= set(PROGRAMS)
    assert any(LOOPS[name].__module__ == compiled.__name__ for name in PROGRAMS)
