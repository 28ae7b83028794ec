"""An update that only its device knows to be skipped is unknown until the device has answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from otel_train import catalog as c
from otel_train.aggregation.metrics import MetricBuilder, RunMetrics
from otel_train.datamodel import Outcomes, Point
from otel_train.instrumentation.optimizer import MOST_HELD, ScaledUpdates
from otel_train.testing import FakeClock
from tests.support.device import FakeDriver
from tests.support.runs import run_state

torch = pytest.importorskip("torch")

FUSED = SimpleNamespace(_step_supports_amp_scaling=True)
ORDINARY = SimpleNamespace()


def there(value: float, kind: str = "meta") -> Any:
    """A number on a device."""
    return SimpleNamespace(is_cpu=False, value=value, device=SimpleNamespace(type=kind))


class Scaler:
    """As much of a gradient scaler as is asked, with a number per device for each update."""

    def __init__(self, *found: Any, scale: Any = None) -> None:
        self._found = dict(enumerate(found))
        self._scale = scale

    def is_enabled(self) -> bool:
        return True

    def _found_inf_per_device(self, _: Any) -> dict[int, Any]:
        return self._found

    def _get_scale_async(self) -> Any:
        return self._scale


class Bench:
    def __init__(self) -> None:
        self.clock = FakeClock(1000)
        self.driver = FakeDriver(self.clock)
        self.updates = ScaledUpdates(self.driver)


def test_what_the_device_has_not_done_is_not_known_yet() -> None:
    """A read that waited would be a synchronisation in disguise, and a zero would be a guess."""
    bench = Bench()
    bench.driver.work(100)
    bench.updates.note(Scaler(there(1.0)), FUSED)
    bench.driver.work(100)
    bench.updates.note(Scaler(there(0.0)), FUSED)

    assert bench.updates.take() == Outcomes(2, 0, 0)
    bench.clock.tick(100)
    assert bench.updates.take() == Outcomes(0, 1, 1)
    bench.clock.tick(100)
    assert bench.updates.take() == Outcomes(0, 1, 0)


def test_of_several_devices_one_is_enough_to_skip() -> None:
    """The scaler takes the sum."""
    bench = Bench()

    bench.updates.note(Scaler(there(0.0), there(1.0)), FUSED)

    assert bench.updates.take() == Outcomes(1, 1, 1)


def test_an_optimizer_that_does_not_update_is_seen_without_asking_its_device() -> None:
    """Its step is not called, which the edges tell."""
    bench = Bench()

    bench.updates.note(Scaler(there(1.0)), ORDINARY)

    assert bench.updates.take() == Outcomes()


@pytest.mark.parametrize("what", ["captured", "elsewhere", "unreported"])
def test_what_cannot_be_read_stays_unknown(what: str) -> None:
    """No event is recorded into a graph under capture, and another kind of device has no driver here."""
    bench = Bench()
    bench.driver.captures = what == "captured"
    found = [] if what == "unreported" else [there(1.0, "xpu" if what == "elsewhere" else "meta")]

    bench.updates.note(Scaler(*found), FUSED)
    bench.driver.captures = False

    assert bench.updates.take() == Outcomes(1, 0, 0)


def test_a_hung_device_holds_no_more_than_so_much() -> None:
    """Memory stays bounded, and training goes on."""
    bench = Bench()
    bench.driver.hung = True

    for _ in range(MOST_HELD + 5):
        bench.updates.note(Scaler(there(1.0)), FUSED)

    assert bench.updates.take() == Outcomes(MOST_HELD + 5, 0, 0)
    assert len(bench.updates._held) == MOST_HELD


def test_a_scaler_of_another_make_is_our_fault_and_not_trainings() -> None:
    """It is raised where faults are counted."""
    bench = Bench()

    bench.updates.note(object(), FUSED)

    with pytest.raises(AttributeError):
        bench.updates.take()
    assert bench.updates.take() == Outcomes()


def test_the_scale_is_read_once_a_turn_and_as_it_was() -> None:
    """It is changed in place; a copy for every step would be a copy too many."""
    updates = ScaledUpdates(None)
    scale = torch.full((), 4.0)

    updates.note(Scaler(scale=scale), ORDINARY)
    scale.fill_(8.0)
    updates.note(Scaler(scale=scale), ORDINARY)
    updates.take()
    first = updates.scale
    updates.note(Scaler(scale=scale), ORDINARY)
    updates.take()

    assert (first, updates.scale) == (4.0, 8.0)


def skips_shown(outcomes: Outcomes) -> list[float]:
    run = run_state()
    run.totals.add_outcomes(outcomes)
    builder = MetricBuilder(lambda _: True)
    RunMetrics(run, max_loaders=4, max_stages=4).write(builder)
    points = [
        point for family in builder.families() if family.metric is c.STEP_SKIPS for point in family.points
    ]
    return [
        point.value
        for point in points
        if isinstance(point, Point) and "amp_overflow" in dict(point.attributes).values()
    ]


@pytest.mark.parametrize(
    ("outcomes", "shown"),
    [(Outcomes(), [0]), (Outcomes(5, 0, 0), []), (Outcomes(5, 3, 0), [0]), (Outcomes(5, 3, 2), [2])],
)
def test_the_metric_is_absent_until_something_is_known(outcomes: Outcomes, shown: list[float]) -> None:
    """Not measured is not zero."""
    assert skips_shown(outcomes) == shown
