"""Ten training loops whose every millisecond is spent on purpose; only ``clock.spend`` lets time pass.

Durations differ from stage to stage and from loop to loop, so that time given to the wrong one shows in the values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import otel_train
from tests.contract.goldens.machine import clock

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., Any]
    """``otel_train.instrument`` with the settings of the goldens."""

    Program = Callable[[Start], dict[str, Any] | None]
    """A loop; gives what ``session.summary()`` said in mid-run, where it asked."""

LOOPS: dict[str, Program] = {}
"""Every program, by name."""


def loop(program: Program) -> Program:
    """Enter a program in the table."""
    LOOPS[program.__name__] = program
    return program


class Rows(Dataset[torch.Tensor]):
    """Rows that take their time to be read; the one numbered ``broken`` cannot be."""

    def __init__(self, rows: int, ms: float, *, on: str = "reading", broken: int = -1) -> None:
        self.rows = rows
        self.ms = ms
        self.on = on
        self.broken = broken

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> torch.Tensor:
        clock.spend(self.ms, self.on)
        if row == self.broken:
            raise OSError(f"row {row} cannot be read")
        return torch.full((4,), row / 10)


class Net(nn.Module):
    """A layer whose forward and backward take a given time; without gradients it takes half as long."""

    def __init__(self, forward_ms: float, backward_ms: float, *, outputs: int = 1, on: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(4, outputs)
        self.forward_ms = forward_ms
        self.backward_ms = backward_ms
        self.on = on
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            clock.spend(self.forward_ms, f"{self.on}forward")
        else:
            clock.spend(self.forward_ms / 2, f"{self.on}forward without gradients")
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(self._backward)
        return y

    def _backward(self, _: torch.Tensor) -> None:
        clock.spend(self.backward_ms, f"{self.on}backward")


class Sgd(torch.optim.SGD):
    """Gradient descent whose steps take a given time."""

    def __init__(self, model: nn.Module, ms: float, *, on: str = "") -> None:
        super().__init__(model.parameters(), lr=0.01)
        self.ms = ms
        self.on = on

    def step(self, closure: Any = None) -> Any:
        clock.spend(self.ms, f"{self.on}update")
        return super().step(closure)


def loss_of(y: torch.Tensor, ms: float) -> torch.Tensor:
    """A loss that takes ``ms`` milliseconds."""
    clock.spend(ms, "loss")
    return y.square().mean()


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, *, loss_ms: float) -> None:
    """The inside of an ordinary step."""
    optimizer.zero_grad()
    loss_of(model(x), loss_ms).backward()
    optimizer.step()


@loop
def two_epochs(start: Start) -> dict[str, Any]:
    """Two epochs, a validation pass after each, a pause between epochs and after the loop; one slow step."""
    train = DataLoader(Rows(18, 4), batch_size=3)
    val = DataLoader(Rows(4, 7, on="reading for validation"), batch_size=2)
    model = Net(30, 50)
    optimizer = Sgd(model, 10)
    session = start(model, {"train": train, "val": val})
    clock.spend(400, "setting up")
    running: list[dict[str, Any]] = []
    for _ in range(2):
        model.train()
        for number, x in enumerate(train):
            model.backward_ms = 150 if number == 2 else 50
            learn(model, optimizer, x, loss_ms=2)
            clock.spend(3, "logging in the loop")
        model.eval()
        with torch.no_grad():
            for x in val:
                model(x)
                clock.spend(5, "a validation metric")
        clock.spend(700, "saving between epochs")
        running.append(session.summary())
    clock.spend(1300, "sleeping after the loop")
    return running[0]


@loop
def accumulation(start: Start) -> None:
    """Gradients of three batches per update, and one batch that remains; nothing is given, everything is found."""
    start()
    batches = DataLoader(Rows(26, 6), batch_size=2)
    model = Net(20, 34)
    optimizer = Sgd(model, 11)
    for number, x in enumerate(batches, 1):
        loss_of(model(x), 1).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
            clock.spend(9, "logging after an update")
    clock.spend(250, "looking at what remains")
    optimizer.step()
    clock.spend(60, "saving")


@loop
def gan(start: Start) -> None:
    """Two models and two optimizers that update in turn on each batch."""
    real = DataLoader(Rows(20, 5), batch_size=2)
    generator = Net(13, 17, outputs=4, on="generator ")
    discriminator = Net(19, 29, on="discriminator ")
    to_generate = Sgd(generator, 3, on="generator ")
    to_discriminate = Sgd(discriminator, 7, on="discriminator ")
    start({"generator": generator, "discriminator": discriminator}, {"real": real})
    for x in real:
        fake = generator(torch.ones(2, 4))
        to_discriminate.zero_grad()
        (loss_of(discriminator(x), 2) - loss_of(discriminator(fake.detach()), 2)).backward()
        to_discriminate.step()
        clock.spend(23, "between the two updates")
        to_generate.zero_grad()
        loss_of(discriminator(fake), 2).backward()
        to_generate.step()
        clock.spend(1, "logging in the loop")
    clock.spend(500, "drawing samples")


@loop
def zipped(start: Start) -> dict[str, Any]:
    """Two loaders of unequal length side by side, twice, with a pause between; the longer one then runs alone."""
    pictures = DataLoader(Rows(10, 8, on="reading pictures"), batch_size=2)
    words = DataLoader(Rows(6, 3, on="reading words"), batch_size=2)
    model = Net(21, 40)
    optimizer = Sgd(model, 6)
    session = start(model, {"pictures": pictures, "words": words})
    for _ in range(2):
        for x, y in zip(pictures, words, strict=False):
            learn(model, optimizer, x + y, loss_ms=2)
        clock.spend(333, "pausing between passes")
    running: dict[str, Any] = session.summary()
    for x in pictures:
        learn(model, optimizer, x, loss_ms=2)
    return running


@loop
def look_ahead(start: Start) -> None:
    """The next batch is fetched before the present one is used; so is that of the validation pass."""
    train = DataLoader(Rows(12, 9), batch_size=2)
    val = DataLoader(Rows(3, 2, on="reading for validation"), batch_size=1)
    model = Net(25, 45)
    optimizer = Sgd(model, 8)
    start(model, {"train": train, "val": val})
    for _ in range(2):
        batches = iter(train)
        following = next(batches, None)
        while following is not None:
            x, following = following, next(batches, None)
            learn(model, optimizer, x, loss_ms=3)
        checks = iter(val)
        following = next(checks, None)
        with torch.no_grad():
            while following is not None:
                x, following = following, next(checks, None)
                model(x)
                clock.spend(12, "a validation metric")
        clock.spend(150, "saving between epochs")


@loop
def break_and_evaluate(start: Start) -> None:
    """A pass is broken off, the model is evaluated on tensors at hand, and training goes on with a new pass."""
    train = DataLoader(Rows(16, 7), batch_size=2)
    model = Net(24, 38)
    optimizer = Sgd(model, 5)
    start(model, {"train": train})
    for number, x in enumerate(train):
        learn(model, optimizer, x, loss_ms=1)
        if number == 3:
            break
    clock.spend(90, "getting ready to evaluate")
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 4))
            clock.spend(16, "a metric of the evaluation")
    clock.spend(210, "writing the evaluation down")
    model.train()
    for x in train:
        learn(model, optimizer, x, loss_ms=1)
    clock.spend(420, "sleeping after the loop")


@loop
def manual_marks(start: Start) -> None:
    """Steps and epochs are marked, two stages are the program's own, a checkpoint is saved, values are logged."""
    train = DataLoader(Rows(10, 5), batch_size=1)
    model = Net(18, 31)
    optimizer = Sgd(model, 4)
    start(model, {"train": train}, total_steps=20)
    batches = iter(train)
    for _ in otel_train.epoch(range(2)):
        for number in range(5):
            with otel_train.stage("augment"):
                x = next(batches)
                clock.spend(14, "augmenting")
            upload = otel_train.begin("upload")
            learn(model, optimizer, x, loss_ms=2)
            with otel_train.stage("metrics"):
                clock.spend(6, "metrics")
            otel_train.end(upload)
            otel_train.log(loss=1.0 / (number + 1), lr=0.01)
            otel_train.step()
            clock.spend(2, "after the mark")
        with otel_train.checkpoint():
            clock.spend(120, "a checkpoint")
        otel_train.event("epoch over", steps=5)
        clock.spend(80, "pausing between epochs")


@loop
def without_an_optimizer(start: Start) -> None:
    """Weights are changed by the program itself: nothing but the backwards shows what a step is."""
    train = DataLoader(Rows(15, 3), batch_size=3)
    model = Net(22, 36)
    start(model, {"train": train})
    for _ in range(2):
        for x in train:
            model.zero_grad()
            loss_of(model(x), 2).backward()
            clock.spend(15, "an update of the program's own")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.01 * parameter.grad)
        clock.spend(260, "pausing between epochs")


@loop
def broken_row(start: Start) -> None:
    """A row cannot be read in the second epoch; the program catches it, waits, and goes on with the third."""
    rows = Rows(8, 6)
    train = DataLoader(rows, batch_size=2)
    model = Net(27, 41)
    optimizer = Sgd(model, 9)
    start(model, {"train": train})
    for epoch in range(3):
        rows.broken = 5 if epoch == 1 else -1
        try:
            for x in train:
                learn(model, optimizer, x, loss_ms=2)
        except OSError:
            clock.spend(190, "getting over it")
    clock.spend(310, "sleeping after the loop")


@loop
def several_loaders(start: Start) -> None:
    """Two training loaders taken in turn, and loaders declared for eval, test and predict; samples and tokens counted."""
    chat = DataLoader(Rows(6, 4, on="reading chat"), batch_size=2)
    code = DataLoader(Rows(9, 7, on="reading code"), batch_size=3)
    val, test, new = (DataLoader(Rows(4, ms, on="reading for the rest"), batch_size=2) for ms in (2, 3, 5))
    model = Net(26, 44)
    optimizer = Sgd(model, 8)
    start(
        model,
        {
            "chat": otel_train.Loader(chat, phase="train", samples=len, tokens=torch.numel),
            "code": otel_train.Loader(code, phase="train", samples=lambda x: 2 * len(x)),
            "val": otel_train.Loader(val, phase="eval", tokens=lambda _: 100),
            "test": otel_train.Loader(test, phase="test"),
            "new": otel_train.Loader(new, phase="predict"),
        },
        flops_per_sample=1e6,
    )
    for _ in range(2):
        for loader in (chat, code):
            for x in loader:
                learn(model, optimizer, x, loss_ms=1)
            clock.spend(35, "changing the loader")
        _predict(model, val)
        clock.spend(140, "saving between epochs")
    _predict(model, test)
    clock.spend(55, "reporting")
    _predict(model, new)


def _predict(model: nn.Module, batches: DataLoader[torch.Tensor]) -> None:
    model.eval()
    with torch.no_grad():
        for x in batches:
            model(x)
            clock.spend(10, "using what the model says")
    model.train()
