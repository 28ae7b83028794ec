"""Everything known of a loader, as a row of the summary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from otel_train.aggregate.loader_rows import LoaderFacts, loader_rows, supplies
from otel_train.codes import Ending
from tests.support.edges import Tape
from tests.unit.test_run_account import Run

MS = 10**6
FACTS = {"code": LoaderFacts(2, 2, persistent=False), "val": LoaderFacts(0), "never": LoaderFacts()}


def run() -> Run:
    """Two passes of ``code``, 3 + 50 each to begin, and one of ``val``."""
    tape = Tape()
    for _ in range(2):
        tape.start(ns=3 * MS).ask(ns=50 * MS).forward().backward().update()
        for _ in range(9):
            tape.ask(ns=5 * MS).forward().backward().update()
        tape.stop(why=Ending.SHORT)
    tape.start("val").validate(3)
    seen = Run().feed(tape).close(tape.now_ns)
    seen.account.totals.loaders.add_builds("code", np.array([40, 40, 80, 40]) * MS, 2)
    return seen


def row(name: str, facts: dict[str, LoaderFacts] = FACTS) -> dict[str, Any]:
    (found,) = (row for row in loader_rows(run().account.totals, facts) if row["loader"] == name)
    return found


def test_builds_starts_waits_and_endings_stand_together() -> None:
    """The wait alone does not say whose fault it is."""
    code = row("code")

    assert (code["build"]["measured_in"], code["build"]["count"], code["build"]["lost"]) == ("worker", 4, 2)
    assert code["build"]["p50"] == pytest.approx(0.040, rel=0.05)
    assert code["build"]["max"] == 0.080
    assert (code["wait"]["count"], code["wait"]["total_seconds"]) == (20, pytest.approx(0.19))
    assert (code["start"]["count"], code["start"]["avg"]) == (2, pytest.approx(0.053))
    assert code["start"]["making_seconds"] == pytest.approx(0.006)
    assert code["start"]["first_batch_seconds"] == pytest.approx(0.1)
    assert code["endings"] == {"short": 2}


def test_without_workers_the_build_is_the_wait_and_says_so() -> None:
    """One figure under two names must not pass for two measurements."""
    val = row("val")

    assert val["build"]["measured_in"] == "training_thread"
    assert val["build"]["count"] == val["wait"]["count"] == 3


def test_a_loader_never_read_has_no_figures() -> None:
    """Not measured is not zero."""
    never = row("never")

    assert (never["build"], never["wait"], never["start"], never["batch_bytes"]) == (None,) * 4
    assert (never["endings"], never["errors"], never["worker_exits"]) == ({}, {}, {})


def test_a_window_counts_from_its_beginning() -> None:
    """``reset_window`` before the second epoch."""
    account = run().account
    earlier = account.totals.copy()
    account.totals.loaders.add_builds("code", np.array([70 * MS]), 0)
    account.totals.loaders.endings["code", "epoch_end"] = 1
    (code, *_) = loader_rows(account.totals.since(earlier), FACTS)

    assert (code["build"]["count"], code["build"]["lost"]) == (1, 0)
    assert code["endings"] == {"epoch_end": 1}
    assert code["start"] is None


def test_the_verdict_gets_what_it_needs() -> None:
    """Of training: what validation costs to begin is no reason to call training slow."""
    found = supplies(run().account.totals, FACTS, 8)

    assert found["code"].build_s == pytest.approx(0.050)
    assert (found["code"].workers, found["code"].passes, found["code"].processors) == (2, 2, 8)
    assert found["code"].start_s == pytest.approx(0.106)
    assert (found["val"].passes, found["val"].build_s) == (0, None)
