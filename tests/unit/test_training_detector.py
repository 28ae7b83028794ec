"""The first sign of training, when several threads give it at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from otel_train.autoinstrument.attach import TrainingDetector
from otel_train.datamodel import system_clock
from otel_train.instrumentation.dataloader import DataLoaderPatch
from otel_train.instrumentation.loader_probe import LoaderProbe
from otel_train.instrumentation.naming import Loader
from otel_train.recording.recorder import Recorder
from tests.support.flight import PrivateMemory
from tests.support.watchdog import watchdog


def test_a_thread_that_begins_meanwhile_is_held_until_the_hooks_are_in() -> None:
    """An iterator that is made before the hooks are in is never seen, and a whole epoch is missing."""
    began, go_on = threading.Event(), threading.Event()
    seen: list[Any] = []
    loaders = [DataLoader(TensorDataset(torch.zeros(2, 1))) for _ in range(2)]
    patches: list[Any] = []

    def found() -> None:
        began.set()
        assert go_on.wait(60)
        patches.append(DataLoaderPatch(seen.append, lambda _: None))

    evidence = TrainingDetector(found)
    evidence.wait()
    threads = [threading.Thread(target=iter, args=(loader,)) for loader in loaders]
    try:
        threads[0].start()
        assert began.wait(60)
        threads[1].start()
        threads[1].join(0.2)
        held = threads[1].is_alive()
        go_on.set()
        for thread in threads:
            thread.join(60)
    finally:
        go_on.set()
        evidence.stop()
        evidence.finder.remove()
        for patch in patches:
            patch.remove()

    assert held
    assert {id(loader) for loader in seen} == {id(loader) for loader in loaders}


@pytest.mark.parametrize("own", [False, True], ids=["without", "with"])
def test_hooks_of_the_program_stay_on_an_optimizer_and_no_other(*, own: bool) -> None:
    """Torch iterates over the hooks of an optimizer while its first step is detected."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    called: list[str] = []
    handle = optimizer.register_step_pre_hook(lambda *_: called.append("own")) if own else None
    evidence = TrainingDetector(lambda: called.append("found"))
    evidence.wait()
    try:
        optimizer.step()
        optimizer.step()
        if handle is not None:
            handle.remove()
            optimizer.step()
    finally:
        evidence.stop()
        evidence.finder.remove()

    assert called == (["own", "found", "own"] if own else ["found"])
    assert len(optimizer._optimizer_step_pre_hooks) == own


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_metaclass_that_raises_does_not_reach_the_program(allowed: int) -> None:
    """A class with its own ``__iter__`` gets a wrapper until training begins."""
    changes = []

    class Frozen(type):
        def __setattr__(cls, name: str, value: object) -> None:
            changes.extend([name] if name == "__iter__" else [])
            if len(changes) > allowed:
                raise AttributeError(name)
            super().__setattr__(name, value)

    class Own(DataLoader[Any], metaclass=Frozen):
        def __iter__(self) -> Any:
            yield from (1, 2)

    evidence = TrainingDetector(lambda: None)
    evidence.wait()
    try:
        assert list(Own(TensorDataset(torch.zeros(2, 1)))) == [1, 2]
    finally:
        evidence.stop()
        evidence.finder.remove()
    assert changes
    DataLoaderPatch(lambda _: None, lambda _: None).remove()


def test_nothing_stays_of_what_waited_although_others_came_after_it() -> None:
    """What gives its place to a session must not come back when the session closes."""
    from torch.utils.data import dataloader

    before = dataloader._SingleProcessDataLoaderIter.__init__
    patches: list[Any] = []
    evidence = TrainingDetector(lambda: patches.append(DataLoaderPatch(lambda _: None, lambda _: None)))
    evidence.wait()
    waits = dataloader._SingleProcessDataLoaderIter.__init__
    iter(DataLoader(TensorDataset(torch.zeros(2, 1))))
    evidence.finder.remove()

    assert dataloader._SingleProcessDataLoaderIter.__init__ not in (before, waits)
    patches[0].remove()
    assert dataloader._SingleProcessDataLoaderIter.__init__ is before


def test_the_first_pass_of_a_loader_that_returns_an_iterator_of_its_own_is_timed() -> None:
    """Its ``__iter__`` has begun when torch's iterator is made: too late to time what it returns."""

    class Doubles(DataLoader[Any]):
        def __iter__(self) -> Any:
            return map(id, super().__iter__())

    rows = Doubles(TensorDataset(torch.zeros(2, 1)))
    probe = LoaderProbe(Loader(rows, name="rows"), Recorder(PrivateMemory(64), clock=system_clock))
    patches: list[DataLoaderPatch] = []
    evidence = TrainingDetector(lambda: patches.append(DataLoaderPatch(lambda _: probe, lambda _: None)))
    evidence.wait()
    iterator = iter(Doubles(rows.dataset))
    evidence.finder.remove()
    timed = isinstance(iterator, map) and type(iterator) is not map
    patches[0].remove()

    assert timed


def test_where_a_watchdog_interrupts_the_start_the_next_sign_starts() -> None:
    """The program catches its exception, and trains on."""
    starts: list[Callable[..., None]] = []
    loader = DataLoader(TensorDataset(torch.zeros(2, 1)))

    with watchdog() as expire:

        def found() -> None:
            starts.append(expire)
            if len(starts) == 1:
                expire()

        detector = TrainingDetector(found)
        detector.wait()
        try:
            with pytest.raises(TimeoutError, match="watchdog"):
                iter(loader)
            iter(loader)
        finally:
            detector.stop()
            detector.finder.remove()

    assert len(starts) == 2
