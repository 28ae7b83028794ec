"""A program whose own methods raise where they are not called without otel_train trains as it would alone."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

import otel_train
from otel_train.instrumentation import dataloader, registry
from otel_train.instrumentation.checkpoints import CheckpointProbe
from otel_train.instrumentation.manager import InstrumentationManager
from otel_train.instrumentation.module import ModuleProbe
from otel_train.instrumentation.optimizer import OptimizerProbe, ScaledUpdates
from otel_train.instrumentation.root_modules import RootFinder
from otel_train.instrumentation.stages import active_session
from otel_train.recording.events import SourceKind
from otel_train.recording.recorder import Recorder
from tests.integration.loops.truth import QUIET
from tests.support.waiting import in_threads

DATA = TensorDataset(torch.ones(8, 4))


class Fault(Exception):  # noqa: N818 - not an error of the program
    """What methods of the program raise."""


class Wrapper(nn.Module):
    """Shows the parameters of another module, as wrappers do, without the arguments that torch's methods take."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def parameters(self) -> Any:
        return self.module.parameters()

    named_parameters = modules = named_modules = parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Property(nn.Linear):
    @property
    def training(self) -> bool:
        raise Fault

    @training.setter
    def training(self, value: bool) -> None:
        pass


class Options:
    """Its ``__getattr__`` looks into a dict, as those of configuration objects do; its constructor tries the model."""

    def __init__(self, model: nn.Module) -> None:
        self.options = {"lr": 0.1}
        self.out = model(torch.ones(1, 4))

    def __getattr__(self, name: str) -> Any:
        return self.options[name]


class Unbound:
    """Stands for an object that is set later."""

    @property
    def __class__(self) -> Any:
        raise Fault

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise Fault


class Returning(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class Generating(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


class Private(DataLoader[Any]):
    def __getattribute__(self, name: str) -> Any:
        if name == "persistent_workers" and "otel_train" in inspect.stack()[1].filename:
            raise Fault
        return super().__getattribute__(name)


class Unhashable(_SingleProcessDataLoaderIter):
    __hash__ = None  # type: ignore[assignment]  # as a class has that defines ``__eq__``


class OfUnhashable(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return Unhashable(self)


class Final(_SingleProcessDataLoaderIter):
    def __init_subclass__(cls) -> None:
        raise Fault


class OfFinal(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return Final(self)


class Array:
    shape = (1 << 70,)


class Lazy:
    """An iterable that has an attribute only if its options have it."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return self.options[name]

    def __iter__(self) -> Iterator[Any]:
        return iter([[torch.ones(2, 4)], Array(), [torch.ones(2, 4)]])


def batches(kind: type[DataLoader[Any]] = DataLoader) -> DataLoader[Any]:
    return kind(DATA, batch_size=2)


def with_unbound(kind: type[DataLoader[Any]]) -> DataLoader[Any]:
    made = batches(kind)
    made.bound = Unbound()
    return made


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Returns ``instrument``; closes the session at the end."""
    yield lambda *given, **named: otel_train.instrument(
        *given, **{**QUIET, "run_dir": str(tmp_path), **named}
    )
    if (session := otel_train.current()) is not None:
        session.close()


def train(model: nn.Module, loader: Any, epochs: int = 2) -> int:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    seen = 0
    for (x,) in itertools.chain.from_iterable(itertools.repeat(loader, epochs)):
        model(x).sum().backward()
        optimizer.step()
        seen += 1
    return seen


def counted(stage: str) -> int:
    session = otel_train.current()
    assert session is not None
    session.close()
    return sum(row["count"] for row in session.summary()["stages"] if row["stage"] == stage)


# --- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Wrapper, lambda part: nn.Sequential(nn.Linear(4, 4), part)])
def test_a_model_with_its_own_parameters_method_is_recorded(start: Any, make: Callable[..., Any]) -> None:
    """Torch calls ``named_parameters(recurse=...)`` of the class, which alone is never called so."""
    model = make(Wrapper(nn.Linear(4, 1)))
    start(model)
    assert train(model, batches()) == 8
    assert counted("forward") == 8


def test_a_model_with_its_own_parameters_method_is_found(start: Any) -> None:
    """The search for models sees every outermost call."""
    session = start(loaders=batches())
    session.find_models(RootFinder())
    assert train(Wrapper(nn.Linear(4, 1)), batches()) == 8
    assert counted("forward") == 8


def test_a_constructor_that_calls_a_model_may_have_any_getattr(start: Any) -> None:
    """The search reads ``self`` of every ``__init__`` around a call."""
    session = start(loaders=batches())
    session.find_models(RootFinder())
    assert Options(nn.Linear(4, 1)).out.shape == (1, 1)


def test_a_model_may_be_compiled_whose_new_part_has_its_own_parameters_method(start: Any) -> None:
    """Parts are searched again after a compilation, inside the call of the program."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    start(model)
    model[1] = Wrapper(nn.Linear(4, 1))
    compiled = torch.compile(model, backend="eager")
    model.compile(backend="eager")
    assert compiled is not model
    assert train(model, batches()) == 8


def test_training_may_be_a_property_that_raises(start: Any) -> None:
    """``Module.__call__`` does not read it."""
    model = Property(4, 1)
    start(model)
    assert train(model, batches()) == 8
    assert counted("forward") == 8


# --- loaders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
@pytest.mark.parametrize(
    ("make", "recorded"),
    [
        (lambda: with_unbound(DataLoader), 8),
        (lambda: with_unbound(Returning), 8),
        (lambda: with_unbound(Generating), 8),
        (lambda: batches(Private), 8),
        (lambda: batches(OfUnhashable), 8),
        (lambda: batches(OfFinal), 0),
    ],
    ids=["unbound", "returning", "generating", "private", "unhashable", "final"],
)
def test_a_loader_gives_all_its_batches(
    start: Any, make: Callable[[], Any], recorded: int, *, given: bool
) -> None:
    """A class that forbids subclasses is not recorded; every other one is."""
    loader = make()
    start(loaders=loader if given else None)
    assert train(nn.Linear(4, 1), loader) == 8
    waits = counted("data")
    assert waits == 0 if recorded == 0 else waits >= recorded, waits


def test_an_iterable_may_have_any_getattr_and_any_batch(start: Any) -> None:
    """Settings of a DataLoader are read of every iterable, and a shape may not fit into an event."""
    start(nn.Linear(4, 1), Lazy())
    assert len(list(Lazy())) == 3
    assert len(list(otel_train.watch(Lazy(), name="lazy"))) == 3


def test_a_sample_count_may_be_any_number(start: Any) -> None:
    """A number that does not fit into an event is an error of the program that training survives."""
    loader = batches()
    start(loaders=otel_train.Loader(loader, samples=lambda _: 1 << 70))
    assert train(nn.Linear(4, 1), loader) == 8


# --- gradient scalers ------------------------------------------------------------------------------


def test_a_gradient_scaler_keeps_its_text_and_may_refuse_to_say_whether_it_is_enabled(start: Any) -> None:
    """``help`` shows the text; the outcome of an update is read after the call."""

    class Scaler(torch.amp.GradScaler):
        def is_enabled(self) -> bool:
            raise Fault

    before = inspect.signature(torch.amp.GradScaler.step), torch.amp.GradScaler.step.__doc__
    start()
    Scaler("cpu", enabled=False).step(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    assert (inspect.signature(torch.amp.GradScaler.step), torch.amp.GradScaler.step.__doc__) == before


# --- faults of otel_train --------------------------------------------------------------------------


def compile_it() -> None:
    torch.compile(nn.Linear(4, 1), backend="eager")


def compile_in_place() -> None:
    nn.Linear(4, 1).compile(backend="eager")


def iterate(kind: type[DataLoader[Any]]) -> Callable[[], None]:
    def run() -> None:
        assert len(list(batches(kind))) == 4

    return run


def scale() -> None:
    torch.amp.GradScaler("cpu", enabled=False).step(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def update() -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()


def differentiate() -> None:
    torch.ones(1, requires_grad=True).sum().backward()


def save() -> None:
    with otel_train.checkpoint():
        pass


def call_function_of_jax() -> None:
    """Registers a function, as its first call does; JAX is not installed everywhere."""
    assert active_session.stages is not None
    active_session.stages.register_function(SourceKind.STAGE, "step")


def elsewhere(run: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that runs ``run`` in a new thread."""

    def wait() -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(run).result()

    return wait


def call() -> None:
    nn.Linear(4, 1)(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("place", "run"),
    [
        ((registry.ProbeRegistry, "_known"), iterate(DataLoader)),
        ((registry.ProbeRegistry, "_add_probe"), iterate(DataLoader)),
        ((registry.ProbeRegistry, "_pass_starts"), iterate(DataLoader)),
        ((registry.ProbeRegistry, "_is_recorded"), compile_it),
        ((ModuleProbe, "attach"), compile_in_place),
        ((dataloader.DataLoaderPatch, "_adopt"), iterate(DataLoader)),
        ((dataloader.DataLoaderPatch, "_time"), iterate(DataLoader)),
        ((dataloader.DataLoaderPatch, "_follow_openings"), iterate(DataLoader)),
        ((dataloader.DataLoaderPatch, "_opened"), iterate(Returning)),
        ((dataloader, "iterators_of"), iterate(Returning)),
        ((dataloader, "iterators_of"), iterate(Generating)),
        ((dataloader.DataLoaderPatch, "_decide"), iterate(Generating)),
        ((RootFinder, "_inspect_call"), call),
        ((ScaledUpdates, "_note"), scale),
        ((OptimizerProbe, "_name"), update),
        ((Recorder, "_add_calling_thread"), elsewhere(differentiate)),
        ((Recorder, "_add_calling_thread"), elsewhere(update)),
        ((Recorder, "_add_calling_thread"), elsewhere(save)),
        ((InstrumentationManager, "_listen"), call_function_of_jax),
    ],
)
def test_a_fault_in_a_replaced_function_does_not_reach_the_program(
    start: Any, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], run: Callable[[], None]
) -> None:
    """One row for each function of torch that is replaced and runs more than a few lines of otel_train."""

    def fail(*_: object, **__: object) -> None:
        raise Fault

    session = start(nn.Linear(4, 1))
    session.find_models(RootFinder())
    monkeypatch.setattr(*place, fail)
    run()
    monkeypatch.undo()  # before the session is closed


def test_two_threads_do_not_instrument_imported_modules_at_once(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training and the service thread both look for new imports; a function that is replaced twice counts twice."""
    recording, inside, most = start()._recording, list[int](), list[int]()

    def watch(_: CheckpointProbe) -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()

    monkeypatch.setattr(CheckpointProbe, "watch", watch)
    in_threads(*[recording.follow_imports] * 4)
    assert set(most) == {1}
