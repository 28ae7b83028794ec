"""A callback for fastai's Learner."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from otel_train import front
from otel_train.guard import Guard
from otel_train.integrations.shared import checked, shared
from otel_train.optional import require

if TYPE_CHECKING:
    from otel_train.record.epochs import Epoch

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
        self.settings = checked(settings)
        self._guard = Guard("the fastai callback")
        self._epoch: Epoch | None = None

    def before_fit(self) -> None:
        """Open the session, or join it."""
        self.run = not (hasattr(self.learn, "lr_finder") or hasattr(self, "gather_preds"))
        if self.run:
            session = shared.join(self, self.settings)
            session.name_loaders(functools.partial(_name_of, weakref.ref(self.learn), self._guard))

    def before_epoch(self) -> None:
        """Mark the epoch."""
        with self._guard:
            self._epoch = front.epoch(self.learn.epoch + 1)

    def after_epoch(self) -> None:
        """It is over, validation included."""
        if self._epoch is not None:
            self._epoch.end()

    def after_fit(self) -> None:
        """Close the session, if it is ours and nobody else's."""
        with self._guard:
            shared.leave(self)


def _name_of(learner: weakref.ref[Any], guard: Guard, loader: Any) -> str:
    """What a loader of this Learner is for; "" for one that is not the Learner's."""
    with guard:
        for number, each in enumerate(getattr(getattr(learner(), "dls", None), "loaders", ())):
            # fastai's own loader has torch iterate another one that stands for it.
            if loader is each or loader is getattr(each, "fake_l", each):
                return "train" if number == 0 else "valid" if number == 1 else f"valid_{number}"
    return ""
