"""Figures in the OpenTelemetry SDK's words, and in those of OTLP/JSON."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest
from google.protobuf import json_format  # type: ignore[import-untyped]  # no stubs are published with it
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from otel_train.errors import ConfigError
from otel_train.export.otlp_json import metrics_line, spans_line
from otel_train.export.otlp_read import read_metrics, read_spans
from otel_train.export.otlp_sdk import sdk_resource, sdk_scope, to_metrics_data, to_readable_span
from otel_train.export.settings import OtlpSettings, otlp_configured
from otel_train.records import Exemplar, Family, HistogramPoint, Point, Snapshot
from tests.support.figures import RESOURCE, STEP, STEPS, snapshot, spans

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


def metrics_request(figures: Snapshot) -> ExportMetricsServiceRequest:
    return encode_metrics(to_metrics_data(figures, sdk_resource(RESOURCE), sdk_scope("1")))


def trace_request() -> ExportTraceServiceRequest:
    resource, scope = sdk_resource(RESOURCE), sdk_scope("1")
    return encode_spans([to_readable_span(span, resource, scope) for span in spans()])


def from_spec_json(text: str, message: Any) -> Any:
    """Parse OTLP/JSON with protobuf's own parser, which differs from OTLP only in how bytes are spelled."""

    def ids(node: Any) -> Any:
        if isinstance(node, dict):
            return {
                key: base64.b64encode(bytes.fromhex(value)).decode()
                if key in {"traceId", "spanId", "parentSpanId"}
                else ids(value)
                for key, value in node.items()
            }
        return [ids(item) for item in node] if isinstance(node, list) else node

    return json_format.ParseDict(ids(json.loads(text)), message)


def test_the_json_line_of_a_snapshot_says_what_the_protobuf_says() -> None:
    """Whoever reads the file sees what the collector saw."""
    line = metrics_line(snapshot(), RESOURCE, "1")
    assert from_spec_json(line, ExportMetricsServiceRequest()) == metrics_request(snapshot())


def test_the_json_line_of_spans_says_what_the_protobuf_says() -> None:
    """Ids, parents, links, events and status must survive in both forms."""
    line = spans_line(spans(), RESOURCE, "1")
    assert from_spec_json(line, ExportTraceServiceRequest()) == trace_request()


def test_a_line_read_back_is_what_was_written() -> None:
    """A replay must not change what it sends."""
    [data] = read_metrics(json.loads(metrics_line(snapshot(), RESOURCE, "1")))
    assert encode_metrics(data) == metrics_request(snapshot())
    assert encode_spans(read_spans(json.loads(spans_line(spans(), RESOURCE, "1")))) == trace_request()


numbers = st.floats(allow_nan=False)
durations = st.floats(min_value=0, max_value=1e9, allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(value=numbers, loader=texts, observed=st.lists(durations, min_size=1, max_size=5))
def test_any_figures_survive_the_way_through_a_file(value: float, loader: str, observed: list[float]) -> None:
    """Infinities, odd label values and tiny numbers are written as the specification wants them."""
    labels = (("train.loader", loader),)
    point = HistogramPoint(
        attributes=labels,
        count=len(observed),
        sum=math.fsum(observed),
        min=min(observed),
        max=max(observed),
        zero_count=len(observed),
        scale=4,
        offset=-3,
        exponential_counts=(),
        explicit_counts=(0, 0, 0, len(observed)),
        exemplars=tuple(Exemplar(each, 1, 2, 3) for each in observed),
    )
    figures = Snapshot(1, 2, (Family(STEPS, (Point(labels, value),)), Family(STEP, (point,))))
    line = metrics_line(figures, RESOURCE, "1")
    assert "\n" not in line
    [data] = read_metrics(json.loads(line))
    assert encode_metrics(data) == metrics_request(figures)


def test_a_histogram_nobody_observed_has_no_minimum() -> None:
    """Zero is not the same as not measured."""
    [metric, *_] = metrics_request(snapshot()).resource_metrics[0].scope_metrics[0].metrics
    full, empty = metric.exponential_histogram.data_points
    assert (full.min, full.max) == (0.5, 4.0)
    assert not empty.HasField("min")


def test_temporality_is_cumulative_whatever_the_environment_prefers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus drops deltas without a word, and clusters set this variable for other languages."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    [histogram, steps, *_] = metrics_request(snapshot()).resource_metrics[0].scope_metrics[0].metrics
    assert histogram.exponential_histogram.aggregation_temporality == 2
    assert steps.sum.aggregation_temporality == 2
    assert steps.sum.is_monotonic


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        (ENDPOINT, True),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "false"}, True),
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "none"}, True),
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "none", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:1/v1/traces"}, True),
    ],
)
def test_otlp_is_on_when_an_endpoint_is_named_and_nothing_says_no(environ: dict[str, str], on: bool) -> None:
    """A laptop without a collector must not try to reach one."""
    assert otlp_configured(environ) is on


def test_each_signal_follows_its_own_variables() -> None:
    """Traces must not go to a default address because metrics have one."""
    only = OtlpSettings.read({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://h:1/v1/metrics"})
    assert list(only.protocols) == ["metrics"]
    mixed = OtlpSettings.read({**ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"})
    assert mixed.protocols == {"metrics": "http/protobuf", "traces": "grpc"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "carrier-pigeon"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "-1"),
    ],
)
def test_a_setting_we_cannot_honour_is_refused_with_its_value(name: str, value: str) -> None:
    """Silence here means an empty dashboard hours later."""
    with pytest.raises(ConfigError, match=value):
        OtlpSettings.read({**ENDPOINT, name: value})


def test_a_password_in_the_address_is_never_shown() -> None:
    """The address is logged and written to files that people share."""
    settings = OtlpSettings.read({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:secret@collector:4318"})
    assert set(settings.endpoints.values()) == {"http://collector:4318"}
