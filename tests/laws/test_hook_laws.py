"""Hooks in C do what the hooks in Python do: the same edges, the same results, the same exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from otel_train.instrumentation.dataloader import DataLoaderPatch
from otel_train.instrumentation.loader_probe import LoaderProbe
from otel_train.instrumentation.module import ModuleProbe, no_open_forward
from otel_train.instrumentation.naming import Loader
from otel_train.instrumentation.optimizer import BackwardProbe, OptimizerProbe, ScaledUpdates
from otel_train.recording import ring_buffer
from otel_train.recording.events import SourceKind
from otel_train.recording.recorder import Recorder

FAULTS = (KeyError("fault"), KeyboardInterrupt("fault"))
ACTS = (
    "batch", "forward", "part", "eval", "backward", "grad", "update", "closure", "raise_forward", "raise_backward",
)  # fmt: skip


class Listing:
    """A recorder whose edges are a list."""

    def __init__(self) -> None:
        self.edges: list[int] = []
        self.edge = self.edges.append
        self.sources: list[tuple[SourceKind, str]] = []

    def source(self, kind: SourceKind, name: str, _phase: str = "") -> int:
        self.sources.append((kind, name))
        return len(self.sources) - 1

    def changed(self) -> None:
        """Nothing reads it."""


class Net(torch.nn.Module):
    """A root with a part, which raises what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Linear(2, 1)

    def forward(self, samples: torch.Tensor, *, fault: BaseException | None = None) -> torch.Tensor:
        if fault is not None:
            raise fault
        result: torch.Tensor = self.part(samples)
        return result


class Stream(IterableDataset[Any]):
    """Batches of the lengths given; an exception in the place of one is raised, None is a batch of no arrays."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            if isinstance(item, BaseException):
                raise item
            yield ["text"] if item is None else [torch.zeros(item, 2)]


def raising(fault: BaseException) -> torch.Tensor:
    """A loss whose backward raises."""
    loss = torch.zeros(1, requires_grad=True).sum()

    def hook(_: torch.Tensor) -> None:
        raise fault

    loss.register_hook(hook)
    return loss


def played(acts: list[str], batches: list[Any], fault: BaseException) -> tuple[list[int], list[Any]]:
    """Edges of a program, and what each of its acts gave or raised."""
    torch.manual_seed(0)
    recorder, said = Listing(), list[Any]()
    net, loader = Net(), DataLoader(Stream(batches), batch_size=None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    probe = LoaderProbe(Loader(loader, "stream"), cast("Recorder", recorder))
    with ExitStack() as undo:
        undo.callback(DataLoaderPatch(lambda _: probe, lambda _: None).remove)
        undo.callback(ModuleProbe(net, "net", cast("Recorder", recorder), no_open_forward()).remove)
        undo.callback(BackwardProbe(cast("Recorder", recorder)).remove)
        undo.callback(OptimizerProbe(cast("Recorder", recorder), ScaledUpdates(None)).remove)
        iterator, samples = iter(loader), torch.ones(1, 2)
        make: dict[str, Any] = {
            "batch": lambda: len(next(iterator)),
            "forward": lambda: net(samples).item(),
            "part": lambda: net.part(samples).item(),
            "eval": lambda: net.eval()(samples).item() + net.train().training,
            "backward": lambda: net(samples).sum().backward(),
            "grad": lambda: torch.autograd.grad(net(samples).sum(), [net.part.weight])[0].mean().item(),
            "update": optimizer.step,
            "closure": lambda: (optimizer.step(lambda: 1.0), optimizer.step(closure=lambda: 2.0)),
            "raise_forward": lambda: net(samples, fault=fault),
            "raise_backward": lambda: raising(fault).backward(),
        }
        for number, act in enumerate(acts):
            with torch.no_grad() if act == "eval" and number % 2 else nullcontext():
                try:
                    said.append(make[act]())
                except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # the comparison shows the difference
                    said.append((type(error), str(error), error is fault))
    assert "__next__" not in vars(type(iterator))
    number = probe.ask >> 4
    passes = [
        edge & (1 << 20) - 1 if edge >> 4 & 0xFFF == number and edge & 0xF == 1 else edge
        for edge in recorder.edges
    ]
    return passes, said


@pytest.mark.skipif(ring_buffer.EXTENSION is None, reason="the hooks in C were not built")
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(ACTS), max_size=12),
    st.lists(st.one_of(st.integers(0, 5), st.none(), st.sampled_from(FAULTS)), max_size=4),
    st.sampled_from(FAULTS),
)
def test_hooks_in_c_write_what_hooks_in_python_write(
    acts: list[str], batches: list[Any], fault: BaseException
) -> None:
    """Whoever has no compiler gets the same metrics, and the same exceptions."""
    native = played(acts, batches, fault)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_buffer, "EXTENSION", None)
        assert played(acts, batches, fault) == native


@pytest.mark.usefixtures("both_writers")
def test_a_method_that_the_program_kept_outlives_the_session() -> None:
    """``close()`` leaves nothing that raises, and a program may keep ``iter(loader).__next__``."""
    recorder = Listing()
    loader = DataLoader(Stream([1, 2]), batch_size=None)
    probe = LoaderProbe(Loader(loader, "stream"), cast("Recorder", recorder))
    patch = DataLoaderPatch(lambda _: probe, lambda _: None)
    next_batch = iter(loader).__next__
    next_batch()
    patch.remove()
    written = list(recorder.edges)

    assert len(next_batch()[0]) == 2
    with pytest.raises(StopIteration):
        next_batch()
    assert recorder.edges == written


@pytest.mark.usefixtures("both_writers")
def test_an_error_in_the_truth_of_training_does_not_reach_the_program() -> None:
    """The program does not ask for it, and a hook that went on with an error set would make the interpreter raise another one."""

    class Undecided:
        def __bool__(self) -> bool:
            raise ValueError("neither")

    model = torch.nn.Linear(1, 1)
    recorder = Listing()
    probe = ModuleProbe(model, "model", cast("Recorder", recorder), no_open_forward())
    model.__dict__["training"] = Undecided()

    assert model(torch.zeros(1)).shape == (1,)
    assert len(recorder.edges) == 2
    probe.remove()
