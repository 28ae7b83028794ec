"""A profiler that only records its calls, and fails on request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from otel_train.profiler.requests import Options
from otel_train.profiler.torch_profiler import Profiler


class FakeProfiler(Profiler):
    """Goes wherever a ``Profiler`` goes.

    Attributes:
        log: everything that was called, in order; ranges as ``+name`` and ``-name``.
        taken: a profiler of the program runs.
        without: why nothing can be recorded.
        broken: names of methods that raise.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.taken = False
        self.without = ""
        self.broken: set[str] = set()
        self.missing: list[str] = []
        self.size = 0
        self.give_way: Callable[[], None] = lambda: None

    def __call__(self, give_way: Callable[[], None]) -> FakeProfiler:
        self.give_way = give_way
        return self

    def unavailable(self) -> str:
        return self.without

    def busy(self) -> bool:
        return self.taken

    def prepare(self, options: Options) -> list[str]:
        del options
        self._do("prepare")
        return self.missing

    def start(self) -> None:
        self._do("start")

    def stop(self) -> Any:
        self._do("stop")
        begun = [name[1:] for name in self.log if name.startswith("+")]
        return {"traceEvents": [{"name": name} for name in ("x" * self.size, *begun)]}

    def range(self, name: str) -> Callable[[], object]:
        self._do("+" + name)
        return lambda: self.log.append("-" + name)

    def save(self, trace: Any, path: Path) -> None:
        self._do("save")
        path.write_text(json.dumps(trace))

    def _do(self, what: str) -> None:
        self.log.append(what)
        if what in self.broken:
            raise RuntimeError(f"{what} is broken")


class FakeTraining:
    """A ``TrainingState`` whose clock is Unix time; what is in the loop is looked up when it is asked for."""

    def __init__(self, loop: Any, thread: Any, number: Any, epoch: Any) -> None:
        self._loop = loop
        self.thread, self.number, self.epoch = thread, number, epoch

    @property
    def loop(self) -> Any:
        return self._loop()

    def unix_ns(self, clock_ns: int) -> int:
        return clock_ns

    def active(self, *, active: bool) -> None:
        """Ignore it."""

    def over(self, capture: Any) -> None:
        """Ignore it."""
