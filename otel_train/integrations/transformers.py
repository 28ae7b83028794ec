"""A callback for the Trainer of transformers."""

from __future__ import annotations

from numbers import Real
from typing import Any

from otel_train import api
from otel_train.errors import require
from otel_train.integrations.shared_session import CallbackSession

_Callback: Any = require("transformers", extra="transformers").TrainerCallback

_ROUNDING = 1e-6
"""Tolerance for the Trainer's epoch, which is a sum of floating-point fractions."""


class OtelTrainCallback(_Callback):
    """Observes what a Trainer does: ``Trainer(..., callbacks=[OtelTrainCallback(run_name="baseline")])``.

    Loaders and models are found when they are used; epochs are the Trainer's, counted from 1; loss, learning rate and
    gradient norm are those that it logs. The session closes when ``train`` ends; one that was open before stays open.

    Args:
        **settings: as for ``otel_train.instrument``.

    Raises:
        ConfigError: a setting is invalid; the message has value, rule and remedy.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._shared = CallbackSession("the transformers callback", settings)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Opens or joins the session."""
        self._shared.join()

    def on_epoch_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Begins an epoch."""
        self._shared.begin_epoch(lambda: int((state.epoch or 0) + _ROUNDING) + 1)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Ends the epoch; evaluation follows it."""
        self._shared.end_epoch()

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        """Logs the values of a step, not those of a whole run or an evaluation."""
        with self._shared.guard:
            known = {"loss", "learning_rate", "grad_norm"}
            api.log(**{k: v for k, v in (logs or {}).items() if k in known and isinstance(v, Real)})

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Closes the session if this callback opened it and no other uses it."""
        self._shared.leave()
