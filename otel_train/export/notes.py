"""What the user logs, read on the pump thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train import catalog as c
from otel_train.records import Event

if TYPE_CHECKING:
    from otel_train.aggregate.run import RunAccount
    from otel_train.aggregate.signals import Signals
    from otel_train.clock import Anchor
    from otel_train.record.notes import Notes

_PLAIN = (str, bool, int, float)


class NoteReader:
    """Turns notes into metrics and events.

    Args:
        notes: what was handed over.
        signals: takes numbers.
        run: takes events.
        anchor: turns the monotonic clock into wall time.
    """

    def __init__(self, notes: Notes, signals: Signals, run: RunAccount, anchor: Anchor) -> None:
        self._notes = notes
        self._signals = signals
        self._run = run
        self._anchor = anchor

    def read(self) -> None:
        """Read everything that has been handed over since the last call."""
        for note in self._notes.drain():
            if hasattr(note, "value"):
                self._log(note.at_ns, note.name, note.value)
            else:
                plain = {str(key): _plain(value) for key, value in note.attributes.items()}
                self._tell(note.at_ns, note.name, plain)

    def _log(self, at_ns: int, name: str, value: Any) -> None:  # Any: the user's own
        if not self._signals.take(name, float(value)):
            self._run.keeper.nonfinite(at_ns)
            kind = "gradient" if "norm" in name else "loss"
            self._tell(at_ns, c.NONFINITE_EVENT.name, {c.SPAN_NONFINITE_KIND.name: kind, "name": name})

    def _tell(self, at_ns: int, name: str, attributes: dict[str, Any]) -> None:
        attributes = {c.STEP_NUMBER.name: self._run.step_number, **attributes}
        self._run.tell(event=Event(name=name, time_unix_ns=self._anchor.unix(at_ns), attributes=attributes))


def _plain(value: Any) -> str | bool | int | float:  # Any: the user's own
    return value if isinstance(value, _PLAIN) else str(value)
