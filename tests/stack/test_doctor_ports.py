"""The doctor and the ports of a real Collector and a real Prometheus."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_train.doctor import endpoint
from otel_train.doctor.checks import PROBLEM
from tests.support.stack import stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(200)]

ONLY_METRICS = {"OTEL_TRACES_EXPORTER": "none"}


def problems(address: str, **environ: str) -> list[str]:
    found = endpoint.check_endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": address, **environ})
    return [each.what for each in found if each.state == PROBLEM]


def test_ports_that_are_taken_for_one_another_are_named(tmp_path: Path) -> None:
    """4317 and 4318 are one key apart; Prometheus takes OTLP at a path of its own."""
    with stack(tmp_path / "state", "collector", "prometheus") as made:
        http, grpc, prometheus = (
            f"http://127.0.0.1:{port}"
            for port in (made.ports.otlp_http, made.ports.otlp_grpc, made.ports.prometheus)
        )
        assert problems(http) == problems(grpc, OTEL_EXPORTER_OTLP_PROTOCOL="grpc") == []
        assert problems(http, OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf") == []
        assert problems(grpc) == [f"{grpc} expects gRPC, and the request came over HTTP/1"]
        assert problems(http, OTEL_EXPORTER_OTLP_PROTOCOL="grpc") == [
            f"{http} expects HTTP/1, and the request came over gRPC"
        ]
        direct = f"{prometheus}/api/v1/otlp"
        assert problems(direct, OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf", **ONLY_METRICS) == []
        assert problems(direct, **ONLY_METRICS) == []
        assert problems(prometheus, **ONLY_METRICS) == [f"{prometheus} answers 404"]
