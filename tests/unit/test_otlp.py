"""Metrics in the OpenTelemetry SDK's words, and in those of OTLP/JSON."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_train.datamodel import Exemplar, HistogramPoint, MetricFamily, Point, Snapshot
from otel_train.errors import ConfigError
from otel_train.exporters.otel_providers import to_metrics_data, to_readable_span
from otel_train.exporters.otlp_json import metrics_line, protobuf_of, records_in, spans_line
from otel_train.exporters.otlp_settings import OtlpSettings, otlp_configured
from otel_train.resource import VERSION
from tests.support.receiver import ids_in_base64
from tests.support.snapshots import RESOURCE, STEP, STEPS, snapshot, spans

SCOPE = InstrumentationScope("otel_train", VERSION)
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


def metrics_request(metrics: Snapshot) -> ExportMetricsServiceRequest:
    return encode_metrics(to_metrics_data(metrics, Resource(RESOURCE), SCOPE))


def trace_request() -> ExportTraceServiceRequest:
    return encode_spans([to_readable_span(span, Resource(RESOURCE), SCOPE) for span in spans()])


def from_spec_json(text: str, message: Any) -> Any:
    """Parse OTLP/JSON with protobuf's own parser."""
    return json_format.ParseDict(ids_in_base64(json.loads(text)), message)


def test_the_json_line_of_a_snapshot_says_what_the_protobuf_says() -> None:
    """Whoever reads the file sees what the collector saw."""
    line = metrics_line(snapshot(), RESOURCE)
    assert from_spec_json(line, ExportMetricsServiceRequest()) == metrics_request(snapshot())


def test_the_json_line_of_spans_says_what_the_protobuf_says() -> None:
    """Ids, parents, links and status must survive in both forms."""
    line = spans_line(spans(), RESOURCE)
    assert from_spec_json(line, ExportTraceServiceRequest()) == trace_request()


def test_a_line_in_protobuf_is_what_the_sdk_would_have_sent() -> None:
    """A collector must not see which of the two carried it."""
    line = metrics_line(snapshot(), RESOURCE).encode()
    assert protobuf_of(line, "metrics") == metrics_request(snapshot()).SerializeToString()
    line = spans_line(spans(), RESOURCE).encode()
    assert protobuf_of(line, "traces") == trace_request().SerializeToString()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{}",
        b'{"resourceMetrics": 3}',
        b'{"resourceMetrics": [{"scopeMetrics": 1}]}',
        b"[" * 10_000,
    ],
)
def test_what_is_no_request_raises_one_error(line: bytes) -> None:
    """Whatever lies in a file, the thread that sends goes on."""
    with pytest.raises(ValueError, match="no OTLP request of metrics"):
        protobuf_of(line, "metrics")


def test_records_are_counted_without_reading_a_request() -> None:
    """What is dropped is counted, and parsing megabytes would hold the interpreter."""
    points = sum(len(family.points) for family in snapshot().families)
    assert records_in(metrics_line(snapshot(), RESOURCE).encode()) == points
    assert records_in(spans_line(spans(), RESOURCE).encode()) == len(spans())


numbers = st.floats(allow_nan=False)
durations = st.floats(min_value=0, max_value=1e9, allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(value=numbers, loader=texts, observed=st.lists(durations, min_size=1, max_size=5))
def test_any_metrics_survive_the_way_through_a_file(value: float, loader: str, observed: list[float]) -> None:
    """Infinities, odd label values and tiny numbers are written as the specification wants them."""
    labels = (("train.loader", loader),)
    point = HistogramPoint(
        attributes=labels, count=len(observed), sum=math.fsum(observed), min=min(observed), max=max(observed),
        zero_count=len(observed), scale=4, offset=-3, exponential_counts=(), explicit_counts=(0, 0, 0, len(observed)),
        exemplars=tuple(Exemplar(each, 1, 2, 3) for each in observed),
    )  # fmt: skip
    metrics = Snapshot(1, 2, (MetricFamily(STEPS, (Point(labels, value),)), MetricFamily(STEP, (point,))))
    line = metrics_line(metrics, RESOURCE)
    assert "\n" not in line
    assert protobuf_of(line.encode(), "metrics") == metrics_request(metrics).SerializeToString()


def test_an_empty_histogram_has_no_minimum() -> None:
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
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "oltp", "OTEL_TRACES_EXPORTER": "none"}, True),
        ({"OTEL_METRICS_EXPORTER": "oltp"}, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:1/v1/traces"}, True),
    ],
)
def test_otlp_is_on_when_an_endpoint_is_named_and_nothing_says_no(environ: dict[str, str], on: bool) -> None:
    """A laptop without a collector must not try to reach one."""
    assert otlp_configured(environ) is on


def test_each_signal_follows_its_own_variables() -> None:
    """Traces must not go to a default address because metrics have one."""
    only = OtlpSettings.read({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://h:1/own/path?tenant=7"})
    assert list(only.targets) == ["metrics"]
    assert only.targets["metrics"].url == "http://h:1/own/path?tenant=7"
    mixed = OtlpSettings.read({
        **ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-other=1",
        "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20a%3Db, x-tenant = 7",
    })  # fmt: skip
    metrics, traces = mixed.targets["metrics"], mixed.targets["traces"]
    assert (metrics.protocol, traces.protocol) == ("http/json", "grpc")
    assert metrics.url == "http://127.0.0.1:4318/v1/metrics"
    assert metrics.headers == {"authorization": "Bearer a=b", "x-tenant": "7"}
    assert traces.headers == {"x-other": "1"}
    assert "Bearer" not in repr(mixed)


@pytest.mark.parametrize(
    "address", ["http://h:1/base?key=7", "http://h:1/base/?key=7", "HTTP://h:1/base?key=7"]
)
def test_the_path_of_a_signal_is_appended_before_the_query(address: str) -> None:
    """Some services take their key in the query, which must not become part of the path."""
    targets = OtlpSettings.read({"OTEL_EXPORTER_OTLP_ENDPOINT": address}).targets
    expected = [f"http://h:1/base/v1/{signal}?key=7" for signal in ("metrics", "traces")]
    assert [target.url for target in targets.values()] == expected


@pytest.mark.parametrize(
    ("protocol", "address", "insecure", "tls"),
    [
        # Schemes have no case.
        *((protocol, "HTTPS://h:1", "true", True) for protocol in ("http/json", "http/protobuf", "grpc")),
        ("grpc", "http://h:4317", "", False),
        ("grpc", "https://h:4317", "true", True),
        # The specification's rule for a bare address.
        ("grpc", "h:4317", "", True),
        ("grpc", "h:4317", "true", False),
    ],
)
def test_an_address_is_encrypted_unless_set_otherwise(
    protocol: str, address: str, insecure: str, *, tls: bool
) -> None:
    """A token must not cross the network in the clear by default."""
    values = {"ENDPOINT": address, "PROTOCOL": protocol, "INSECURE": insecure}
    targets = OtlpSettings.read(
        {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in values.items()}
    ).targets

    assert {target.tls for target in targets.values()} == {tls}
    assert all(target.url.startswith(address.lower()) for target in targets.values() if "://" in address)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PROTOCOL", "http/xml"), ("METRICS_PROTOCOL", "carrier-pigeon"), ("COMPRESSION", "zstd"),
        *(("ENDPOINT", address) for address in (
            "http://collector:port", "collector:4318", "http:// collector:4318", "http://collector:4318/a b",
        )),
        ("TIMEOUT", "soon"), ("TIMEOUT", "-1"),
    ],
)  # fmt: skip
def test_a_setting_we_cannot_honour_is_refused_with_its_value(name: str, value: str) -> None:
    """Silence here means an empty dashboard hours later."""
    with pytest.raises(ConfigError, match=value):
        OtlpSettings.read({**ENDPOINT, f"OTEL_EXPORTER_OTLP_{name}": value})


@pytest.mark.parametrize(
    "wrong",
    [
        "Bearer secret", "=secret", "clé=secret", "a b=secret", "a=secret%0d%0ab: c", "a=secrèt", "Content-Length=99",
        "transfer-encoding=chunked"
    ],
)  # fmt: skip
def test_an_entry_that_is_no_header_is_said_and_left_out(wrong: str) -> None:
    """It went unsaid, or each request failed with a UnicodeEncodeError, for which the log named the Collector."""
    said: list[tuple[str, ...]] = []
    environ = {**ENDPOINT, "OTEL_EXPORTER_OTLP_HEADERS": f"x=1, {wrong},y=2,"}
    settings = OtlpSettings.read(environ, on_wrong=lambda *each: said.append(each))

    ((variable, problem, used),) = said
    assert (variable, used) == ("OTEL_EXPORTER_OTLP_HEADERS", "the other 2")
    assert "1 of 3 entries are no header, expected name=value in ASCII" in problem
    assert "secr" not in problem
    assert settings.targets["metrics"].headers == {"x": "1", "y": "2"}


@pytest.mark.parametrize("variable", ["OTEL_METRICS_EXPORTER", "OTEL_TRACES_EXPORTER"])
@pytest.mark.parametrize("named", ["oltp", "none, oltp"])
def test_an_unknown_exporter_is_said_with_those_that_are_known(variable: str, named: str) -> None:
    """One letter switched a signal off, and no line of a log said so."""
    said: list[tuple[str, ...]] = []
    settings = OtlpSettings.read({**ENDPOINT, variable: named}, on_wrong=lambda *each: said.append(each))

    ((name, problem, used),) = said
    assert (name, used) == (variable, "none" if "none" in named else "unset")
    assert f"{variable}='oltp': there is no such exporter; expected 'otlp'" in problem
    assert (len(settings.targets) == 1) is ("none" in named)


def test_a_key_without_its_certificate_is_refused(tmp_path: Path) -> None:
    """With gRPC it ended the agent, and the telemetry of all ranks of the node."""
    key = tmp_path / "client.key"
    key.write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE beside it"):
        OtlpSettings.read({**ENDPOINT, "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(key)})


def test_a_port_that_cannot_be_is_refused_with_the_ports_that_can() -> None:
    """Of http://host:99999 it said: expected http://host:port."""
    with pytest.raises(ConfigError, match=r"host:99999.*with a port from 1 to 65535"):
        OtlpSettings.read({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://host:99999"})


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("http://collector:99999/v1?api-key=SECRET", "http://collector:99999/v1"),
        ("http://collector:99999/v1?next=http://x/SECRET", "http://collector:99999/v1"),
        ("http://collector:99999/#SECRET", "http://collector:99999/"),
        ("http://collector:99999/v1?api-key=SEC@RET", "http://..."),
        ("http://user:SEC?RET@collector:4318", "http://..."),
        ("http://user:SEC//RET@collector:99999", "http://collector:99999"),
        ("SECRET:SECRET@collector:4318", "collector:4318"),
        ("SECRET:SECRET@collector//v1", "collector//v1"),
        ("collector:4318?api-key=SECRET", "collector:4318"),
        ("//SECRET@collector", "//collector"),
    ],
)
@pytest.mark.parametrize("protocol", ["http/json", "grpc"])
def test_secrets_of_an_address_that_cannot_be_used_are_not_shown(
    endpoint: str, shown: str, protocol: str
) -> None:
    """A key in the query was in the log and in `settings_ignored`. gRPC takes some of these addresses, and shows them likewise."""
    problems: list[str] = []
    settings = OtlpSettings.read(
        {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol},
        on_wrong=lambda _name, problem, _used: problems.append(problem),
    )

    (text,) = problems or [settings.addresses]
    assert text == shown or f"{shown!r}" in text
    assert not re.search("SEC|RET", text)


def test_a_password_in_the_address_is_never_shown() -> None:
    """The address is logged and written to files that people share."""
    settings = OtlpSettings.read({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:secret@collector:4318"})
    assert settings.addresses == "http://collector:4318"
    assert "secret" not in repr(settings)
