"""A callback for fastai's Learner."""

from __future__ import annotations

from typing import Any

from otel_train.errors import require
from otel_train.integrations.shared_session import CallbackSession

_Callback: Any = require("fastai.callback.core", extra="fastai").Callback


class OtelTrainCallback(_Callback):
    """Observes what a Learner does: ``Learner(..., cbs=OtelTrainCallback(run_name="baseline"))``.

    Models are found when they are called; loaders are named ``train`` and ``valid``; epochs count from 1. The search
    for a learning rate and predictions are not observed. The session closes when ``fit`` ends; one that was open
    before stays open.

    Args:
        **settings: as for ``otel_train.instrument``.

    Raises:
        ConfigError: a setting is invalid; the message has value, rule and remedy.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._shared = CallbackSession("the fastai callback", settings)

    def before_fit(self) -> None:
        """Opens or joins the session."""
        self.run = not (hasattr(self.learn, "lr_finder") or hasattr(self, "gather_preds"))
        if self.run:
            self._shared.join()

    def before_epoch(self) -> None:
        """Begins an epoch."""
        self._shared.begin_epoch(lambda: self.learn.epoch + 1)

    def after_epoch(self) -> None:
        """Ends the epoch, validation included."""
        self._shared.end_epoch()

    def after_fit(self) -> None:
        """Closes the session if this callback opened it and no other uses it."""
        self._shared.leave()
