"""Series collected for one export, in the catalogue's words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train.catalog import ALL, DEVICE, OTHER_VALUE, Emit, Kind
from otel_train.records import HistogramPoint, MetricFamily, Point

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from otel_train.aggregation.histogram import Histograms
    from otel_train.catalog import Metric
    from otel_train.records import Attributes, Exemplar


class MetricBuilder:
    """Collects points and hands them over as families.

    Args:
        emits: whether this process publishes metrics of a given kind of emitter.
        only: names of the metrics to collect, devices added up; None for all.
        events: names of metrics to collect beside those, each from its first value above zero on.
        breathe: called between series, to let the training thread have the interpreter.
    """

    def __init__(
        self,
        emits: Callable[[Emit], bool] = lambda _: True,
        *,
        only: Container[str] | None = None,
        events: Container[str] = (),
        breathe: Callable[[], None] = lambda: None,
    ) -> None:
        self._emits = emits
        self._only = only
        self._events = events
        self._breathe = breathe
        self._points: dict[str, dict[Attributes, float]] = {}
        self._histograms: dict[str, list[HistogramPoint]] = {}

    def put(self, metric: Metric, value: float, *labels: str) -> None:
        """Set one series. Equal labels of a counter add up (names folded to ``_OTHER``)."""
        if self._only is not None:
            if metric.name not in self._only and not (value and metric.name in self._events):
                return
            labels = tuple(
                "" if label is DEVICE else text for label, text in zip(metric.labels, labels, strict=False)
            )
        series = self._points.setdefault(metric.name, {})
        attributes = _attributes(metric, labels)
        before = series.get(attributes, 0) if metric.kind in (Kind.COUNTER, Kind.UPDOWN) else 0
        series[attributes] = before + value
        self._breathe()

    def take(self, metric: Metric) -> dict[Attributes, float]:
        """Remove what was put of a counter or gauge; its values by labels."""
        return self._points.pop(metric.name, {})

    def values(self, metric: Metric) -> dict[Attributes, float]:
        """What was put of a counter or gauge, by labels."""
        return dict(self._points.get(metric.name, {}))

    def put_all(self, metric: Metric, values: Iterable[str], found: dict[str, float]) -> None:
        """One series for each value of the metric's only label, zero where nothing was found."""
        for value in values:
            self.put(metric, found.get(value, 0), value)

    def histogram(
        self, metric: Metric, histograms: Histograms, series: int, *labels: str,
        exemplars: tuple[Exemplar, ...] = (),
    ) -> None:  # fmt: skip
        """Set one histogram series; an empty one is left out."""
        left_out = self._only is not None and metric.name not in self._only
        if left_out or not histograms.count(series):
            return
        point = HistogramPoint(_attributes(metric, labels), *histograms.point(series), exemplars)
        self._histograms.setdefault(metric.name, []).append(point)
        self._breathe()

    def families(self) -> tuple[MetricFamily, ...]:
        """Everything collected that this process publishes, in catalogue order."""
        found = []
        for metric in ALL:
            if not self._emits(metric.emit):
                continue
            if metric.name in self._points:
                points = tuple(Point(*series) for series in self._points[metric.name].items())
                found.append(MetricFamily(metric, points))
            elif metric.name in self._histograms:
                found.append(MetricFamily(metric, tuple(self._histograms[metric.name])))
        return tuple(found)


def _attributes(metric: Metric, labels: tuple[str, ...]) -> Attributes:
    return tuple(
        (label.name, value) for label, value in zip(metric.labels, labels, strict=False) if value != ""
    )


class LabelLimiter:
    """Folds names beyond a bound into ``_OTHER``, first come first served.

    Args:
        bound: names published as they are.
    """

    def __init__(self, bound: int) -> None:
        self.overflown: set[str] = set()
        self._names: set[str] = set()
        self._bound = bound

    def fold(self, name: str) -> str:
        """``name``, or ``_OTHER``."""
        if name in self._names or name in ("", OTHER_VALUE):
            return name
        if len(self._names) < self._bound:
            self._names.add(name)
            return name
        self.overflown.add(name)
        return OTHER_VALUE
