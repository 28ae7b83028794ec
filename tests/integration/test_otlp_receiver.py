"""A real collector's wire: what arrives, and what happens when it does not."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from otel_train.cli.replay import RequestCounts, replay
from otel_train.datamodel import ExportBatch
from otel_train.errors import ConfigError
from otel_train.exporters.otlp import OtlpExporter
from otel_train.exporters.otlp_json import OtlpLines
from otel_train.exporters.otlp_settings import OtlpSettings
from otel_train.resource import VERSION
from tests.support.receiver import Received, black_hole, grpc_receiver, http_receiver, refusing_address
from tests.support.snapshots import RESOURCE, SPAN_ID, TRACE_ID, snapshot, spans
from tests.support.waiting import until

RECEIVERS = {"http/json": http_receiver, "http/protobuf": http_receiver, "grpc": grpc_receiver}


@pytest.fixture(params=RECEIVERS)
def receiver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    """A healthy receiver, and an environment that names it."""
    with RECEIVERS[request.param]() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", request.param)
        yield received


def exporter(directory: Path) -> OtlpExporter:
    return OtlpExporter(OtlpSettings.read(os.environ), OtlpLines(RESOURCE), directory=directory)


def attributes(owner: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, str(item.value.WhichOneof("value"))) for item in owner.attributes}


def test_metrics_arrive_as_they_were(receiver: Received, tmp_path: Path) -> None:
    """Buckets, exemplars, start times and resource: a dashboard needs every one."""
    otlp = exporter(tmp_path)
    otlp.export(ExportBatch(snapshot=snapshot()))
    assert receiver.wait(metrics=1)
    otlp.close(2)
    group = receiver.metrics[0].resource_metrics[0]
    assert attributes(group.resource) == RESOURCE
    assert (group.scope_metrics[0].scope.name, group.scope_metrics[0].scope.version) == (
        "otel_train",
        VERSION,
    )
    points = receiver.points()
    full = points["train.step.duration"].exponential_histogram.data_points[0]
    assert (full.count, full.sum, full.min, full.max, full.scale) == (3, 5.0, 0.5, 4.0, 0)
    assert (full.positive.offset, list(full.positive.bucket_counts)) == (-2, [2, 0, 0, 1])
    assert attributes(full) == {"train.loader": "code"}
    assert full.start_time_unix_nano == snapshot().start_unix_ns
    [exemplar] = full.exemplars
    assert (exemplar.as_double, exemplar.trace_id.hex()) == (4.0, f"{TRACE_ID:032x}")
    assert exemplar.span_id.hex() == f"{SPAN_ID:016x}"
    assert points["train.steps"].sum.data_points[0].as_double == 7
    assert not points["train.loader.workers"].sum.is_monotonic
    assert points["train.heartbeat.time"].gauge.data_points[0].as_double == 1_700_000_010.5
    assert not otlp.drops


def test_spans_arrive_as_they_were(receiver: Received, tmp_path: Path) -> None:
    """Ids are decided by us: ranks meet in one trace, and exemplars point to it."""
    otlp = exporter(tmp_path)
    otlp.export(ExportBatch(spans=spans()))
    assert receiver.wait(traces=1)
    otlp.close(2)
    step, child = receiver.spans()
    assert (step.trace_id.hex(), step.span_id.hex()) == (f"{TRACE_ID:032x}", f"{SPAN_ID:016x}")
    assert child.parent_span_id == step.span_id
    assert (step.status.code, step.status.message) == (2, "ValueError")
    assert attributes(step)["error.type"] == "ValueError"
    assert attributes(step)["train.step.index"] == 12
    assert step.links[0].trace_id.hex() == f"{TRACE_ID + 1:032x}"
    assert step.end_time_unix_nano - step.start_time_unix_nano == 4_000_000_000


def test_standard_variables_are_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers carry the token, compression saves the link; both are set by the cluster."""
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        otlp = exporter(tmp_path)
        otlp.export(ExportBatch(snapshot=snapshot(), spans=spans()))
        otlp.close(2)
        assert received.points()["train.steps"].sum.data_points[0].as_double == 7
        assert received.headers["x-token"] == "abc"
        assert received.headers["Content-Encoding"] == "gzip"
        assert not received.traces


def test_a_certificate_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found at start, not after a night without metrics."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem")
    with pytest.raises(ConfigError, match=r"/nowhere/ca.pem"):
        OtlpExporter(OtlpSettings.read(os.environ), OtlpLines(RESOURCE))


def no_place(name: str) -> AbstractContextManager[Any]:
    if name == "refuse":
        return refusing_address()
    if name == "black hole":
        return black_hole()
    return http_receiver(name, slow_s=60)


TROUBLES = ["refuse", "black hole", "500", "429", "slow"]


@pytest.mark.parametrize("protocol", ["http/json", "grpc"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_in_every_trouble_closing_is_bounded_and_what_is_left_is_replayed_once(  # noqa: PLR0917  # fixtures
    trouble: str, protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """A collector that is away costs no exit and no metrics."""
    rank = tmp_path / "rank0"
    with no_place(trouble) as place:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", getattr(place, "endpoint", place))
        otlp = exporter(rank)
        otlp.export(ExportBatch(snapshot=snapshot(), spans=spans()))
        start_s = time.monotonic()
        otlp.close(1.5)
        assert time.monotonic() - start_s < 2
        assert not otlp.drops
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
        assert replay(tmp_path, endpoint=received.endpoint) == RequestCounts(accepted=2)
        assert replay(tmp_path, endpoint=received.endpoint) == RequestCounts()
        assert received.points()["train.steps"].sum.data_points[0].as_double == 7
        assert attributes(received.metrics[0].resource_metrics[0].resource) == RESOURCE
        assert [span.name for span in received.spans()] == ["train.step", "train.stage"]
    assert "Traceback" not in capfd.readouterr().err


def test_the_log_names_the_reason_and_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, from which a person knows where the metrics are."""
    with refusing_address() as place:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", place)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5")
        otlp = exporter(tmp_path)
        for _ in range(3):
            otlp.export(ExportBatch(snapshot=snapshot(), spans=spans()))
        until(lambda: otlp.failures, seconds=5)
        otlp.close(1)
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    [line] = lines
    assert line.name == "otel_train"
    assert f"OTLP: {place} refuses connections; requests wait in {tmp_path}" in line.getMessage()


def test_replay_speaks_grpc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some collectors only listen on 4317."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with refusing_address() as place:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", place)
        otlp = exporter(tmp_path / "rank0")
        otlp.export(ExportBatch(snapshot=snapshot(), spans=spans()))
        otlp.close(1)
    with grpc_receiver() as received:
        assert replay(tmp_path, endpoint=received.endpoint) == RequestCounts(accepted=2)
        assert len(received.metrics) == len(received.traces) == 1
