"""One callback's part in the session that all callbacks share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train import front
from otel_train.guard import Guard
from otel_train.integrations.shared import checked, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from otel_train.record.epochs import Epoch
    from otel_train.session import Session


class Part:
    """What a callback of any library does; faults of ours stay here.

    Args:
        name: of the callback, as people call it.
        settings: as for ``otel_train.instrument``.

    Raises:
        ConfigError: a setting cannot be honoured; says value, rule and remedy.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self.guard = Guard(name)
        self._settings = checked(settings)
        self._epoch: Epoch | None = None

    def join(self) -> Session:
        """Open the session, or join it.

        Raises:
            ConfigError: see ``otel_train.instrument``.
        """
        return shared.join(self, self._settings)

    def begin_epoch(self, number: Callable[[], int]) -> None:
        """Mark the epoch that begins here."""
        with self.guard:
            self._epoch = front.epoch(number())

    def end_epoch(self) -> None:
        """It is over."""
        if self._epoch is not None:
            self._epoch.end()

    def leave(self) -> None:
        """Close the session, if it is ours and nobody else's."""
        with self.guard:
            shared.leave(self)
