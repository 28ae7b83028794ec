"""Our metrics by way of the program's own OpenTelemetry providers."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics as metrics_api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_train
from otel_train.datamodel import ExportBatch
from otel_train.exporters.otel_providers import ProviderExporter
from tests.support.snapshots import RESOURCE, snapshot, spans


class Sent(MetricExporter):
    """Keeps what a reader sends, or hangs."""

    def __init__(self, *, hangs: threading.Event | None = None) -> None:
        super().__init__()
        self.names: list[set[str]] = []
        self._hangs = hangs

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: Any
    ) -> MetricExportResult:
        self.names.append(names_in(metrics_data))
        if self._hangs is not None:
            self._hangs.wait(30)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:
        """Nothing is open."""


def names_in(data: MetricsData | None) -> set[str]:
    """Of the metrics in it."""
    groups = data.resource_metrics if data is not None else ()
    return {metric.name for group in groups for scope in group.scope_metrics for metric in scope.metrics}


OURS = {family.metric.name for family in snapshot().families}


def test_a_reader_collects_our_metrics_beside_the_programs_own() -> None:
    """One pipeline, one place to look at; and after the end only theirs."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], resource=Resource({"service.name": "trainer"}))
    provider.get_meter("mine").create_counter("mine").add(3)
    exporter = ProviderExporter(RESOURCE, meters=provider)
    before = names_in(reader.get_metrics_data())
    exporter.export(ExportBatch(snapshot=snapshot()))
    data = reader.get_metrics_data()
    exporter.close(1)

    assert before == {"mine"}
    assert names_in(data) == {"mine", *OURS}
    assert data is not None
    assert [group.resource.attributes["service.name"] for group in data.resource_metrics] == ["trainer"] * 2
    assert data.resource_metrics[1].resource.attributes["train.run.id"] == RESOURCE["train.run.id"]
    assert names_in(reader.get_metrics_data()) == {"mine"}
    provider.shutdown()


def test_the_last_metrics_are_sent_at_the_end() -> None:
    """A reader that sends once a minute would never see those of a short run."""
    sent = Sent()
    provider = MeterProvider(
        metric_readers=[PeriodicExportingMetricReader(sent, export_interval_millis=60_000)]
    )
    exporter = ProviderExporter(RESOURCE, meters=provider)
    exporter.export(ExportBatch(snapshot=snapshot(), final=True))
    exporter.close(1)

    assert sent.names == [OURS]
    provider.shutdown()


@pytest.mark.parametrize("kind", [SimpleSpanProcessor, BatchSpanProcessor])
def test_spans_keep_their_ids(kind: Any) -> None:
    """Exemplars point to them, and ranks join one trace by them."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "trainer"}))
    provider.add_span_processor(kind(kept))
    exporter = ProviderExporter(RESOURCE, tracers=provider)
    exporter.export(ExportBatch(spans=spans()))
    exporter.close(5)

    finished = kept.get_finished_spans()
    assert [(span.context.trace_id, span.context.span_id) for span in finished if span.context] == [
        (span.trace_id, span.span_id) for span in spans()
    ]
    assert {span.resource.attributes["service.name"] for span in finished} == {"trainer"}
    provider.shutdown()


@pytest.mark.parametrize("name", ["meter_provider", "tracer_provider"])
@pytest.mark.parametrize("given", [object(), metrics_api.NoOpMeterProvider()])
def test_what_is_no_provider_of_the_sdk_is_refused(name: str, given: Any, tmp_path: Path) -> None:
    """The API's own providers throw everything away without a word."""
    with pytest.raises(otel_train.ConfigError, match=f"{name}=.*opentelemetry-sdk"):
        otel_train.instrument(run_dir=str(tmp_path), console=False, prometheus=False, **{name: given})

    assert otel_train.current() is None


def test_a_session_exports_by_way_of_the_programs_providers(tmp_path: Path) -> None:
    """Metrics and spans of a whole run, and both are let go at its end."""
    reader, kept = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider(metric_readers=[reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(kept))
    session = otel_train.instrument(
        run_dir=str(tmp_path), console=False, prometheus=False, otlp="off",
        meter_provider=meters, tracer_provider=tracers, tuning={"poll_interval_s": 0.05}, export_interval_s=0.1,
    )  # fmt: skip
    for _ in session.watch(range(10), name="numbers", phase="train"):
        otel_train.step()
    deadline, names = time.monotonic() + 60, set[str]()
    while "train.batches" not in names and time.monotonic() < deadline:
        names |= names_in(reader.get_metrics_data())
        time.sleep(0.05)
    session.close()

    assert "train.batches" in names
    assert "train.step" in {span.name for span in kept.get_finished_spans()}
    assert "train.batches" in names_in(reader.get_metrics_data())  # the last metrics, sent at the end
    assert names_in(reader.get_metrics_data()) == set()
    meters.shutdown()
    tracers.shutdown()


def test_a_provider_that_hangs_does_not_block(tmp_path: Path) -> None:
    """Its collector is down: training ends in time all the same."""
    released = threading.Event()
    sent = Sent(hangs=released)
    meters = MeterProvider(
        metric_readers=[PeriodicExportingMetricReader(sent, export_interval_millis=60_000)],
        shutdown_on_exit=False,
    )
    session = otel_train.instrument(
        run_dir=str(tmp_path), console=False, prometheus=False, otlp="off", meter_provider=meters
    )
    begun = time.monotonic()
    session.close()
    took_s = time.monotonic() - begun
    released.set()
    meters.shutdown()

    assert sent.names
    assert took_s < 15
