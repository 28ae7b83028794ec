"""What the user logs, read on the pump thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from otel_train import catalog as c
from otel_train.instrumentation.logged_values import UserEvent, Value, as_number, as_plain

if TYPE_CHECKING:
    from otel_train.aggregation.metrics import Signals
    from otel_train.aggregation.run_state import RunState
    from otel_train.instrumentation.logged_values import ValueQueue

_MOST_WARNINGS = 16

_log = logging.getLogger("otel_train")


class NoteReader:
    """Turns notes into metrics and events.

    Args:
        notes: what was handed over.
        signals: takes numbers.
        run: takes events.
    """

    def __init__(self, notes: ValueQueue, signals: Signals, run: RunState) -> None:
        self._notes = notes
        self._signals = signals
        self._run = run
        self._untold: list[UserEvent] = []
        self._warned: set[str] = set()

    def read(self) -> None:
        """Read everything that has been handed over since the last call."""
        for note in self._notes.drain():
            if isinstance(note, Value):
                self._log(note)
            else:
                self._untold.append(note)

    def tell(self) -> None:
        """Tell what was read as events; by now it is known in which step it happened."""
        untold, self._untold = self._untold, []
        for happening in untold:
            plain = as_plain(happening).attributes
            number = self._run.recent.at(happening.at_ns, self._run.step_number)
            self._run.teller.event(happening.name, happening.at_ns, {c.STEP_NUMBER.name: number, **plain})

    def _log(self, note: Value) -> None:
        value = as_number(note.value)
        if value is None:
            self._refuse(note.name)
            return
        if not self._signals.take(note.name, value):
            self._run.keeper.nonfinite(note.at_ns)
            kind = "gradient" if "norm" in note.name else "loss"
            attributes = {c.SPAN_NONFINITE_KIND.name: kind, "name": note.name}
            self._untold.append(UserEvent(note.at_ns, c.NONFINITE_EVENT.name, attributes))

    def _refuse(self, name: str) -> None:
        self._notes.refused += 1
        if name not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(name)
            _log.warning("log(%s=...): expected a number or a tensor of one element; it is left out", name)
