"""OTLP/JSON lines back into the SDK's data classes, so that they can be sent after all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from otel_train.export.otlp_sdk import metrics_data, sdk_resource, span_context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.trace import ReadableSpan

# Any throughout: this is JSON from a file. What has the wrong shape raises LookupError, TypeError,
# ValueError or AttributeError, which ``unreadable`` lists for the caller.

unreadable = (LookupError, TypeError, ValueError, AttributeError)


def read_metrics(line: dict[str, Any]) -> Iterator[MetricsData]:
    """The metrics of one ``ExportMetricsServiceRequest``, by resource and scope."""
    for group in line["resourceMetrics"]:
        resource = sdk_resource(_attributes(group["resource"]))
        for part in group["scopeMetrics"]:
            metrics = [_metric(metric) for metric in part["metrics"]]
            yield metrics_data(metrics, resource, _scope(part))


def read_spans(line: dict[str, Any]) -> list[ReadableSpan]:
    """The spans of one ``ExportTraceServiceRequest``."""
    return [
        _span(span, sdk_resource(_attributes(group["resource"])), _scope(part))
        for group in line["resourceSpans"]
        for part in group["scopeSpans"]
        for span in part["spans"]
    ]


def _scope(part: dict[str, Any]) -> Any:
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    scope = part["scope"]
    return InstrumentationScope(scope["name"], scope.get("version", ""))


def _metric(metric: dict[str, Any]) -> Any:
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        ExponentialHistogram,
        Gauge,
        Metric,
        Sum,
    )

    data: Any
    if "gauge" in metric:
        data = Gauge([_number(point) for point in metric["gauge"]["dataPoints"]])
    elif "sum" in metric:
        body = metric["sum"]
        data = Sum(
            [_number(point) for point in body["dataPoints"]],
            AggregationTemporality(body["aggregationTemporality"]),
            is_monotonic=body["isMonotonic"],
        )
    else:
        body = metric["exponentialHistogram"]
        points = [_histogram(point) for point in body["dataPoints"]]
        data = ExponentialHistogram(points, AggregationTemporality(body["aggregationTemporality"]))
    return Metric(
        name=metric["name"],
        description=metric.get("description", ""),
        unit=metric.get("unit", ""),
        data=data,
    )


def _number(point: dict[str, Any]) -> Any:
    from opentelemetry.sdk.metrics.export import NumberDataPoint

    return NumberDataPoint(
        attributes=_attributes(point),
        start_time_unix_nano=int(point.get("startTimeUnixNano", 0)),
        time_unix_nano=int(point["timeUnixNano"]),
        value=float(point["asDouble"]),
    )


def _histogram(point: dict[str, Any]) -> Any:
    from opentelemetry.sdk.metrics.export import Buckets, ExponentialHistogramDataPoint

    positive = point.get("positive", {"offset": 0, "bucketCounts": []})
    minimum, maximum = point.get("min"), point.get("max")
    return ExponentialHistogramDataPoint(
        attributes=_attributes(point),
        start_time_unix_nano=int(point["startTimeUnixNano"]),
        time_unix_nano=int(point["timeUnixNano"]),
        count=int(point["count"]),
        sum=float(point["sum"]),
        scale=point["scale"],
        zero_count=int(point["zeroCount"]),
        positive=Buckets(positive["offset"], [int(count) for count in positive["bucketCounts"]]),
        negative=Buckets(0, ()),
        flags=0,
        min=None if minimum is None else float(minimum),  # type: ignore[arg-type]  # None: never observed
        max=None if maximum is None else float(maximum),  # type: ignore[arg-type]  # as above
        exemplars=[_exemplar(exemplar) for exemplar in point.get("exemplars", ())],
    )


def _exemplar(exemplar: dict[str, Any]) -> Any:
    from opentelemetry.sdk.metrics import Exemplar

    return Exemplar(
        filtered_attributes={},
        value=float(exemplar["asDouble"]),
        time_unix_nano=int(exemplar["timeUnixNano"]),
        span_id=int(exemplar["spanId"], 16),
        trace_id=int(exemplar["traceId"], 16),
    )


def _span(span: dict[str, Any], resource: Any, scope: Any) -> ReadableSpan:
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import Link, Status, StatusCode

    trace_id = int(span["traceId"], 16)
    parent = span.get("parentSpanId")
    failed = span["status"].get("code") == StatusCode.ERROR.value
    return ReadableSpan(
        name=span["name"],
        context=span_context(trace_id, int(span["spanId"], 16)),
        parent=span_context(trace_id, int(parent, 16)) if parent else None,
        resource=resource,
        attributes=_attributes(span),
        events=[
            Event(event["name"], _attributes(event), timestamp=int(event["timeUnixNano"]))
            for event in span.get("events", ())
        ],
        links=[
            Link(span_context(int(link["traceId"], 16), int(link["spanId"], 16)), _attributes(link))
            for link in span.get("links", ())
        ],
        status=Status(StatusCode.ERROR, span["status"]["message"]) if failed else Status(StatusCode.UNSET),
        start_time=int(span["startTimeUnixNano"]),
        end_time=int(span["endTimeUnixNano"]),
        instrumentation_scope=scope,
    )


def _attributes(owner: dict[str, Any]) -> dict[str, Any]:
    return {item["key"]: _value(item["value"]) for item in owner.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    kind, content = next(iter(value.items()))
    if kind == "arrayValue":
        return tuple(_value(item) for item in content["values"])
    return {"intValue": int, "doubleValue": float, "stringValue": str, "boolValue": bool}[kind](content)
