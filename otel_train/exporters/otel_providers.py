"""Exports metrics and spans through the program's own OpenTelemetry providers. Imported only if the program passes some."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.metrics.export import AggregationTemporality, Buckets, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from otel_train.catalog import Kind
from otel_train.errors import ConfigError
from otel_train.exporters.otlp_json import SCOPE_NAME, span_attributes
from otel_train.resource import VERSION
from otel_train.safety import Guard

if TYPE_CHECKING:
    from otel_train import datamodel
    from otel_train.datamodel import AttributeValue, Snapshot, Span

MS_PER_S = 1e3
_UNKNOWN = "unknown_service"  # beginning of ``service.name`` where the SDK was given none


class ProviderExporter:
    """Adds otel_train's metrics to those that the provider's readers collect, and passes its spans to the span processors.

    When and where they are exported is up to the program. The SDK has no public API for metrics that are aggregated already,
    so the collect callback of each reader is wrapped; a provider without readers or processors of the SDK is a ConfigError.
    Resource attributes of the provider take precedence.
    """

    def __init__(
        self, resource: Mapping[str, AttributeValue], *, meters: Any = None, tracers: Any = None
    ) -> None:
        self._scope = InstrumentationScope(SCOPE_NAME, VERSION)
        self._providers = [provider for provider in (meters, tracers) if provider is not None]
        self._snapshot: Snapshot | None = None
        self._guard = Guard("metrics for the program's meter provider")
        self._undo: list[Callable[[], None]] = []
        processor = None if tracers is None else getattr(tracers, "_active_span_processor", None)
        if tracers is not None and processor is None:
            raise _refusal("tracer_provider", tracers, "opentelemetry.sdk.trace.TracerProvider()")
        readers = () if meters is None else _readers(meters)
        if readers is None:
            raise _refusal(
                "meter_provider", meters, "opentelemetry.sdk.metrics.MeterProvider(metric_readers=[...])"
            )
        self._on_end: Callable[[Any], None] | None = getattr(processor, "on_end", None)
        # Not ``Resource.create``, which would run detectors and add attributes of the SDK.
        self._span_resource = Resource({**resource, **_attributes(tracers)})
        self._metric_resource = Resource({**resource, **_attributes(meters)})
        for reader in readers:
            self._attach_reader(reader)

    def export(self, batch: datamodel.ExportBatch) -> None:
        """Keeps the metrics for the next collection, and passes spans on."""
        if batch.snapshot is not None:
            self._snapshot = batch.snapshot
        if self._on_end is not None:
            for span in batch.spans:
                self._on_end(to_readable_span(span, self._span_resource, self._scope))

    def close(self, timeout_s: float) -> None:
        """Flushes the providers, which collects the last metrics, and restores the collect callbacks of the readers."""
        try:
            for provider in self._providers:
                provider.force_flush(timeout_millis=timeout_s * MS_PER_S)
        finally:
            for undo in self._undo:
                undo()

    def _attach_reader(self, reader: Any) -> None:  # Any: a MetricReader of the SDK
        theirs = getattr(reader, "_collect", None)
        register = getattr(reader, "_set_collect_callback", None)
        if theirs is None or register is None:
            return

        def collect(asking: Any, timeout_millis: float = 10_000) -> Any:
            found = theirs(asking, timeout_millis=timeout_millis)
            if self._guard.closed or self._snapshot is None:
                return found
            with self._guard:
                ours = to_metrics_data(self._snapshot, self._metric_resource, self._scope)
                if found is None:
                    return ours
                return replace(found, resource_metrics=[*found.resource_metrics, *ours.resource_metrics])
            return found

        register(collect)
        self._undo.append(lambda: register(theirs))


def _readers(meters: Any) -> tuple[Any, ...] | None:
    """Returns the metric readers of a provider, from the attribute of this release of the SDK; None if it is not the SDK's."""
    found = getattr(meters, "_metric_readers", None)
    if found is None:
        found = getattr(getattr(meters, "_sdk_config", None), "metric_readers", None)
    return None if found is None else tuple(found)


def _attributes(provider: Any) -> dict[str, AttributeValue]:
    config = getattr(provider, "_sdk_config", provider)
    attributes = dict(getattr(getattr(config, "resource", None), "attributes", {}))
    if str(attributes.get("service.name", "")).startswith(_UNKNOWN):
        del attributes["service.name"]
    return attributes


def _refusal(name: str, given: Any, remedy: str) -> ConfigError:
    return ConfigError(f"{name}={given!r}: expected a provider of opentelemetry-sdk. Pass {remedy}")


def to_metrics_data(snapshot: Snapshot, resource: Resource, scope: InstrumentationScope) -> MetricsData:
    """Returns a snapshot in the SDK's public data classes; always cumulative, because Prometheus drops deltas."""
    metrics = [_family(family, snapshot) for family in snapshot.families]
    scopes = [sdk.ScopeMetrics(scope=scope, metrics=metrics, schema_url="")]
    resources = [sdk.ResourceMetrics(resource=resource, scope_metrics=scopes, schema_url="")]
    return MetricsData(resource_metrics=resources)


def _family(family: datamodel.MetricFamily, snapshot: Snapshot) -> sdk.Metric:
    metric, cumulative = family.metric, AggregationTemporality.CUMULATIVE
    times: dict[str, Any] = {
        "start_time_unix_nano": snapshot.start_unix_ns,
        "time_unix_nano": snapshot.time_unix_ns,
    }
    data: Any  # Any: one of three unrelated classes, of points of one of two
    if metric.kind is Kind.HISTOGRAM:
        data = sdk.ExponentialHistogram(
            [_histogram_point(point, times) for point in family.points], cumulative
        )
    else:
        points: Any = [
            sdk.NumberDataPoint(attributes=dict(point.attributes), value=float(point.value), **times)  # type: ignore[union-attr]  # the kind says which
            for point in family.points
        ]
        gauge, counter = metric.kind is Kind.GAUGE, metric.kind is Kind.COUNTER
        data = sdk.Gauge(points) if gauge else sdk.Sum(points, cumulative, is_monotonic=counter)
    return sdk.Metric(name=metric.name, description=metric.meaning, unit=metric.unit, data=data)


def _histogram_point(point: Any, times: Mapping[str, int]) -> sdk.ExponentialHistogramDataPoint:
    # For None the encoder leaves the field unset, as OTLP has it for a histogram without observations.
    empty = math.isnan(point.min)
    exemplars = [
        Exemplar({}, float(each.value), each.time_unix_ns, each.span_id, each.trace_id)
        for each in point.exemplars
    ]
    return sdk.ExponentialHistogramDataPoint(
        **times,
        attributes=dict(point.attributes),
        count=point.count,
        sum=float(point.sum),
        scale=point.scale,
        zero_count=point.zero_count,
        positive=Buckets(offset=point.offset, bucket_counts=point.exponential_counts),
        negative=Buckets(offset=0, bucket_counts=()),
        flags=0,
        min=None if empty else float(point.min),  # type: ignore[arg-type]  # see above
        max=None if empty else float(point.max),  # type: ignore[arg-type]  # see above
        exemplars=exemplars,
    )


def to_readable_span(span: Span, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    """Returns a finished span of the SDK, with the same ids."""
    links = [Link(_context(link.trace_id, link.span_id)) for link in span.links]
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=_context(span.trace_id, span.parent_id) if span.parent_id else None,
        resource=resource,
        attributes=dict(span_attributes(span)),
        links=links,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_unix_ns,
        end_time=span.end_unix_ns,
        instrumentation_scope=scope,
    )


def _context(trace_id: int, span_id: int) -> Any:  # Any: the API's class subclasses an untyped tuple
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
