"""Exports metrics and spans through the program's own OpenTelemetry providers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from otel_train.catalog import Kind
from otel_train.errors import ConfigError
from otel_train.exporters.otlp_json import SCOPE_NAME, span_attributes
from otel_train.safety import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opentelemetry.sdk.metrics.export import Metric as SdkMetric
    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_train.datamodel import (
        AttributeValue,
        Exemplar,
        ExportBatch,
        HistogramPoint,
        MetricFamily,
        Point,
        Snapshot,
        Span,
    )

MS_PER_S = 1e3
_UNKNOWN = "unknown_service"  # what the SDK calls a program that has not said its name


class ProviderExporter:
    """Puts our metrics among those that a provider's readers collect, and our spans before its processors.

    When and where they go is the program's own affair. The SDK has no public way to hand over metrics that
    are aggregated already, so what the readers call to collect is wrapped; a provider without it is refused with
    a ConfigError. Resource attributes of the provider win over ours.
    """

    def __init__(
        self, resource: Mapping[str, AttributeValue], *, version: str, meters: Any = None, tracers: Any = None
    ) -> None:
        self._scope = sdk_scope(version)
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
        self._span_resource = sdk_resource({**resource, **_attributes(tracers)})
        self._metric_resource = sdk_resource({**resource, **_attributes(meters)})
        for reader in readers:
            self._join(reader)

    def export(self, batch: ExportBatch) -> None:
        """Keep the metrics for the next collection, and pass spans on."""
        if batch.snapshot is not None:
            self._snapshot = batch.snapshot
        if self._on_end is not None:
            for span in batch.spans:
                self._on_end(to_readable_span(span, self._span_resource, self._scope))

    def close(self, timeout_s: float) -> None:
        """Have the last metrics sent, and leave the readers as they were."""
        try:
            for provider in self._providers:
                provider.force_flush(timeout_millis=timeout_s * MS_PER_S)
        finally:
            for undo in self._undo:
                undo()

    def _join(self, reader: Any) -> None:  # Any: a MetricReader of the SDK
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
    """The readers of a provider; None if it is none of the SDK's. Where they are depends on the release."""
    found = getattr(meters, "_metric_readers", None)
    if found is None:
        found = getattr(getattr(meters, "_sdk_config", None), "metric_readers", None)
    return None if found is None else tuple(found)


def _attributes(provider: Any) -> dict[str, AttributeValue]:
    """What a provider says of the program."""
    config = getattr(provider, "_sdk_config", provider)
    attributes = dict(getattr(getattr(config, "resource", None), "attributes", {}))
    if str(attributes.get("service.name", "")).startswith(_UNKNOWN):
        del attributes["service.name"]
    return attributes


def _refusal(name: str, given: Any, remedy: str) -> ConfigError:
    return ConfigError(f"{name}={given!r}: expected a provider of opentelemetry-sdk. Pass {remedy}")


def sdk_resource(attributes: Mapping[str, AttributeValue]) -> Resource:
    """Exactly these attributes: no detectors, none of the SDK's own."""
    from opentelemetry.sdk.resources import Resource

    return Resource(dict(attributes))


def sdk_scope(version: str) -> InstrumentationScope:
    """The instrumentation scope of everything we send."""
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    return InstrumentationScope(SCOPE_NAME, version)


def to_metrics_data(snapshot: Snapshot, resource: Resource, scope: InstrumentationScope) -> MetricsData:
    """A snapshot as the SDK's public data classes; always cumulative, because Prometheus drops deltas."""
    metrics = [_family(family, snapshot) for family in snapshot.families]
    return metrics_data(metrics, resource, scope)


def metrics_data(
    metrics: Sequence[SdkMetric], resource: Resource, scope: InstrumentationScope
) -> MetricsData:
    """Metrics of one resource and one scope, wrapped the way the exporters take them."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics

    scopes = [ScopeMetrics(scope=scope, metrics=metrics, schema_url="")]
    return MetricsData(
        resource_metrics=[ResourceMetrics(resource=resource, scope_metrics=scopes, schema_url="")]
    )


def _family(family: MetricFamily, snapshot: Snapshot) -> SdkMetric:
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        ExponentialHistogram,
        Gauge,
        Metric,
        Sum,
    )

    metric = family.metric
    cumulative = AggregationTemporality.CUMULATIVE
    data: Any  # Any: one of three unrelated classes
    if metric.kind is Kind.HISTOGRAM:
        points = [_histogram_point(point, snapshot) for point in family.points]  # type: ignore[arg-type]  # the kind says which
        data = ExponentialHistogram(points, cumulative)
    else:
        numbers = [_number_point(point, snapshot) for point in family.points]  # type: ignore[arg-type]  # the kind says which
        monotonic = metric.kind is Kind.COUNTER
        data = (
            Gauge(numbers) if metric.kind is Kind.GAUGE else Sum(numbers, cumulative, is_monotonic=monotonic)
        )
    return Metric(name=metric.name, description=metric.meaning, unit=metric.unit, data=data)


def _number_point(point: Point, snapshot: Snapshot) -> Any:  # Any: made by the SDK, taken by the SDK
    from opentelemetry.sdk.metrics.export import NumberDataPoint

    return NumberDataPoint(
        attributes=dict(point.attributes),
        start_time_unix_nano=snapshot.start_unix_ns,
        time_unix_nano=snapshot.time_unix_ns,
        value=float(point.value),
    )


def _histogram_point(point: HistogramPoint, snapshot: Snapshot) -> Any:  # Any: as above
    from opentelemetry.sdk.metrics.export import Buckets, ExponentialHistogramDataPoint

    # The encoder leaves a field unset for None, which is how OTLP says "no observation yet".
    empty = math.isnan(point.min)
    return ExponentialHistogramDataPoint(
        attributes=dict(point.attributes),
        start_time_unix_nano=snapshot.start_unix_ns,
        time_unix_nano=snapshot.time_unix_ns,
        count=point.count,
        sum=float(point.sum),
        scale=point.scale,
        zero_count=point.zero_count,
        positive=Buckets(offset=point.offset, bucket_counts=point.exponential_counts),
        negative=Buckets(offset=0, bucket_counts=()),
        flags=0,
        min=None if empty else float(point.min),  # type: ignore[arg-type]  # see above
        max=None if empty else float(point.max),  # type: ignore[arg-type]  # see above
        exemplars=[_exemplar(exemplar) for exemplar in point.exemplars],
    )


def _exemplar(exemplar: Exemplar) -> Any:  # Any: as above
    from opentelemetry.sdk.metrics import Exemplar as SdkExemplar

    return SdkExemplar(
        filtered_attributes={},
        value=float(exemplar.value),
        time_unix_nano=exemplar.time_unix_ns,
        span_id=exemplar.span_id,
        trace_id=exemplar.trace_id,
    )


def to_readable_span(span: Span, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    """A finished span, with the ids it was given."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import Link, Status, StatusCode

    return ReadableSpan(
        name=span.name,
        context=span_context(span.trace_id, span.span_id),
        parent=span_context(span.trace_id, span.parent_id) if span.parent_id else None,
        resource=resource,
        attributes=dict(span_attributes(span)),
        events=[
            Event(event.name, dict(event.attributes), timestamp=event.time_unix_ns) for event in span.events
        ],
        links=[Link(span_context(link.trace_id, link.span_id), dict(link.attributes)) for link in span.links],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_unix_ns,
        end_time=span.end_unix_ns,
        instrumentation_scope=scope,
    )


def span_context(trace_id: int, span_id: int) -> Any:  # Any: the API's class subclasses an untyped tuple
    """A local, sampled span context."""
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(
        trace_id=trace_id,
        span_id=span_id,
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
