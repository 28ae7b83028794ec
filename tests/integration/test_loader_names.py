"""A loader that was not named has the name of the place that iterates it, also when it is made anew each time."""

from __future__ import annotations

import copy
import inspect
import queue
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import otel_train
from tests.integration.loops.truth import QUIET, Net, loader, sgd
from tests.support.waiting import in_threads

Observed = Callable[..., dict[str, Any]]


@pytest.fixture
def observed(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a program under a session; the summary of its loaders, in the order of their first iteration."""

    def run(program: Callable[[], object], loaders: Any = None) -> dict[str, Any]:
        with otel_train.instrument(Net(), loaders, run_dir=tmp_path, **QUIET) as session:
            program()
        summary = session.summary()
        assert summary["telemetry"]["faults"] == {}
        return summary

    return run


def passes(summary: dict[str, Any]) -> dict[str, int]:
    return {row["loader"]: row["endings"].get("epoch_end", 0) for row in summary["loaders"]}


def repeated(times: int, part: Callable[[], None]) -> Callable[[], None]:
    def program() -> None:
        for _ in range(times):
            part()

    return program


def use(batches: Any) -> None:
    """Iterate to the end: the parameter's name says nothing."""
    for _ in batches:
        pass


def test_a_loader_made_for_each_evaluation_is_one_series(observed: Observed) -> None:
    """A framework that keeps what it made must not cost a name, and a series on the dashboard, per evaluation."""
    kept = []

    def evaluate() -> None:
        eval_dataloader = loader(3)
        kept.append(eval_dataloader)
        for _ in eval_dataloader:
            pass

    summary = observed(repeated(4, evaluate))

    assert summary["batches"] == {"eval_dataloader": 12}
    assert passes(summary) == {"eval_dataloader": 4}


def test_a_loader_made_anew_while_the_iterator_before_lives_is_one_series(observed: Observed) -> None:
    """Lightning stops at the length of a loader, asks for no end, and holds the iterator until it has the next one."""
    held: list[object] = []

    def evaluate() -> None:
        val_loader = loader(3)
        batches = iter(val_loader)
        held[:] = [batches]
        for _ in range(len(val_loader)):
            next(batches)

    assert observed(repeated(4, evaluate))["batches"] == {"val_loader": 12}


def test_an_evaluation_that_is_broken_off_keeps_its_name(observed: Observed) -> None:
    """An evaluation of a few batches is the usual one in mid-epoch."""
    kept = []

    def evaluate() -> None:
        val_loader = loader(5)
        kept.append(val_loader)
        for number, _ in enumerate(val_loader):
            if number == 1:
                break

    assert observed(repeated(3, evaluate))["batches"] == {"val_loader": 6}


@pytest.mark.parametrize("made", ["at once", "before the session"])
def test_loaders_of_one_place_that_live_side_by_side_are_distinguished(made: str, observed: Observed) -> None:
    """Of two validation sets the slow one is to be found; the i-th of each evaluation goes on with one name."""
    early = [loader(1), loader(2)]
    kept = []

    def evaluate() -> None:
        parts = early if made == "before the session" else [loader(batches) for batches in (1, 2)]
        kept.append(parts)
        for part in parts:
            use(part)

    summary = observed(repeated(3, evaluate))

    assert summary["batches"] == {"part": 3, "part_2": 6}
    assert passes(summary) == {"part": 3, "part_2": 3}


def test_a_loader_in_a_list_has_the_list_s_name_and_its_number(observed: Observed) -> None:
    """``loader`` says nothing where ``val_loaders`` says what it is for, and which it is stays the same."""

    def evaluate() -> None:
        val_loaders = [loader(1), loader(2)]
        for data_loader in reversed(val_loaders):
            use(data_loader)

    summary = observed(repeated(2, evaluate))

    assert summary["batches"] == {"val_loaders_1": 4, "val_loaders_0": 2}
    assert summary["steps"] == {"eval": 6}


def test_loaders_that_are_zipped_are_distinguished(observed: Observed) -> None:
    """They are iterated by one function, and nothing but their iterators holds them."""

    def stream(batches: int) -> Iterator[Any]:
        yield from loader(batches)

    def epoch() -> None:
        for _ in zip(stream(2), stream(4), strict=False):
            pass

    names = observed(repeated(3, epoch))["batches"]

    assert names == {"TensorDataset": 6, "TensorDataset_2": 6}


class Moving:
    """A wrapper as Fabric's: no DataLoader, and it has all that the one has which it iterates."""

    def __init__(self, dataloader: Any) -> None:
        self.__dict__.update(dataloader.__dict__)
        self.inner = dataloader

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


def sampled_anew(dataloader: Any) -> Any:
    """Another loader of the same rows."""
    return DataLoader(dataloader.dataset, batch_size=4, sampler=SequentialSampler(dataloader.dataset))


def by_a_framework(make: Callable[[Any], Any], dataloader: Any) -> Any:
    """Another loader, made by a function of an installed package, as one does to give every rank its share."""
    framework: dict[str, Any] = {"make": make}
    source = "def setup(dataloader):\n    return make(dataloader)"
    exec(compile(source, "/lib/site-packages/framework.py", "exec"), framework)  # where it lies matters
    return framework["setup"](dataloader)


def test_a_loader_made_from_a_given_one_keeps_its_name(tmp_path: Path) -> None:
    """``accelerator.prepare`` and Fabric make a loader anew from the one they are given, which the program then drops."""
    train_loader, val_loader = loader(3), loader(2)
    given = {"train": train_loader, "held_out": val_loader}
    with otel_train.instrument(Net(), given, run_dir=tmp_path, **QUIET) as session:
        given.clear()
        train_loader = Moving(by_a_framework(sampled_anew, train_loader))
        val_loader = Moving(by_a_framework(sampled_anew, val_loader))
        for _ in range(2):
            use(train_loader)
            use(val_loader)

    summary = session.summary()
    assert summary["batches"] == {"train": 6, "held_out": 4}
    assert passes(summary) == {"train": 2, "held_out": 2}


def test_a_streaming_loader_made_from_a_given_one_keeps_its_name(tmp_path: Path) -> None:
    """It has no length, and to ask for one is an error, or a promise."""

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(4)

    def made_again(dataloader: Any) -> Any:
        return DataLoader(dataloader.dataset, batch_size=2)

    stream = DataLoader(Stream(), batch_size=2)
    with otel_train.instrument(Net(), {"train": stream}, run_dir=tmp_path, **QUIET) as session:
        made = by_a_framework(made_again, stream)
        loader(1)
        use(made)

    summary = session.summary()
    assert summary["batches"] == {"train": 2}
    assert summary["loaders"][0]["endings"] == {"streaming_end": 1}
    assert summary["telemetry"]["faults"] == {}


class Passing:
    """A wrapper as accelerate's around a stateful loader: it passes for its class, and asks for its state when it is made."""

    def __init__(self, dataloader: Any) -> None:
        self.base_dataloader = dataloader
        self.state = dataloader.state_dict()

    @property  # type: ignore[misc]  # as accelerate does it
    def __class__(self) -> type:
        return type(self.base_dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)

    def __iter__(self) -> Iterator[Any]:
        yield from self.base_dataloader


def stateful(dataloader: Any) -> Any:
    return Passing(StatefulDataLoader(dataloader.dataset, batch_size=4))


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # torchdata calls what torch has given up
def test_a_stateful_loader_made_from_a_given_one_keeps_its_name(observed: Observed) -> None:
    """``StatefulDataLoader.__init__`` does not call that of ``DataLoader``; the iterator that its state is of shows what it replaces."""
    train = loader(3)

    assert observed(lambda: use(by_a_framework(stateful, train)), {"train": train})["batches"] == {"train": 3}


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # torchdata calls what torch has given up
def test_an_iterator_that_a_given_wrapper_holds_further_in_is_counted(observed: Observed) -> None:
    """It was made with the wrapper, before the session, and gives the batches of the first pass."""
    wrapped = stateful(loader(3))

    assert observed(repeated(2, lambda: use(wrapped)), {"train": wrapped})["batches"] == {"train": 6}


class Pipeline(IterableDataset[Any]):
    """Iterates the first of its stages as webdataset does: in methods of other names, with the loader in a list."""

    def __init__(self, *stages: Any) -> None:
        self.pipeline = [*stages]

    def invoke(self, f: Any) -> Any:
        return iter(f)

    def iterator(self) -> Iterator[Any]:
        yield from self.invoke(self.pipeline[0])

    def __iter__(self) -> Iterator[Any]:
        return self.iterator()


def test_a_pipeline_names_the_loader_in_its_list_of_stages(observed: Observed) -> None:
    """Its own variables name no loader: two pipelines would be the first and the second of one name."""

    def program() -> None:
        train_pipeline, val_pipeline = Pipeline(loader(3)), Pipeline(loader(2))
        for _ in range(2):
            for _ in train_pipeline:
                pass
            for _ in val_pipeline:
                pass

    assert passes(observed(program)) == {"train_pipeline": 2, "val_pipeline": 2}


def test_a_progress_bar_does_not_name_the_loader_that_it_shows(observed: Observed) -> None:
    """Ultralytics: a bar around ``self.dataloader`` of a validator, which the trainer has made for its ``test_loader``."""

    class Bar:
        def __init__(self, batches: Any) -> None:
            self.iterable = batches

        def __iter__(self) -> Iterator[Any]:
            yield from self.iterable

    class Validator:
        def __init__(self, batches: Any) -> None:
            self.dataloader = batches

        def validate(self) -> None:
            bar = Bar(self.dataloader)
            for _ in bar:
                pass

    class Trainer:
        def __init__(self) -> None:
            self.test_loader = loader(2)
            self.validator = Validator(self.test_loader)

        def validate(self) -> None:
            self.validator.validate()

    assert passes(observed(lambda: Trainer().validate())) == {"test_loader": 1}


def test_a_given_wrapper_names_the_loader_that_it_iterates(observed: Observed) -> None:
    """``instrument`` may come after the framework has wrapped the loaders."""
    wrapped = Moving(loader(3))

    assert observed(lambda: use(wrapped), {"train": wrapped})["batches"] == {"train": 3}


def test_a_given_wrapper_iterated_as_the_session_gives_it_is_one_loader(tmp_path: Path) -> None:
    """What it holds is asked inside of it: the name must not count both."""
    with otel_train.instrument(Net(), {"train": Moving(loader(3))}, run_dir=tmp_path, **QUIET) as session:
        use(session.loaders["train"])

    assert session.summary()["batches"]["train"] == 3


class Pairs:
    """Joins every two batches of a loader, as webdataset's ``WebLoader(...).batched(2)`` does: no DataLoader, and no ``dataset``."""

    def __init__(self, loader: Any) -> None:
        self.stages = [loader]

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.stages[0])
        return ((torch.cat((x, next(batches)[0])), y) for x, y in batches)


class Repeated(Pairs):
    """A class that extends one of those that are timed."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(2):
            yield from super().__iter__()


class Ticks(Iterator[int]):
    """An iterator whose ``__iter__`` is that of a class which others extend as well."""

    def __init__(self) -> None:
        self.rest = [3, 2, 1]

    def __next__(self) -> int:
        if not self.rest:
            raise StopIteration
        return self.rest.pop()


def test_the_class_of_a_given_iterable_is_changed_alone_and_for_the_session(tmp_path: Path) -> None:
    """What other classes inherit from the same one costs them nothing more."""
    inherited = vars(Iterator)["__iter__"]
    with otel_train.instrument(Net(), {"train": (ticks := Ticks())}, run_dir=tmp_path, **QUIET) as session:
        use(ticks)
        assert vars(Iterator)["__iter__"] is inherited

    assert "__iter__" not in vars(Ticks)
    assert session.summary()["batches"] == {"train": 3}


def test_a_given_iterable_that_the_loop_iterates_itself_is_counted(observed: Observed) -> None:
    """Many do not iterate what the session gives: what the loop gets counts, and not what the iterable reads."""
    pairs, repeated_pairs, other = Pairs(loader(4)), Repeated(loader(2)), Pairs(loader(2))
    before = Pairs.__iter__, Repeated.__iter__

    def program() -> None:
        for _ in range(2):
            use(pairs)
        use(repeated_pairs)
        use(other)

    summary = observed(program, {"train": pairs, "val": repeated_pairs})

    assert {name: summary["batches"][name] for name in ("train", "val")} == {"train": 4, "val": 2}
    assert summary["samples"]["train"] == 2 * sum(len(x) for x, _ in loader(4))
    waits = {row["loader"]: row["self_seconds"] > 0 for row in summary["stages"] if row["stage"] == "data"}
    assert waits["train"]
    assert waits["val"]
    assert (Pairs.__iter__, Repeated.__iter__) == before


class Window(Iterator[Any]):
    """An iterator that can do more than ``next``."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.at = batches, 0

    def __next__(self) -> Any:
        if self.at == len(self.batches):
            raise StopIteration
        self.at += 1
        return self.batches[self.at - 1]

    def __len__(self) -> int:
        return len(self.batches) - self.at

    def __getitem__(self, number: int) -> Any:
        return self.batches[number]

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *error: object) -> None:
        self.at = len(self.batches)


class Windows:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Window:
        return Window(self.batches)


class Rows(Windows):
    def __iter__(self) -> Any:
        yield from self.batches


def test_the_iterator_of_a_given_iterable_can_do_what_its_class_can(observed: Observed) -> None:
    """``len``, an index, a with-block, an attribute, the class, a copy: the loop may use each of them."""
    windows, rows = Windows(list(loader(4))), Rows(list(loader(2)))

    def program() -> None:
        iterator = iter(windows)
        assert isinstance(iterator, Window)
        assert len(iterator) == 4
        assert iterator[1] is windows.batches[1]
        assert len(copy.copy(iterator)) == 4
        next(iterator)
        iterator.at = 2
        assert len(iterator) == 2
        with iterator as same:
            next(same)
            assert len(iterator) == 1
        assert list(iterator) == []
        generator = iter(rows)
        assert isinstance(generator, types.GeneratorType)
        next(generator)
        generator.close()

    assert observed(program, {"train": windows, "val": rows})["batches"] == {"train": 2, "val": 1}


class Unhashable(type):
    __hash__ = None  # type: ignore[assignment] # such a class may not be looked up


class Odd(metaclass=Unhashable):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Odd:
        return self

    def __next__(self) -> Any:
        if not self.batches:
            raise StopIteration
        return self.batches.pop()


class OddRows(Windows):
    def __iter__(self) -> Any:
        return Odd(list(self.batches))


def test_an_iterator_of_an_odd_class_is_counted_all_the_same(observed: Observed) -> None:
    """What cannot be made for its class must not reach the loop."""
    rows = OddRows(list(loader(3)))

    assert observed(lambda: list(rows), {"train": rows})["batches"] == {"train": 3}


def test_a_second_loader_of_the_same_rows_has_a_name_of_its_own(observed: Observed) -> None:
    """Training accuracy is measured on rows that a given loader has, and that is not the given loader's time."""
    train = loader(3)

    class Trainer:
        def __init__(self, dataloader: Any) -> None:
            self.dataloader, self.accuracy_loader = dataloader, sampled_anew(dataloader)

        def fit(self) -> None:
            for _ in self.dataloader:
                pass
            for _ in self.accuracy_loader:
                pass

    def statistics(dataloader: Any) -> None:
        for _ in DataLoader(dataloader.dataset, batch_size=12):
            pass

    def program() -> None:
        statistics(train)
        Trainer(train).fit()

    batches = observed(program, {"train": train})["batches"]

    assert batches == {"TensorDataset": 1, "train": 3, "accuracy_loader": 3}


def test_two_functions_with_the_same_variable_are_two_places(observed: Observed) -> None:
    """Validation and test in one series would be a series of neither."""

    def validate() -> None:
        loader_here = loader(1)
        use(loader_here)

    def test() -> None:
        loader_here = loader(2)
        use(loader_here)

    def program() -> None:
        for _ in range(3):
            validate()
            test()

    assert observed(program)["batches"] == {"loader_here": 3, "loader_here_2": 6}


def test_loaders_made_in_a_call_are_distinguished_by_the_call(observed: Observed) -> None:
    """``run(make())`` in two lines is two places; ``run`` calls both ``batches``."""

    def wrapped(*args: Any) -> None:
        use(*args)

    def epoch() -> None:
        use(loader(1))
        use(loader(2))
        wrapped(loader(4))
        wrapped(loader(8))

    summary = observed(repeated(3, epoch))

    assert summary["batches"] == {"batches": 3, "batches_2": 6, "batches_3": 12, "batches_4": 24}


def test_a_loop_in_a_thread_behind_a_queue_keeps_its_name(observed: Observed) -> None:
    """A new thread and a new loader for each epoch are still one place."""
    kept = []

    def produce(source: Any, ready: queue.Queue[Any]) -> None:
        for batch in source:
            ready.put(batch)
        ready.put(None)

    def epoch() -> None:
        kept.append(loader(3))
        ready: queue.Queue[Any] = queue.Queue()
        thread = threading.Thread(target=produce, args=(kept[-1], ready))
        thread.start()
        while ready.get() is not None:
            pass
        thread.join()

    assert passes(observed(repeated(3, epoch))) == {"source": 3}


def test_threads_that_run_side_by_side_have_a_name_each(observed: Observed) -> None:
    """Two trainings in one process share their code, not their metrics."""
    both = threading.Barrier(2)

    def work() -> None:
        train_loader = loader(2)
        for _ in train_loader:
            both.wait(30)

    assert passes(observed(lambda: in_threads(work, work))) == {"train_loader": 1, "train_loader_2": 1}


def test_threads_that_begin_at_once_have_a_name_each(observed: Observed) -> None:
    """The second is named while the first is still making its iterator: no pass has begun yet."""
    both = threading.Barrier(2)

    class Meeting(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            both.wait(30)
            yield from super().__iter__()

    def work() -> None:
        rows = [torch.zeros(4)] * 4
        train_loader = DataLoader(rows, batch_size=2, sampler=Meeting(rows))
        for _ in train_loader:
            pass

    assert passes(observed(lambda: in_threads(work, work))) == {"train_loader": 1, "train_loader_2": 1}


def test_a_loader_that_comes_back_is_distinguished_from_the_one_made_after_it(observed: Observed) -> None:
    """Loaders that are made when they are first needed look like one made anew, until the first is used again."""
    made: list[DataLoader[Any]] = []

    def epoch() -> None:
        for number in range(2):
            if len(made) == number:
                made.append(loader(number + 1))
            use(made[number])

    summary = observed(repeated(3, epoch))

    assert summary["batches"] == {"made_0": 3, "made_1": 6}

    hidden: dict[int, DataLoader[Any]] = {}

    def hidden_epoch() -> None:
        for number in range(2):
            if number not in hidden:
                hidden[number] = loader(number + 1)
            use(hidden[number])

    summary = observed(repeated(3, hidden_epoch))

    assert summary["batches"] == {"batches": 1 + 2 + 1 + 1, "batches_2": 2 + 2}
    assert passes(summary) == {"batches": 4, "batches_2": 2}


def test_a_new_loader_under_a_given_name_goes_on_with_its_metrics(observed: Observed) -> None:
    """Folds give each loader the same name on purpose."""
    first, second = loader(2), loader(3)

    def program() -> None:
        session = otel_train.current()
        assert session is not None
        use(first)
        session.add(loaders={"train": second})
        use(second)

    summary = observed(program, {"train": first})

    assert summary["batches"] == {"train": 5}
    assert passes(summary) == {"train": 2}


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"train": loader(12).dataset, "val": loader(2)}, ["train"]),  # a dataset in place of its loader
        (loader(12), ["loader"]),  # made twice, and the loop has the other one
        ({"holdout": loader(2), "test": loader(2)}, []),  # their first evaluation may come later
        ({"train": "passed", "val": loader(2)}, []),
        ({"extra": "passed", "train": loader(2)}, []),  # a curriculum: it may come later
    ],
)
def test_a_given_loader_that_training_does_not_read_is_a_gap(
    given: Any, missing: list[str], observed: Observed
) -> None:
    """Its rows are absent, and those of the loader in its place have another name."""
    model, rows = Net(), loader(12)
    optimizer = sgd(model)
    if isinstance(given, dict):
        given = {name: rows if each == "passed" else each for name, each in given.items()}

    def program() -> None:
        for x, _ in rows:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    gaps = [gap for gap in observed(program, given)["instrumentation_gaps"] if gap["what"] == "loader"]

    assert [gap["name"] for gap in gaps] == missing
    assert all("it iterates another object (`rows`)" in gap["reason"] for gap in gaps)


class ReadAhead(threading.Thread):
    """The iterator of ``prefetch_generator``: a thread of its own reads the batches."""

    def __init__(self, batches: Iterator[Any]) -> None:
        super().__init__()
        self.batches, self.ready = batches, queue.Queue[Any](2)
        self.start()

    def run(self) -> None:
        for batch in self.batches:
            self.ready.put(batch)
        self.ready.put(None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self.ready.get()
        if batch is None:
            self.join()
            raise StopIteration
        return batch


class ReadsAhead(DataLoader[Any]):
    """``DataLoaderX`` of many programs."""

    def __iter__(self) -> Any:
        return ReadAhead(super().__iter__())


class ReadsItselfAhead(DataLoader[Any]):
    """Its thread makes the iterator, too."""

    def __iter__(self) -> Any:
        return ReadAhead(batch for batch in DataLoader.__iter__(self))


class GeneratesAhead(DataLoader[Any]):
    """MONAI's ``ThreadDataLoader``."""

    def __iter__(self) -> Any:
        yield from ReadAhead(super().__iter__())


class Moves(DataLoader[Any]):
    """Works on a batch when it is asked for it."""

    def __iter__(self) -> Any:
        return map(tuple, super().__iter__())


class Keeps(DataLoader[Any]):
    """Returns what it has read once."""

    def __iter__(self) -> Any:
        self.kept = vars(self).get("kept") or list(super().__iter__())
        return iter(self.kept)


class _Filtered:
    """The ``DataLoaderIterator`` of PyTorch Geometric."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.batches._reset(loader, first_iter)

    def __next__(self) -> Any:
        return tuple(next(self.batches))


class Filters(DataLoader[Any]):
    """Its ``NodeLoader``."""

    def _get_iterator(self) -> Any:
        return _Filtered(super()._get_iterator())


class Preloads(DataLoader[Any]):
    """Returns itself, and holds the next batch already, as prefetchers to a device do."""

    def __iter__(self) -> Any:
        self.batches = super().__iter__()
        self.following = next(self.batches, None)
        return self

    def __next__(self) -> Any:
        batch, self.following = self.following, next(self.batches, None)
        if batch is None:
            raise StopIteration
        return batch


class Resumes(DataLoader[Any]):
    """Passes over the batches of an earlier run, and returns torch's iterator."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        next(batches)
        return batches


class Counts(DataLoader[Any]):
    """Returns torch's iterator."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()


def training(model: Net, batches: Callable[[], Any], passes: int = 2) -> None:
    optimizer = sgd(model)
    for _ in range(passes):
        for x, _ in batches():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("known", ["given", "found", "found, of a class made before the session"])
@pytest.mark.parametrize(
    "kind",
    [ReadsAhead, ReadsItselfAhead, GeneratesAhead, Moves, Keeps, Filters, Preloads, Resumes, Counts],
)
def test_the_waits_of_a_loader_are_those_for_what_the_loop_iterates(
    kind: type[DataLoader[Any]], known: str, workers: int, observed: Observed
) -> None:
    """A loader may return another iterator than torch's, which reads that one, on a thread of its own or not at all."""
    model, dataset = Net(), loader(12).dataset
    of_the_session: Any = type(kind.__name__, (kind,), {}) if known == "found" else kind
    made: list[Any] = []

    def make() -> Any:
        keeps = {"persistent_workers": True} if workers else {}
        return of_the_session(dataset, batch_size=4, num_workers=workers, **keeps)

    def program() -> None:
        rows = made[0] if made else make()
        training(model, lambda: rows)

    if known != "found":
        made.append(make())
    summary = observed(program, {"rows": made[0]} if known == "given" else None)
    waits = {
        row["loader"]: row["count"] for row in summary["stages"] if row["stage"] == "data" and row["count"]
    }
    batches = 2 * (len(make()) - (kind is Resumes))

    assert waits == {"rows": batches}
    assert summary["batches"]["rows"] == summary["steps"]["train"] == batches
    assert passes(summary)["rows"] == 2
    assert [gap["what"] for gap in summary["instrumentation_gaps"]] == ["model"]  # it is another one
    assert "__iter__" not in vars(of_the_session) or not hasattr(of_the_session.__iter__, "__wrapped__")


@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_loop_sends_and_throws_reaches_the_generator_of_its_loader(
    ahead: bool, observed: Observed
) -> None:
    """A sampler by losses: the loop answers each batch with its loss."""

    def read_beside(batches: Any) -> Iterator[Any]:
        with ThreadPoolExecutor(1) as pool:
            while (batch := pool.submit(next, batches, None).result()) is not None:
                yield batch

    answers: list[object] = []

    class Answered(DataLoader[Any]):
        def __iter__(self) -> Any:
            batches: Any = super().__iter__()
            try:
                for batch in read_beside(batches) if ahead else batches:
                    answer = yield batch
                    answers.append(answer)
            except ValueError as error:
                answers.append((yield str(error)))
            finally:
                answers.append("closed")
            return "the end"

    def rest(batches: Any) -> Iterator[Any]:
        answers.append((yield from batches))

    def use() -> list[object]:
        answers.clear()
        rows = Answered(loader(12).dataset, batch_size=2)
        for throws in (False, True, False):
            batches = iter(rows)
            next(batches)
            if throws:
                answers.append(batches.throw(ValueError("too large")))
            for loss in () if throws else (0.5, 0.25):
                batches.send(loss)
            answers.append(len(list(rest(batches))))
        batches = iter(rows)
        next(batches)
        batches.close()
        return answers.copy()

    said: list[list[object]] = [use()]
    observed(lambda: said.append(use()))

    assert said[0] == said[1]


def test_a_loader_that_a_thread_of_the_program_reads_is_waited_for_as_its_gap_advises(
    observed: Observed,
) -> None:
    """``watch`` wraps the iterator that the loop reads."""
    model, rows = Net(), loader(12)

    def prefetch() -> Any:
        return ReadAhead(iter(rows))

    [gap] = [
        gap
        for gap in observed(lambda: training(model, prefetch, 1))["instrumentation_gaps"]
        if gap["what"] == "loop"
    ]
    followed = observed(lambda: training(model, lambda: otel_train.watch(prefetch(), name="train"), 1))
    waits = {
        row["loader"]: row["count"] for row in followed["stages"] if row["stage"] == "data" and row["count"]
    }

    assert "otel_train.watch(prefetch(loader), name=...)" in gap["reason"]
    assert waits["train"] == followed["batches"]["train"] == followed["steps"]["train"]


def test_generated_names_are_bounded(observed: Observed) -> None:
    """A hundred loaders that live side by side must not become a hundred series of every metric."""
    many = [loader(1) for _ in range(100)]

    def program() -> None:
        for each in many:
            use(each)

    batches = observed(program)["batches"]

    assert len(batches) == 65
    assert batches["_OTHER"] == 36


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("eval_dataloader", "eval"),
        ("val_batches", "eval"),
        ("valid_dl", "eval"),
        ("test_dataloader", "test"),
        ("predict_dataloader", "predict"),
    ],
)
def test_the_name_says_what_batches_are_for_that_show_nothing(
    name: str, phase: str, observed: Observed
) -> None:
    """A metric over a loader without a forward is no training."""
    summary = observed(lambda: _evaluate(name))

    assert summary["batches"] == {name: 3}
    assert summary["steps"] == {phase: 3}


def _evaluate(name: str) -> None:
    loaders = {name: loader(3)}
    use(loaders[name])


def test_making_loaders_is_as_before(tmp_path: Path) -> None:
    """Frameworks read the signature of ``DataLoader`` to make one again; a closed session leaves nothing there."""
    made, signature = DataLoader.__init__, inspect.signature(DataLoader)
    with otel_train.instrument(Net(), run_dir=tmp_path, **QUIET):
        assert inspect.signature(DataLoader) == signature
        assert inspect.signature(DataLoader.__init__) == inspect.signature(made)
        with pytest.raises(ValueError, match="batch_size"):
            DataLoader(torch.ones(4), batch_size=0)

    assert DataLoader.__init__ is made


def test_training_and_evaluation_by_one_helper_keep_their_names(observed: Observed) -> None:
    """The usual script: one function for both, loaders of an object, evaluation with a loader of its own."""

    class Experiment:
        def __init__(self) -> None:
            self.model, self.train_batches = Net(), loader(4)
            self.optimizer = sgd(self.model)

        def run(self, batches: Any, *, train: bool) -> None:
            with torch.set_grad_enabled(train):
                for x, y in batches:
                    loss = torch.nn.functional.cross_entropy(self.model(x), y)
                    if train:
                        loss.backward()
                        self.optimizer.step()

        def fit(self) -> None:
            for _ in range(3):
                self.run(self.train_batches, train=True)
                self.held_out = loader(2)
                self.run(self.held_out, train=False)

    summary = observed(lambda: Experiment().fit())

    assert summary["batches"] == {"train_batches": 12, "held_out": 6}
