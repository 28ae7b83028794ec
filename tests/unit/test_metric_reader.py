"""Logged values: from the training thread's hand to metrics and events."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from otel_train import catalog as c
from otel_train.agent.metric_reader import LoggedValueReader, MetricReader
from otel_train.aggregation.metrics import LoggedSignals, MetricBuilder
from otel_train.config import Config
from otel_train.instrumentation.logged_values import MAX_HELD, UserEvent, Value, ValueQueue, plain
from otel_train.resource import Process, detect
from otel_train.testing import FakeClock
from tests.support.edges import Tape
from tests.support.runs import Run
from tests.unit.test_agent_summary import account, run_of


def published(signals: LoggedSignals) -> dict[str, dict[tuple[str, ...], float]]:
    builder = MetricBuilder()
    signals.write(builder)
    return {
        family.metric.name: {
            tuple(v for _, v in p.attributes): getattr(p, "value", 0.0) for p in family.points
        }
        for family in builder.families()
    }


# --- which metric a name means --------------------------------------------------------------------


def test_the_last_value_counts() -> None:
    """A gauge shows now."""
    signals = LoggedSignals()
    signals.take("loss", 2.0)
    signals.take("loss", 1.0)

    assert published(signals)["train.loss"] == {("loss", "train"): 1.0}


def test_names_of_values_are_bounded() -> None:
    """``log(**{f"layer_{n}": ...})`` must not make a thousand series."""
    signals = LoggedSignals()
    for number in range(1000):
        signals.take(f"value{number}", number)
        signals.take(f"loss{number}", number)
    found = published(signals)

    assert len(found["train.metric.value"]) == c.METRIC_NAME.bound + 1
    assert len(found["train.loss"]) == c.LOSS_NAME.bound + 1
    assert signals.overflows()["train.metric.name"] == 1000 - c.METRIC_NAME.bound


# --- the box --------------------------------------------------------------------------------------


class Hostile:
    """Raises at every touch."""

    def detach(self) -> Any:
        raise RuntimeError("no")

    def __float__(self) -> float:
        raise RuntimeError("no")

    def __str__(self) -> str:
        raise RuntimeError("no")


def test_what_is_put_in_comes_out_in_order_with_its_time() -> None:
    """The agent reads later; when it happened must not be lost."""
    clock = FakeClock(100)
    queue = ValueQueue(clock)
    queue.log({"loss": 1.0, "lr": 0.1})
    clock.tick(us=1)
    queue.event("resumed", {"epoch": 3})

    assert list(queue.drain()) == [
        Value(100, "loss", 1.0), Value(100, "lr", 0.1), UserEvent(1100, "resumed", {"epoch": 3}),
    ]  # fmt: skip
    assert list(queue.drain()) == []


def test_the_box_is_bounded_and_what_is_lost_is_counted() -> None:
    """An agent that is late must not cost memory without end."""
    queue = ValueQueue(FakeClock())
    for number in range(MAX_HELD + 10):
        queue.log({"loss": float(number)})

    assert len(list(queue.drain())) == MAX_HELD
    assert queue.dropped == 10


def test_a_value_that_cannot_be_copied_does_not_reach_the_loop() -> None:
    """otel_train raises no exception into training."""
    queue = ValueQueue(FakeClock())
    queue.log({"loss": Hostile(), "lr": 0.1})

    assert list(queue.drain()) == [Value(0, "loss", None), Value(0, "lr", 0.1)]


class Large:
    """Stands for a tensor of many elements."""

    def numel(self) -> int:
        return 1000

    def detach(self) -> Large:
        return self

    def clone(self) -> Large:
        return self

    def __float__(self) -> float:
        return 1.0


def test_a_large_tensor_is_not_held() -> None:
    """``log(output=logits)`` in every step would fill the device's memory with copies."""
    queue = ValueQueue(FakeClock())
    queue.log({"output": Large(), "loss": 2.0})

    assert [entry.value for entry in queue.drain() if isinstance(entry, Value)] == [None, 2.0]


# --- the reader -----------------------------------------------------------------------------------


def reader_of(run: Run, **info: Any) -> MetricReader:
    """Reads a run without other sources."""
    loaders = {name: SimpleNamespace(workers=0, token_count=0) for name in ("dataloader", "queue")}
    sources: Any = SimpleNamespace(watch=SimpleNamespace(loaders=lambda: loaders), signals=LoggedSignals())
    known = detect(Config(run_id="r"), {}, process=Process(live_ranks=lambda: None))
    return MetricReader(run.account, sources, info=replace(known, **info), config=Config())


def test_samples_that_a_thread_reads_ahead_are_reported_to_rank_0_once() -> None:
    """The training thread reads the same samples from a queue."""
    training, loading, run = Tape(), Tape(), Run()
    for _ in range(100):
        training.forward().backward().update()
        loading.ask("dataloader", 10, samples=32)
    reader = reader_of(run.feed(training).feed(loading, main=False, name="prefetch"))
    before = reader.counted()
    for _ in range(100):
        loading.ask("dataloader", 10, samples=32)
        training.ask("queue", 1, samples=32).forward().backward().update()
    run.feed(training).feed(loading, main=False, name="prefetch").close(max(training.now_ns, loading.now_ns))
    after = reader.counted()

    assert after["train.samples", "queue", "train"] == 3200
    assert after.get(("train.samples", "dataloader", "train")) == before.get(
        ("train.samples", "dataloader", "train")
    )


def test_counts_stay_in_the_order_of_their_first_samples() -> None:
    """Rank reports name the loaders of the first ones."""
    tape, run = Tape(), Run()
    for _ in range(20):
        tape.ask("dataloader", 10, samples=32).forward().backward().update()
    reader = reader_of(run.feed(tape))
    assert [loader for _, loader, _ in reader.counted()] == ["dataloader"]
    for _ in range(10):
        tape.ask("queue", 10, samples=32).forward().backward().update()
    run.feed(tape).close(tape.now_ns)

    assert [loader for _, loader, _ in reader.counted()] == ["dataloader", "queue"]


@pytest.mark.parametrize(("replica_ranks", "times"), [(1, 8), (4, 2)])
def test_the_bound_on_throughput_counts_the_samples_of_a_model_replica_once(
    replica_ranks: int, times: int
) -> None:
    """Eight ranks, of which four share a replica, work on two batches at a time."""
    tape, run = Tape(), Run()
    for _ in range(10):
        tape.ask("dataloader", 10, samples=32).forward().backward().update()
    run.feed(tape).close(tape.now_ns)

    def bound(**info: Any) -> float:
        builder = MetricBuilder()
        reader_of(run, **info)._write_throughput(builder)
        [(_, value)] = builder.values(c.THROUGHPUT_THEORETICAL).items()
        return value

    assert bound(world_size=8, replica_ranks=replica_ranks) == pytest.approx(times * bound())


class Reading:
    """A box and its reader, beside an account in which twelve steps have been made."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.queue, self.signals = ValueQueue(self.clock), LoggedSignals()
        self.run = account(run_of(), close=False)
        self.run.spans.drain()
        self.logged: deque[Value | UserEvent] = deque()
        self.reader = LoggedValueReader(self.logged, self.signals, self.run)

    def read(self) -> list[tuple[str, dict[str, Any]]]:
        self.logged.extend(map(plain, self.queue.drain()))
        self.reader.read()
        self.reader.emit_events()
        return [(event.name, dict(event.attributes)) for event in self.run.spans.drain()[1]]


@pytest.mark.parametrize(
    ("ns", "step"),
    # Twelve steps of 62 ns each: in the second case the fourth is running.
    [(1_000_000_000, 12), (62 * 3 + 10, 3)],
    ids=["after the last", "in the fourth"],
)
def test_an_event_is_exported_at_the_step_in_which_it_happened(ns: int, step: int) -> None:
    """The time line of a run is read by step; the agent reads half a second later, when the run is a hundred steps further."""
    reading = Reading()
    reading.clock.tick(ns)
    reading.queue.event("resumed", {"epoch": 3, "path": Hostile.__name__})

    assert reading.read() == [("resumed", {c.STEP_NUMBER.name: step, "epoch": 3, "path": "Hostile"})]


def test_a_value_that_is_not_finite_is_an_event_of_the_kind_that_is_counted() -> None:
    """Who looks up what the counter counts looks for the event; a learning rate is neither loss nor gradient."""
    reading = Reading()
    reading.queue.log(dict.fromkeys(("loss", "normalized_loss", "grad_norm", "lr", "amp_scale"), math.nan))

    assert [(found["name"], found[c.SPAN_NONFINITE_KIND.name]) for _, found in reading.read()] == [
        ("loss", "loss"), ("normalized_loss", "loss"), ("grad_norm", "gradient"),
    ]  # fmt: skip
    assert {kind: count for kind, count in reading.signals.nonfinite.items() if count} == {
        "loss": 2, "gradient": 1,
    }  # fmt: skip


def test_attributes_of_any_kind_become_text() -> None:
    """A path or an array is no OTLP attribute."""
    reading = Reading()
    reading.queue.event("saved", {"shape": (2, 3), "ok": True, "none": None})
    [(_, attributes)] = reading.read()

    assert (attributes["shape"], attributes["ok"], attributes["none"]) == ("(2, 3)", True, "None")


def test_numbers_of_libraries_are_numbers_in_an_event() -> None:
    """As text they could be neither compared nor plotted."""
    reading = Reading()
    reading.queue.event(
        "best", {"loss": np.float32(1.25), "step": np.int64(3), "ok": np.bool_(True), "at": np.array(2)}
    )
    [(_, attributes)] = reading.read()

    assert (attributes["loss"], attributes["step"], attributes["ok"], attributes["at"]) == (1.25, 3, True, 2)
    assert {type(attributes[name]) for name in ("loss", "step", "ok")} == {float, int, bool}


def test_attributes_are_those_of_the_event() -> None:
    """The program may use its mapping again. Whole numbers of more than 64 bits would cost the batch that they are in."""
    reading = Reading()
    mine = {"epoch": 1, "large": 1 << 70, "larger": 10**5000}
    reading.queue.event("saved", mine)
    mine["epoch"] = 2
    [(_, attributes)] = reading.read()

    assert (attributes["epoch"], attributes["large"], attributes["larger"]) == (1, str(1 << 70), "<int>")


def test_a_value_that_is_no_number_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Its metric would be missing without a reason."""
    reading = Reading()
    for _ in range(3):
        reading.queue.log({"output": Large(), "lr": "a tenth", "loss": Hostile()})
    reading.read()

    assert reading.reader.refused == 9
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "log(output=...)",
        "log(lr=...)",
        "log(loss=...)",
    ]


@pytest.mark.parametrize("wrong", ["high", None, [1.0, 2.0], np.zeros(3), Hostile()])
def test_a_value_that_is_no_number_costs_only_itself(wrong: Any) -> None:
    """A slip in one call must not switch off everything that is logged."""
    reading = Reading()
    for _ in range(5):
        reading.queue.log({"accuracy": wrong, "loss": 1.0})
        reading.read()
    reading.queue.event("odd", {"value": wrong})
    reading.read()

    assert published(reading.signals)["train.loss"] == {("loss", "train"): 1.0}
    assert "train.metric.value" not in published(reading.signals)
