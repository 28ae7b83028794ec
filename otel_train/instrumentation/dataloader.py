"""Batches, seen in the iterator's own ``__next__``.

The loader object is never touched. ``_BaseDataLoaderIter.__init__`` is wrapped, and there the new
iterator's class becomes a cached subclass of its own class whose ``__next__`` is timed: ``isinstance``,
``len(iter(loader))``, persistent workers, ``StatefulDataLoader`` and the loader's pickle stay as they were.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from _thread import get_ident
from collections import Counter
from operator import attrgetter
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from otel_train.instrumentation.batch_bytes import BatchBytes, weigh
from otel_train.instrumentation.batch_size import size_of_batches
from otel_train.instrumentation.patching import replace
from otel_train.instrumentation.worker_pool import CREW, INIT, WorkerInit, WorkerPool
from otel_train.recording.events import FLAG_SHIFT, PAYLOAD_SHIFT, Ending, Flag, Op, SourceKind, code

if TYPE_CHECKING:
    from collections.abc import Callable

    from otel_train.instrumentation.batch_size import Size
    from otel_train.recording.recorder import Recorder

PROBE = "_otel_train_probe"
ASK = "_otel_train_ask"
"""The word that begins an ask of an iterator: it has the number of the pass."""
_FRESH = "_otel_train_fresh"
"""The iterator is being made: its first pass has a number already."""
OWNER = "_otel_train_thread"
OTHER = "_OTHER"

_MAP_STYLE = 0
_PASS = attrgetter("_num_yielded", "_dataset_kind")
_STREAM = attrgetter("_IterableDataset_len_called", "_index_sampler", "_drop_last", "_num_workers")
"""What torch's iterators know of themselves."""


_passes = itertools.count(1)
"""Numbers of passes, over all loaders of the process."""

START_BITS = int(Flag.START) << FLAG_SHIFT


class LoaderProbe:
    """What the iterators of one loader need: codes, the reader of batch sizes, a count of tokens.

    Attributes:
        token_count: tokens counted so far.
        failures: exceptions that left it, by class.
        weights: bytes of the batches that were weighed.
        crews: workers of its iterators, until all about them is known.
        workers: its ``num_workers``; None where it has no such setting.
        prefetch_factor: batches that each worker reads ahead; None where it has none.
        persistent: its workers live on from pass to pass.
        sized: it knows how many batches it has.
        loader: gives the loader, while it lives.
        inner: gives the DataLoader that iterates in its place, if there is one.
        given: the program gave it; else it was found when it was first iterated.
        awaited: it has its name, and its first pass begins any moment.
        began_ns: when its newest pass began, on the clock of ``MadeLoaders``; 0 before the first.

    Args:
        loader: held weakly where its type allows.
        name: as it reads in every figure.
        recorder: takes the edges.
        phase: declared by the user, or "".
        samples: from a batch to its samples, by the user; else found.
        tokens: from a batch to its tokens, by the user; else unknown.
    """

    def __init__(
        self,
        loader: Any,
        name: str,
        recorder: Recorder,
        *,
        phase: str = "",
        samples: Callable[[Any], int] | None = None,
        tokens: Callable[[Any], int] | None = None,
    ) -> None:
        self.name = name
        self.phase = phase
        self.source = recorder.source(SourceKind.DATA, name, phase)
        self.token_count = 0
        self.failures: Counter[str] = Counter()
        self.weights = BatchBytes()
        self.crews: list[WorkerPool] = []
        self.edge = recorder.edge
        self.ask, self.got = code(Op.BEGIN, self.source), code(Op.END, self.source)
        self.stop, self.fail = code(Op.STOP, self.source), code(Op.FAIL, self.source)
        self.gone = code(Op.PASS_END, self.source)
        self.started = code(Op.END, self.source, Flag.START)
        self._read_size: Size = self._learn if samples is None else _safe(samples)
        self.size: Size = self._weigh
        self._tokens = tokens
        self._batch_size = getattr(loader, "batch_size", None)
        self.workers: int | None = getattr(loader, "num_workers", None)
        self.prefetch_factor: int | None = getattr(loader, "prefetch_factor", None)
        self.persistent: bool | None = getattr(loader, "persistent_workers", None)
        kind = getattr(
            loader, "_dataset_kind", None
        )  # len() of an iterable-style DataLoader has side effects
        self.sized = kind == 0 if kind is not None else hasattr(loader, "__len__")
        self.loader = _weak(loader)
        self.inner: Callable[[], Any] = lambda: None
        self.began_ns = 0
        self.given = True
        self.awaited = False
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def running(self) -> bool:
        """An iterator of it is alive and has not come to its end."""
        return len(self._running) > 0

    def begins(self, iterator: Any) -> None:
        """A pass begins."""
        self.awaited = False
        self.began_ns = perf_counter_ns()
        self._running.add(iterator)

    def ends(self, iterator: Any) -> None:
        """A pass has come to its end."""
        self._running.discard(iterator)

    def next_pass(self) -> int:
        """The word that begins an ask of a new pass."""
        return self.ask | next(_passes) << PAYLOAD_SHIFT

    def pass_end(self, ask: int) -> int:
        """The word that ends a pass whose iterator is disposed of. ``ask``: the word that began its asks."""
        return self.gone | ask >> PAYLOAD_SHIFT << PAYLOAD_SHIFT

    def payload(self, batch: Any) -> int:
        """The word that ends the ask for ``batch``."""
        if self._tokens is not None:
            self._count_tokens(batch)
        return self.got | self.size(batch) << PAYLOAD_SHIFT

    def stopped(self, given: int, promised: int | None) -> int:
        """The word that ends an ask at the end of the loader.

        Args:
            given: batches of this pass.
            promised: batches that it said it would have; None where it did not.
        """
        ending = Ending.STREAMING_END
        if promised is not None:
            ending = Ending.EPOCH_END if given >= promised else Ending.SHORT
        return self.stop | ending << PAYLOAD_SHIFT

    def failed(self, error: BaseException) -> int:
        """The word that ends an ask that raised. Ctrl-C is no fault of the loader's."""
        if not isinstance(error, Exception):
            return self.fail
        self.failures[type(error).__name__] += 1
        return self.fail | Ending.ERROR << PAYLOAD_SHIFT

    def weigh_next(self) -> None:
        """Weigh the next batch: asked for now and then, because it costs microseconds."""
        if not self.weights.hopeless:
            self.size = self._weigh

    def inherit(self, before: LoaderProbe) -> None:
        """Go on with the figures of a loader of the same name: folds, sweeps."""
        self.token_count, self.failures = before.token_count, before.failures
        self.weights, self.crews = before.weights, before.crews

    def _weigh(self, batch: Any) -> int:
        self.weights.add(weigh(batch))
        size = self._read_size(batch)  # which may be another one after the first batch
        self.size = self._read_size
        return size

    def _learn(self, batch: Any) -> int:
        try:
            self._read_size = size_of_batches(batch, self._batch_size)
        except Exception:  # noqa: BLE001  # somebody else's container may raise anything
            self._read_size = lambda _: 0
        return self._read_size(batch)

    def _count_tokens(self, batch: Any) -> None:
        try:
            self.token_count += int(self._tokens(batch))  # type: ignore[misc]  # asked for by payload()
        except Exception:  # noqa: BLE001  # a count that fails is absent, training goes on
            self._tokens = None


def _safe(samples: Callable[[Any], int]) -> Size:
    def size(batch: Any) -> int:
        try:
            return max(0, int(samples(batch))) + 1
        except Exception:  # noqa: BLE001  # a count that fails is unknown, training goes on
            return 0

    return size


def _weak(loader: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(loader)
    except TypeError:  # a list, say: nothing of ours may keep it alive
        return lambda: None


class MadeLoaders:
    """Remembers when DataLoaders were made, while they live."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Any], int]] = {}

    def add(self, loader: Any) -> None:
        """A DataLoader is made."""
        key = id(loader)

        def forget(gone: weakref.ref[Any]) -> None:
            if key in self._made and self._made[key][0] is gone:
                del self._made[key]

        self._made[key] = (weakref.ref(loader, forget), perf_counter_ns())

    def at_ns(self, loader: Any) -> int:
        """When a DataLoader was made; 0 where nobody looked."""
        made = self._made.get(id(loader))
        return made[1] if made is not None and made[0]() is loader else 0


class DataLoaderPatch:
    """Sees every ``DataLoader`` and its iterators made from now on, until ``remove``.

    Args:
        probe_for: gives the probe of a loader, also of one that nobody named.
    """

    def __init__(self, probe_for: Callable[[Any], LoaderProbe | None]) -> None:
        from torch.utils.data import dataloader

        self._probe_for = probe_for
        self._classes: dict[type, type] = {}
        self._adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        self.made = MadeLoaders()
        self._undo: list[Callable[[], None]] = []
        self._wrap_init(dataloader._BaseDataLoaderIter, self._adopting)  # noqa: SLF001  # see above
        for concrete in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
            self._wrap_init(getattr(dataloader, concrete), self._starting)
        self._undo.append(replace(dataloader.DataLoader, "__init__", self._making))

    def adopt(self, iterator: Any, loader: Any) -> None:
        """Time an iterator that exists already, such as one with persistent workers."""
        probe = self._probe_for(loader)
        if probe is None or PROBE in iterator.__dict__:
            return
        workers = getattr(iterator, "_num_workers", 0)
        if workers:
            crew = WorkerPool(iterator, None if hasattr(iterator, "_workers") else workers)
            iterator.__dict__[CREW] = crew
            probe.crews.append(crew)
        iterator.__dict__[PROBE] = probe
        iterator.__dict__.setdefault(ASK, probe.next_pass())
        iterator.__dict__[OWNER] = get_ident()
        iterator.__class__ = self._timed(type(iterator))
        self._adopted.add(iterator)
        probe.begins(iterator)

    def remove(self) -> None:
        """Give every living iterator its own class back, then undo the wraps."""
        for iterator in list(self._adopted):
            iterator.__class__ = type(iterator).__mro__[1]
            for name in (PROBE, ASK, CREW, _FRESH, OWNER):
                iterator.__dict__.pop(name, None)
        for undo in self._undo:
            undo()

    def _wrap_init(self, cls: Any, make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        def named(original: Callable[..., None]) -> Callable[..., None]:
            wrapper = make(original)
            wrapper.__name__, wrapper.__qualname__ = original.__name__, original.__qualname__
            return wrapper

        self._undo.append(replace(cls, "__init__", named))

    def _adopting(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # in its place
            original(iterator, loader, *args, **kwargs)
            self.adopt(iterator, loader)

        return __init__

    def _starting(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # in its place
            probe = self._probe_for(loader)
            if probe is None:
                original(iterator, loader, *args, **kwargs)
                return
            ask = iterator.__dict__[ASK] = iterator.__dict__[_FRESH] = probe.next_pass()
            probe.edge(ask | START_BITS)
            try:
                original(iterator, loader, *args, **kwargs)
            finally:
                probe.edge(probe.started)

        return __init__

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        made = self.made

        @functools.wraps(original)  # whoever makes loaders again reads its signature
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # in its place
            original(loader, *args, **kwargs)
            made.add(loader)

        return __init__

    def _timed(self, cls: type) -> type:
        if cls not in self._classes:
            self._classes[cls] = _timed_subclass(cls)
        return self._classes[cls]


def _timed_subclass(cls: Any) -> type:
    ask_inner, reset_inner = cls.__next__, cls._reset

    def __next__(self: Any) -> Any:  # noqa: N807  # as above
        probe = self.__dict__[PROBE]
        edge = probe.edge
        edge(self.__dict__[ASK])
        try:
            batch = ask_inner(self)
        except StopIteration:
            edge(probe.stopped(*_given(self)))
            probe.ends(self)
            raise
        except BaseException as error:
            edge(probe.failed(error))
            raise
        edge(probe.payload(batch))
        return batch

    def _reset(self: Any, *args: Any, **kwargs: Any) -> None:
        probe = self.__dict__[PROBE]
        ask = self.__dict__[ASK] = self.__dict__.pop(_FRESH, None) or probe.next_pass()
        probe.edge(ask | START_BITS)
        probe.begins(self)
        try:
            reset_inner(self, *args, **kwargs)
        finally:
            probe.edge(probe.started)
            crew = self.__dict__.get(CREW)
            if crew is not None:  # a new iterator resets itself when its workers run
                crew.complete()

    names = {"__next__": __next__, "_reset": _reset, "__del__": _disposing(cls), INIT: WorkerInit()}
    timed = type(cls.__name__, (cls,), {**names, "__module__": cls.__module__, "__doc__": cls.__doc__})
    timed.__qualname__ = cls.__qualname__
    return timed


def _disposing(cls: Any) -> Callable[[Any], None]:
    """A ``__del__`` that ends the pass, and goes on with the class's own."""
    dispose_inner = getattr(cls, "__del__", None)

    def __del__(self: Any) -> None:  # noqa: N807  # in its place
        end_pass(self.__dict__)
        if dispose_inner is not None:
            dispose_inner(self)

    return __del__


def end_pass(attributes: dict[str, Any]) -> None:
    """An iterator is disposed of: its pass ends in the thread that made it. ``attributes``: those of the iterator."""
    probe, ask = attributes.get(PROBE), attributes.get(ASK)
    if probe is None or ask is None or get_ident() != attributes.get(OWNER):
        return
    try:
        probe.edge(probe.pass_end(ask))
    except Exception:  # noqa: BLE001  # the interpreter may be ending, and nothing may be raised here
        return


def _given(iterator: Any) -> tuple[int, int | None]:  # Any: torch's iterator
    """Batches that an iterator has given, and how many it had promised; None where it had not.

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
    except Exception:  # noqa: BLE001  # a sampler of the user's own may have no length
        return 0, None
    return given, least
