"""The loop that a simulated rank runs, as the edges that its training thread would write."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from otel_train.datamodel import NS_PER_S, DeviceTimes, Pace
from otel_train.recording.events import Ending, Flag, Instrumented, Op, SourceKind, code

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE: Final = "cuda:0"
TRAIN, VAL = "train", "val"
SOURCES: Final = (
    Instrumented(SourceKind.DATA, TRAIN),
    Instrumented(SourceKind.DATA, VAL, "eval"),
    Instrumented(SourceKind.H2D, DEVICE),
    Instrumented(SourceKind.FORWARD, "model"),
    Instrumented(SourceKind.BACKWARD, "backward"),
    Instrumented(SourceKind.OPTIMIZER, "AdamW"),
    Instrumented(SourceKind.CHECKPOINT, "checkpoint"),
)
"""What the edges are of: two loaders, a device, a model and its backward, an optimizer, a checkpoint."""

_TRAIN, _VAL, _H2D, _FORWARD, _BACKWARD, _OPTIMIZER, _CHECKPOINT = range(len(SOURCES))

SHARES: Final = {_TRAIN: 0.06, _H2D: 0.02, _FORWARD: 0.27, _BACKWARD: 0.51, _OPTIMIZER: 0.09}
"""Shares of a step; the rest is `other`."""

EVAL_EVERY_STEPS, EVAL_BATCHES = 200, 10
CHECKPOINT_EVERY_STEPS = 500
SLOW_ONE_IN, SLOW_FACTOR = 400, 3.0
"""On average one step in so many takes so many times as long, enough for its trace to be kept."""

BATCH_SAMPLES, BATCH_BYTES = 8, 8 << 20


class Written(NamedTuple):
    """What a rank wrote up to an instant.

    Attributes:
        times: int64[n], never falling.
        codes: int64[n].
        device: what the device did meanwhile.
        builds_ns: int64[m], how long the loader's workers took for each batch.
    """

    times: np.ndarray
    codes: np.ndarray
    device: DeviceTimes
    builds_ns: np.ndarray


class _Call(NamedTuple):
    source: int
    begun_ns: int
    ended_ns: int


class Workload:
    """An endless loop. Steps of all ranks are equally long, as they are where gradients are reduced.

    Args:
        steps_per_s: updates per second on average, without evaluations and checkpoints.
        rank: seed of the variation that ranks do not share.
        started_ns: when the first step begins.
    """

    def __init__(self, steps_per_s: float, rank: int, started_ns: int) -> None:
        self._step_ns = NS_PER_S / steps_per_s
        self._shared = random.Random(0)
        self._own = random.Random(rank + 1)
        self._now_ns = started_ns
        self._edges: deque[tuple[int, int]] = deque()
        self._calls: deque[_Call] = deque()
        self._builds_ns: list[float] = []
        self._steps = self._all_steps()

    def until(self, now_ns: int) -> Written:
        """Returns everything up to ``now_ns`` that was not fetched before."""
        while self._now_ns <= now_ns:
            next(self._steps)
        taken = []
        while self._edges and self._edges[0][0] <= now_ns:
            taken.append(self._edges.popleft())
        done = []
        while self._calls and self._calls[0].ended_ns <= now_ns:
            done.append(self._calls.popleft())
        table = np.array(taken, dtype=np.int64).reshape(-1, 2)
        builds_ns, self._builds_ns = np.array(self._builds_ns, dtype=np.int64), []
        return Written(table[:, 0], table[:, 1], _device_times(done, now_ns), builds_ns)

    def _all_steps(self) -> Iterator[None]:
        number = 0
        self._call(_TRAIN, self._step_ns, flags=Flag.START)
        while True:
            number += 1
            self._step(slow=self._shared.randrange(SLOW_ONE_IN) == 0)
            if number % EVAL_EVERY_STEPS == 0:
                self._edge(Op.BEGIN, _TRAIN)
                self._edge(Op.STOP, _TRAIN, payload=Ending.EPOCH_END)
                self._evaluation()
                self._call(_TRAIN, SHARES[_TRAIN] * self._step_ns, flags=Flag.START)
            if number % CHECKPOINT_EVERY_STEPS == 0:
                self._call(_CHECKPOINT, 2 * self._step_ns)
            yield

    def _step(self, *, slow: bool) -> None:
        whole_ns = self._step_ns * self._shared.uniform(0.95, 1.05) * (SLOW_FACTOR if slow else 1.0)
        began_ns = self._now_ns
        own = {source: share * whole_ns * self._own.uniform(0.9, 1.1) for source, share in SHARES.items()}
        # A rank that is late at the barrier, which is in backward, waits less there.
        own[_BACKWARD] += sum(share * whole_ns for share in SHARES.values()) - sum(own.values())
        self._builds_ns.append(2 * whole_ns * self._own.uniform(0.8, 1.2))
        self._call(_TRAIN, own[_TRAIN], payload=BATCH_SAMPLES + 1)
        self._call(_H2D, own[_H2D], payload=BATCH_BYTES + 1)
        self._call(_FORWARD, own[_FORWARD], flags=Flag.GRAD | Flag.TRAINING)
        self._call(_BACKWARD, own[_BACKWARD])
        self._call(_OPTIMIZER, own[_OPTIMIZER])
        self._now_ns = began_ns + int(whole_ns)

    def _evaluation(self) -> None:
        self._call(_VAL, SHARES[_TRAIN] * self._step_ns, flags=Flag.START)
        for _ in range(EVAL_BATCHES):
            self._call(_VAL, SHARES[_TRAIN] * self._step_ns, payload=BATCH_SAMPLES + 1)
            self._call(_FORWARD, SHARES[_FORWARD] * self._step_ns)
        self._edge(Op.BEGIN, _VAL)
        self._edge(Op.STOP, _VAL, payload=Ending.EPOCH_END)

    def _call(self, source: int, lasts_ns: float, *, flags: int = 0, payload: int = 0) -> None:
        began_ns = self._now_ns
        self._edge(Op.BEGIN, source, flags=flags)
        self._now_ns += int(lasts_ns)
        self._edge(Op.END, source, flags=flags, payload=payload)
        if source in (_H2D, _FORWARD, _BACKWARD, _OPTIMIZER):
            self._calls.append(_Call(source, began_ns, self._now_ns))

    def _edge(self, op: Op, source: int, *, flags: int = 0, payload: int = 0) -> None:
        self._edges.append((self._now_ns, code(op, source, flags, payload)))


def _device_times(calls: list[_Call], until_ns: int) -> DeviceTimes:
    """Returns the times of a device that keeps up: busy for 90 % of every call, and 1 ms behind the host."""
    table = np.array(calls, dtype=np.int64).reshape(-1, 3)
    source, begun_ns, ended_ns = table[:, 0], table[:, 1], table[:, 2]
    lasted_ns = ended_ns - begun_ns
    forwards, backwards, updates = (int((source == s).sum()) for s in (_FORWARD, _BACKWARD, _OPTIMIZER))
    lag_ns = 1_000_000
    pace = Pace(
        forwards, forwards * lag_ns, backwards, backwards * lag_ns, updates, updates * lag_ns,
        updates, int(lasted_ns[source == _OPTIMIZER].sum()),
    )  # fmt: skip
    return DeviceTimes(source, begun_ns, ended_ns, lasted_ns * 9 // 10, until_ns, pace)
