"""A snapshot as the families of a Prometheus page."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import Metric as PrometheusFamily
from prometheus_client.samples import Exemplar as PrometheusExemplar
from prometheus_client.utils import floatToGoString

from otel_train.catalog import Kind
from otel_train.export.otlp_json import paced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from otel_train.records import (
        Attributes,
        AttributeValue,
        Family,
        HistogramPoint,
        Snapshot,
    )

_UNITS = ("seconds", "bytes", "ratio", "watts", "celsius")
"""Units that the OpenTelemetry translation puts into a name, which OpenMetrics then wants declared."""

_TYPES = {
    Kind.COUNTER: "counter",
    Kind.UPDOWN: "gauge",
    Kind.GAUGE: "gauge",
    Kind.HISTOGRAM: "histogram",
}


class SnapshotCollector:
    """What ``prometheus_client`` asks for the families of one page.

    Args:
        latest: the newest snapshot, or None before the first. Called once per page.
        constant_labels: labels that every sample carries, by Prometheus name.
        resource: what ``target_info`` says, by OpenTelemetry name.
    """

    def __init__(
        self,
        latest: Callable[[], Snapshot | None],
        constant_labels: Mapping[str, str],
        resource: Mapping[str, AttributeValue],
    ) -> None:
        self._latest = latest
        self._labels = dict(constant_labels)
        self._target = {label_name(key): str(value) for key, value in resource.items()}

    def collect(self) -> Iterator[PrometheusFamily]:
        """Every family of one snapshot, the target first."""
        snapshot = self._latest()
        yield self._target_info()
        if snapshot is not None:
            yield from paced(self._family(family) for family in snapshot.families if family.points)

    def _target_info(self) -> PrometheusFamily:
        family = PrometheusFamily("target", "Who publishes this page.", "info")
        family.add_sample("target_info", {**self._target, **self._labels}, 1.0)
        return family

    def _family(self, family: Family) -> PrometheusFamily:
        metric = family.metric
        name = metric.prometheus.removesuffix("_total")
        page = PrometheusFamily(name, metric.meaning, _TYPES[metric.kind], _unit(name))
        suffix = "_total" if metric.kind is Kind.COUNTER else ""
        for point in family.points:
            labels = self._with_constants(point.attributes)
            if metric.kind is Kind.HISTOGRAM:
                _add_histogram(page, metric.bounds, point, labels)  # type: ignore[arg-type]  # the kind says which
            else:
                page.add_sample(name + suffix, labels, point.value)  # type: ignore[union-attr]  # the kind says which
        return page

    def _with_constants(self, attributes: Attributes) -> dict[str, str]:
        return {**self._labels, **{label_name(key): value for key, value in attributes}}


def label_name(attribute: str) -> str:
    """An attribute's name after the OpenTelemetry to Prometheus translation."""
    name = "".join(char if char.isascii() and char.isalnum() else "_" for char in attribute)
    return f"key_{name}" if name[:1].isdigit() else name


def _unit(name: str) -> str:
    return next((unit for unit in _UNITS if name.endswith(f"_{unit}")), "")


def _add_histogram(
    page: PrometheusFamily,
    bounds: tuple[float, ...],
    point: HistogramPoint,
    labels: dict[str, str],
) -> None:
    exemplars = _exemplar_by_bucket(bounds, point)
    edges = (*bounds, math.inf)
    for bucket, count in enumerate(accumulate(point.explicit_counts)):
        page.add_sample(
            f"{page.name}_bucket",
            {**labels, "le": floatToGoString(edges[bucket])},  # type: ignore[no-untyped-call]  # theirs
            count,
            exemplar=exemplars.get(bucket),
        )
    page.add_sample(f"{page.name}_count", labels, point.count)
    page.add_sample(f"{page.name}_sum", labels, point.sum)


def _exemplar_by_bucket(bounds: tuple[float, ...], point: HistogramPoint) -> dict[int, PrometheusExemplar]:
    """The newest exemplar of each bucket; OpenMetrics allows one."""
    newest = sorted(point.exemplars, key=lambda exemplar: exemplar.time_unix_ns)
    return {
        bisect_left(bounds, exemplar.value): PrometheusExemplar(
            {"trace_id": f"{exemplar.trace_id:032x}", "span_id": f"{exemplar.span_id:016x}"},
            exemplar.value,
            exemplar.time_unix_ns / 1e9,
        )
        for exemplar in newest
    }
