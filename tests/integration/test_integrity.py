"""With us or without us: the same weights, the same objects, and afterwards not a trace."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import dataloader as torch_dataloader

import otel_train
from tests.integration.loops.truth import Net, Truth, Watch, loader, loss_of, sgd
from tests.support.receiver import http_receiver, refusing_address

# --- weights -------------------------------------------------------------------------------------


class Pictures(nn.Module):
    """A small convnet with batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()
        )
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.view(-1, 1, 8, 8)))


class Sequences(nn.Module):
    """A recurrent layer and a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 16, batch_first=True)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(x.view(-1, 8, 8))
        return self.head(self.block(hidden).mean(dim=1))


def rows(number: int = 48) -> TensorDataset:
    return TensorDataset(torch.randn(number, 64), torch.randint(0, 3, (number,)))


def train(kind: type[nn.Module], every: int, watch: Watch | None) -> list[Any]:
    """Two epochs from fixed seeds, an update every so many batches: weights, losses, and all random states."""
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002 - its global state is what we must not touch
    torch.manual_seed(3)
    model = kind()
    batches = DataLoader(rows(), batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    session = watch(model, {"train": batches}, tuning={"poll_interval_s": 0.01}) if watch else None
    for _ in range(2):
        for i, batch in enumerate(batches):
            loss = loss_of(model, batch) / every
            loss.backward()
            losses.append(loss.detach().clone())
            if watch:
                otel_train.log(loss=loss)
            if i % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()
    if session:
        session.close()
    numbers = [np.random.get_state(legacy=False)["state"]["key"], torch.get_rng_state()]  # noqa: NPY002 - as above
    return [*model.state_dict().values(), *losses, *map(torch.as_tensor, numbers), random.getstate()]


@pytest.mark.parametrize(("kind", "every"), [(Pictures, 1), (Sequences, 1), (Pictures, 4)])
def test_trained_weights_are_the_same_bit_for_bit(kind: type[nn.Module], every: int, watch: Watch) -> None:
    """Instrumentation changes no seed and no order of operations."""
    bare, observed = train(kind, every, None), train(kind, every, watch)

    assert len(bare) == len(observed)
    for left, right in zip(bare, observed, strict=True):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


# --- the model -----------------------------------------------------------------------------------


def generators() -> tuple[Any, ...]:
    """States of the generators that a program seeds."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 - programs do
    return random.getstate(), repr(numpy_state), torch.get_rng_state().tolist()


@pytest.mark.parametrize("protocol", ["http/json", "grpc"])
def test_a_collector_that_is_away_takes_no_random_numbers(
    protocol: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses between tries are random; augmentations draw from the global generator."""
    with refusing_address() as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        random.seed(0)
        before = generators()
        session = watch(otlp="on", export_interval_s=0.1, exit_timeout_s=3.0)
        deadline = time.monotonic() + 4
        while generators() == before and time.monotonic() < deadline:
            time.sleep(0.05)
        session.close()

    assert generators() == before


def shape_of(model: nn.Module) -> list[Any]:
    """Everything a program may look at."""
    return [
        type(model), repr(model), list(model.state_dict()), [name for name, _ in model.named_modules()],
        [name for name, _ in model.named_parameters()], model.training, set(dir(model)), isinstance(model, Net),
        model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, type(model).__mro__,
    ]  # fmt: skip


def test_a_model_looks_the_same(watch: Watch) -> None:
    """Checkpoints load by key, frameworks ask for types, people read ``repr``."""
    model = Net()
    bare = shape_of(model)
    session = watch(model, {"train": loader(2)})

    assert shape_of(model) == bare
    session.close()
    assert shape_of(model) == bare
    assert "_compiled_call_impl" not in model.__dict__


def through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
    "torch.save": through_a_file,
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_model_is_clean(way: str, watch: Watch) -> None:
    """An averaged copy that counts as the model doubles its values; one that cannot be saved loses the run."""
    model = Net()
    session = watch(model, {"train": loader(2)})
    x = torch.randn(3, 4)
    other = COPIES[way](model)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
        for parameter in other.parameters():
            parameter.data = torch.zeros_like(parameter)
        assert not other(x).any()
    session.close()

    counts = [row["count"] for row in session.summary()["stages"] if row["stage"] == "forward"]
    assert counts == [1]
    assert type(other) is Net


def test_a_state_dict_travels(watch: Watch) -> None:
    """The usual checkpoint, with nothing but weights in it."""
    model = Net()
    watch(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)

    assert Net().load_state_dict(torch.load(file, weights_only=True)) == model.load_state_dict(
        model.state_dict()
    )


# --- the loader ----------------------------------------------------------------------------------


def features(batches: Any) -> list[list[float]]:
    return [batch[0].flatten().tolist() for batch in batches]


def test_a_loader_stays_what_it_is(watch: Watch) -> None:
    """Progress bars want a length, samplers an attribute, frameworks an ``isinstance``."""
    train = loader(5)
    bare = dict(train.__dict__)
    rows = features(train)
    session = watch(None, {"train": train})

    assert type(train) is DataLoader
    assert isinstance(train, DataLoader)
    assert session.loaders["train"] is train
    assert len(train) == len(iter(train)) == 5
    assert isinstance(iter(train), torch_dataloader._BaseDataLoaderIter)
    assert type(iter(train)).__name__ == "_SingleProcessDataLoaderIter"
    assert train.__dict__ == bare
    assert (train.batch_size, train.num_workers, train.dataset) == (4, 0, bare["dataset"])
    assert features(train) == rows
    assert features(itertools.islice(itertools.cycle(train), 12)) == (rows * 3)[:12]
    assert [features(pair) for pair in zip(train, train, strict=True)] == [[row, row] for row in rows]
    train.sampler_of_mine = 3
    with pytest.raises(ValueError, match="batch_size"):
        train.batch_size = 8


@pytest.mark.parametrize("way", [pickle.loads, copy.copy, copy.deepcopy])
def test_a_copy_of_a_loader_is_a_loader_of_its_own(way: Any, watch: Watch) -> None:
    """Launchers pickle loaders, sweeps copy them; the copy must not be taken for the original."""
    train = loader(5)
    session = watch(None, {"train": train})
    other = way(pickle.dumps(train)) if way is pickle.loads else way(train)

    assert features(other) == features(train)
    session.close()
    batches = session.summary()["batches"]
    assert batches.pop("train") == 5
    assert sum(batches.values()) == 5


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_give_the_same_batches(context: str, watch: Watch) -> None:
    """Order, values and the way to the workers are as they were."""
    train = loader(4, num_workers=1, persistent_workers=True, multiprocessing_context=context)
    bare = features(loader(4))
    session = watch(None, {"train": train})

    assert [features(train), features(train)] == [bare, bare]
    iterator = train._iterator
    assert iter(train) is iterator
    session.close()
    assert features(train) == bare


def test_an_iterator_that_was_there_before_us_is_seen(watch: Watch) -> None:
    """With persistent workers the iterator of the first epoch serves them all."""
    train = loader(4, num_workers=1, persistent_workers=True)
    bare = features(train)
    session = watch(None, {"train": train})

    assert features(train) == bare
    session.close()
    assert session.summary()["batches"] == {"train": 4}
    assert type(train._iterator) is torch_dataloader._MultiProcessingDataLoaderIter


# --- after close ---------------------------------------------------------------------------------


def interception() -> dict[str, Any]:
    """Every place we might have put something."""
    return {
        "backward": torch.autograd._engine_run_backward,
        "autograd.backward": torch.autograd.backward,
        "Tensor.backward": torch.Tensor.backward,
        "before step": dict(torch_optimizer._global_optimizer_pre_hooks),
        "after step": dict(torch_optimizer._global_optimizer_post_hooks),
        "Optimizer.step": torch.optim.SGD.step,
        "scaler": torch.amp.GradScaler.step,
        "iterator": torch_dataloader._BaseDataLoaderIter.__init__,
        "single": torch_dataloader._SingleProcessDataLoaderIter.__init__,
        "several": torch_dataloader._MultiProcessingDataLoaderIter.__init__,
        "loader": DataLoader.__iter__,
        "call": nn.Module.__call__,
        "Net.call": Net.__call__,
        "excepthook": sys.excepthook,
        "thread excepthook": threading.excepthook,
        "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
    }


_OF_A_RECEIVER = "(process_request_thread)"
"""Threads of the receiver in this process, which end when they see that a connection has."""


def holdings(folder: Path) -> dict[str, Any]:
    """Threads, sockets, open and mapped files of this process that can be ours."""
    process, names = psutil.Process(), [thread.name for thread in threading.enumerate()]
    return {
        "threads": sorted(name for name in names if not name.endswith(_OF_A_RECEIVER)),
        "listening": sorted(
            c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN
        ),
        "connected": len([c for c in process.net_connections() if c.status == psutil.CONN_ESTABLISHED]),
        "files": [file.path for file in process.open_files() if file.path.startswith(str(folder))],
        "maps": [m.path for m in process.memory_maps() if m.path.startswith(str(folder))],
    }


def test_close_leaves_nothing_behind(tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 7: no hook, patch, thread, socket or open file, and the loop runs on as if we had never been there."""
    model, train, truth = Net(), loader(4), Truth()
    optimizer = sgd(model)
    hooks = interception()
    with http_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        before = holdings(tmp_path)
        session = watch(
            model,
            {"train": train},
            prometheus=True,
            prometheus_address="127.0.0.1:0",
            otlp="auto",
            exit_timeout_s=60,
        )
        live = iter(train)
        truth.learn(model, optimizer, next(live))
        assert interception() != hooks
        assert holdings(tmp_path) != before
        session.close()
        assert receiver.wait(metrics=1)

        assert interception() == hooks
        assert "_compiled_call_impl" not in model.__dict__
        after = holdings(tmp_path)
    assert {**after, "connected": 0} == {**before, "connected": 0}
    assert type(live) is torch_dataloader._SingleProcessDataLoaderIter
    batches = session.summary()["batches"]
    for batch in live:
        truth.learn(model, optimizer, batch)
    session.close()
    assert truth.updates == 4
    assert session.summary()["batches"] == batches == {"train": 1}


def test_a_patch_put_over_ours_stays(watch: Watch) -> None:
    """Two tools that each restore what they found would tear each other out."""
    model, train, truth = Net(), loader(4), Truth()
    optimizer, seen = sgd(model), []
    before = interception()
    session = watch(model, {"train": train})
    ours = {"backward": torch.autograd._engine_run_backward, "scaler": torch.amp.GradScaler.step}
    called = model.__dict__["_compiled_call_impl"]

    def backward(*args: Any, **kwargs: Any) -> Any:
        seen.append("backward")
        return ours["backward"](*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append("forward")
        return called(*args, **kwargs)

    torch.autograd._engine_run_backward = backward
    model.__dict__["_compiled_call_impl"] = call
    try:
        session.close()
        for batch in train:
            truth.learn(model, optimizer, batch)
        assert torch.autograd._engine_run_backward is backward
        assert model.__dict__["_compiled_call_impl"] is call
        assert seen == ["forward", "backward"] * 4
        assert session.summary()["updates"] in {0, None}
    finally:
        torch.autograd._engine_run_backward = before["backward"]
        model.__dict__.pop("_compiled_call_impl")


def test_a_signal_handler_set_later_stays(watch: Watch) -> None:
    """The launcher's handler must outlive our session."""
    original = signal.getsignal(signal.SIGTERM)
    session = watch(Net())

    def mine(*_: object) -> None:
        raise AssertionError

    signal.signal(signal.SIGTERM, mine)
    try:
        session.close()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, original)


def test_nothing_is_kept_alive_while_the_session_lasts(watch: Watch) -> None:
    """A sweep of a hundred models must not hold a hundred models in memory: it is wanted for the next fold."""
    gone = []
    for _ in range(3):
        model, train, truth = Net(), loader(3), Truth()
        optimizer = sgd(model)
        watch(model, {"train": train})
        for batch in train:
            truth.learn(model, optimizer, batch)
            otel_train.log(loss=loss_of(model, batch))
        gone += [weakref.ref(model), weakref.ref(train), weakref.ref(train.dataset), weakref.ref(optimizer)]
        del model, train, optimizer, batch
    watch.models.clear()
    gc.collect()

    assert [reference() for reference in gone] == [None] * len(gone)


# --- switched off --------------------------------------------------------------------------------


def test_switched_off_means_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One variable must be enough to rule us out when a run misbehaves."""
    monkeypatch.setenv("OTEL_TRAIN_DISABLED", "true")
    hooks, held = interception(), holdings(tmp_path)
    model, batches, truth = Net(), list(loader(3)), Truth()
    optimizer = sgd(model)
    session = otel_train.instrument(model, {"train": batches}, run_dir=str(tmp_path / "runs"))
    with session:
        assert interception() == hooks
        assert holdings(tmp_path) == held
        assert "_compiled_call_impl" not in model.__dict__
        assert session.loaders["train"] is batches
        for batch in otel_train.watch(session.loaders["train"], name="train"):
            with otel_train.stage("augment"), otel_train.checkpoint():
                truth.learn(model, optimizer, batch)
            otel_train.step()
            otel_train.log(loss=1.0)
            otel_train.event("seen")
    session.close()

    assert truth.updates == 3
    assert not list(tmp_path.iterdir())


def test_without_a_session_the_hand_tools_do_nothing() -> None:
    """Library code may contain stages where no session is open."""
    hooks = interception()

    @otel_train.stage("augment")
    def augment(x: int) -> int:
        return x + 1

    with otel_train.stage("outer"), otel_train.checkpoint():
        assert augment(1) == 2
    rows = [1, 2]
    assert otel_train.watch(rows, name="numbers") is rows
    assert otel_train.summary() == {}
    otel_train.reset_window()
    otel_train.step()
    otel_train.step(start=5)
    otel_train.log(loss=torch.tensor(1.0))
    otel_train.event("nothing")
    assert otel_train.current() is None
    assert interception() == hooks


def test_a_session_warns_of_nothing(watch: Watch) -> None:
    """Under ``-W error``, as careful people test, a warning ends the training."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, train, truth = Net(), loader(3), Truth()
        optimizer = sgd(model)
        session = watch(model, {"train": train})
        for batch in train:
            truth.learn(model, optimizer, batch)
        session.close()
        gc.collect()

    assert session.summary()["updates"] == truth.updates == 3
