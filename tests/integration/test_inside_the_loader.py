"""What happens inside a DataLoader, measured there, against what is known beforehand."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter
from torchdata.stateful_dataloader import StatefulDataLoader

import otel_train
from otel_train import catalog as c
from tests.support.inside import inside
from tests.support.waiting import in_threads

pytestmark = pytest.mark.timeout(300)
QUIET: dict[str, Any] = {"prometheus": False, "console": False, "tuning": {"poll_interval_s": 0.02}}
SLEEP_S = 0.05
"""Per batch; long beside what a busy machine adds."""


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows that take a known time to make; one of them may misbehave."""

    def __init__(self, rows: int, *, sleep_s: float = 0.0, bad: int = -1, how: str = "") -> None:
        self.rows, self.sleep_s, self.bad, self.how = rows, sleep_s, bad, how

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.sleep_s)
        if index == self.bad:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit":
                os._exit(3)
            if self.how == "stop":
                raise StopIteration
            raise ValueError("a bad row")
        return torch.rand(3), torch.tensor(torch.initial_seed() % 1000)


class Stream(IterableDataset[int]):
    """A stream that may know its length."""

    def __init__(self, rows: int, length: int | None = None) -> None:
        self.rows, self.length = rows, length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from range(first, self.rows, step)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError
        return self.length


def remember(worker: int) -> None:
    """The user's own initialiser: what it was called with can be seen in the seed of the worker's rows."""
    torch.manual_seed(500 + worker)


def run(loader: Any, tmp_path: Path, *, passes: int = 1, **settings: Any) -> tuple[list[Any], Any]:
    """All batches of some passes, and the closed session."""
    session = otel_train.instrument(loaders={"rows": loader}, run_dir=str(tmp_path), **{**QUIET, **settings})
    try:
        batches = [batch for _ in range(passes) for batch in loader]
    finally:
        session.close()
    return batches, session


def builds(session: Any) -> tuple[int, int]:
    """Batches whose build time is known, and those that were missed."""
    totals = inside(session).service.run.totals.loaders
    return totals.builds.count(totals.number("rows")), totals.lost.get("rows", 0)


def events(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    (path,) = tmp_path.glob("*/rank0/events.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["attributes"] for line in lines if line["name"] == name]


def test_build_time_is_what_the_dataset_takes(tmp_path: Path) -> None:
    """Ground truth: a dataset that sleeps; within 15 %, and it says so although the loop hardly waits."""
    rows = Rows(24, sleep_s=SLEEP_S / 2)
    _, session = run(DataLoader(rows, batch_size=2, num_workers=2), tmp_path)
    totals = inside(session).service.run.totals.loaders

    assert builds(session) == (12, 0)
    assert totals.builds.quantile(0, 0.5) == pytest.approx(SLEEP_S, rel=0.15)


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_every_batch_of_every_worker_is_timed(context: str, tmp_path: Path) -> None:
    """However the workers are started, and although they are started anew for every pass."""
    start = multiprocessing.get_context(context)
    if context == "forkserver":
        start.set_forkserver_preload(["torch"])
    loader = DataLoader(
        Rows(12), batch_size=2, num_workers=2, multiprocessing_context=start, worker_init_fn=remember
    )
    before = dict(vars(loader))
    batches, session = run(loader, tmp_path, passes=1 if context == "spawn" else 2)

    assert builds(session) == (len(batches), 0)
    assert [batch[1].tolist() for batch in batches[:2]] == [[500, 500], [501, 501]]
    assert vars(loader) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Rows(8), batch_size=2, num_workers=2, persistent_workers=True),
        lambda: DataLoader(Rows(8), batch_size=None, num_workers=2),
        lambda: DataLoader(Rows(8), batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7]], num_workers=2),
        lambda: DataLoader(Stream(9), batch_size=2, num_workers=2),
        lambda: DataLoader(Rows(8), batch_size=2, num_workers=2, worker_init_fn=lambda _: None),
        lambda: DataLoader(Rows(8), batch_size=2, num_workers=2, in_order=False),
    ],
    ids=["persistent", "batch_size=None", "batch_sampler", "stream", "lambda", "any order"],
)
def test_every_kind_of_loader_is_timed(make: Any, tmp_path: Path) -> None:
    """Two passes; a batch is a batch."""
    batches, session = run(make(), tmp_path, passes=2)

    assert builds(session) == (len(batches), 0)


def test_random_numbers_in_the_workers_are_as_without_us(tmp_path: Path) -> None:
    """Instrumentation must not change the random numbers of an augmentation."""

    def rows() -> list[list[float]]:
        torch.manual_seed(7)
        return [x.tolist() for x, _ in DataLoader(Rows(8), num_workers=2)]

    bare = rows()
    with otel_train.instrument(run_dir=str(tmp_path), **QUIET):
        instrumented = rows()

    assert instrumented == bare


def test_many_threads_may_make_iterators_of_one_loader(tmp_path: Path) -> None:
    """Each iterator has its own workers; the loader is touched by none."""
    loader = DataLoader(Rows(8), batch_size=2, num_workers=1, worker_init_fn=remember)
    before = dict(vars(loader))
    seen: list[int] = []
    session = otel_train.instrument(loaders={"rows": loader}, run_dir=str(tmp_path), **QUIET)
    in_threads(*[lambda: seen.extend(len(x) for x, _ in loader)] * 4)
    session.close()

    assert len(seen) == 16
    assert builds(session) == (16, 0)
    assert vars(loader) == before


def test_an_iterator_is_as_torch_made_it_once_its_workers_run(tmp_path: Path) -> None:
    """The user's initialiser is there for whoever looks for it."""
    loader = DataLoader(Rows(4), num_workers=1, worker_init_fn=remember, persistent_workers=True)
    with otel_train.instrument(loaders={"rows": loader}, run_dir=str(tmp_path), **QUIET):
        iterator = iter(loader)
        assert iterator._worker_init_fn is remember
    assert vars(iterator)["_worker_init_fn"] is remember
    assert [name for name in vars(iterator) if "otel" in name] == []
    assert pickle.loads(pickle.dumps(remember)) is remember


def test_persistent_workers_that_were_there_before_are_instrumented_without_a_clock(tmp_path: Path) -> None:
    """Their clock would have had to start with them: absent, not zero."""
    loader = DataLoader(Rows(4), num_workers=1, persistent_workers=True)
    list(loader)
    batches, session = run(loader, tmp_path)

    assert len(batches) == 4
    assert "rows" in inside(session).service.run.totals.loaders.numbers
    assert builds(session) == (0, 0)


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # torchdata calls what torch has given up
def test_a_stateful_loader_is_timed_and_resumes(tmp_path: Path) -> None:
    """It has iterators and workers of its own kind, and goes on where it was: that pass is not short."""
    loader = StatefulDataLoader(Rows(12), batch_size=2, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    del iterator
    resumed: Any = StatefulDataLoader(Rows(12), batch_size=2, num_workers=2, worker_init_fn=remember)
    resumed.load_state_dict(state)
    batches, session = run(resumed, tmp_path)

    assert len(batches) == 5
    assert builds(session) == (5, 0)
    assert inside(session).service.run.totals.loaders.endings == {("rows", "epoch_end"): 1}


class SlowIterator(_SingleProcessDataLoaderIter):
    """An iterator of another package, whose making takes a known time after that of torch's."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        time.sleep(SLEEP_S)


class SlowLoader(DataLoader[Any]):
    """A loader with such iterators."""

    def _get_iterator(self) -> Any:
        return SlowIterator(self)


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # as above
@pytest.mark.parametrize(
    "made", [lambda: StatefulDataLoader(Rows(4), num_workers=2), lambda: SlowLoader(Rows(4))]
)
def test_making_an_iterator_of_another_package_is_a_wait_for_its_first_batch(
    made: Callable[[], Any], tmp_path: Path
) -> None:
    """Workers that start anew for every pass would be `outside`, and the finding would not name the loader."""
    loader, making_s = made(), 0.0
    with otel_train.instrument(loaders={"rows": loader}, run_dir=tmp_path, **QUIET) as session:
        for _ in range(3):
            began = time.perf_counter()
            iterator = iter(loader)
            making_s += time.perf_counter() - began
            for _ in iterator:
                pass

    [row] = session.summary()["loaders"]
    assert row["start"]["making_seconds"] == pytest.approx(making_s, rel=0.2)


def test_the_first_batch_of_a_pass_is_counted_separately(tmp_path: Path) -> None:
    """Workers that start for every epoch: the wait for the first batch is no sign that they cannot keep up."""
    loader = DataLoader(Rows(8, sleep_s=SLEEP_S), batch_size=2, num_workers=1)
    _, session = run(loader, tmp_path, passes=3)
    (start,) = inside(session).service.run.totals.loaders.starts.values()

    assert start.passes == 3
    assert start.waiting_s > 3 * 2 * SLEEP_S


def test_workers_of_earlier_passes_are_forgotten_once_their_batches_are_counted(tmp_path: Path) -> None:
    """Workers made anew for every epoch must not pile up."""
    loader = DataLoader(Rows(8), batch_size=2, num_workers=1)
    with otel_train.instrument(loaders={"rows": loader}, run_dir=str(tmp_path), **QUIET) as session:
        for _ in range(3):
            list(loader)
        for _ in range(3):
            session._service.report(fresh=True)
        pools = session._recording.probes.loaders["rows"].pools

        assert len(pools) <= 1
    assert builds(session) == (12, 0)


# Of the temporary files that torch then opens, to see whether descriptors are left, a signal may leave one open.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*FileIO name=:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("how", "cause"), [("kill", "SIGKILL"), ("exit", "exit_3")])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_is_reported_with_its_cause(
    how: str, cause: str, workers: int, tmp_path: Path
) -> None:
    """The OOM killer leaves nothing but its signal; torch's error goes on to the loop as ever."""
    # A tensor would be handed over by a connection to the worker, which may be gone by then.
    loader = DataLoader(Rows(12, bad=6, how=how), batch_size=2, num_workers=workers, collate_fn=len)
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (exited unexpectedly|is killed by signal)"):
        run(loader, tmp_path)
    exits = events(tmp_path, c.LOADER_WORKER_EXIT_EVENT.name)

    # torch's handler of SIGCHLD may raise in the middle of the call that reaps the worker: the status is lost then.
    assert [event[c.SPAN_ERROR_TYPE.name] for event in exits] in ([cause], ["unknown"])
    assert [event[c.SPAN_LOADER.name] for event in exits] == ["rows"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("how", "why"), [("raise", "error"), ("stop", "short"), ("", "epoch_end")])
def test_why_a_pass_ended_is_reported(how: str, why: str, workers: int, tmp_path: Path) -> None:
    """A StopIteration that escapes a dataset ends an epoch early, without an error."""
    loader = DataLoader(Rows(12, bad=6 if how else -1, how=how), batch_size=2, num_workers=workers)
    session = otel_train.instrument(loaders={"rows": loader}, run_dir=str(tmp_path), **QUIET)
    try:
        for _ in loader:
            pass
    except ValueError as error:
        assert how == "raise"
        assert "a bad row" in str(error)  # noqa: PT017 - both outcomes are tested
    session.close()

    assert inside(session).service.run.totals.loaders.endings == {("rows", why): 1}
    assert inside(session).service.watch.facts()["rows"].errors == (
        {"ValueError": 1} if how == "raise" else {}
    )


@pytest.mark.parametrize(
    ("stream", "ask", "why"),
    [
        (Stream(8), False, "streaming_end"),
        (Stream(8, 8), False, "streaming_end"),
        (Stream(8, 8), True, "epoch_end"),
        (Stream(4, 8), True, "short"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_short_only_of_what_it_was_asked_for(
    stream: Stream, ask: bool, why: str, workers: int, *, tmp_path: Path
) -> None:
    """``len()`` of an iterable-style loader has side effects: only the program may ask for it."""
    loader = DataLoader(stream, batch_size=2, num_workers=workers)
    if ask:
        assert len(loader) == 4
    _, session = run(loader, tmp_path)

    assert inside(session).service.run.totals.loaders.endings == {("rows", why): 1}


@pytest.mark.parametrize(("given", "why"), [(3, "epoch_end"), (2, "short")])
def test_an_iterable_of_another_kind_that_stops_too_soon_is_short(
    given: int, why: str, tmp_path: Path
) -> None:
    """A framework's own loader whose shards are missing."""

    class Own:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter(range(given))

    session = otel_train.instrument(loaders={"own": Own()}, run_dir=str(tmp_path), **QUIET)
    assert len(list(session.loaders["own"])) == given
    for _ in session.loaders["own"]:
        break
    session.close()

    assert inside(session).service.run.totals.loaders.endings == {("own", why): 1}


def test_what_the_program_sets_on_the_loader_it_gets_back_is_set_on_its_own(tmp_path: Path) -> None:
    """timm: ``loader.mixup_enabled = False`` after so many epochs must end the mixing."""

    class Mixing:
        mixup_enabled = True

        def __iter__(self) -> Iterator[bool]:
            yield self.mixup_enabled

    mixing = Mixing()
    with otel_train.instrument(loaders={"train": mixing}, run_dir=str(tmp_path), **QUIET) as session:
        train = session.loaders["train"]
        assert list(train) == [True]
        train.mixup_enabled = False
        assert list(train) == [False]
        assert vars(mixing) == {"mixup_enabled": False}
        del train.mixup_enabled
        assert list(train) == [True]


def test_bytes_per_batch_are_found(tmp_path: Path) -> None:
    """12 bytes of features and 8 of a label, twice."""
    _, session = run(DataLoader(Rows(4), batch_size=2), tmp_path)

    found = {**(inside(session).service.watch.facts()["rows"].batch_bytes or {})}
    assert found.pop("sampled") in (1, 2)  # the second where the service thread has asked for one meanwhile
    assert found == {"min": 40, "avg": 40, "max": 40}
