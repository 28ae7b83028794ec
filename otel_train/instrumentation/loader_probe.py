"""The probe of a loader: event codes, batch sizes, tokens, failures, begin and end of passes."""

from __future__ import annotations

import itertools
import sys
import weakref
from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from otel_train.fast_classes import FastNamedTuple, fast_dataclass
from otel_train.instrumentation.batch_size import BatchBytes, Size, size_of_batches, weigh
from otel_train.instrumentation.dataloader_workers import LoaderState, WorkerPool, loader_state
from otel_train.instrumentation.naming import attribute
from otel_train.recording import ring_buffer
from otel_train.recording.events import (
    MAX_PAYLOAD,
    PAYLOAD_SHIFT,
    START_BITS,
    Ending,
    Flag,
    Op,
    SourceKind,
    code,
)
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train.instrumentation.naming import Loader
    from otel_train.recording.recorder import Recorder

PROBE = "_otel_train_probe"
ASK = "_otel_train_ask"
"""Attribute of an iterator: the event word that begins its ``next``, with the number of the pass."""
OWNER = "_otel_train_thread"
"""Attribute of an iterator: identity of the thread that made it."""

_MAP_STYLE = 0
_PASS = attrgetter("_num_yielded", "_dataset_kind")
_STREAM = attrgetter("_IterableDataset_len_called", "_index_sampler", "_drop_last", "_num_workers")
"""Attributes of torch's iterators: of the pass, and of an iterable-style dataset."""


_passes = itertools.count(1)
"""Numbers of passes, over all loaders of the process."""


@fast_dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """State of a loader that events do not contain; names as in ``LoaderProbe``."""

    phase: str
    token_count: int
    workers: int | None
    sized: bool
    prefetch_factor: int | None
    persistent: bool | None
    weights: BatchBytes
    failures: Mapping[str, int]
    given: bool
    state: LoaderState | None


class LoaderProbe:
    """Event codes, batch size function and token count of a loader, shared by its iterators.

    Attributes:
        token_count: tokens counted so far.
        failures: number of exceptions that the loader raised, by class name.
        weights: bytes of the batches that were measured.
        pools: workers of its iterators, until all their exits are known.
        workers, prefetch_factor, persistent: settings of a DataLoader; None if the loader has no such setting.
        sized: whether the loader knows its number of batches.
        loader: returns the loader, or None once it is deleted.
        inner: returns the DataLoader that is iterated in place of the loader, or None.
        given: whether the program passed the loader to ``instrument``; else it was found at its first iteration.
        awaited: whether it has a name, and its first pass is about to begin.
        pass_starts: called when a pass begins, if the loader is no DataLoader.
        began_ns: when its latest pass began, on the clock of ``MadeLoaders``; 0 before the first.
        opening: running calls of its ``__iter__``, by thread.
        beginning: threads in the first ``next`` of its generator, and the event word that began a wait for data there, or 0.
        passed_on: whether torch's iterator is read, maybe on another thread, by the object that ``__iter__`` returns, which is
            timed in its place.
    """

    def __init__(self, entry: Loader, recorder: Recorder) -> None:
        loader = entry.loader
        self.opening: dict[int, Opening] = {}
        self.beginning: dict[int, int] = {}
        self.passed_on = False
        self.name, self.phase = entry.name, entry.phase
        self.source = recorder.source(SourceKind.DATA, entry.name, entry.phase)
        self.token_count = 0
        self.failures: Counter[str] = Counter()
        self.weights = BatchBytes()
        self.pools: list[WorkerPool] = []
        self.edge, self.changed = recorder.edge, recorder.changed
        self.pass_starts: Callable[[], None] = lambda: None
        self.ask, self.got = code(Op.BEGIN, self.source), code(Op.END, self.source)
        self.stop, self.fail = code(Op.STOP, self.source), code(Op.FAIL, self.source)
        self.gone = code(Op.PASS_END, self.source)
        self.started = code(Op.END, self.source, Flag.START)
        self._read_size: Size = self._learn if entry.samples is None else _sample_counter(entry)
        self.size: Size = self._weigh
        self._tokens = entry.tokens
        self._counting_tokens = _counting("tokens", entry)
        self._batch_size = attribute(loader, "batch_size")
        self.workers: int | None = attribute(loader, "num_workers")
        self.prefetch_factor: int | None = attribute(loader, "prefetch_factor")
        self.persistent: bool | None = attribute(loader, "persistent_workers")
        # len() of an iterable-style DataLoader has side effects.
        kind = attribute(loader, "_dataset_kind")
        self.sized = kind == 0 if kind is not None else attribute(loader, "__len__") is not None
        self.loader = weak(loader)
        self.inner: Callable[[], Any] = lambda: None
        self.began_ns = 0
        self.given = True
        self.awaited = False
        self._running: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )  # a class may forbid ``hash``

    @property
    def polled(self) -> bool:
        """Whether it has state that events do not contain and that changes continuously: tokens, workers."""
        return self._tokens is not None or bool(self.pools)

    @property
    def running(self) -> bool:
        """Whether a living iterator has batches left, by count: Lightning reads ``len(loader)`` batches, not up to StopIteration."""
        passes = map(_given, list(self._running.values()))
        return any(promised is None or given < promised for given, promised in passes)

    def begins(self) -> None:
        """Records that a pass begins."""
        self.awaited = False
        self.began_ns = perf_counter_ns()

    def runs(self, iterator: Any) -> None:
        """Records that a pass of torch's ``iterator`` begins."""
        self.begins()
        self._running[id(iterator)] = iterator

    def ends(self, iterator: Any) -> None:
        """Records the end of a pass."""
        self._running.pop(id(iterator), None)

    def next_pass(self) -> int:
        """Returns the event word that begins ``next`` of a new pass; the same for all iterators that one ``__iter__`` call makes."""
        opening = self.opened_by()
        return self.ask | next(_passes) << PAYLOAD_SHIFT if opening is None else opening.ask

    def opened_by(self) -> Opening | None:
        """Returns the running call of ``__iter__`` of this thread, else of any thread, which may have started this one; or None."""
        mine = self.opening.get(get_ident())
        return mine or next(iter(list(self.opening.values())), None)

    @property
    def is_read_beside(self) -> bool:
        """Whether an iterator that this thread makes is not the one that the loop reads."""
        return (self.passed_on or bool(self.opening)) and get_ident() not in self.opening

    def wait_on(self, ask: int) -> None:
        """Begins a wait for data, from the creation of torch's iterator to its first ``next``, or to the generator's first batch."""
        if self.beginning.get(get_ident()) == 0:
            self.beginning[get_ident()] = ask
            self.edge(ask | START_BITS)

    def waited(self) -> int:
        """Ends the wait that ``wait_on`` began. Returns the event word that began it, or 0."""
        ask = self.beginning.get(get_ident(), 0)
        if ask:
            self.beginning[get_ident()] = 0
            self.edge(self.started)
        return ask

    def pass_end(self, ask: int) -> int:
        """Returns the event word that ends a pass whose iterator is deleted. ``ask``: the event word that began its ``next``."""
        return self.gone | ask >> PAYLOAD_SHIFT << PAYLOAD_SHIFT

    def payload(self, batch: Any) -> int:
        """Returns the event word that ends ``next`` with ``batch``."""
        return self.got | self.size(batch) << PAYLOAD_SHIFT

    def stopped(self, given: int, promised: int | None) -> int:
        """Returns the event word that ends ``next`` by StopIteration, after ``given`` of ``promised`` batches (None: unknown)."""
        ending = Ending.STREAMING_END
        if promised is not None:
            ending = Ending.EPOCH_END if given >= promised else Ending.SHORT
        return self.stop | ending << PAYLOAD_SHIFT

    def raised(self, iterator: Any, error: BaseException) -> int:
        """Returns the event word that ends ``next`` of torch's ``iterator`` without a batch."""
        if isinstance(error, StopIteration):
            self.ends(iterator)
            return self.stopped(*_given(iterator))
        return self.failed(error)

    def failed(self, error: BaseException) -> int:
        """Returns the event word that ends ``next`` by an exception. Ctrl-C is no fault of the loader."""
        if not isinstance(error, Exception):
            return self.fail
        self.failures[type(error).__name__] += 1
        self.changed()
        return self.fail | Ending.ERROR << PAYLOAD_SHIFT

    def batch_hook(self, ask_inner: Callable[[Any], Any]) -> Any:
        """Returns the function that ``__next__`` in C calls for an iterator whose class has ``ask_inner`` as ``__next__``."""
        state = (self.edge, ask_inner, self, vars(self), ring_buffer.packed(self.got))
        return ring_buffer.EXTENSION.hook("batch", state)

    def weigh_next(self) -> None:
        """Has the bytes of the next batch measured. Called at each report, because it takes microseconds."""
        if not self.weights.hopeless:
            self.size = self._weigh

    def report(self) -> LoaderReport:
        """Returns what is known now. Called by the service thread."""
        return LoaderReport(
            phase=self.phase, token_count=self.token_count, workers=self.workers, sized=self.sized,
            prefetch_factor=self.prefetch_factor, persistent=self.persistent, weights=self.weights,
            failures=dict(self.failures), given=self.given, state=loader_state(self.pools),
        )  # fmt: skip

    def inherit(self, before: LoaderProbe) -> None:
        """Continues the counts of a loader of the same name, as in folds and sweeps."""
        self.token_count, self.failures = before.token_count, before.failures
        self.weights, self.pools = before.weights, before.pools

    def _weigh(self, batch: Any) -> int:
        self.weights.add(weigh(batch))
        self.size = self._size_and_tokens
        size = self.size(batch)
        if self._tokens is None:
            self.size = self._read_size  # which may be another one after the first batch
        return size

    def _size_and_tokens(self, batch: Any) -> int:
        if self._tokens is not None:
            self._count_tokens(batch)
        return self._read_size(batch)

    def _learn(self, batch: Any) -> int:
        try:
            self._read_size = size_of_batches(batch, self._batch_size)
        except Exception:  # the user's container may raise anything
            self._read_size = lambda _: 0
        return self._read_size(batch)

    def _count_tokens(self, batch: Any) -> None:
        with self._counting_tokens:
            self.token_count += int(self._tokens(batch))  # type: ignore[misc]  # asked for by payload()
        if self._counting_tokens.faults:
            self._tokens = None


def _sample_counter(entry: Loader) -> Size:
    samples: Any = entry.samples
    counting = _counting("samples", entry)

    def size(batch: Any) -> int:
        with counting:
            return min(max(0, int(samples(batch))), MAX_PAYLOAD - 1) + 1
        return 0  # unknown, training goes on

    return size


def _counting(what: str, entry: Loader) -> Guard:
    """Returns a guard that logs the first error of a counting function, and never closes."""
    return Guard(f"{what}= of loader {entry.name!r}", limit=sys.maxsize)


def weak(loader: Any) -> Callable[[], Any]:  # Any: the user's own
    """Returns a function that returns an object while it lives; None if its class has no weak references."""
    try:
        return weakref.ref(loader)
    except TypeError:  # such as a list: a strong reference would keep it alive
        return lambda: None


class Opening(FastNamedTuple):
    """A running call of ``__iter__``: the event word that begins ``next`` of its pass, and torch's iterators that it has made."""

    ask: int
    made: list[Any]


def end_pass(attributes: dict[str, Any]) -> None:
    """Ends the pass of an iterator with these attributes that is deleted, if this thread made it."""
    write_of_pass(attributes, lambda probe, ask: probe.pass_end(ask))


def write_of_pass(attributes: dict[str, Any], word: Callable[[LoaderProbe, int], int]) -> None:
    """Writes the event word that ``word`` returns for the probe and the pass of an iterator that is deleted."""
    probe, ask = attributes.get(PROBE), attributes.get(ASK)
    if probe is None or ask is None or get_ident() != attributes.get(OWNER):
        return
    try:
        probe.edge(word(probe, ask))
    except Exception:  # the interpreter may be ending, and nothing may be raised here
        return


def _given(iterator: Any) -> tuple[int, int | None]:  # Any: torch's iterator
    """Returns the batches that an iterator has returned, and the least number that it promised; None if it promised none.

    ``len()`` of an iterable-style loader has side effects, so it is not called: the number is known only if the program
    has called it. Each worker may drop, or return, an incomplete last batch.
    """
    try:
        given, kind = _PASS(iterator)
        if kind == _MAP_STYLE:
            return given, len(iterator)
        rows, sampler, drops, workers = _STREAM(iterator)
        if rows is None:
            return given, None
        size = getattr(sampler, "batch_size", None) or 1  # 1: not collated
        least = max(0, rows - max(1, workers) * (size - 1)) // size if drops else -(-rows // size)
    except Exception:  # a user-defined sampler may have no length
        return 0, None
    return given, least
