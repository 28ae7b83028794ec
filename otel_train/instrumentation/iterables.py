"""Times batches that do not come from torch's iterators: iterables of any class, and iterators returned in place of torch's."""

from __future__ import annotations

import functools
from _thread import get_ident
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from otel_train.instrumentation.loader_probe import ASK, OWNER, PROBE, LoaderProbe, end_pass
from otel_train.recording.events import START_BITS


class InstrumentedIterable:
    """An iterable whose batches are timed; all other attributes are the iterable's. ``make``: makes an iterator of it.

    ``instrumented`` adds its special methods.
    """

    def __init__(
        self, iterable: Any, probe: LoaderProbe, make: Callable[[Any], Iterator[Any]] = iter
    ) -> None:
        vars(self).update(_original=iterable, _probe=probe, _make=make, _given=0, _ask=0)

    def __iter__(self) -> Iterator[Any]:
        probe = self._probe
        probe.inner = lambda: None  # timed here, so not also in a DataLoader that the iterable holds
        probe.begins()
        probe.pass_starts()
        ask = probe.next_pass()
        probe.edge(ask | START_BITS)
        try:
            iterator = self._make(self._original)
            return _class_for(type(iterator), InstrumentedIterator)(iterator, self._original, probe, ask)
        finally:
            probe.edge(probe.started)

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # not set yet, while unpickling
            raise AttributeError(name)
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)


def _next_of_iterable(iterable: Any) -> Any:  # Any: an InstrumentedIterable
    """Times ``next`` of an iterable that is its own iterator."""
    own = vars(iterable)  # ``__setattr__`` would set attributes of the original
    original, probe = own["_original"], own["_probe"]
    if not own["_given"]:
        own["_ask"] = probe.next_pass()
    try:
        batch = _timed_next(original, original, probe, own["_ask"], given=own["_given"])
    except StopIteration:
        own["_given"] = 0  # the iterable may begin again
        raise
    own["_given"] += 1
    return batch


class InstrumentedIterator:
    """An iterator whose ``next`` is timed. All other attributes are the iterator's; ``_class_for`` adds its special methods."""

    def __init__(
        self, iterator: Iterator[Any], iterable: Any, probe: LoaderProbe, ask: int, *, given: int = 0
    ) -> None:
        vars(self).update(
            _ask=ask, _thread=get_ident(), _original=iterator, _iterable=iterable, _probe=probe, _given=given
        )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = _timed_next(self._original, self._iterable, self._probe, self._ask, given=self._given)
        vars(self)["_given"] += 1  # ``__setattr__`` would set an attribute of the iterator
        return batch

    def __getattr__(self, name: str) -> Any:
        if name == "_original":
            raise AttributeError(name)
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    def __del__(self) -> None:
        end_pass({PROBE: self._probe, ASK: self._ask, OWNER: self._thread})


class FirstRead:
    """A generator whose first batch has been read: yields it first. ``send``, ``throw`` and ``close`` are the generator's."""

    def __init__(self, generator: Any, batch: object) -> None:
        self._generator, self._first = generator, [batch]
        self.send, self.throw, self.close = generator.send, generator.throw, generator.close

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._first.pop() if self._first else next(self._generator)


Base = TypeVar("Base")

_NOT_FORWARDED = frozenset(
    {
        "__class__", "__class_getitem__", "__del__", "__getattribute__", "__init_subclass__", "__new__",
        "__subclasshook__",
    }
)  # fmt: skip
"""Special methods that are not forwarded: instances do not have them, they look up the others, or Python calls them of the original."""


@functools.lru_cache(maxsize=128)
def _class_with_methods_of(kind: type, base: Any) -> Callable[..., Any]:
    """Returns a subclass of ``base`` with the special methods of ``kind``: Python looks these up in the class."""

    def forward(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = getattr(self._original, name)(*args, **kwargs)
            return self if given is self._original else given  # ``__enter__`` returns the original

        return method

    special: dict[str, Any] = {}
    for each in kind.__mro__[:-1]:  # without ``object``
        special = {**{name: value for name, value in vars(each).items() if name[:2] == "__"}, **special}
    own = {name for name, value in special.items() if callable(value) or type(value) is classmethod}
    names = (own | {"__reduce_ex__"}) - vars(base).keys() - _NOT_FORWARDED
    methods = {name: forward(name) for name in names}
    if "__next__" in methods:
        methods["__next__"] = _next_of_iterable
    passes_for = property(lambda self: type(self._original))  # for ``isinstance``
    return type(kind.__name__, (base,), {"__class__": passes_for, **methods})


def _class_for(kind: type, base: Callable[..., Base]) -> Callable[..., Base]:
    try:
        return _class_with_methods_of(kind, base)
    except Exception:  # a metaclass may raise anything
        return base


def instrumented(
    iterable: Any, probe: LoaderProbe, make: Callable[[Any], Iterator[Any]] = iter
) -> InstrumentedIterable:
    """Returns ``iterable`` wrapped and timed."""
    return _class_for(type(iterable), InstrumentedIterable)(iterable, probe, make)


def timed_pass(
    iterator: Iterator[Any], loader: Any, probe: LoaderProbe, ask: int, *, given: int = 0
) -> InstrumentedIterator:
    """Begins a pass, and returns ``iterator`` wrapped and timed; ``given`` batches of the pass were read before."""
    probe.begins()
    sized = loader if probe.sized else None
    return _class_for(type(iterator), InstrumentedIterator)(iterator, sized, probe, ask, given=given)


def _timed_next(iterator: Iterator[Any], iterable: Any, probe: LoaderProbe, ask: int, *, given: int) -> Any:
    edge = probe.edge
    edge(ask)
    try:
        batch = next(iterator)
    except StopIteration:
        edge(probe.stopped(given, _length_of(iterable)))
        raise
    except BaseException as error:
        edge(probe.failed(error))
        raise
    edge(probe.payload(batch))
    return batch


def _length_of(iterable: Any) -> int | None:  # Any: the user's own
    """Returns the length of an iterable; None if it has none."""
    try:
        return len(iterable)
    except Exception:  # the user's __len__ may raise anything
        return None
