"""The name we query is the name we publish."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as PrometheusFamily,
)
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from otel_train import catalog
from otel_train.catalog import Kind, Metric

GOLDEN = Path(__file__).parents[1] / "golden" / "metric_names.txt"
TYPES = {
    Kind.COUNTER: "counter",
    Kind.UPDOWN: "gauge",
    Kind.GAUGE: "gauge",
    Kind.HISTOGRAM: "histogram",
}
INSTRUMENTS = {
    "Counter": Kind.COUNTER,
    "UpDownCounter": Kind.UPDOWN,
    "Gauge": Kind.GAUGE,
    "Histogram": Kind.HISTOGRAM,
}


def sdk_exposition() -> str:
    """What the SDK's own Prometheus exporter makes of one value per metric."""
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(disable_target_info=True, registry=registry, scope_info_enabled=False)
    provider = MeterProvider([reader], shutdown_on_exit=False)
    meter = provider.get_meter("otel_train")
    for metric in catalog.ALL:
        if metric.kind is Kind.COUNTER:
            meter.create_counter(metric.name, metric.unit, metric.meaning).add(1)
        elif metric.kind is Kind.UPDOWN:
            meter.create_up_down_counter(metric.name, metric.unit, metric.meaning).add(1)
        elif metric.kind is Kind.GAUGE:
            meter.create_gauge(metric.name, metric.unit, metric.meaning).set(1)
        else:
            meter.create_histogram(metric.name, metric.unit, metric.meaning).record(1)
    text = generate_latest(registry).decode()
    provider.shutdown()
    return text


class OneValueEach(Collector):
    """Publishes one value per metric under our own translation of its name."""

    def collect(self) -> list[PrometheusFamily]:
        return [self._family(metric) for metric in catalog.ALL]

    def _family(self, metric: Metric) -> PrometheusFamily:
        name = metric.prometheus
        if metric.kind is Kind.COUNTER:
            return CounterMetricFamily(name, metric.meaning, value=1)
        if metric.kind is Kind.HISTOGRAM:
            return HistogramMetricFamily(name, metric.meaning, buckets=[("+Inf", 1)], sum_value=1)
        return GaugeMetricFamily(name, metric.meaning, value=1)


def test_the_sdk_gives_every_metric_the_name_and_type_we_say() -> None:
    """Dashboards and rules use our names; another path with other names leaves them empty."""
    lines = sdk_exposition().splitlines()

    published = {line for line in lines if line.startswith("# TYPE ")}

    assert published == {f"# TYPE {metric.prometheus} {TYPES[metric.kind]}" for metric in catalog.ALL}


def test_prometheus_client_keeps_every_name_as_it_is() -> None:
    """It refuses some names and edits others (``_total``, ``_info``, units)."""
    registry = CollectorRegistry()
    registry.register(OneValueEach())

    text = generate_latest(registry).decode()
    families = {family.name: family.type for family in text_string_to_metric_families(text)}

    # A parser calls a counter by its name without the suffix.
    assert families == {
        metric.prometheus.removesuffix("_total"): TYPES[metric.kind] for metric in catalog.ALL
    }


def test_openmetrics_accepts_every_name() -> None:
    """Its parser is strict about suffixes, and exemplars travel in this format alone."""
    registry = CollectorRegistry()
    registry.register(OneValueEach())

    # prometheus_client does not type these two.
    text = generate_openmetrics(registry).decode()  # type: ignore[no-untyped-call]
    families = list(openmetrics_families(text))  # type: ignore[no-untyped-call]
    samples = {sample.name for family in families for sample in family.samples}

    for metric in catalog.ALL:
        suffix = "_count" if metric.kind is Kind.HISTOGRAM else ""
        assert metric.prometheus + suffix in samples


def test_every_agreed_name_kind_and_unit_is_in_the_catalogue_in_order() -> None:
    """Names are an interface: rules and dashboards of others were written against this list."""
    agreed = [line.split() for line in GOLDEN.read_text().splitlines()]

    ours = [metric for metric in catalog.ALL if metric.name in {row[0] for row in agreed}]

    assert [(m.name, m.prometheus, m.kind, m.unit) for m in ours] == [
        (name, prometheus, INSTRUMENTS[kind], unit) for name, prometheus, kind, unit in agreed
    ]


@pytest.mark.parametrize(
    ("unit", "kind", "name"),
    [
        ("s", Kind.COUNTER, "train_x_seconds_total"),
        ("By", Kind.GAUGE, "train_x_bytes"),
        ("W", Kind.GAUGE, "train_x_watts"),
        ("Cel", Kind.GAUGE, "train_x_celsius"),
        ("{sample}/s", Kind.GAUGE, "train_x_per_second"),
        ("{flop}/s", Kind.GAUGE, "train_x_per_second"),
        ("{step}", Kind.COUNTER, "train_x_total"),
        ("{loss}", Kind.GAUGE, "train_x"),
        ("1", Kind.UPDOWN, "train_x"),
    ],
)
def test_a_unit_becomes_a_suffix(unit: str, kind: Kind, name: str) -> None:
    """The rules of the OpenTelemetry to Prometheus translation, one by one."""
    metric = Metric(name="train.x", unit=unit, kind=kind, meaning="Synthetic.")

    assert metric.prometheus == name
