"""The steps in a capture are the run's own, whatever the shape of the loop."""

from __future__ import annotations

import gzip
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import otel_train
from tests.integration.loops.truth import QUIET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from otel_train.session import Session

    Mark = Callable[[int], None]
    Program = Callable[["Run"], None]

FAST: dict[str, Any] = {**QUIET, "tuning": {"poll_interval_s": 0.02}}
MOST_S = 60
AT = 500
"""Half a second ahead: what a step is, and which one runs, the agent knows."""

PROGRAMS: list[Program] = []


def program(one: Program) -> Program:
    """A loop that is captured in the middle."""
    PROGRAMS.append(one)
    return one


class Run:
    """A loop that marks every step with a range of its own, until a capture is on the disk."""

    def __init__(self, session: Session) -> None:
        assert session.run_directory is not None
        self.session = session
        self.folder = session.run_directory / "captures"
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.rows = torch.randn(64, 8)
        self.step = 0
        self._deadline = time.monotonic() + MOST_S

    @property
    def over(self) -> bool:
        """Whether there is enough."""
        return bool(list(self.folder.glob("*.record.json"))) or time.monotonic() > self._deadline

    def loader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.rows), batch_size=8)

    def mark(self) -> None:
        """Say, in the trace, which step this is, by the loop's own count."""
        with torch.profiler.record_function(f"mine#{self.step}"):
            time.sleep(0.001)

    def learn(self, batch: torch.Tensor, *, model: Any = None, over: int = 1) -> None:
        called = self.model if model is None else model
        (called(batch).sum() / over).backward()

    def update(self) -> None:
        self.mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1


@program
def one_update_per_batch(run: Run) -> None:
    """The plainest loop."""
    run.session.add(run.model)
    while not run.over:
        for (batch,) in run.loader():
            run.learn(batch)
            run.update()


@program
def gradients_accumulated(run: Run) -> None:
    """Two batches make a step."""
    run.session.add(run.model)
    while not run.over:
        for number, (batch,) in enumerate(run.loader()):
            run.learn(batch, over=2)
            if number % 2:
                run.update()


@program
def no_loader(run: Run) -> None:
    """Batches come from nowhere."""
    run.session.add(run.model)
    while not run.over:
        run.learn(run.rows)
        run.update()


@program
def two_optimizers_in_turn(run: Run) -> None:
    """A generator and a discriminator: one step is a round of both."""
    other = torch.nn.Linear(8, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.01)
    run.session.add({"generator": run.model, "discriminator": other})
    while not run.over:
        for (batch,) in run.loader():
            run.learn(batch, model=other)
            second.step()
            second.zero_grad()
            run.learn(batch)
            run.update()


@program
def two_optimizers_without_a_loader(run: Run) -> None:
    """The same, where no ask for a batch shows the end of a step."""
    other = torch.nn.Linear(8, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.01)
    run.session.add({"generator": run.model, "discriminator": other})
    while not run.over:
        run.learn(run.rows, model=other)
        second.step()
        second.zero_grad()
        run.learn(run.rows)
        run.update()


@program
def manual_steps(run: Run) -> None:
    """The program says where a step ends."""
    run.session.add(run.model)
    while not run.over:
        run.learn(run.rows)
        run.update()
        otel_train.step()


@program
def a_loader_in_a_helper_thread(run: Run) -> None:
    """A prefetcher asks for batches; the training thread never does."""
    import queue

    run.session.add(run.model, {"train": (loader := run.loader())})
    batches: queue.Queue[Any] = queue.Queue(4)

    def fetch() -> None:
        while not run.over:
            for (batch,) in loader:
                batches.put(batch)

    helper = threading.Thread(target=fetch, daemon=True)
    helper.start()
    while not run.over:
        run.learn(batches.get(timeout=20))
        run.update()
    while helper.is_alive():  # it may wait for space
        while not batches.empty():
            batches.get()
        helper.join(0.05)


@program
def a_compiled_model(run: Run) -> None:
    """No interpreter runs inside forward."""
    compiled = torch.compile(run.model, backend="eager")
    run.session.add(compiled)
    while not run.over:
        for (batch,) in run.loader():
            run.learn(batch, model=compiled)
            run.update()


@program
def an_evaluation_every_few_steps(run: Run) -> None:
    """What lies between two steps belongs to none."""
    run.session.add(run.model)
    held_out = run.loader()
    while not run.over:
        for (batch,) in run.loader():
            run.learn(batch)
            run.update()
            if run.step % 7 == 0:
                run.model.eval()
                with torch.no_grad():
                    for (one,) in held_out:
                        run.model(one)
                run.model.train()


@program
def an_iterator_for_each_batch(run: Run) -> None:
    """Making an iterator is the ask that ends a step."""
    run.session.add(run.model)
    loader = run.loader()
    while not run.over:
        (batch,) = next(iter(loader))
        run.learn(batch)
        run.update()


@program
def another_thread_that_trains_as_well(run: Run) -> None:
    """The capture is of the thread that began; the other one has steps of its own."""
    other = torch.nn.Linear(8, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.01)
    run.session.add({"first": run.model, "second": other})

    def train() -> None:
        while not run.over:
            for (batch,) in run.loader():
                other(batch).sum().backward()
                second.step()
                second.zero_grad()
                time.sleep(0.0007)

    helper = threading.Thread(target=train, daemon=True)
    while not run.over:
        for (batch,) in run.loader():
            run.learn(batch)
            run.update()
            if run.step == 12:  # enough for it to be known that this thread trains, and was first
                run.session.summary()
                helper.start()
    helper.join(20)
    assert not helper.is_alive()


@program
def a_checkpoint_every_few_steps(run: Run) -> None:
    """It closes a step before the next batch is asked for."""
    run.session.add(run.model)
    while not run.over:
        for (batch,) in run.loader():
            run.learn(batch)
            run.update()
            if run.step % 3 == 0:
                with otel_train.checkpoint():
                    time.sleep(0.001)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run of which nothing has been recorded."""
    torch.manual_seed(0)
    with otel_train.instrument(run_dir=str(tmp_path), **FAST) as session:
        yield Run(session)


def capture_of(run: Run) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record and the events of the one capture there is."""
    (path,) = run.folder.glob("*.record.json")
    record: dict[str, Any] = json.loads(path.read_text())
    with gzip.open(run.folder / record["file"]) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return record, events


def numbered(events: list[dict[str, Any]], prefix: str) -> dict[int, tuple[float, float]]:
    """Ranges of a name and a number: begin and end by number."""
    return {
        int(event["name"].removeprefix(prefix)): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(prefix)
    }


@pytest.mark.parametrize("at", ["a step", "the next step"])
@pytest.mark.parametrize("loop", PROGRAMS, ids=lambda one: one.__name__)
def test_the_steps_of_a_capture_are_those_that_the_loop_counts(run: Run, loop: Program, at: str) -> None:
    """A trace whose step 40 is the run's step 39 points to the wrong place."""
    wanted = {"at_step": AT} if at == "a step" else {}
    assert otel_train.capture(steps=4, **wanted) == ""
    loop(run)

    record, events = capture_of(run)
    first, last = record["steps"]
    steps, mine = numbered(events, "ProfilerStep#"), numbered(events, "mine#")
    assert record["problem"] == ""
    assert list(steps) == list(range(first, last + 1))
    assert last - first == 3
    if wanted:
        assert first == wanted["at_step"]
    for number, (begun, ended) in steps.items():
        assert begun <= mine[number][0] <= mine[number][1] <= ended, f"step {number} holds {mine}"
