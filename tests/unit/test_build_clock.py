"""The clock in a worker, with fetchers that take known times."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from otel_train.instrumentation.dataloader_workers import BuildTimeReader
from otel_train.instrumentation.worker_timer import SharedRows, WorkerTimer, time_fetches
from otel_train.testing import FakeClock


class Worker:
    """Fetchers like torch's on a clock of their own, timed; ``built`` are the times that were written."""

    def __init__(self) -> None:
        dial = self.dial = FakeClock()

        class MapFetcher:
            def fetch(self, index: Any) -> Any:
                return index(self)

        class IterableFetcher(MapFetcher):
            def fetch(self, index: Any) -> Any:
                dial.now_ns += 1
                return index(self)

        self.module = SimpleNamespace(_MapDatasetFetcher=MapFetcher, _IterableDatasetFetcher=IterableFetcher)
        rows = SharedRows(1)
        self.times = BuildTimeReader(rows)
        self.row = rows.row(0)
        time_fetches(self.row, self.module, clock=dial)

    def fetch(self, ns: int, *, kind: str = "_MapDatasetFetcher", then: Any = None) -> Any:
        def index(fetcher: Any) -> Any:
            self.dial.now_ns += ns
            return then() if then else ns

        return getattr(self.module, kind)().fetch(index)

    @property
    def built(self) -> list[int]:
        built: list[int] = self.times.read().build_ns.tolist()
        return built


def raises(error: BaseException) -> Any:
    def then() -> None:
        raise error

    return then


@pytest.mark.parametrize("error", [StopIteration(), ValueError("bad sample"), SystemExit(3)])
def test_a_fetch_that_raises_is_no_batch(error: BaseException) -> None:
    """And the error goes on as it was; the next batch is timed again."""
    worker = Worker()

    with pytest.raises(type(error)) as caught:
        worker.fetch(5, then=raises(error))
    worker.fetch(7)

    assert caught.value is error
    assert worker.built == [7]


def test_a_fetch_inside_a_fetch_is_part_of_it() -> None:
    """A dataset that reads a loader of its own."""
    worker = Worker()

    worker.fetch(5, then=lambda: worker.fetch(7))

    assert worker.built == [12]


def test_a_clock_put_over_a_clock_changes_nothing() -> None:
    """Torch wraps the initialiser of a DataPipe's workers once more."""
    worker = Worker()
    time_fetches(worker.row, worker.module, clock=worker.dial)
    worker.fetch(5)

    assert worker.built == [5]


def test_a_torch_that_we_do_not_know_is_left_alone() -> None:
    """Its fetchers may have moved."""
    rows = SharedRows(1)
    time_fetches(rows.row(0), None, time.perf_counter_ns)
    time_fetches(rows.row(0), SimpleNamespace(_MapDatasetFetcher=object), time.perf_counter_ns)

    assert BuildTimeReader(rows).read().build_ns.tolist() == []


def test_nothing_is_timed_in_the_process_that_trains() -> None:
    """A pool of threads that poses as processes must not change its fetchers."""
    import torch.utils.data._utils.fetch as fetchers

    before = fetchers._MapDatasetFetcher.fetch
    WorkerTimer(None, SharedRows(1), os.getpid())(0)

    assert fetchers._MapDatasetFetcher.fetch is before


def test_it_can_be_pickled_without_its_memory() -> None:
    """Only a worker that is being started can take that along."""
    clock = pickle.loads(pickle.dumps(WorkerTimer(bool, SharedRows(1), 1)))

    assert clock.init is bool
    assert clock._rows is None


def test_an_initialiser_that_cannot_be_pickled_fails_as_it_did() -> None:
    """A lambda under spawn: the message is torch's, and names the user's function."""
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(WorkerTimer(lambda _: None, None, 1))


def test_a_worker_imports_no_heavy_module() -> None:
    """A spawned worker pays for every import before its first batch."""
    code = (
        "import sys, otel_train.instrumentation.worker_timer\n"
        "print([m for m in ('numpy', 'torch', 'opentelemetry', 'psutil') if m in sys.modules])\n"
        "print(sorted(m for m in sys.modules if m.startswith('otel_train')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == [
        "[]",
        (
            "['otel_train', 'otel_train.instrumentation', 'otel_train.instrumentation.worker_timer',"
            " 'otel_train.recording', 'otel_train.recording.descriptors']"
        ),
    ]
