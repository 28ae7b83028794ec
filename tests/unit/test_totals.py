"""Everything counted since the session began."""

from __future__ import annotations

import pytest

from otel_train.accounting.account import ThreadAccount
from otel_train.aggregation.counters import StageTotals, Totals
from otel_train.aggregation.series_names import SeriesNames
from tests.support.edges import Tape


class Counted:
    """Totals that follow a tape, piece by piece."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.totals = Totals(SeriesNames())
        self._account, self._read = ThreadAccount(0, self.totals.names.table), 0

    def read(self) -> Totals:
        """Count what has been written since the last call."""
        self.totals.names.learn(self.tape.sources)
        self._account.feed(self.tape.times[self._read :], self.tape.codes[self._read :])
        self._read = len(self.tape.times)
        self.totals.add(self._account.take(), ledger=True)
        return self.totals

    def close(self) -> Totals:
        """Count all of it."""
        self.read()
        self.totals.add(self._account.close(self.tape.now_ns), ledger=True)
        return self.totals


def row(totals: Totals, stage: str, loader: str = "code", phase: str = "train") -> StageTotals:
    [found] = [r for r in totals.rows() if (r.key.stage, r.key.loader, r.key.phase) == (stage, loader, phase)]
    return found


def epoch(tape: Tape, steps: int = 3, loader: str = "code") -> Tape:
    for _ in range(steps):
        tape.step(loader)
    return tape.stop(loader)


def test_quantiles_of_equal_values_are_the_value() -> None:
    """Whatever the buckets, minimum and maximum are exact."""
    quantiles = row(Counted(epoch(Tape())).close(), "forward").quantiles

    assert quantiles == pytest.approx((20e-9,) * 5)


def test_rows_come_in_the_order_in_which_a_step_meets_them() -> None:
    """Training first; data, forward, backward, optimizer: as one would say it."""
    tape = Tape().validate()
    epoch(tape, 12)
    order = [(r.key.phase, r.key.stage) for r in Counted(tape).close().rows() if r.count]

    assert order == [
        *(("train", stage) for stage in ("data", "forward", "backward", "optimizer")),
        *(("eval", stage) for stage in ("data", "forward")),
    ]


def test_a_window_is_what_came_since() -> None:
    """``summary()`` after ``reset_window()`` must not remember the epochs before."""
    tape = epoch(Tape(), 20)
    counted = Counted(tape)
    earlier = counted.read().copy()
    epoch(tape, 7, "code").ask("late", samples=3).forward(50).backward().update().stop("late")
    window = counted.close().since(earlier)

    first, second = earlier.steps_by_phase(), window.steps_by_phase()
    assert first["train"] + second["train"] == counted.totals.steps_by_phase()["train"] == 28
    assert window.updates + earlier.updates == 28
    assert row(window, "forward", "late").count == 1
    assert window.activity_ns.sum() + earlier.activity_ns.sum() == tape.now_ns
    assert window.by_loader(window.samples) == {"late": 3}


def test_seconds_of_training_are_distinguished_by_loader() -> None:
    """The finding needs: how long did training wait for this one, how long did it work on its batches."""
    tape = epoch(Tape(), 10, "code")
    epoch(tape, 5, "prose")
    by_loader = Counted(tape).close().train_s_by_loader()

    assert by_loader["code"][1] == pytest.approx(10 * 57e-9)
    assert by_loader["prose"][1] == pytest.approx(5 * 57e-9)
    assert by_loader["code"][0] == pytest.approx(10 * 5e-9, abs=6e-9)
