"""Instruments DataLoaders in the ``__next__`` of torch's iterators: data wait, samples, bytes, end of the pass."""

from __future__ import annotations

import functools
import sys
import weakref
from _thread import get_ident
from inspect import isgeneratorfunction
from time import perf_counter_ns
from types import FunctionType, GeneratorType
from typing import TYPE_CHECKING, Any

from otel_train.instrumentation.dataloader_workers import INIT, POOL, WorkerInit, WorkerPool
from otel_train.instrumentation.iterables import FirstRead, InstrumentedIterator, timed_pass
from otel_train.instrumentation.loader_probe import (
    ASK,
    OWNER,
    PROBE,
    LoaderProbe,
    Opening,
    end_pass,
    write_of_pass,
)
from otel_train.instrumentation.naming import attribute
from otel_train.recording import ring_buffer
from otel_train.recording.events import PAYLOAD_SHIFT, START_BITS
from otel_train.safety import Guard, replace, waited_before

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

_FRESH = "_otel_train_fresh"
"""Attribute of an iterator whose ``__init__`` has given its first pass a number, until ``_reset`` begins that pass."""
NEXT = "_otel_train_next"
"""Attribute of an iterator: the hook that ``__next__`` in C calls."""


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
        probe_for: returns the probe of a loader, also of one that the program did not name.
        made: called with every DataLoader that is created.
    """

    def __init__(self, probe_for: Callable[[Any], LoaderProbe | None], made: Callable[[Any], None]) -> None:
        from torch.utils.data import dataloader

        self._probe_for = probe_for
        self._made = made
        self._guard = Guard("instrumentation of DataLoaders", limit=sys.maxsize)
        self._timed: Callable[[type], type] = functools.cache(_timed_subclass)
        self._without_next: Callable[[type], type] = functools.cache(_subclass_without_next)
        self._adopted: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
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
        """Times an existing iterator, such as one with persistent workers."""
        with self._guard:
            self._adopt(iterator, loader)

    def _adopt(self, iterator: Any, loader: Any) -> None:
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
        self._adopted[id(iterator)] = iterator
        opening = probe.opened_by()
        if opening is not None or probe.passed_on:
            iterator.__class__ = self._without_next(type(iterator))
            if opening is not None:  # ``__iter__`` runs: it is not known yet which object the loop will read
                opening.made.append(iterator)
        elif probe.beginning:
            iterator.__class__ = self._undecided(type(iterator))
        else:
            self._time(iterator, type(iterator), probe)

    def _time(self, iterator: Any, kind: type, probe: LoaderProbe) -> None:
        """Times ``next`` of an iterator, whose class without instrumentation is ``kind``."""
        if ring_buffer.EXTENSION is not None:
            hook = iterator.__dict__[NEXT] = probe.batch_hook(kind.__next__)  # type: ignore[attr-defined]  # an iterator's
            hook.ask = iterator.__dict__[ASK]
        iterator.__class__ = self._timed(kind)
        # The dict no longer shares its keys with those of other iterators. In a new dict, all attribute look-ups of torch for
        # one batch are a third of a microsecond faster.
        iterator.__dict__ = dict(iterator.__dict__.items())
        probe.runs(iterator)

    def remove(self) -> None:
        """Restores the class of every living iterator, then the replaced functions."""
        for iterator in list(self._adopted.values()):
            with self._guard:
                iterator.__class__ = type(iterator).__mro__[1]
                for name in (PROBE, ASK, NEXT, POOL, _FRESH, OWNER):
                    iterator.__dict__.pop(name, None)
        for undo in self._undo:
            with self._guard:  # a metaclass of the program may raise
                undo()

    def _find_kinds(self, base: Any) -> None:  # Any: a class
        """Times the construction of every iterator class: torch's two, and those of other packages."""
        for kind in base.__subclasses__():
            with self._guard:  # as above
                if kind not in self._kinds and "__init__" in vars(kind):
                    self._undo.append(replace(kind, "__init__", self._starting))
                self._kinds.add(kind)
                self._find_kinds(kind)

    def _find_openers(self, base: Any) -> None:  # Any: a class of loaders
        """Times what loaders of all subclasses of ``base`` return in place of torch's iterator."""
        for kind in base.__subclasses__():
            with self._guard:  # as above
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
            if probe is None or thread in probe.opening:  # called through ``super()`` in a subclass
                return original(loader)
            opening = probe.opening[thread] = Opening(probe.next_pass(), [])
            self._suspend_timing(loader, opening)
            try:
                iterator = original(loader)
            finally:
                del probe.opening[thread]
            with self._guard:
                return self._opened(iterator, loader, probe, opening)
            return iterator

        return __iter__

    def _suspend_timing(self, loader: Any, opening: Opening) -> None:
        """Stops timing the iterators that a loader keeps, until its ``__iter__`` has returned."""
        with self._guard:
            for kept in iterators_of(loader):
                if PROBE in kept.__dict__:
                    kept.__class__ = self._without_next(type(kept).__mro__[1])
                    kept.__dict__.pop(NEXT, None)
                    opening.made.append(kept)

    def _opened(self, iterator: Any, loader: Any, probe: LoaderProbe, opening: Opening) -> Any:
        """Returns the result of a loader's ``__iter__``, wrapped and timed if it is neither torch's iterator nor a generator."""
        kind = type(iterator)
        timed = issubclass(kind, (self._base, InstrumentedIterator, GeneratorType))
        probe.passed_on = hasattr(kind, "__next__") and not timed
        if probe.passed_on:
            return timed_pass(iterator, loader, probe, opening.ask)
        for made in opening.made:
            self._time(made, type(made).__mro__[1], probe)
        return iterator

    def _follow_loops(self, kind: Any) -> None:  # Any: a class of loaders
        """Times passes of loaders of a class whose ``__iter__`` is a generator function."""
        owner = next((base for base in kind.__mro__ if "__iter__" in vars(base)), None)
        if owner not in self._loops and isgeneratorfunction(waited_before(getattr(owner, "__iter__", None))):
            self._loops.add(owner)
            self._undo.append(replace(owner, "__iter__", self._looping))

    def _looping(self, original: Callable[[Any], Generator[Any, Any, Any]]) -> Callable[[Any], Iterator[Any]]:
        """Returns an ``__iter__`` whose end, also by a break, ends the passes of the iterators that the loader keeps."""

        @functools.wraps(original)
        def __iter__(loader: Any) -> Iterator[Any]:  # noqa: N807  # in its place
            outermost = type(loader).__iter__ is __iter__  # else called through ``super()`` in a subclass
            probe = self._probe_for(loader) if outermost else None
            try:
                return (yield from self._begun(original(loader), loader, probe))
            finally:
                with self._guard:
                    for iterator in iterators_of(loader):
                        read_by_loop = iterator.__dict__.get(PROBE)
                        if read_by_loop is not None and not read_by_loop.passed_on:
                            _end_and_renumber(iterator.__dict__)

        return __iter__

    def _begun(
        self, generator: Generator[Any, Any, Any], loader: Any, probe: LoaderProbe | None
    ) -> Iterator[Any]:
        """Returns a loader's generator, wrapped and timed if another thread reads torch's iterator."""
        if probe is None:
            return generator
        probe.passed_on = probe.passed_on or type(loader) in self._read_beside
        if probe.passed_on:
            return timed_pass(generator, loader, probe, probe.next_pass())
        return self._first_read(generator, loader, probe)

    def _first_read(self, generator: Any, loader: Any, probe: LoaderProbe) -> Iterator[Any]:
        """Reads the first batch. If another thread reads torch's iterator, the pass is timed here: this wait counts as its start."""
        probe.beginning[get_ident()] = 0
        try:
            batch = next(generator)
        except StopIteration:
            return iter(())
        finally:
            ask = probe.waited() or probe.next_pass()
            probe.beginning.pop(get_ident(), None)  # a loader may iterate itself
        if not probe.passed_on:
            return FirstRead(generator, batch)
        self._read_beside.add(type(loader))
        timed = timed_pass(generator, loader, probe, ask, given=1)
        probe.edge(ask)
        probe.edge(probe.payload(batch))
        return FirstRead(timed, batch)

    def _undecided_subclass(self, cls: Any) -> type:
        """Returns the class that an iterator created by a generator has until its first ``next``."""
        ask_inner = cls.__next__

        def __next__(iterator: Any) -> Any:  # noqa: N807  # in its place
            if type(iterator) is undecided:
                with self._guard:
                    self._decide(iterator, cls)
            return ask_inner(iterator) if type(iterator) is undecided else next(iterator)

        undecided = _subclass_with_next(cls, __next__)
        return undecided

    def _decide(self, iterator: Any, kind: type) -> None:
        """Times ``next`` of an iterator of class ``kind``, unless the first call comes from another thread than its generator's."""
        probe = iterator.__dict__[PROBE]
        probe.passed_on = bool(probe.beginning) and get_ident() not in probe.beginning
        if probe.passed_on:
            iterator.__class__ = self._without_next(kind)
        else:
            probe.waited()
            self._time(iterator, kind, probe)

    def _adopting(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # in its place
            if type(iterator) not in self._kinds:  # of a package imported since: from its next iterator on
                with self._guard:
                    self._find_kinds(self._base)
            original(iterator, loader, *args, **kwargs)
            self.adopt(iterator, loader)

        return __init__

    def _starting(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # in its place
            probe = None if _FRESH in iterator.__dict__ else self._probe_for(loader)
            if probe is None or probe.is_read_beside:  # None also for a call through ``super()``
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
        @functools.wraps(original)  # frameworks that create a loader again read its signature
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # in its place
            original(loader, *args, **kwargs)
            with self._guard:
                self._follow_openings(type(loader))
                self.made.add(loader)
                self._made(loader)

        return __init__


def opens_itself(kind: Any) -> bool:  # Any: a class of DataLoaders
    """Returns whether ``__iter__`` of a class is no generator function and may return another object than torch's iterator."""
    return iterates_itself(kind) and not isgeneratorfunction(waited_before(kind.__iter__))


def iterates_itself(kind: Any) -> bool:  # Any: a class of DataLoaders
    """Returns whether ``__iter__`` of a class may return another object than torch's iterator."""
    from torch.utils.data import DataLoader

    own = any(getattr(kind, name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator"))
    return own and isinstance(kind.__iter__, FunctionType)


def _timed_subclass(cls: Any) -> type:
    ask_inner = cls.__next__

    def __next__(self: Any) -> Any:  # noqa: N807  # as above
        attributes = self.__dict__
        probe = attributes.get(PROBE)
        if probe is None:  # the session has ended, and the program has kept this bound method
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
    return _subclass_with_next(cls, __next__ if native is None else native.hook("__next__", cls))


def _subclass_with_next(cls: Any, ask: Callable[[Any], Any]) -> type:
    """Returns a subclass with ``ask`` as ``__next__``; it also times workers, and writes begin and end of passes."""
    names = {"__next__": ask, "_reset": _resetting(cls), "__del__": _disposing(cls), INIT: WorkerInit()}
    return _subclass(cls, names)


def _subclass_without_next(cls: Any) -> type:
    """Returns a subclass that times workers and writes the begin of passes, while the loop does not call its ``__next__``."""
    return _subclass(cls, {"_reset": _resetting(cls), INIT: WorkerInit()})


def _subclass(cls: Any, names: Mapping[str, Any]) -> type:
    """Returns a subclass of ``cls`` with the attributes ``names`` and the name, module and docstring of ``cls``."""
    made = type(cls.__name__, (cls,), {**names, "__module__": cls.__module__, "__doc__": cls.__doc__})
    made.__qualname__ = cls.__qualname__
    return made


def _resetting(cls: Any) -> Callable[..., None]:
    """Returns a ``_reset`` that begins a pass. With persistent workers it also ends a previous pass that the loop left."""
    reset_inner = cls._reset

    def _reset(self: Any, *args: Any, **kwargs: Any) -> None:
        attributes, probe = self.__dict__, self.__dict__.get(PROBE)
        if probe is None or probe.is_read_beside:  # None: another thread has just ended the session
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
            if pool is not None:  # a new iterator has started its workers before it resets itself
                pool.complete()

    return _reset


def _disposing(cls: Any) -> Callable[[Any], None]:
    """Returns a ``__del__`` that calls that of the class and ends the pass. Its wait for the workers to exit counts as data wait."""
    dispose_inner = getattr(cls, "__del__", None)

    def __del__(self: Any) -> None:  # noqa: N807  # in its place
        attributes = self.__dict__
        waits = attributes.get("_shutdown") is False
        if waits:
            write_of_pass(attributes, lambda _, ask: ask | START_BITS)
        try:
            if dispose_inner is not None:
                dispose_inner(self)
        finally:
            if waits:
                write_of_pass(attributes, lambda probe, _: probe.started)
            end_pass(attributes)

    return __del__


def iterators_of(loader: Any) -> list[Any]:  # Any: a DataLoader
    """Returns the iterators in a loader's attributes: with persistent workers, or an endless one that its constructor made."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    held = list(attribute(loader, "__dict__", {}).values())
    return [each for each in held if issubclass(type(each), _BaseDataLoaderIter)]


def _end_and_renumber(attributes: dict[str, Any]) -> None:
    """Ends the pass of an iterator that is used again, and numbers its next pass."""
    end_pass(attributes)
    attributes[ASK] = attributes[PROBE].next_pass()
    if NEXT in attributes:
        attributes[NEXT].ask = attributes[ASK]
