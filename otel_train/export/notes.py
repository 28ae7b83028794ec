"""What the user logs, read on the pump thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train import catalog as c
from otel_train.record.notes import Value

if TYPE_CHECKING:
    from otel_train.aggregate.run import RunAccount
    from otel_train.aggregate.signals import Signals
    from otel_train.record.notes import Notes

_PLAIN = (str, bool, int, float)


class NoteReader:
    """Turns notes into metrics and events.

    Args:
        notes: what was handed over.
        signals: takes numbers.
        run: takes events.
    """

    def __init__(self, notes: Notes, signals: Signals, run: RunAccount) -> None:
        self._notes = notes
        self._signals = signals
        self._run = run

    def read(self) -> None:
        """Read everything that has been handed over since the last call."""
        for note in self._notes.drain():
            if isinstance(note, Value):
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
        self._run.teller.event(name, at_ns, {c.STEP_NUMBER.name: self._run.step_number, **attributes})


def _plain(value: Any) -> str | bool | int | float:  # Any: the user's own
    return value if isinstance(value, _PLAIN) else str(value)
