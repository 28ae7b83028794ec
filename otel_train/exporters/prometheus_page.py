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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from otel_train.datamodel import (
        Attributes,
        AttributeValue,
        HistogramPoint,
        MetricFamily,
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


class RankPage:
    """What one rank puts on a page. ``latest`` gives the newest snapshot, or None before the first; it is called once per page."""

    def __init__(
        self,
        latest: Callable[[], Snapshot | None],
        constant_labels: Mapping[str, str],
        resource: Mapping[str, AttributeValue],
    ) -> None:
        self.latest = latest
        self._labels = dict(constant_labels)
        self._target = {label_name(key): str(value) for key, value in resource.items()}

    def add_target(self, page: PrometheusFamily) -> None:
        """Add ``target_info``, which carries the resource attributes."""
        page.add_sample("target_info", {**self._target, **self._labels}, 1.0)

    def add(self, page: PrometheusFamily, family: MetricFamily) -> None:
        """Add the points of one metric."""
        metric = family.metric
        name = page.name + ("_total" if metric.kind is Kind.COUNTER else "")
        for point in family.points:
            labels = self._with_constants(point.attributes)
            if metric.kind is Kind.HISTOGRAM:
                _add_histogram(page, metric.bounds, point, labels)  # type: ignore[arg-type]  # the kind says which
            else:
                page.add_sample(name, labels, point.value)  # type: ignore[union-attr]  # the kind says which

    def _with_constants(self, attributes: Attributes) -> dict[str, str]:
        return {**self._labels, **{label_name(key): value for key, value in attributes}}


class PageCollector:
    """What ``prometheus_client`` asks for the families of one page."""

    def __init__(self, ranks: Sequence[RankPage]) -> None:
        self._ranks = ranks

    def collect(self) -> Iterator[PrometheusFamily]:
        """Every family once, with the points of all ranks, the targets first."""
        target = PrometheusFamily("target", "Who publishes this page.", "info")
        found: dict[str, list[tuple[RankPage, MetricFamily]]] = {}
        for rank in list(self._ranks):
            rank.add_target(target)
            snapshot = rank.latest()
            for family in snapshot.families if snapshot is not None else ():
                if family.points:
                    found.setdefault(family.metric.prometheus, []).append((rank, family))
        yield target
        for parts in found.values():
            yield self._family(parts)

    def _family(self, parts: Sequence[tuple[RankPage, MetricFamily]]) -> PrometheusFamily:
        metric = parts[0][1].metric
        name = metric.prometheus.removesuffix("_total")
        page = PrometheusFamily(name, metric.meaning, _TYPES[metric.kind], _unit(name))
        for rank, family in parts:
            rank.add(page, family)
        return page


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
