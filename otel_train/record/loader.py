"""Batches, seen in the iterator's own ``__next__``.

The loader object is never touched. ``_BaseDataLoaderIter.__init__`` is wrapped, and there the new
iterator's class becomes a cached subclass of its own class whose ``__next__`` is timed: ``isinstance``,
``len(iter(loader))``, persistent workers, ``StatefulDataLoader`` and the loader's pickle stay as they were.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from otel_train.codes import PAYLOAD_SHIFT, Flag, Op, SourceKind, code
from otel_train.record.samples import size_of_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from otel_train.record.recorder import Recorder
    from otel_train.record.samples import Size

PROBE = "_otel_train_probe"
OTHER = "_OTHER"


class LoaderProbe:
    """What the iterators of one loader need: codes, the reader of batch sizes, a count of tokens.

    Attributes:
        token_count: tokens counted so far.
        workers: its ``num_workers``; None where it has no such setting.
        sized: it knows how many batches it has.

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
        self.edge = recorder.edge
        self.ask, self.got = code(Op.BEGIN, self.source), code(Op.END, self.source)
        self.stop, self.fail = code(Op.STOP, self.source), code(Op.FAIL, self.source)
        self.start = code(Op.BEGIN, self.source, Flag.START)
        self.started = code(Op.END, self.source, Flag.START)
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self.size: Size = self._learn if samples is None else _safe(samples)
        self._tokens = tokens
        self._batch_size = getattr(loader, "batch_size", None)
        self.workers: int | None = getattr(loader, "num_workers", None)
        kind = getattr(
            loader, "_dataset_kind", None
        )  # len() of an iterable-style DataLoader has side effects
        self.sized = kind == 0 if kind is not None else hasattr(loader, "__len__")
        self.loader = _weak(loader)

    def payload(self, batch: Any) -> int:
        """The word that ends the ask for ``batch``."""
        if self._tokens is not None:
            self._count_tokens(batch)
        return self.got | self.size(batch) << PAYLOAD_SHIFT

    def _learn(self, batch: Any) -> int:
        try:
            self.size = size_of_batches(batch, self._batch_size)
        except Exception:  # noqa: BLE001  # somebody else's container may raise anything
            self.size = lambda _: 0
        return self.size(batch)

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


class DataLoaderPatch:
    """Sees every ``DataLoader`` iterator made from now on, until ``remove``.

    Args:
        probe_for: gives the probe of a loader, also of one that nobody named.
    """

    def __init__(self, probe_for: Callable[[Any], LoaderProbe | None]) -> None:
        from torch.utils.data import dataloader

        self._probe_for = probe_for
        self._classes: dict[type, type] = {}
        self._adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo: list[Callable[[], None]] = []
        self._wrap_init(dataloader._BaseDataLoaderIter, self._adopting)  # noqa: SLF001  # see above
        for concrete in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
            self._wrap_init(getattr(dataloader, concrete), self._starting)

    def adopt(self, iterator: Any, loader: Any) -> None:
        """Time an iterator that exists already, such as one with persistent workers."""
        probe = self._probe_for(loader)
        if probe is None or PROBE in iterator.__dict__:
            return
        iterator.__dict__[PROBE] = probe
        iterator.__class__ = self._timed(type(iterator))
        probe.iterators.add(iterator)
        self._adopted.add(iterator)

    def remove(self) -> None:
        """Give every living iterator its own class back, then undo the wraps."""
        for iterator in list(self._adopted):
            iterator.__class__ = type(iterator).__mro__[1]
            del iterator.__dict__[PROBE]
        for undo in self._undo:
            undo()

    def _wrap_init(self, cls: Any, make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        original: Callable[..., None] = cls.__init__
        wrapper = make(original)
        wrapper.__name__, wrapper.__qualname__ = original.__name__, original.__qualname__
        cls.__init__ = wrapper

        def undo() -> None:
            if cls.__init__ is wrapper:
                cls.__init__ = original

        self._undo.append(undo)

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
            probe.edge(probe.start)
            try:
                original(iterator, loader, *args, **kwargs)
            finally:
                probe.edge(probe.started)

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
        edge(probe.ask)
        try:
            batch = ask_inner(self)
        except StopIteration:
            edge(probe.stop)
            raise
        except BaseException:
            edge(probe.fail)
            raise
        edge(probe.payload(batch))
        return batch

    def _reset(self: Any, *args: Any, **kwargs: Any) -> None:
        probe = self.__dict__[PROBE]
        probe.edge(probe.start)
        try:
            reset_inner(self, *args, **kwargs)
        finally:
            probe.edge(probe.started)

    names = {"__next__": __next__, "_reset": _reset, "__module__": cls.__module__, "__doc__": cls.__doc__}
    timed = type(cls.__name__, (cls,), names)
    timed.__qualname__ = cls.__qualname__
    return timed


class Watched:
    """An iterable whose ``next`` is timed. Everything else is the iterable's own.

    Args:
        iterable: what the loop wanted to iterate.
        probe: how it is recorded.
    """

    def __init__(self, iterable: Any, probe: LoaderProbe) -> None:
        self._iterable = iterable
        self._probe = probe

    def __iter__(self) -> Iterator[Any]:
        probe = self._probe
        probe.edge(probe.start)
        try:
            return _WatchedIterator(iter(self._iterable), probe)
        finally:
            probe.edge(probe.started)

    def __next__(self) -> Any:
        return _ask(self._iterable, self._probe)

    def __len__(self) -> int:
        return len(self._iterable)

    def __getattr__(self, name: str) -> Any:
        if name == "_iterable":  # not set yet, while unpickling
            raise AttributeError(name)
        return getattr(self._iterable, name)


class _WatchedIterator:
    def __init__(self, iterator: Iterator[Any], probe: LoaderProbe) -> None:
        self._iterator = iterator
        self._probe = probe

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _ask(self._iterator, self._probe)

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator":
            raise AttributeError(name)
        return getattr(self._iterator, name)


def _ask(iterator: Iterator[Any], probe: LoaderProbe) -> Any:
    edge = probe.edge
    edge(probe.ask)
    try:
        batch = next(iterator)
    except StopIteration:
        edge(probe.stop)
        raise
    except BaseException:
        edge(probe.fail)
        raise
    edge(probe.payload(batch))
    return batch
