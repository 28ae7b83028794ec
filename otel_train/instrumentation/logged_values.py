"""Values and events that the user hands over, kept until the pump reads them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.errors import by_name, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from otel_train.datamodel import Clock

_PLAIN = (str, bool, int, float)
MOST_NOTES = 4096
"""Notes held between two turns of the pump; the oldest go first, and are counted."""


class Value(NamedTuple):
    """Something logged: a number, or a tensor of one element that is read later."""

    at_ns: int
    name: str
    value: Any


class UserEvent(NamedTuple):
    """An event of the user's own."""

    at_ns: int
    name: str
    attributes: Mapping[str, Any]


class ValueQueue:
    """A bounded box: the training thread puts in, the pump takes out. Neither waits for the other.

    Attributes:
        dropped: notes that found no room.
        refused: values that are no numbers, counted by whoever reads them.

    Args:
        clock: monotonic nanoseconds.
    """

    def __init__(self, clock: Clock) -> None:
        self.dropped = 0
        self.refused = 0
        self._clock = clock
        self._held: deque[Value | UserEvent] = deque(maxlen=MOST_NOTES)

    def log(self, values: Mapping[str, Any]) -> None:
        """Keep values. A tensor is copied where it lives, without waiting for it.

        Raises:
            ConfigError: they have no names.
        """
        remedy = 'Write log(loss=loss), or session.log({"loss": loss})'
        by_name("log({})", values, "values by name", remedy)
        for name in values:
            if name.__class__ is not str:
                text("log({{}: ...})", name, remedy)
        now = self._clock()
        self._make_room(len(values))
        for name, value in values.items():
            self._hold(now, name, value)

    def _hold(self, now_ns: int, name: str, value: Any) -> None:  # Any: see ``_kept``
        try:
            kept = _kept(value)
        except Exception:  # noqa: BLE001 - whatever the user's object does must not reach the user's loop
            kept = None  # which the reader refuses, and says so
        self._held.append(Value(now_ns, name, kept))

    def event(self, name: str, attributes: Mapping[str, Any], at_ns: int = 0) -> None:
        """Keep an event, of now or of an instant.

        Raises:
            ConfigError: it has no name, or what there is to say about it has none.
        """
        text("event({})", name, 'Write event("name", key=value)')
        remedy = 'Write session.event("name", {"key": value})'
        by_name(f"event({name!r}, {{}})", attributes, "attributes by name", remedy)
        self._make_room(1)
        self._held.append(UserEvent(at_ns or self._clock(), name, attributes))

    def drain(self) -> Iterator[Value | UserEvent]:
        """Take everything out, oldest first."""
        while self._held:
            yield self._held.popleft()

    def _make_room(self, wanted: int) -> None:
        self.dropped += max(0, len(self._held) + wanted - MOST_NOTES)


def as_number(value: Any) -> float | None:  # Any: see ``_kept``
    """A logged value as a number; None where it is none."""
    try:
        return float(value)
    except Exception:  # noqa: BLE001 - a user's object may raise anything, and costs only itself
        return None


def as_plain(happening: UserEvent) -> UserEvent:
    """An event with attributes of plain types."""
    return happening._replace(
        attributes={str(key): _plain(value) for key, value in happening.attributes.items()}
    )


def _plain(value: Any) -> str | bool | int | float:  # Any: the user's own
    if isinstance(value, _PLAIN):
        return value
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - as above
        return f"<{type(value).__name__}>"


def _kept(value: Any) -> Any:  # Any: a number, an array, or a tensor of whatever library
    """What to hold: later changes in place must not show, nor the graph behind a loss be kept alive.

    Raises:
        ValueError: a tensor of several elements: thousands of them would fill the memory.
    """
    if not hasattr(value, "detach"):
        return value
    if value.numel() != 1:
        raise ValueError(f"{value.numel()} elements: expected one")
    return value.detach().clone()
