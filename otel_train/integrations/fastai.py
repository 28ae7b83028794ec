"""A callback for fastai's Learner."""

from __future__ import annotations

from typing import Any

from otel_train.errors import require
from otel_train.integrations.shared import CallbackSession

_Callback: Any = require("fastai.callback.core", extra="fastai").Callback


class OtelTrainCallback(_Callback):
    """Observes what a Learner does: ``Learner(..., cbs=OtelTrainCallback(run_name="baseline"))``.

    Models are found as they are called; loaders are called ``train`` and ``valid``; epochs count from 1. The search
    for a learning rate and predictions are left alone. The session closes when ``fit`` is over; one that was open
    before stays open.

    Args:
        **settings: as for ``otel_train.instrument``.

    Raises:
        ConfigError: a setting cannot be honoured; says value, rule and remedy.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._shared = CallbackSession("the fastai callback", settings)

    def before_fit(self) -> None:
        """Open the session, or join it."""
        self.run = not (hasattr(self.learn, "lr_finder") or hasattr(self, "gather_preds"))
        if self.run:
            self._shared.join()

    def before_epoch(self) -> None:
        """Mark the epoch."""
        self._shared.begin_epoch(lambda: self.learn.epoch + 1)

    def after_epoch(self) -> None:
        """It is over, validation included."""
        self._shared.end_epoch()

    def after_fit(self) -> None:
        """Close the session, if it is ours and nobody else's."""
        self._shared.leave()
