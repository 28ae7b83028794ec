"""What a training loop knows of itself, counted in plain Python while it runs."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, TensorDataset, default_collate

import otel_train

QUIET: dict[str, Any] = {
    "prometheus": False,
    "console": False,
    "otlp": "off",
    "flight_recorder_events": 1 << 14,
}
"""Nothing listens, prints or sends; a ring of 16384 edges is plenty for a few dozen steps."""

EAGER: dict[str, Any] = {"tuning": {"poll_interval_s": 0.01}}
"""The agent polls a hundred times a second, so that loops are cut into slices at odd places."""

torch.set_num_threads(1)  # a second thread only waits for the first in models as small as these

TRAIN = "train"
EVAL = "eval"
TRAIN_ALONE = {"train": TRAIN}
TRAIN_AND_VAL = {"train": TRAIN, "val": EVAL}
"""What ``Truth.rated`` of most programs is."""


class Attribution(NamedTuple):
    """What a program says that a stretch of its time was for.

    Attributes:
        activity: of the run; "" for the time of a thread that does not train.
        stage: where the time lies inside a batch; "" for time in no batch.
        loader: that the batch is of; "" where the program does not say.
    """

    activity: str
    stage: str = ""
    loader: str = ""

    @property
    def phase(self) -> str:
        """Phase of the row that holds this time."""
        if self.activity in {"", "outside"}:
            return ""
        return EVAL if self.activity == EVAL else TRAIN


@dataclass
class Truth:
    """Counts and times of one program, none of which comes from a hook.

    Attributes:
        steps: by phase.
        batches: by loader.
        samples: by loader; None: this program does not say.
        forwards: by model and phase.
        backwards: by phase.
        optimizer: occurrences of the optimizer stage.
        updates: outermost calls of an optimizer's ``step`` that returned.
        skipped: updates that a gradient scaler skipped.
        stages: occurrences of user stages.
        failed: by stage, occurrences that raised.
        checkpoints: blocks.
        source: what steps are counted by; None: this program does not say.
        partial: steps left unfinished; None: this program does not say.
        threads: training threads; the times of several overlap.
        phases: whether the program says in which phase every forward ran.
        unseen: stages that cannot be seen in this shape: absent, with an entry in the instrumentation gaps.
        repeatable: two runs of the program end with the same weights.
        inside: loaders that are asked while another is asked: their batches are counted, the wait is the other's.
        names: how many loaders the summary may name; None: this program does not say.
        sleeps: whether the stated sleeps are slept; else the program only counts.
        seconds: time that the program measured around its sleeps, by what the time was for.
        owners: whether the program says whose batch a forward is of; else only the phase of each is known.
        rated: loaders whose every batch was timed, and the phase of those batches.
        place: phase and loader of the batch that the program works on.
    """

    steps: Counter[str] = field(default_factory=Counter)
    batches: Counter[str] = field(default_factory=Counter)
    samples: Counter[str] | None = field(default_factory=Counter)
    forwards: Counter[tuple[str, str]] = field(default_factory=Counter)
    backwards: Counter[str] = field(default_factory=Counter)
    optimizer: int = 0
    updates: int = 0
    skipped: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    checkpoints: int = 0
    source: str | None = "update"
    partial: int | None = 0
    threads: int = 1
    phases: bool = True
    unseen: tuple[str, ...] = ()
    repeatable: bool = True
    inside: tuple[str, ...] = ()
    names: int | None = None
    sleeps: bool = False
    seconds: defaultdict[Attribution, float] = field(default_factory=lambda: defaultdict(float))
    owners: bool = True
    rated: Mapping[str, str] = field(default_factory=dict)
    place: tuple[str, str] = (TRAIN, "")

    @contextmanager
    def spent(self, activity: str, stage: str = "", loader: str = "") -> Iterator[None]:
        """Measure a block and attribute its time. Blocks must not overlap."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[Attribution(activity, stage, loader)] += time.perf_counter() - began

    def sleep(self, seconds: float, activity: str, stage: str = "", loader: str = "") -> None:
        """Sleep, and attribute the time that it took; on a busy machine that is more than was asked for."""
        if self.sleeps:
            with self.spent(activity, stage, loader):
                time.sleep(seconds)

    def at(self, phase: str, loader: str = "") -> None:
        """Say what the next batch is for, and whose it is."""
        self.place = phase, loader if self.owners else ""

    def work(self, seconds: float, stage: str = "other", loader: str | None = None) -> None:
        """Sleep in a stage of the present batch."""
        phase, present = self.place
        training = "data_wait" if stage == "data" else "productive"
        self.sleep(
            seconds, training if phase == TRAIN else phase, stage, present if loader is None else loader
        )

    def batch(self, loader: str, size: int | None = 4) -> None:
        """A loader gave a batch; ``size`` None: the number of samples is unknown."""
        self.batches[loader] += 1
        if self.samples is not None and size is not None:
            self.samples[loader] += size

    def forward(self, phase: str = TRAIN, model: str = "model") -> None:
        """The loop called a model."""
        self.forwards[model, phase] += 1

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """A forward of training, and the loss of it."""
        self.forward()
        return loss_of(model, batch)

    def backward(self, loss: torch.Tensor | None = None, phase: str = TRAIN) -> None:
        """The loop asked for gradients: here those of ``loss`` if it is given, else by its own means."""
        self.backwards[phase] += 1
        if loss is not None:
            loss.backward()

    def update(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """The loop called ``step`` of an optimizer, and it returned: here of ``optimizer`` if it is given."""
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        self.updates += 1
        self.optimizer += 1

    def update_that_ends_a_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The last update of a step."""
        self.update(optimizer)
        self.step()

    def step(self, phase: str = TRAIN) -> None:
        """A step as docs/reference/step-boundaries.md defines it."""
        self.steps[phase] += 1

    def learn(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """The inside of an ordinary step, for programs whose point lies elsewhere."""
        optimizer.zero_grad()
        self.backward(self.loss(model, batch))
        self.update(optimizer)

    def one_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """An ordinary step."""
        self.learn(model, optimizer, batch)
        self.step()

    def train_on(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterable[Any],
        *,
        name: str = "train",
    ) -> None:
        """A pass of ordinary steps."""
        self.at(TRAIN, name)
        for batch in batches:
            self.batch(name, len(batch[0]))
            self.one_step(model, optimizer, batch)

    def train_in_a_thread(self, lock: Lock, name: str, model: nn.Module, batches: Iterable[Any]) -> None:
        """A pass of ordinary steps in one of several threads; model and loader have the same name."""
        optimizer = sgd(model)
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            with lock:
                self.batch(name)
                self.forward(model=name)
                self.backward()
                self.update()
                self.step()

    def evaluate_on(
        self, model: nn.Module, batches: Iterable[Any], name: str = "val", *, phase: str = EVAL
    ) -> None:
        """A pass without gradients."""
        self.at(phase, name)
        with torch.no_grad():
            for batch in batches:
                self.batch(name, len(batch[0]))
                self.forward(phase)
                loss_of(model, batch)
                self.step(phase)

    def counted(self) -> dict[str, int]:
        """The six values of the table of loops."""
        return {
            "steps": self.steps[TRAIN],
            "evals": self.steps.total() - self.steps[TRAIN],
            "batches": self.batches.total(),
            "forwards": sum(self.forwards.values()),
            "backwards": self.backwards.total(),
            "updates": self.updates,
        }


class Net(nn.Module):
    """Two layers, quick to train."""

    def __init__(self, inputs: int = 4, outputs: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 8)
        self.last = nn.Linear(8, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


class Wrapper(nn.Module):
    """Calls what it wraps, as ``DistributedDataParallel`` does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    """Plain gradient descent over all parameters of ``models``."""
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)


def dataset(batches: int, size: int = 4) -> TensorDataset:
    """Enough rows of four features and one of two classes for ``batches`` batches."""
    generator = torch.Generator().manual_seed(7)
    rows = batches * size
    return TensorDataset(
        torch.randn(rows, 4, generator=generator), torch.randint(0, 2, (rows,), generator=generator)
    )


def loader(batches: int, size: int = 4, **options: Any) -> DataLoader[Any]:
    """A loader of ``batches`` batches of ``size`` samples."""
    return DataLoader(dataset(batches, size), batch_size=size, **options)


class Slow(Net):
    """Its forward takes a stated time."""

    def __init__(self, truth: Truth, seconds: float = 0.01) -> None:
        super().__init__()
        self.truth = truth
        self.takes_s = seconds
        self.stage = "forward"
        """The stage that its time is part of; a program may change it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.truth.work(self.takes_s, self.stage)
        return super().forward(x)


def slow_loader(
    truth: Truth, name: str, batches: int, seconds: float = 0.01, *, size: int = 4, **options: Any
) -> DataLoader[Any]:
    """A loader that makes the training thread wait a stated time for every batch."""

    def collate(rows: list[Any]) -> Any:
        truth.work(seconds, "data", name)
        return default_collate(rows)

    return loader(batches, size, collate_fn=collate, **options)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> torch.Tensor:
    """The loss of one forward on a batch of features and classes."""
    x, y = batch
    return F.cross_entropy(model(x), y)


class Beginnings:
    """How programs begin. What it is called with gets a session."""

    said: Truth

    def __call__(self, model: Any = None, loaders: Any = None, **settings: Any) -> Any:
        """``otel_train.instrument``, or nothing at all."""
        raise NotImplementedError

    def truth(self, **says: Any) -> Truth:
        """The truth of a program that can be timed."""
        raise NotImplementedError

    def training(
        self, batches: Mapping[str, int], *, model: nn.Module | None = None, **says: Any
    ) -> tuple[Truth, Any]:
        """Truth; model, optimizer and loaders of so many batches, with a session that has model and loaders."""
        model = Net() if model is None else model
        loaders = {name: loader(number) for name, number in batches.items()}
        optimizer = sgd(model)
        self(model, loaders)
        self.said = Truth(**says)
        return self.said, (model, optimizer, *loaders.values())

    def slow_training(
        self, batches: Mapping[str, int | tuple[int, float]], *, takes_s: float = 0.01, **says: Any
    ) -> tuple[Truth, Any]:
        """The same of a program that can be timed; a loader has batches, and may have seconds per batch."""
        truth = self.truth(**says)
        model = Slow(truth, takes_s)
        loaders = {
            name: slow_loader(truth, name, *(many if isinstance(many, tuple) else (many,)))
            for name, many in batches.items()
        }
        optimizer = sgd(model)
        self(model, loaders)
        return truth, (model, optimizer, *loaders.values())


class Watch(Beginnings):
    """Starts sessions for a program, and keeps them to be closed.

    Args:
        folder: parent of the run directories.
        sleeps: whether programs sleep where they say so.
        settings: over those that keep a test quiet.

    Attributes:
        opening: instants before and after the first session was opened.
        closing: instants before and after the sessions were closed.
    """

    def __init__(self, folder: Path, *, sleeps: bool = False, **settings: Any) -> None:
        self.sessions: list[Any] = []
        self.models: list[nn.Module] = []
        self.said = Truth()
        self.opening = self.closing = (0.0, 0.0)
        self._sleeps = sleeps
        self._settings = {**QUIET, "run_dir": str(folder), **settings}

    def __call__(self, model: Any = None, loaders: Any = None, **settings: Any) -> Any:
        """``otel_train.instrument`` with the settings of the test; the session."""
        self.models += model.values() if isinstance(model, dict) else [model] if model is not None else []
        began = time.perf_counter()
        session = otel_train.instrument(model, loaders, **{**self._settings, **settings})
        if not self.sessions:
            self.opening = began, time.perf_counter()
        if session not in self.sessions:
            self.sessions.append(session)
        return session

    def truth(self, **says: Any) -> Truth:
        """The truth of a program that can be timed."""
        self.said = Truth(sleeps=self._sleeps, **says)
        return self.said

    def weights(self) -> str:
        """What the models that were given have learnt, to the last bit."""
        sha256 = hashlib.sha256()
        for model in self.models:
            for name, weight in model.state_dict().items():
                sha256.update(name.encode())
                # A shard, of sharded ones.
                here = weight.to_local() if hasattr(weight, "to_local") else weight
                sha256.update(here.detach().contiguous().numpy().tobytes())
        return sha256.hexdigest()

    def close(self) -> None:
        """Close what the program left open."""
        began = time.perf_counter()
        for session in self.sessions:
            session.close()
        self.closing = began, time.perf_counter()


class NoSession(Beginnings):
    """What a program gets in place of a ``Watch`` when it has to be found: nothing happens."""

    loaders: dict[str, Any]

    def __call__(self, model: Any = None, loaders: Any = None, **_: Any) -> NoSession:
        """No session."""
        self.loaders = dict(loaders or {})
        return self

    def truth(self, **says: Any) -> Truth:
        """The truth of a program that only counts."""
        self.said = Truth(**says)
        return self.said


Program = Callable[[Watch], None]

LOOPS: dict[str, Callable[[Watch], Truth]] = {}
"""Every program, by name."""


def loop(program: Program) -> Program:
    """Enter a program in the table, which gives the truth that the program has made."""

    @wraps(program)
    def run(watch: Watch) -> Truth:
        program(watch)
        return watch.said

    assert program.__name__ not in LOOPS
    LOOPS[program.__name__] = run
    return program


TIMED: list[str] = []
"""Programs that say how long they take, by name."""


def timed(program: Program) -> Program:
    """Enter a program in the table that is also run with its sleeps, and compared with their lengths."""
    TIMED.append(program.__name__)
    return loop(program)
