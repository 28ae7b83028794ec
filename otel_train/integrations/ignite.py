"""A handler for Ignite's engines."""

from __future__ import annotations

from typing import Any

from otel_train.errors import require, shown, wrong_argument
from otel_train.integrations.shared_session import CallbackSession

_Events: Any = require("ignite.engine", extra="ignite").Events


class OtelTrainHandler:
    """Observes the runs of an engine: ``OtelTrainHandler(run_name="baseline").attach(trainer)``.

    Loaders and models are found when they are used; epochs are the engine's. Evaluators that run inside its handlers
    are observed with it. The session closes when the run ends; one that was open before stays open. After a run that
    raised, it is closed at the end of the program, as failed.

    Args:
        **settings: as for ``otel_train.instrument``.

    Raises:
        ConfigError: a setting is invalid; the message has value, rule and remedy.
    """

    def __init__(self, **settings: Any) -> None:
        self._shared = CallbackSession("the ignite handler", settings)

    def attach(self, engine: Any) -> None:
        """Observes every run of ``engine``: pass the trainer, not evaluators. Raises ConfigError if it is not an engine."""
        if not hasattr(engine, "add_event_handler"):
            raise wrong_argument(f"attach({shown(engine)})", "an Engine of Ignite", "Pass the trainer")
        # Ignite calls a handler with the engine if its signature takes it, else without.
        engine.add_event_handler(_Events.STARTED, self._shared.join)
        engine.add_event_handler(_Events.EPOCH_STARTED, self._epoch_started)
        engine.add_event_handler(_Events.EPOCH_COMPLETED, self._shared.end_epoch)
        engine.add_event_handler(_Events.COMPLETED, self._shared.leave)

    def _epoch_started(self, engine: Any) -> None:
        self._shared.begin_epoch(lambda: engine.state.epoch)
