"""Metrics and spans as lines of OTLP/JSON, the format of the OpenTelemetry file exporter.

Source: the OTLP specification, "JSON Protobuf Encoding": lowerCamelCase keys, enums as numbers, 64-bit
integers as decimal strings, trace and span ids as hex.
"""

from __future__ import annotations

import json
import math
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from otel_train.catalog import Kind
from otel_train.resource import VERSION

if TYPE_CHECKING:
    from otel_train.datamodel import AttributeValue, HistogramPoint, MetricFamily, Point, Snapshot, Span

    _Resource = Mapping[str, AttributeValue]

SCOPE_NAME = "otel_train"

CUMULATIVE = 2
"""AGGREGATION_TEMPORALITY_CUMULATIVE in metrics.proto."""

SPAN_KIND_INTERNAL = 1
STATUS_CODE_ERROR = 2

SPAN_FLAGS_HAS_IS_REMOTE = 0x100
"""SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK in trace.proto: "is remote" is known, and it is false."""

REQUEST_KEYS = {"metrics": "resourceMetrics", "traces": "resourceSpans"}
"""By signal, the key of a request."""

Json = dict[str, object]
_Records = TypeVar("_Records")


def metrics_line(snapshot: Snapshot, resource: Mapping[str, AttributeValue]) -> str:
    """Returns one ``ExportMetricsServiceRequest`` on one line, without the newline."""
    metrics = [_family(family, snapshot) for family in snapshot.families]
    return _envelope("metrics", metrics, resource)


class OtlpLines:
    """Encodes lines with one resource. Keeps the last line of each kind, because the run directory and the spool both need it."""

    def __init__(self, resource: Mapping[str, AttributeValue]) -> None:
        self._resource = dict(resource)
        self._made: dict[str, tuple[object, str]] = {}

    def metrics(self, snapshot: Snapshot) -> str:
        """Returns ``metrics_line`` of a snapshot."""
        return self._line("metrics", snapshot, metrics_line)

    def spans(self, spans: Sequence[Span]) -> str:
        """Returns ``spans_line`` of spans."""
        return self._line("spans", spans, spans_line)

    def _line(self, kind: str, records: _Records, line_of: Callable[[_Records, _Resource], str]) -> str:
        known, line = self._made.get(kind, (None, ""))
        if known is not records:
            line = line_of(records, self._resource)
            self._made[kind] = records, line
        return line


def spans_line(spans: Sequence[Span], resource: Mapping[str, AttributeValue]) -> str:
    """Returns one ``ExportTraceServiceRequest`` on one line, without the newline."""
    return _envelope("spans", [_span(span) for span in spans], resource)


def protobuf_of(line: bytes, signal: str) -> bytes:
    """Returns the request on a line as a protobuf message, without unknown fields. ValueError if the line is no request."""
    json_format, request, _ = load_protobuf(signal)
    try:
        value = {REQUEST_KEYS[signal]: json.loads(line)[REQUEST_KEYS[signal]]}
        message = json_format.ParseDict(_ids_in_base64(value), request(), ignore_unknown_fields=True)
        return bytes(message.SerializeToString())
    except (json_format.Error, LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"the line is no OTLP request of {signal} ({error})") from error


def load_protobuf(signal: str) -> tuple[Any, Any, Any]:  # Any: generated code without types
    """Returns the protobuf's JSON format, and the classes of a request and a response."""
    from google.protobuf import json_format

    if signal == "metrics":
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics

        return json_format, metrics.ExportMetricsServiceRequest, metrics.ExportMetricsServiceResponse
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace

    return json_format, trace.ExportTraceServiceRequest, trace.ExportTraceServiceResponse


def _ids_in_base64(node: Any) -> Any:  # Any: JSON
    """Converts trace and span ids from hex, as in OTLP/JSON, to URL-safe base64, as protobuf's own JSON mapping has bytes."""
    if isinstance(node, dict):
        return {
            key: urlsafe_b64encode(bytes.fromhex(value)).decode() if key in _IDS else _ids_in_base64(value)
            for key, value in node.items()
        }
    return [_ids_in_base64(item) for item in node] if isinstance(node, list) else node


_IDS = frozenset({"traceId", "spanId", "parentSpanId"})


def records_in(line: bytes) -> int:
    """Returns how many data points or spans a request on a line has, without parsing it.

    Every data point and every exemplar has a time; otel_train's exemplars also have a span id. Every span has a start.
    """
    if b'"resourceSpans"' in line[:64]:
        return line.count(b'"startTimeUnixNano"')
    return max(0, line.count(b'"timeUnixNano"') - line.count(b'"spanId"'))


def _envelope(key: str, records: list[Json], resource: Mapping[str, AttributeValue]) -> str:
    suffix = key.capitalize()
    scope = {"scope": {"name": SCOPE_NAME, "version": VERSION}, key: records}
    one = {"resource": {"attributes": _attributes(resource)}, f"scope{suffix}": [scope]}
    return _dump({f"resource{suffix}": [one]})


def _dump(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _family(family: MetricFamily, snapshot: Snapshot) -> Json:
    metric = family.metric
    write = _histogram_point if metric.kind is Kind.HISTOGRAM else _number_point
    data: Json = {"dataPoints": [write(point, snapshot, metric.kind) for point in family.points]}  # type: ignore[arg-type]  # the kind says which
    if metric.kind is not Kind.GAUGE:
        data["aggregationTemporality"] = CUMULATIVE
    if metric.kind in {Kind.COUNTER, Kind.UPDOWN}:
        data["isMonotonic"] = metric.kind is Kind.COUNTER
    key = {Kind.HISTOGRAM: "exponentialHistogram", Kind.GAUGE: "gauge"}.get(metric.kind, "sum")
    return {"name": metric.name, "description": metric.meaning, "unit": metric.unit, key: data}


def _number_point(point: Point, snapshot: Snapshot, kind: Kind) -> Json:
    data: Json = {
        "attributes": _attributes(dict(point.attributes)),
        "timeUnixNano": str(snapshot.time_unix_ns),
        "asDouble": _double(point.value),
    }
    if kind is not Kind.GAUGE:
        data["startTimeUnixNano"] = str(snapshot.start_unix_ns)
    return data


def _histogram_point(point: HistogramPoint, snapshot: Snapshot, _: Kind) -> Json:
    data: Json = {
        "attributes": _attributes(dict(point.attributes)),
        "startTimeUnixNano": str(snapshot.start_unix_ns),
        "timeUnixNano": str(snapshot.time_unix_ns),
        "count": str(point.count),
        "sum": _double(point.sum),
        "scale": point.scale,
        "zeroCount": str(point.zero_count),
    }
    if point.exponential_counts:
        counts = [str(count) for count in point.exponential_counts]
        data["positive"] = {"offset": point.offset, "bucketCounts": counts}
    if not math.isnan(point.min):
        data["min"] = _double(point.min)
        data["max"] = _double(point.max)
    if point.exemplars:
        data["exemplars"] = [
            {
                "timeUnixNano": str(exemplar.time_unix_ns),
                "asDouble": _double(exemplar.value),
                "spanId": f"{exemplar.span_id:016x}",
                "traceId": f"{exemplar.trace_id:032x}",
            }
            for exemplar in point.exemplars
        ]
    return data


def _span(span: Span) -> Json:
    data: Json = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "flags": SPAN_FLAGS_HAS_IS_REMOTE,
        "name": span.name,
        "kind": SPAN_KIND_INTERNAL,
        "startTimeUnixNano": str(span.start_unix_ns),
        "endTimeUnixNano": str(span.end_unix_ns),
        "attributes": _attributes(span_attributes(span)),
        "links": [
            {
                "traceId": f"{link.trace_id:032x}",
                "spanId": f"{link.span_id:016x}",
                "flags": SPAN_FLAGS_HAS_IS_REMOTE,
            }
            for link in span.links
        ],
        "status": {"code": STATUS_CODE_ERROR, "message": span.error} if span.error else {},
    }
    if span.parent_id:
        data["parentSpanId"] = f"{span.parent_id:016x}"
    return data


def span_attributes(span: Span) -> Mapping[str, AttributeValue]:
    """Returns the attributes of a span; a failed one carries ``error.type`` (general semantic conventions)."""
    if span.error and "error.type" not in span.attributes:
        return {**span.attributes, "error.type": span.error}
    return span.attributes


def _attributes(attributes: Mapping[str, AttributeValue]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: AttributeValue) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": _double(value)}
    return {"arrayValue": {"values": [_value(item) for item in value]}}


def _double(value: float) -> float | str:
    # JSON has no NaN and no infinities; the protobuf mapping writes them as strings.
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(value)
