"""Instruments loaders in their iterator's ``__next__``: data wait, samples, bytes, batches left at the end."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from _thread import get_ident
from collections import Counter
from inspect import isgeneratorfunction
from operator import attrgetter
from time import perf_counter_ns
from types import FunctionType, GeneratorType
from typing import TYPE_CHECKING, Any

from otel_train.fast_classes import FastNamedTuple, fast_dataclass
from otel_train.instrumentation.batch_size import BatchBytes, Size, size_of_batches, weigh
from otel_train.instrumentation.dataloader_workers import (
    INIT,
    POOL,
    LoaderState,
    WorkerInit,
    WorkerPool,
    loader_state,
)
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
from otel_train.safety import Guard, replace, waited_before

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from otel_train.instrumentation.naming import Loader
    from otel_train.recording.recorder import Recorder

PROBE = "_otel_train_probe"
ASK = "_otel_train_ask"
"""The word that begins an ask of an iterator: it has the number of the pass."""
_FRESH = "_otel_train_fresh"
"""Whether the iterator is being made: its first pass has a number already."""
OWNER = "_otel_train_thread"
NEXT = "_otel_train_next"
"""What ``__next__`` in C calls."""
OTHER = "_OTHER"

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


class MadeLoaders:
    """Creation times of DataLoaders that are alive."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}

    def add(self, loader: Any) -> None:
        """Records when a DataLoader is made."""
        key = id(loader)

        def forget(gone: weakref.ref[Any]) -> None:
            if key in self._made and self._made[key][0] is gone:
                del self._made[key]

        self._made[key] = (weakref.ref(loader, forget), perf_counter_ns())

    def at_ns(self, loader: Any) -> int:
        """Returns when a DataLoader was made; 0 where that was not recorded."""
        made = self._made.get(id(loader))
        return made[1] if made is not None and made[0]() is loader else 0


class DataLoaderPatch:
    """Instruments every ``DataLoader`` and iterator created from now on, until ``remove``.

    Args:
        probe_for: gives the probe of a loader, also of one that was given no name.
        made: called with every DataLoader that is made.
    """

    def __init__(
        self, probe_for: Callable[[Any], LoaderProbe | None], made: Callable[[Any], None] = lambda _: None
    ) -> None:
        from torch.utils.data import dataloader

        self._probe_for = probe_for
        self._made = made
        self._timed: Callable[[type], type] = functools.cache(_timed_subclass)
        self._unasked: Callable[[type], type] = functools.cache(_unasked_subclass)
        self._adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        self.made = MadeLoaders()
        self._base = dataloader._BaseDataLoaderIter  # noqa: SLF001  # the only one
        self._kinds = {self._base}
        self._undecided: Callable[[type], type] = functools.cache(self._undecided_subclass)
        self._loops: set[Any] = set()
        self._read_beside: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo = [
            replace(self._base, "__init__", self._adopting),
            replace(dataloader.DataLoader, "__init__", self._making),
        ]
        self._find_kinds(self._base)
        self._openers: set[Any] = set()
        self._find_openers(dataloader.DataLoader)

    def adopt(self, iterator: Any, loader: Any) -> None:
        """Times an iterator that exists already, such as one with persistent workers."""
        probe = self._probe_for(loader)
        if probe is None or PROBE in iterator.__dict__:
            return
        workers = getattr(iterator, "_num_workers", 0)
        if workers:
            pool = WorkerPool(iterator, None if hasattr(iterator, "_workers") else workers)
            iterator.__dict__[POOL] = pool
            probe.pools.append(pool)
            probe.changed()
        iterator.__dict__[PROBE] = probe
        iterator.__dict__.setdefault(ASK, probe.next_pass())
        iterator.__dict__[OWNER] = get_ident()
        self._adopted.add(iterator)
        opening = probe.opened_by()
        if opening is not None:  # what the loop asks is not known yet
            opening.made.append(iterator)
        if opening is not None or probe.passed_on:
            iterator.__class__ = self._unasked(type(iterator))
        elif probe.beginning:
            iterator.__class__ = self._undecided(type(iterator))
        else:
            self._time(iterator, type(iterator), probe)

    def _time(self, iterator: Any, kind: type, probe: LoaderProbe) -> None:
        """Times ``next`` of an iterator. ``kind``: its class."""
        if ring_buffer.EXTENSION is not None:
            hook = iterator.__dict__[NEXT] = probe.batch_hook(kind.__next__)  # type: ignore[attr-defined]  # an iterator's
            hook.ask = iterator.__dict__[ASK]
        iterator.__class__ = self._timed(kind)
        # Its attributes now share no layout with others of its class: in a dict made anew they are found a third of a
        # microsecond sooner, in all that torch does for a batch.
        iterator.__dict__ = dict(iterator.__dict__.items())
        probe.runs(iterator)

    def remove(self) -> None:
        """Gives every living iterator its own class back, then undoes the wraps."""
        for iterator in list(self._adopted):
            iterator.__class__ = type(iterator).__mro__[1]
            for name in (PROBE, ASK, NEXT, POOL, _FRESH, OWNER):
                iterator.__dict__.pop(name, None)
        for undo in self._undo:
            undo()

    def _find_kinds(self, base: Any) -> None:  # Any: a class
        """Times the making of every kind of iterator: torch's two, and those of other packages."""
        for kind in base.__subclasses__():
            if kind not in self._kinds and "__init__" in vars(kind):
                self._undo.append(replace(kind, "__init__", self._starting))
            self._kinds.add(kind)
            self._find_kinds(kind)

    def _find_openers(self, base: Any) -> None:  # Any: a class of loaders
        """Times what loaders of all classes derived from ``base`` return in place of torch's iterator."""
        for kind in base.__subclasses__():
            self._follow_openings(kind)
            self._find_openers(kind)

    def _follow_openings(self, kind: Any) -> None:  # Any: as above
        """Times what loaders of a class return from ``__iter__``, if that or ``_get_iterator`` is not torch's."""
        if kind in self._openers:
            return
        self._openers.add(kind)
        self._follow_loops(kind)
        if opens_itself(kind):
            self._undo.append(replace(kind, "__iter__", self._opening))

    def _opening(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def __iter__(loader: Any) -> Any:  # noqa: N807  # in its place
            probe = self._probe_for(loader)
            thread = get_ident()
            if probe is None or thread in probe.opening:  # called by that of a class derived from this one
                return original(loader)
            opening = probe.opening[thread] = Opening(probe.next_pass(), [])
            self._await(loader, opening)
            try:
                iterator = original(loader)
            finally:
                del probe.opening[thread]
            return self._opened(iterator, loader, probe, opening)

        return __iter__

    def _await(self, loader: Any, opening: Opening) -> None:
        """Times no iterator that a loader keeps until its ``__iter__`` has returned."""
        for kept in iterators_of(loader):
            if PROBE in kept.__dict__:
                kept.__class__ = self._unasked(type(kept).__mro__[1])
                kept.__dict__.pop(NEXT, None)
                opening.made.append(kept)

    def _opened(self, iterator: Any, loader: Any, probe: LoaderProbe, opening: Opening) -> Any:
        """Returns what a loader has returned from ``__iter__``; timed, if it is neither torch's iterator nor a generator."""
        kind = type(iterator)
        timed = issubclass(kind, (self._base, _InstrumentedIterator, GeneratorType))
        probe.passed_on = hasattr(kind, "__next__") and not timed
        if probe.passed_on:
            return _timed_pass(iterator, loader, probe, opening.ask)
        for made in opening.made:
            self._time(made, type(made).__mro__[1], probe)
        return iterator

    def _follow_loops(self, kind: Any) -> None:  # Any: a class of loaders
        """Follows passes of loaders of a class, if its ``__iter__`` is a generator of its own."""
        owner = next((base for base in kind.__mro__ if "__iter__" in vars(base)), None)
        if owner not in self._loops and isgeneratorfunction(waited_before(getattr(owner, "__iter__", None))):
            self._loops.add(owner)
            self._undo.append(replace(owner, "__iter__", self._looping))

    def _looping(self, original: Callable[[Any], Generator[Any, Any, Any]]) -> Callable[[Any], Iterator[Any]]:
        """Returns an ``__iter__`` whose end, also by a break, ends the passes of the iterators that the loader keeps."""

        @functools.wraps(original)
        def __iter__(loader: Any) -> Iterator[Any]:  # noqa: N807  # in its place
            outermost = type(loader).__iter__ is __iter__  # or that of a class derived from this one calls it
            probe = self._probe_for(loader) if outermost else None
            try:
                return (yield from self._begun(original(loader), loader, probe))
            finally:
                for iterator in iterators_of(loader):
                    read_by_loop = iterator.__dict__.get(PROBE)
                    if read_by_loop is not None and not read_by_loop.passed_on:
                        _end_and_renumber(iterator.__dict__)

        return __iter__

    def _begun(
        self, generator: Generator[Any, Any, Any], loader: Any, probe: LoaderProbe | None
    ) -> Iterator[Any]:
        """Returns a generator of batches; it is timed here, if another thread asks torch's iterator."""
        if probe is None:
            return generator
        probe.passed_on = probe.passed_on or type(loader) in self._read_beside
        if probe.passed_on:
            return _timed_pass(generator, loader, probe, probe.next_pass())
        return self._first_read(generator, loader, probe)

    def _first_read(self, generator: Any, loader: Any, probe: LoaderProbe) -> Iterator[Any]:
        """Reads the first batch. The wait for one that another thread has read is the begin of the pass."""
        probe.beginning[get_ident()] = 0
        try:
            batch = next(generator)
        except StopIteration:
            return iter(())
        finally:
            ask = probe.waited() or probe.next_pass()
            probe.beginning.pop(get_ident(), None)  # a loader may iterate itself
        if not probe.passed_on:
            return _FirstRead(generator, batch)
        self._read_beside.add(type(loader))
        timed = _timed_pass(generator, loader, probe, ask, given=1)
        probe.edge(ask)
        probe.edge(probe.payload(batch))
        return _FirstRead(timed, batch)

    def _undecided_subclass(self, cls: Any) -> type:
        """Returns the class of an iterator that a generator has made, until it is asked."""

        def __next__(iterator: Any) -> Any:  # noqa: N807  # in its place
            if type(iterator) is undecided:
                self._decide(iterator, cls)
            return next(iterator)

        undecided = _asked_subclass(cls, __next__)
        return undecided

    def _decide(self, iterator: Any, kind: type) -> None:
        """Times ``next`` of an iterator, unless another thread than that of its generator asks it first. ``kind``: its class."""
        probe = iterator.__dict__[PROBE]
        probe.passed_on = bool(probe.beginning) and get_ident() not in probe.beginning
        if probe.passed_on:
            iterator.__class__ = self._unasked(kind)
        else:
            probe.waited()
            self._time(iterator, kind, probe)

    def _adopting(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # in its place
            if type(iterator) not in self._kinds:  # its package was imported later: in time for the next
                self._find_kinds(self._base)
            original(iterator, loader, *args, **kwargs)
            self.adopt(iterator, loader)

        return __init__

    def _starting(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # in its place
            probe = None if _FRESH in iterator.__dict__ else self._probe_for(loader)
            if probe is None or probe.is_read_beside:  # or that of a class derived from this one calls it
                original(iterator, loader, *args, **kwargs)
                return
            ask = iterator.__dict__[ASK] = probe.next_pass()
            iterator.__dict__[_FRESH] = True
            probe.edge(ask | START_BITS)
            try:
                original(iterator, loader, *args, **kwargs)
            finally:
                probe.edge(probe.started)
            probe.wait_on(ask)

        return __init__

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)  # whoever makes loaders again reads its signature
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # in its place
            original(loader, *args, **kwargs)
            self._follow_openings(type(loader))
            self.made.add(loader)
            self._made(loader)

        return __init__


def opens_itself(kind: Any) -> bool:  # Any: a class of DataLoaders
    """Returns whether what loaders of a class return from ``__iter__`` may be another object than torch's iterator, and is no generator."""
    return iterates_itself(kind) and not isgeneratorfunction(waited_before(kind.__iter__))


def iterates_itself(kind: Any) -> bool:  # Any: a class of DataLoaders
    """Returns whether what loaders of a class return from ``__iter__`` may be another object than torch's iterator."""
    from torch.utils.data import DataLoader

    own = any(getattr(kind, name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))
    return own and isinstance(kind.__iter__, FunctionType)


def _timed_subclass(cls: Any) -> type:
    ask_inner = cls.__next__

    def __next__(self: Any) -> Any:  # noqa: N807  # as above
        attributes = self.__dict__
        probe = attributes.get(PROBE)
        if probe is None:  # the session is over, and the program kept this method
            return ask_inner(self)
        edge = probe.edge
        edge(attributes[ASK])
        try:
            batch = ask_inner(self)
        except BaseException as error:
            edge(probe.raised(self, error))
            raise
        edge(probe.got | probe.size(batch) << PAYLOAD_SHIFT)
        return batch

    native = ring_buffer.EXTENSION
    return _asked_subclass(cls, __next__ if native is None else native.hook("__next__", cls))


def _asked_subclass(cls: Any, ask: Callable[[Any], Any]) -> type:
    """Returns the class of an iterator that is asked by ``ask``, whose workers are timed, and whose passes begin and end."""
    names = {"__next__": ask, "_reset": _resetting(cls), "__del__": _disposing(cls), INIT: WorkerInit()}
    return _subclass(cls, names)


def _unasked_subclass(cls: Any) -> type:
    """Returns the class of an iterator whose workers are timed, and whose passes begin; who asks it is not known, or timed itself."""
    return _subclass(cls, {"_reset": _resetting(cls), INIT: WorkerInit()})


def _subclass(cls: Any, names: Mapping[str, Any]) -> type:
    """Returns a class derived from ``cls`` that has ``names``, and looks like ``cls``."""
    made = type(cls.__name__, (cls,), {**names, "__module__": cls.__module__, "__doc__": cls.__doc__})
    made.__qualname__ = cls.__qualname__
    return made


def _resetting(cls: Any) -> Callable[..., None]:
    """Returns a ``_reset`` that begins a pass. One that its loop has left ends by that, where the workers persist."""
    reset_inner = cls._reset

    def _reset(self: Any, *args: Any, **kwargs: Any) -> None:
        attributes, probe = self.__dict__, self.__dict__[PROBE]
        if probe.is_read_beside:
            reset_inner(self, *args, **kwargs)
            return
        if not attributes.pop(_FRESH, False):
            _end_and_renumber(attributes)
        probe.edge(attributes[ASK] | START_BITS)
        probe.runs(self)
        try:
            reset_inner(self, *args, **kwargs)
        finally:
            probe.edge(probe.started)
            pool = attributes.get(POOL)
            if pool is not None:  # a new iterator resets itself when its workers run
                pool.complete()

    return _reset


def _disposing(cls: Any) -> Callable[[Any], None]:
    """Returns a ``__del__`` that calls that of the class and ends the pass. Until its workers have exited, the loader is waited for."""
    dispose_inner = getattr(cls, "__del__", None)

    def __del__(self: Any) -> None:  # noqa: N807  # in its place
        attributes = self.__dict__
        waits = attributes.get("_shutdown") is False
        if waits:
            _write_of_pass(attributes, lambda _, ask: ask | START_BITS)
        try:
            if dispose_inner is not None:
                dispose_inner(self)
        finally:
            if waits:
                _write_of_pass(attributes, lambda probe, _: probe.started)
            end_pass(attributes)

    return __del__


def iterators_of(loader: Any) -> list[Any]:  # Any: a DataLoader
    """Returns iterators that a loader keeps: with persistent workers, or one that it has made when it was made, and never ends."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    held = getattr(loader, "__dict__", {}).values()
    return [each for each in held if isinstance(each, _BaseDataLoaderIter)]


def end_pass(attributes: dict[str, Any]) -> None:
    """Ends the pass of an iterator that is disposed of, in the thread that made it. ``attributes``: those of the iterator."""
    _write_of_pass(attributes, lambda probe, ask: probe.pass_end(ask))


def _end_and_renumber(attributes: dict[str, Any]) -> None:
    """Ends the pass of an iterator that lives on: what it gives next is of another pass."""
    end_pass(attributes)
    attributes[ASK] = attributes[PROBE].next_pass()
    if NEXT in attributes:
        attributes[NEXT].ask = attributes[ASK]


def _write_of_pass(attributes: dict[str, Any], word: Callable[[LoaderProbe, int], int]) -> None:
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


class InstrumentedIterable:
    """An iterable whose ``next`` is timed; all other attributes are the iterable's. ``make``: makes an iterator of it."""

    def __init__(
        self, iterable: Any, probe: LoaderProbe, make: Callable[[Any], Iterator[Any]] = iter
    ) -> None:
        vars(self).update(_iterable=iterable, _probe=probe, _make=make, _given=0, _ask=0)

    def __iter__(self) -> Iterator[Any]:
        probe = self._probe
        probe.inner = lambda: None  # it is timed here, and not where the iterable asks what it holds
        probe.begins()
        probe.pass_starts()
        ask = probe.next_pass()
        probe.edge(ask | START_BITS)
        try:
            iterator = self._make(self._iterable)
            return _class_for(type(iterator))(iterator, self._iterable, probe, ask)
        finally:
            probe.edge(probe.started)

    def __next__(self) -> Any:
        own = vars(self)  # an attribute that is set is the iterable's
        if not self._given:
            own["_ask"] = self._probe.next_pass()
        try:
            batch = _asked(self._iterable, self._iterable, self._probe, self._ask, given=self._given)
        except StopIteration:
            own["_given"] = 0  # it may begin again
            raise
        own["_given"] += 1
        return batch

    def __len__(self) -> int:
        return len(self._iterable)

    def __getattr__(self, name: str) -> Any:
        if name == "_iterable":  # not set yet, while unpickling
            raise AttributeError(name)
        return getattr(self._iterable, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._iterable, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._iterable, name)


class _InstrumentedIterator:
    """An iterator whose ``next`` is timed; in all else it is the iterator, whose special methods ``_timed_iterator`` adds."""

    def __init__(
        self, iterator: Iterator[Any], iterable: Any, probe: LoaderProbe, ask: int, *, given: int = 0
    ) -> None:
        vars(self).update(
            _ask=ask, _thread=get_ident(), _iterator=iterator, _iterable=iterable, _probe=probe, _given=given
        )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = _asked(self._iterator, self._iterable, self._probe, self._ask, given=self._given)
        vars(self)["_given"] += 1  # an attribute that is set is the iterator's
        return batch

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator":
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._iterator, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._iterator, name)

    def __del__(self) -> None:
        end_pass({PROBE: self._probe, ASK: self._ask, OWNER: self._thread})


class _FirstRead:
    """A generator whose first batch has been read: gives that, then what the generator gives. What is sent or thrown reaches it."""

    def __init__(self, generator: Any, batch: object) -> None:
        self._generator, self._first = generator, [batch]
        self.send, self.throw, self.close = generator.send, generator.throw, generator.close

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._first.pop() if self._first else next(self._generator)


_MADE_BY_PYTHON = frozenset(
    {"__class__", "__class_getitem__", "__getattribute__", "__init_subclass__", "__new__", "__subclasshook__"}
)
"""Special methods that an instance does not have, or that find the others."""


@functools.lru_cache(maxsize=64)
def _timed_iterator(kind: type) -> Callable[..., _InstrumentedIterator]:
    """Returns the class of timed iterators that have the special methods of ``kind``, which Python looks up in classes."""

    def forward(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = getattr(self._iterator, name)(*args, **kwargs)
            return self if given is self._iterator else given  # as of ``__enter__``

        return method

    special = {name for name in dir(kind) if name[:2] == "__" and callable(getattr(kind, name, None))}
    own = {name for name in special if getattr(kind, name) is not getattr(object, name, None)}
    names = (own | {"__reduce_ex__"}) - vars(_InstrumentedIterator).keys() - _MADE_BY_PYTHON
    passes_for = property(lambda self: type(self._iterator))  # ``isinstance`` asks for it
    return type(
        kind.__name__,
        (_InstrumentedIterator,),
        {"__class__": passes_for, **{name: forward(name) for name in names}},
    )


def _class_for(kind: type) -> Callable[..., _InstrumentedIterator]:
    try:
        return _timed_iterator(kind)
    except Exception:  # noqa: BLE001 - a metaclass may raise anything
        return _InstrumentedIterator


def _timed_pass(
    iterator: Iterator[Any], loader: Any, probe: LoaderProbe, ask: int, *, given: int = 0
) -> _InstrumentedIterator:
    """Begins a pass of a loader that a loop asks in place of torch's iterator. Returns what it asks, timed; it has ``given`` batches."""
    probe.begins()
    sized = loader if probe.sized else None
    return _class_for(type(iterator))(iterator, sized, probe, ask, given=given)


def _asked(iterator: Iterator[Any], iterable: Any, probe: LoaderProbe, ask: int, *, given: int) -> Any:
    edge = probe.edge
    edge(ask)
    try:
        batch = next(iterator)
    except StopIteration:
        edge(probe.stopped(given, _promised(iterable)))
        raise
    except BaseException as error:
        edge(probe.failed(error))
        raise
    edge(probe.payload(batch))
    return batch


def _promised(iterable: Any) -> int | None:  # Any: the user's own
    """Returns the length of an iterator, if it has one."""
    try:
        return len(iterable)
    except Exception:  # noqa: BLE001  # the user's __len__ may raise anything
        return None
