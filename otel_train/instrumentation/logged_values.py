"""Values, events and caches declared by the program: queued until the agent reads them, sizes read on request."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from operator import index
from typing import TYPE_CHECKING, Any

from otel_train.errors import by_name, callable_, name_of, text
from otel_train.fast_classes import FastNamedTuple
from otel_train.recording.shared_memory import PendingEntries, unreported
from otel_train.safety import Guard, Handle

if TYPE_CHECKING:
    from otel_train.datamodel import Clock

_PLAIN = (str, bool, int, float)
_LARGEST = (1 << 63) - 1
"""Largest integer in OTLP (int64); larger ones become text."""
MAX_HELD = 4096
"""Entries held between two reads; the oldest are dropped and counted."""

_NOT_KEPT, _VALUE, _EVENT = range(3)


class Value(FastNamedTuple):
    """A logged value: a number, or a tensor of one element that is read later."""

    at_ns: int
    name: str
    value: Any


class UserEvent(FastNamedTuple):
    """A user-defined event."""

    at_ns: int
    name: str
    attributes: Mapping[str, Any]


class ValueQueue:
    """A bounded queue from the training thread to the service thread, without a lock.

    Attributes:
        dropped: entries dropped because the queue was full.
        drained: number of the last drained entry plus one.

    Args:
        pending: keeps numbers and events in shared memory until they have been reported; tensors are only in this queue.
        changed: called after each addition.
    """

    def __init__(
        self,
        clock: Clock,
        pending: PendingEntries | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.dropped = 0
        self._changed = changed
        self._clock = clock
        self._held: deque[tuple[int, Value | UserEvent]] = deque(maxlen=MAX_HELD)
        self._pending = pending or PendingEntries()
        self.drained = 0

    def log(self, values: Mapping[str, Any]) -> None:
        """Adds values. A tensor is copied on its device, without synchronisation.

        Raises:
            ConfigError: a value has no name.
        """
        remedy = 'Write log(loss=loss), or log({"loss": loss})'
        by_name("log({})", values, "values by name", remedy)
        for name in values:
            if name.__class__ is not str:
                text("log({{}: ...})", name, remedy)
        now = self._clock()
        self._count_dropped(len(values))
        for name, value in values.items():
            kind, number = _NOT_KEPT, 0.0
            try:
                kept = _kept(value)
                if isinstance(kept, (int, float)):
                    kind, number = _VALUE, float(kept)
            except Exception:  # an error of the user's object must not reach the training loop
                kept = None  # refused and counted by the reader
            self._hold(Value(now, name_of(name), kept), kind, number, name)
        self._changed()

    def event(self, name: str, attributes: Mapping[str, Any], at_ns: int = 0) -> None:
        """Adds an event at ``at_ns``, or now.

        Raises:
            ConfigError: the event, or an attribute, has no name.
        """
        text("event({})", name, 'Write event("name", key=value)')
        remedy = 'Write event("name", {"key": value})'
        by_name(f"event({name!r}, {{}})", attributes, "attributes by name", remedy)
        attributes = dict(attributes)  # a copy: the program may change its own before they are read
        self._count_dropped(1)
        try:
            kind, plain = _EVENT, json.dumps((name, attributes))
        except Exception:  # attributes of other types become text in the report
            kind, plain = _NOT_KEPT, ""
        self._hold(UserEvent(at_ns or self._clock(), name, attributes), kind, 0.0, plain)
        self._changed()

    def drain(self) -> Iterator[Value | UserEvent]:
        """Removes and yields all entries, oldest first."""
        while self._held:
            number, entry = self._held.popleft()
            self.drained = number + 1
            yield entry

    def reported(self) -> None:
        """Records that the agent has all entries that were drained."""
        self._pending.report(self.drained)

    def _hold(self, entry: Value | UserEvent, kind: int, value: float, text: str) -> None:
        self._held.append((self._pending.add(kind, entry.at_ns, value=value, text=text), entry))

    def _count_dropped(self, wanted: int) -> None:
        self.dropped += max(0, len(self._held) + wanted - MAX_HELD)


def unreported_values(memory: memoryview, since: int = 0) -> tuple[list[Value | UserEvent], int]:
    """Returns the numbers and events that a dead process had logged but not reported, and how many are lost; see ``unreported``."""
    found: list[Value | UserEvent] = []
    entries, lost = unreported(memory, since)
    for entry in entries:
        at_ns = entry.numbers[0]
        if entry.kind == _VALUE:
            found.append(Value(at_ns, entry.text, entry.value))
        elif entry.kind == _EVENT:
            with suppress(ValueError, TypeError):  # the process corrupted its memory before it ended
                name, attributes = json.loads(entry.text)
                found.append(plain(UserEvent(at_ns, str(name), dict(attributes))))
    return found, lost


def plain(entry: Value | UserEvent) -> Value | UserEvent:
    """Returns an entry that another process can read: a value as a number, or None; attributes of plain types."""
    if isinstance(entry, Value):
        return entry._replace(value=_as_number(entry.value))
    return entry._replace(attributes={name_of(key): _plain(value) for key, value in entry.attributes.items()})


def _as_number(value: Any) -> float | None:  # Any: see ``_kept``
    try:
        return float(value)
    except Exception:  # a user's object may raise anything, and costs only itself
        return None


def _plain(value: Any) -> str | bool | int | float:  # Any: the user's own
    if isinstance(value, _PLAIN) and not (isinstance(value, int) and abs(value) > _LARGEST):
        return value
    try:
        number = value.item() if getattr(value, "ndim", None) == 0 else None  # of numpy, or a tensor's
        return number if isinstance(number, _PLAIN) else str(value)
    except Exception:  # as above
        return f"<{type(value).__name__}>"


def _kept(value: Any) -> Any:  # Any: a number, an array, or a tensor of whatever library
    """Detaches a tensor from its graph and copies it, so that in-place changes do not show.

    Raises:
        ValueError: a tensor of several elements.
    """
    if not hasattr(value, "detach"):
        return value
    if value.numel() != 1:
        raise ValueError(f"{value.numel()} elements: expected one")
    return value.detach().clone()


class _Cache(FastNamedTuple):
    size: Callable[[], int]
    guard: Guard


class CacheSizes:
    """Functions that return the bytes of a cache, by name. Any thread adds, one thread reads."""

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}
        self._faults_before = 0

    def add(self, name: str, size: Callable[[], int]) -> Handle:
        """Calls ``size`` from now on; replaces a cache of the same name.

        Raises:
            ConfigError: it cannot be called, or has no name.
        """
        text("cache({}, ...)", name, "Say what the cache is called")
        remedy = "Write size=lambda: number_of_bytes"
        callable_("cache(..., size={})", size, "a callable that returns bytes", remedy)
        self._forget(name)
        mine = self._caches[name] = _Cache(size, Guard(f"size of cache {name!r}"))
        return Handle(lambda: self._forget(name) if self._caches.get(name) is mine else None)

    def read(self) -> dict[str, int]:
        """Returns the bytes by name. A function that raises is absent, and after three faults not called again."""
        found = {}
        for name, cache in list(self._caches.items()):
            if not cache.guard.closed:
                with cache.guard:
                    found[name] = _bytes(cache.size())
        return found

    @property
    def faults(self) -> int:
        """Number of calls that failed."""
        return self._faults_before + sum(cache.guard.faults for cache in list(self._caches.values()))

    def _forget(self, name: str) -> None:
        gone = self._caches.pop(name, None)
        self._faults_before += gone.guard.faults if gone else 0


def _bytes(returned: object) -> int:
    """Returns a value as a number of bytes.

    Raises:
        ValueError: it is no whole number, or negative.
    """
    try:
        size = index(returned)  # type: ignore[arg-type]  # that it may be something else is the point
    except TypeError:
        size = -1
    if size < 0:
        raise ValueError(f"size() returned {returned!r}: expected a whole number of bytes")
    return size
