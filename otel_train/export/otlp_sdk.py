"""Figures as the OpenTelemetry SDK's own data classes, in the hands of the SDK's exporters.

Only this room imports opentelemetry, and it does so when an object is made, not when it is imported. No
provider, reader or processor of the SDK is used: those restart themselves in forked children.
"""

from __future__ import annotations

import math
import random
import sys
from typing import TYPE_CHECKING, Any

from otel_train.catalog import Kind
from otel_train.errors import ConfigError
from otel_train.export.certified import certified_session
from otel_train.export.otlp_json import SCOPE_NAME, paced, span_attributes
from otel_train.export.quiet import import_grpc_quietly
from otel_train.records import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from opentelemetry.sdk.metrics.export import Metric as SdkMetric
    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from otel_train.export.settings import OtlpSettings
    from otel_train.export.spool import Payload
    from otel_train.records import (
        AttributeValue,
        Exemplar,
        Family,
        HistogramPoint,
        Point,
        Span,
    )


class _Paced(tuple):  # type: ignore[type-arg]  # holds what the SDK asks for
    """A tuple that lets go of the interpreter between its items while the SDK encodes them."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:  # Any: the SDK's encoders are untyped
        return paced(super().__iter__())


class SdkTransport:
    """Sends payloads with the SDK's OTLP exporters, which read the standard ``OTEL_*`` variables.

    Args:
        settings: which signals go out, by which protocol.
        resource: who we are.
        version: version of the instrumentation scope.

    Raises:
        ConfigError: the exporters refuse their settings (a certificate file that is not there, say).
    """

    def __init__(
        self,
        settings: OtlpSettings,
        resource: Mapping[str, AttributeValue],
        *,
        version: str,
    ) -> None:
        self._settings = settings
        self._resource = sdk_resource(resource)
        self._scope = sdk_scope(version)
        # By signal: the exporter, and the time limit it was made with.
        self._exporters: dict[str, tuple[Any, float]] = {}  # Any: http and grpc share no base class
        for signal in settings.protocols:
            self._exporter(signal, settings.timeout_s)

    def send(self, payload: Payload, timeout_s: float) -> bool:
        """Send one payload in at most ``timeout_s`` seconds, the SDK's own retries included."""
        if isinstance(payload, Snapshot):
            data = to_metrics_data(payload, self._resource, self._scope)
            return self.send_metrics_data(data, timeout_s)
        spans = [to_readable_span(span, self._resource, self._scope) for span in paced(payload)]
        return self.send_readable_spans(spans, timeout_s)

    def send_metrics_data(self, data: MetricsData, timeout_s: float) -> bool:
        """Send metrics that are already in the SDK's form."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        result = self._exporter("metrics", timeout_s).export(data)
        return bool(result is MetricExportResult.SUCCESS)

    def send_readable_spans(self, spans: Sequence[ReadableSpan], timeout_s: float) -> bool:
        """Send spans that are already in the SDK's form."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = self._exporter("traces", timeout_s).export(_Paced(spans))
        return bool(result is SpanExportResult.SUCCESS)

    def close(self) -> None:
        """Drop connections; a send that is waiting to retry gives up."""
        exporters, self._exporters = self._exporters, {}
        for exporter, _ in exporters.values():
            exporter.shutdown()

    def _exporter(self, signal: str, timeout_s: float) -> Any:  # Any: see above
        # An exporter's time limit is fixed when it is made, and the last flush has less time than usual.
        timeout_s = min(timeout_s, self._settings.timeout_s)
        made = self._exporters.get(signal)
        if made is not None and made[1] <= timeout_s:
            return made[0]
        if made is not None:
            made[0].shutdown()
        exporter = make_exporter(signal, self._settings, timeout_s)
        self._exporters[signal] = (exporter, timeout_s)
        return exporter


def make_exporter(signal: str, settings: OtlpSettings, timeout_s: float) -> Any:  # Any: http or grpc
    """The SDK's exporter for ``metrics`` or ``traces``.

    Raises:
        ConfigError: it refuses its settings.
    """
    kind = _exporter_class(signal, settings.protocols[signal])
    _leave_the_generator_alone()
    endpoint = settings.explicit_endpoint(signal)
    chosen: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if settings.protocols[signal] != "grpc" and signal in settings.certificates:
        chosen["session"] = certified_session(settings.certificates[signal])
    try:
        return kind(timeout=timeout_s, **chosen)
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"OTLP exporter for {signal}: {error}. Check the OTEL_EXPORTER_OTLP_* variables, "
            "or set OTEL_SDK_DISABLED=true to run without OTLP."
        ) from error


def _leave_the_generator_alone() -> None:
    """Let the SDK's exporters draw the time until they try again from a generator of their own.

    They draw it from Python's global one, which the training program has seeded: a Collector that is away would change
    its augmentations.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("opentelemetry.exporter.otlp") and getattr(module, "random", None) is random:
            vars(module)["random"] = random.Random()  # noqa: S311 - as good as what it replaces


def _exporter_class(signal: str, protocol: str) -> Any:  # Any: see above
    if protocol == "grpc":
        import_grpc_quietly()
        if signal == "metrics":
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (
                OTLPMetricExporter as GrpcMetrics,
            )

            return GrpcMetrics
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcSpans,
        )

        return GrpcSpans
    import netrc  # noqa: F401  # requests imports it with the first request, which would fall into a step

    if signal == "metrics":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
            OTLPMetricExporter as HttpMetrics,
        )

        return HttpMetrics
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpSpans,
    )

    return HttpSpans


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
    metrics = _Paced([_family(family, snapshot) for family in paced(snapshot.families)])
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


def _family(family: Family, snapshot: Snapshot) -> SdkMetric:
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
        points = _Paced([_histogram_point(point, snapshot) for point in family.points])  # type: ignore[arg-type]  # the kind says which
        data = ExponentialHistogram(points, cumulative)
    else:
        numbers = _Paced([_number_point(point, snapshot) for point in family.points])  # type: ignore[arg-type]  # the kind says which
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
