"""Instruments loaders in their iterator's ``__next__``: data wait, samples, bytes, batches left at the end."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import isgeneratorfunction
from itertools import islice
from operator import attrgetter
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.fast_classes import fast_dataclass
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
    OP_MASK,
    PAYLOAD_SHIFT,
    SOURCE_MASK,
    SOURCE_SHIFT,
    START_BITS,
    Ending,
    Flag,
    Op,
    SourceKind,
    code,
)
from otel_train.safety import Guard, replace

if TYPE_CHECKING:
    from otel_train.instrumentation.naming import Loader
    from otel_train.recording.recorder import Recorder
    from otel_train.recording.ring_buffer import EdgeBatch, Ring

MOST_PARTS = 256
"""Parts of a batch that are looked at: some 0.1 ms. A batch of more is not weighed, and its loader no more."""

_PLAIN = (int, float, str, bytes, type(None))


def weigh(batch: Any) -> int | None:  # Any: whatever a loader yields
    """Returns the bytes of the arrays in a batch: every ``nbytes`` in mappings, sequences and dataclasses.

    None where no array was found, or too many parts. Never raises, copies nothing, waits for no device.
    """
    arrays, parts = [], [batch]
    for number, part in enumerate(parts):  # the list grows while it is gone through
        if number == MOST_PARTS:
            return None
        try:
            nbytes = getattr(part, "nbytes", None)
            if nbytes is not None:
                arrays.append(int(nbytes))
            else:
                parts += _inner(part)
        except Exception:  # noqa: BLE001, S112  # the user's object may raise anything
            continue
    return sum(arrays) if arrays else None


def _inner(part: Any) -> Iterable[Any]:  # Any: a part of a batch
    """Objects in ``item`` that may contain arrays."""
    if isinstance(part, (list, tuple)):
        if part and isinstance(part[0], _PLAIN):  # identifiers, texts
            return [inner for inner in part[:MOST_PARTS] if not isinstance(inner, _PLAIN)]
        return part[:MOST_PARTS]
    if isinstance(part, _PLAIN):
        return ()
    if isinstance(part, Mapping):
        return islice(part.values(), MOST_PARTS)
    if hasattr(part, "__dataclass_fields__"):
        return list(vars(part).values())
    return ()


class BatchBytes:
    """Statistics of the bytes of a loader's batches. The training thread writes, the service thread reads.

    Attributes:
        hopeless: a batch could not be weighed.
    """

    def __init__(self) -> None:
        self.hopeless = False
        self._least = self._most = self._sum = self._number = 0

    def add(self, nbytes: int | None) -> None:
        """Adds the weight of one batch."""
        if nbytes is None:
            self.hopeless = True
            return
        self._least = min(nbytes, self._least) if self._number else nbytes
        self._most = max(nbytes, self._most)
        self._sum += nbytes
        self._number += 1

    @property
    def mean(self) -> float | None:
        """Bytes per batch; None when none was weighed."""
        return self._sum / self._number if self._number else None

    def row(self) -> dict[str, float] | None:
        """Returns the row for the summary; None when none was weighed."""
        mean = self.mean
        if mean is None:
            return None
        return {"sampled": self._number, "min": self._least, "avg": mean, "max": self._most}


Size = Callable[[Any], int]
"""From a batch to its number of samples plus one; 0 where that is unknown. Never raises."""

_DEEPEST = 4
_WIDEST = 4


def size_of_batches(first: Any, batch_size: int | None) -> Size:
    """Returns the reader that suits batches shaped like ``first``.

    A candidate is the leading dimension of an array, or the length of a sequence. Among them the first that
    equals ``batch_size`` wins, else the first array, else the first sequence of plain values.
    """
    candidates = list(_candidates(first, ()))
    fits = [c for c in candidates if c[1] == batch_size]
    arrays = [c for c in candidates if c[2]]
    for path, _, is_array in (fits or arrays or candidates)[:1]:
        return _reader(path, is_array=is_array)
    return lambda _: 0


def _candidates(item: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], int, bool]]:
    """Yields (path, samples, is it an array's leading dimension), outermost first for equal kinds."""
    shape = getattr(item, "shape", None)
    if shape is not None:
        if len(shape):
            yield path, int(shape[0]), True
    elif len(path) < _DEEPEST and isinstance(item, Mapping):
        for key in list(item)[:8]:
            yield from _candidates(item[key], (*path, key))
    elif isinstance(item, Sequence) and not isinstance(item, (str, bytes)) and len(item):
        for place in range(min(len(item), _WIDEST) if len(path) < _DEEPEST else 0):
            yield from _candidates(item[place], (*path, place))
        yield path, len(item), False


def _reader(path: tuple[Any, ...], *, is_array: bool) -> Size:
    if is_array and len(path) == 1:  # by far the commonest: the first of a list or of a mapping
        key = path[0]
        if ring_buffer.EXTENSION is not None:
            torch: Any = sys.modules.get("torch")  # a program that has a tensor has imported it
            base = getattr(getattr(torch, "_C", None), "TensorBase", None)  # whose len() makes no shape
            of_tensors = () if base is None else (torch.Tensor, base)
            leading: Size = ring_buffer.EXTENSION.hook("leading", (None, key, *of_tensors))
            return leading

        def read_first(batch: Any) -> int:
            try:
                return int(batch[key].shape[0]) + 1
            except Exception:  # noqa: BLE001  # a batch of another shape: its size is not known
                return 0

        return read_first

    def read(batch: Any) -> int:
        try:
            for key in path:
                batch = batch[key]
            return int(batch.shape[0] if is_array else len(batch)) + 1
        except Exception:  # noqa: BLE001  # as above
            return 0

    return read


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
    """

    def __init__(self, entry: Loader, recorder: Recorder) -> None:
        loader = entry.loader
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

    def begins(self, iterator: Any) -> None:
        """Records that a pass begins."""
        self.awaited = False
        self.began_ns = perf_counter_ns()
        self._running.add(iterator)

    def ends(self, iterator: Any) -> None:
        """Records the end of a pass."""
        self._running.discard(iterator)

    def next_pass(self) -> int:
        """Returns the event word that begins ``next`` of a new pass."""
        return self.ask | next(_passes) << PAYLOAD_SHIFT

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
        self._adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        self.made = MadeLoaders()
        self._base = dataloader._BaseDataLoaderIter  # noqa: SLF001  # the only one
        self._kinds = {self._base}
        self._loops: set[Any] = set()
        self._undo = [
            replace(self._base, "__init__", self._adopting),
            replace(dataloader.DataLoader, "__init__", self._making),
        ]
        self._find_kinds(self._base)

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
        if ring_buffer.EXTENSION is not None:
            hook = iterator.__dict__[NEXT] = probe.batch_hook(type(iterator).__next__)
            hook.ask = iterator.__dict__[ASK]
        iterator.__class__ = self._timed(type(iterator))
        # Its attributes now share no layout with others of its class: in a dict made anew they are found a third of a
        # microsecond sooner, in all that torch does for a batch.
        iterator.__dict__ = dict(iterator.__dict__.items())
        self._adopted.add(iterator)
        self._follow_loops(type(loader))
        probe.begins(iterator)

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

    def _follow_loops(self, kind: Any) -> None:  # Any: a class of loaders
        """Ends the pass of an iterator that a loader keeps when a loop over the loader ends, if its ``__iter__`` is a generator of its own."""
        owner = next((base for base in kind.__mro__ if "__iter__" in vars(base)), None)
        if owner not in self._loops and isgeneratorfunction(getattr(owner, "__iter__", None)):
            self._loops.add(owner)
            self._undo.append(replace(owner, "__iter__", _looping))

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
            if probe is None:  # or it is called by that of a class derived from this one
                original(iterator, loader, *args, **kwargs)
                return
            ask = iterator.__dict__[ASK] = probe.next_pass()
            iterator.__dict__[_FRESH] = True
            probe.edge(ask | START_BITS)
            try:
                original(iterator, loader, *args, **kwargs)
            finally:
                probe.edge(probe.started)

        return __init__

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)  # whoever makes loaders again reads its signature
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # in its place
            original(loader, *args, **kwargs)
            self.made.add(loader)
            self._made(loader)

        return __init__


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
    timed_next = __next__ if native is None else native.hook("__next__", cls)
    names = {
        "__next__": timed_next,
        "_reset": _resetting(cls),
        "__del__": _disposing(cls),
        INIT: WorkerInit(),
    }
    timed = type(cls.__name__, (cls,), {**names, "__module__": cls.__module__, "__doc__": cls.__doc__})
    timed.__qualname__ = cls.__qualname__
    return timed


def _resetting(cls: Any) -> Callable[..., None]:
    """Returns a ``_reset`` that begins a pass. One that its loop has left ends by that, where the workers persist."""
    reset_inner = cls._reset

    def _reset(self: Any, *args: Any, **kwargs: Any) -> None:
        attributes, probe = self.__dict__, self.__dict__[PROBE]
        if not attributes.pop(_FRESH, False):
            _end_and_renumber(attributes)
        probe.edge(attributes[ASK] | START_BITS)
        probe.begins(self)
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


def _looping(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """Returns an ``__iter__`` whose end, also by a break, ends the passes of the iterators that the loader keeps."""

    @functools.wraps(original)
    def __iter__(loader: Any) -> Iterator[Any]:  # noqa: N807  # in its place
        try:
            return (yield from original(loader))
        finally:
            for iterator in iterators_of(loader):
                if PROBE in iterator.__dict__:
                    _end_and_renumber(iterator.__dict__)

    return __iter__


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


NS_PER_MS = 1e6
_MANY = 512
"""Edges from which on numpy is quicker than Python."""


class LastBatch:
    """Loader and fetch time of a thread's last batch, read from its ring on demand; each event is read once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._ring: Ring | None = None
        self._begin(None)

    def _begin(self, ring: Ring | None) -> None:
        self._ring = ring
        self._read_until = 0
        self._open: dict[int, int] = {}
        self._source = -1
        self._fetch_ns: int | None = None

    @property
    def loader(self) -> str | None:
        """Its loader; None if the calling thread has fetched none."""
        self._read_ring()
        return self._recorder.sources[self._source].name if self._source >= 0 else None

    @property
    def fetch_ms(self) -> float | None:
        """Milliseconds that the calling thread waited for it; None if that is not known."""
        self._read_ring()
        return self._fetch_ns / NS_PER_MS if self._fetch_ns is not None else None

    def _read_ring(self) -> None:
        thread = self._recorder.calling_thread()
        ring = thread.ring if thread is not None else None
        if ring is not self._ring:
            self._begin(ring)
        if ring is None or ring.written == self._read_until:
            return
        new = ring.peek(self._read_until)
        self._read_until += new.missed + len(new.codes)
        if new.missed:
            self._open.clear()
        sources = self._recorder.sources
        for word, at_ns in zip(*self._asks(new), strict=True):
            op, source = word & OP_MASK, word >> SOURCE_SHIFT & SOURCE_MASK
            if sources[source].kind is not SourceKind.DATA or word & START_BITS:
                continue
            if op == Op.BEGIN:
                self._open[source] = at_ns
                continue
            begun_ns = self._open.pop(source, None)
            if op == Op.END:
                self._source = source
                self._fetch_ns = at_ns - begun_ns if begun_ns is not None else None

    def _asks(self, new: EdgeBatch) -> tuple[list[int], list[int]]:
        """Codes and times of events about batches."""
        codes, times = new.codes, new.times
        if len(codes) > _MANY:
            data = [n for n, source in enumerate(self._recorder.sources) if source.kind is SourceKind.DATA]
            mine = np.isin(codes >> SOURCE_SHIFT & SOURCE_MASK, data)
            codes, times = codes[mine], times[mine]
        return codes.tolist(), times.tolist()


class InstrumentedIterable:
    """An iterable whose ``next`` is timed; all other attributes are the iterable's. ``make``: makes an iterator of it."""

    def __init__(
        self, iterable: Any, probe: LoaderProbe, make: Callable[[Any], Iterator[Any]] = iter
    ) -> None:
        vars(self).update(_iterable=iterable, _probe=probe, _make=make, _given=0, _ask=0)

    def __iter__(self) -> Iterator[Any]:
        probe = self._probe
        probe.inner = lambda: None  # it is timed here, and not where the iterable asks what it holds
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

    def __init__(self, iterator: Iterator[Any], iterable: Any, probe: LoaderProbe, ask: int) -> None:
        vars(self).update(
            _ask=ask, _thread=get_ident(), _iterator=iterator, _iterable=iterable, _probe=probe, _given=0
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
