"""Logged values as metrics: loss, learning rate, gradient norm, and the user's own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from otel_train import catalog as c
from otel_train.aggregation.metric_builder import LabelLimiter

if TYPE_CHECKING:
    from otel_train.aggregation.metric_builder import MetricBuilder

_NORMS = ("grad_norm", "gradient_norm", "total_norm")
_RATES = ("lr", "learning_rate")
_SCALES = ("amp_scale", "loss_scale")


class Signals:
    """The last value of everything logged, and how often one was not finite."""

    def __init__(self) -> None:
        self.nonfinite = dict.fromkeys(c.NONFINITE_KIND.values, 0)
        self.tokens = 0
        self._losses: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        self._values: dict[str, float] = {}
        self._single: dict[str, float] = {}
        self._loss_names = LabelLimiter(c.LOSS_NAME.bound)
        self._rate_names = LabelLimiter(c.OPTIMIZER_GROUP.bound)
        self._value_names = LabelLimiter(c.METRIC_NAME.bound)

    def take(self, name: str, value: float) -> bool:
        """Take one value in; whether it is finite."""
        finite = math.isfinite(value)
        if name == "tokens":
            self.tokens += int(value) if finite else 0
        elif name in _NORMS:
            self._single[c.GRADIENT_NORM.name] = value
            self.nonfinite["gradient"] += not finite
        elif name in _SCALES:
            self._single[c.AMP_SCALE.name] = value
        elif name.split("/", maxsplit=1)[0] in _RATES:
            self._rates[self._rate_names.fold(name.partition("/")[2] or "0")] = value
        elif "loss" in name:
            self._losses[self._loss_names.fold(name)] = value
            self.nonfinite["loss"] += not finite
        else:
            self._values[self._value_names.fold(name)] = value
            return True
        return finite

    def overflows(self) -> dict[str, int]:
        """Names folded into ``_OTHER``, by label."""
        return {
            c.LOSS_NAME.name: len(self._loss_names.overflown),
            c.OPTIMIZER_GROUP.name: len(self._rate_names.overflown),
            c.METRIC_NAME.name: len(self._value_names.overflown),
        }

    def write(self, sheet: MetricBuilder, phase: str) -> None:
        """Put the last values."""
        for name, value in self._losses.items():
            sheet.put(c.LOSS, value, name, phase)
        for group, value in self._rates.items():
            sheet.put(c.LEARNING_RATE, value, group)
        for name, value in self._values.items():
            sheet.put(c.METRIC_VALUE, value, name, phase)
        for metric in (c.GRADIENT_NORM, c.AMP_SCALE):
            if metric.name in self._single:
                sheet.put(metric, self._single[metric.name])
        sheet.put_all(c.NONFINITE_DETECTIONS, c.NONFINITE_KIND.values, dict(self.nonfinite))
