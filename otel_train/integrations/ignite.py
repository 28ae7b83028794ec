"""A handler for Ignite's engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train import front
from otel_train.guard import Guard
from otel_train.integrations.shared import checked, shared
from otel_train.optional import require

if TYPE_CHECKING:
    from otel_train.record.epochs import Epoch

_Events: Any = require("ignite.engine", extra="ignite").Events


class OtelTrainHandler:
    """Observes the runs of an engine: ``OtelTrainHandler(run_name="baseline").attach(trainer)``.

    Loaders and models are found as they are used; epochs are the engine's. Evaluators that run inside its handlers
    are seen with it. The session closes when the run is over; one that was open before stays open. A run that fails
    is closed with the program, as failed.

    Args:
        **settings: as for ``otel_train.instrument``.

    Raises:
        ConfigError: a setting cannot be honoured; says value, rule and remedy.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = checked(settings)
        self._guard = Guard("the ignite handler")
        self._epoch: Epoch | None = None

    def attach(self, engine: Any) -> None:
        """Be told of every run of ``engine``: of the trainer, not of evaluators."""
        engine.add_event_handler(_Events.STARTED, self._started)
        engine.add_event_handler(_Events.EPOCH_STARTED, self._epoch_started)
        engine.add_event_handler(_Events.EPOCH_COMPLETED, self._epoch_completed)
        engine.add_event_handler(_Events.COMPLETED, self._completed)

    def _started(self, engine: Any) -> None:
        del engine
        shared.join(self, self.settings)

    def _epoch_started(self, engine: Any) -> None:
        with self._guard:
            self._epoch = front.epoch(engine.state.epoch)

    def _epoch_completed(self, engine: Any) -> None:
        del engine
        if self._epoch is not None:
            self._epoch.end()

    def _completed(self, engine: Any) -> None:
        del engine
        with self._guard:
            shared.leave(self)
