"""The probe of a loader: event codes, batch sizes, tokens, failures, and where its passes begin and end."""

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
from otel_train.recording import ring_buffer
from otel_train.recording.events import (
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
"""The word that begins an ask of an iterator: it has the number of the pass."""
OWNER = "_otel_train_thread"

_MAP_STYLE = 0
_PASS = attrgetter("_num_yielded", "_dataset_kind")
_STREAM = attrgetter("_IterableDataset_len_called", "_index_sampler", "_drop_last", "_num_workers")
"""What torch's iterators know of themselves."""


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
        failures: exceptions that left it, by class.
        weights: bytes of the batches that were weighed.
        pools: workers of its iterators, until all about them is known.
        workers, prefetch_factor, persistent: settings of a DataLoader; None of what has no such setting.
        sized: it knows how many batches it has.
        loader: gives the loader, while it lives.
        inner: gives the DataLoader that iterates in its place, if there is one.
        given: the program gave it; else it was found when it was first iterated.
        awaited: it has its name, and its first pass begins any moment.
        pass_starts: called when a pass of it begins, where it is no DataLoader.
        began_ns: when its newest pass began, on the clock of ``MadeLoaders``; 0 before the first.
        opening: calls of its ``__iter__`` that make an iterator now, by thread.
        beginning: threads in the first ``next`` of a generator that it is iterated by; the word that has begun a wait, or 0.
        passed_on: what its ``__iter__`` returns reads torch's iterator, maybe on another thread, and is timed in its place.
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
        self._read_size: Size = self._learn if entry.samples is None else _safe(entry)
        self.size: Size = self._weigh
        self._tokens = entry.tokens
        self._counting_tokens = _counting("tokens", entry)
        self._batch_size = getattr(loader, "batch_size", None)
        self.workers: int | None = getattr(loader, "num_workers", None)
        self.prefetch_factor: int | None = getattr(loader, "prefetch_factor", None)
        self.persistent: bool | None = getattr(loader, "persistent_workers", None)
        # len() of an iterable-style DataLoader has side effects.
        kind = getattr(loader, "_dataset_kind", None)
        self.sized = kind == 0 if kind is not None else hasattr(loader, "__len__")
        self.loader = _weak(loader)
        self.inner: Callable[[], Any] = lambda: None
        self.began_ns = 0
        self.given = True
        self.awaited = False
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def polled(self) -> bool:
        """Whether it has state that events do not contain and that changes continuously: tokens, workers."""
        return self._tokens is not None or bool(self.pools)

    @property
    def running(self) -> bool:
        """Whether one of its iterators is alive and has batches left. Lightning asks none for more than its length."""
        passes = map(_given, list(self._running))
        return any(promised is None or given < promised for given, promised in passes)

    def begins(self) -> None:
        """Records that a pass begins."""
        self.awaited = False
        self.began_ns = perf_counter_ns()

    def runs(self, iterator: Any) -> None:
        """Records that a pass of torch's ``iterator`` begins."""
        self.begins()
        self._running.add(iterator)

    def ends(self, iterator: Any) -> None:
        """Records the end of a pass."""
        self._running.discard(iterator)

    def next_pass(self) -> int:
        """Returns the event word that begins ``next`` of a new pass; one for all that a call of ``__iter__`` makes."""
        opening = self.opened_by()
        return self.ask | next(_passes) << PAYLOAD_SHIFT if opening is None else opening.ask

    def opened_by(self) -> Opening | None:
        """Returns the call of ``__iter__`` for which an iterator is made now, maybe on a thread that the call has started."""
        mine = self.opening.get(get_ident())
        return mine or next(iter(list(self.opening.values())), None)

    @property
    def is_read_beside(self) -> bool:
        """Whether an iterator that this thread makes is not what the loop asks."""
        return (self.passed_on or bool(self.opening)) and get_ident() not in self.opening

    def wait_on(self, ask: int) -> None:
        """Waits for the loader until torch's iterator, which it has made, is asked, or a generator gives its first batch."""
        if self.beginning.get(get_ident()) == 0:
            self.beginning[get_ident()] = ask
            self.edge(ask | START_BITS)

    def waited(self) -> int:
        """Ends what ``wait_on`` has begun. Returns the word that began it, or 0."""
        ask = self.beginning.get(get_ident(), 0)
        if ask:
            self.beginning[get_ident()] = 0
            self.edge(self.started)
        return ask

    def pass_end(self, ask: int) -> int:
        """Returns the event word that ends a pass whose iterator is deleted. ``ask``: the word that began its ``next``."""
        return self.gone | ask >> PAYLOAD_SHIFT << PAYLOAD_SHIFT

    def payload(self, batch: Any) -> int:
        """Returns the event word that ends ``next`` with ``batch``."""
        return self.got | self.size(batch) << PAYLOAD_SHIFT

    def stopped(self, given: int, promised: int | None) -> int:
        """Returns the event word that ends ``next`` by StopIteration. See ``_given`` for the arguments."""
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
        """Measures the bytes of the next batch; called now and then, because it costs microseconds."""
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
        except Exception:  # noqa: BLE001  # the user's container may raise anything
            self._read_size = lambda _: 0
        return self._read_size(batch)

    def _count_tokens(self, batch: Any) -> None:
        with self._counting_tokens:
            self.token_count += int(self._tokens(batch))  # type: ignore[misc]  # asked for by payload()
        if self._counting_tokens.faults:
            self._tokens = None


def _safe(entry: Loader) -> Size:
    samples: Any = entry.samples
    counting = _counting("samples", entry)

    def size(batch: Any) -> int:
        with counting:
            return max(0, int(samples(batch))) + 1
        return 0  # unknown, training goes on

    return size


def _counting(what: str, entry: Loader) -> Guard:
    """Logs the first error of a function that counts. It is called on: a batch of another kind may come."""
    return Guard(f"{what}= of loader {entry.name!r}", limit=sys.maxsize)


def _weak(loader: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(loader)
    except TypeError:  # a list, say: we may not keep it alive
        return lambda: None


class Opening(FastNamedTuple):
    """A call of a loader's ``__iter__``.

    Attributes:
        ask: event word that begins ``next`` of the pass.
        made: torch's iterators that were made for it.
    """

    ask: int
    made: list[Any]


def end_pass(attributes: dict[str, Any]) -> None:
    """Ends the pass of an iterator that is disposed of, in the thread that made it. ``attributes``: those of the iterator."""
    write_of_pass(attributes, lambda probe, ask: probe.pass_end(ask))


def write_of_pass(attributes: dict[str, Any], word: Callable[[LoaderProbe, int], int]) -> None:
    """Writes what ``word`` gives for the probe and the pass of an iterator that is disposed of."""
    probe, ask = attributes.get(PROBE), attributes.get(ASK)
    if probe is None or ask is None or get_ident() != attributes.get(OWNER):
        return
    try:
        probe.edge(word(probe, ask))
    except Exception:  # noqa: BLE001  # the interpreter may be ending, and nothing may be raised here
        return


def _given(iterator: Any) -> tuple[int, int | None]:  # Any: torch's iterator
    """Returns the batches that an iterator has returned, and how many it had announced; None if it had not.

    ``len()`` of an iterable-style loader is not asked for, because it has side effects: only what the program
    asked for itself is a promise. Each worker may drop, or give, a last batch that is not full.
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
    except Exception:  # noqa: BLE001  # a user-defined sampler may have no length
        return 0, None
    return given, least
