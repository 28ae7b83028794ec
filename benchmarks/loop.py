"""The training loop that everything is measured on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MOST_WARM_UP = 100
_PRODUCTS = 50
"""Matrix products in one timing, from which the time of one is computed."""


SMALL, LARGE, _DEVICE_SIDE = 64, 384, 2048
"""Sides of the padding matrices. Time of a product: some microseconds; most of a millisecond; as long on a CUDA device."""
_BATCH, _FEATURES, _CLASSES = 16, 32, 10


def warm_up_of(steps: int) -> int:
    """Returns the number of warm-up steps of a block, which fill caches and run lazy initialisation."""
    return max(2, min(_MOST_WARM_UP, steps // 10))


class SameBatch(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A dataset that returns one stored batch, so that fetching costs only the DataLoader itself."""

    def __init__(self, device: str) -> None:
        samples = torch.randn(_BATCH, _FEATURES, device=device)
        self._batch = samples, torch.randint(0, _CLASSES, (_BATCH,), device=device)

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, _: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._batch


class Busy(nn.Module):
    """Keeps the thread, or the device, at work: ``repeats`` products of two square matrices.

    Args:
        device: of the matrices.
        side: of a matrix.
    """

    def __init__(self, device: str, side: int) -> None:
        super().__init__()
        self.repeats = 0
        self._matrices = [torch.randn(side, side, device=device) for _ in range(3)]

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Returns ``samples`` after the products."""
        left, right, out = self._matrices
        with torch.no_grad():
            for _ in range(self.repeats):
                torch.mm(left, right, out=out)
        return samples


class Loop:
    """Four stages per step: data, forward, backward, optimizer.

    Args:
        step_ms: how long a bare step takes, padded with real work; 0 for as short as it gets.
        device: where the model is.
        side: of the matrices it is padded with: the larger, the fewer operations a step has.

    Attributes:
        observe: if set, the loop times its four stages itself and calls one of these with the seconds of each.
    """

    def __init__(self, *, step_ms: float = 0.0, device: str = "cpu", side: int = SMALL) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.device = device
        self._busy = Busy(device, side if device == "cpu" else _DEVICE_SIDE)
        layers = nn.Linear(_FEATURES, 64), nn.ReLU(), nn.Linear(64, _CLASSES)
        self.model = nn.Sequential(self._busy, *layers).to(device)
        self.loader = DataLoader(SameBatch(device), batch_size=None)
        self.observe: Sequence[Callable[[float], None]] = ()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.run(_MOST_WARM_UP)
        if step_ms:
            self._pad(step_ms)

    def run(self, steps: int, *, warm_up: int = 0) -> np.ndarray:
        """Trains ``warm_up`` steps that do not count, then ``steps`` that do.

        Returns:
            Durations of the steps that count, int64[steps], ns. On CUDA the device is synchronised after
            the warm-up and at the end of the last step.
        """
        now = time.perf_counter_ns
        ends = [0] * (1 + warm_up + steps)
        if self.observe:
            self._run_observed(ends)
            return np.diff(np.array(ends[warm_up:], dtype=np.int64))
        ends[0] = now()
        for index, (samples, targets) in self._batches(warm_up + steps):
            self._optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(samples), targets)
            loss.backward()
            self._optimizer.step()
            if index == warm_up:
                self.wait()
            ends[index] = now()
        self.wait()
        ends[-1] = now()
        return np.diff(np.array(ends[warm_up:], dtype=np.int64))

    def steps(self, count: int) -> Iterator[tuple[int, int]]:
        """Trains a step at a time; returns processor time of this thread and wall time of each, ns."""
        batches = self._batches(count)
        for _ in range(count):
            begun = time.thread_time_ns(), time.perf_counter_ns()
            _, (samples, targets) = next(batches)
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(samples), targets).backward()
            self._optimizer.step()
            yield time.thread_time_ns() - begun[0], time.perf_counter_ns() - begun[1]

    def _run_observed(self, ends: list[int]) -> None:
        """Trains the same steps, and passes the seconds of each stage to ``observe``."""
        data, forward, backward, optimizer = self.observe
        now = time.perf_counter
        batches = self._batches(len(ends) - 1)
        ends[0] = time.perf_counter_ns()
        while True:
            begun = now()
            batch = next(batches, None)
            data(now() - begun)
            if batch is None:
                return
            index, (samples, targets) = batch
            self._optimizer.zero_grad()
            begun = now()
            outputs = self.model(samples)
            forward(now() - begun)
            loss = nn.functional.cross_entropy(outputs, targets)
            begun = now()
            loss.backward()
            backward(now() - begun)
            begun = now()
            self._optimizer.step()
            optimizer(now() - begun)
            ends[index] = time.perf_counter_ns()

    def wait(self) -> None:
        """Waits until the device has done its queued work."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def steps_in(self, seconds: float) -> int:
        """Returns how many bare steps fit into ``seconds``; at least one."""
        return max(1, int(seconds * 1e9 / self.bare_ns()))

    def pad_like(self, other: Loop) -> None:
        """Pads the step to the length of that of another loop."""
        self._busy.repeats = other.products

    @property
    def products(self) -> int:
        """Operations that a step is padded with."""
        return self._busy.repeats

    def bare_ns(self) -> float:
        """Returns the median duration of some bare steps, ns; on CUDA the mean, because there a step ends when it is queued."""
        steps = self.run(50, warm_up=5)
        return float(steps.mean() if self.device == "cuda" else np.median(steps))

    def _batches(self, count: int) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
        return zip(range(1, count + 1), self.loader)  # noqa: B905 - the loader has no end

    def _pad(self, step_ms: float) -> None:
        """Pads the step with matrix products. Takes the fastest of several tries: other programs only ever slow it down."""
        base_ns = min(self.bare_ns() for _ in range(5))
        self._busy.repeats = _PRODUCTS
        samples = next(iter(self.loader))[0]
        product_ns = min(self._forward_ns(samples) for _ in range(10)) / _PRODUCTS
        self._busy.repeats = max(0, round((step_ms * 1e6 - base_ns) / product_ns))

    def _forward_ns(self, samples: torch.Tensor) -> int:
        self.wait()
        begun = time.perf_counter_ns()
        self._busy(samples)
        self.wait()
        return time.perf_counter_ns() - begun
