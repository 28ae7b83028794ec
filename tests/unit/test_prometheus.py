"""The Prometheus endpoint, read with Prometheus' own parsers."""

from __future__ import annotations

import errno
import gzip
import http.client
import math
import os
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from otel_train.datamodel import Exemplar, ExportBatch, MetricFamily, Point, Snapshot
from otel_train.errors import ConfigError
from otel_train.exporters.prometheus import PrometheusExporter
from tests.support.slow_clients import answered, served_s, trickling
from tests.support.snapshots import (
    HEARTBEAT,
    RESOURCE,
    SPAN_ID,
    STEP,
    STEPS,
    TRACE_ID,
    WORKERS,
    snapshot,
    step_durations,
)

LABELS = {"train_run_id": "run-1", "train_rank": "3"}
OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


@contextmanager
def serving(
    address: str = "127.0.0.1", resource: dict[str, Any] = RESOURCE, **more: Any
) -> Iterator[PrometheusExporter]:
    made = PrometheusExporter(address, 0, LABELS, resource, **more)
    try:
        yield made
    finally:
        made.close(1)


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    with serving() as made:
        yield made


@pytest.fixture
def connect(exporter: PrometheusExporter) -> Iterator[Callable[[], socket.socket]]:
    """Connections to the page, which are closed at the end."""
    with ExitStack() as clients:
        yield lambda: clients.enter_context(socket.create_connection(("127.0.0.1", exporter.port), timeout=5))


def get(port: int, headers: dict[str, str] | None = None, path: str = "/metrics", method: str = "GET") -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def families_of(text: str, parse: Any = parse_openmetrics) -> dict[str, Any]:
    return {family.name: family for family in parse(text)}


def page(exporter: PrometheusExporter, headers: dict[str, str] | None = None) -> str:
    status, _, body = get(exporter.port, headers)
    assert status == 200
    return str(body.decode())


def test_a_client_gets_a_snapshot_that_is_at_most_five_seconds_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made when a client asks. Where none can be made, the last one stays."""
    monkeypatch.setattr("otel_train.exporters.prometheus.PAGE_S", 0.5)
    made = [None, snapshot(7), snapshot(9)]
    with serving(snapshot=lambda: made.pop(0)) as exporter:

        def steps() -> float:
            return float(families_of(page(exporter, OPENMETRICS))["train_steps"].samples[0].value)

        exporter.export(ExportBatch(snapshot=snapshot(5)))
        assert steps() == 5
        time.sleep(0.6)
        assert (steps(), steps(), steps()) == (5, 7, 7)
        time.sleep(0.6)
        assert (steps(), made) == (9, [])


def test_openmetrics_reads_back_what_was_shown(exporter: PrometheusExporter) -> None:
    """Law: what the page says, a Prometheus parser reads."""
    exporter.export(ExportBatch(snapshot=snapshot()))
    families = families_of(page(exporter, OPENMETRICS))
    assert list(families) == [
        "target",
        "train_step_duration_seconds",
        "train_steps",
        "train_loader_workers",
        "train_heartbeat_time_seconds",
    ]
    code = {**LABELS, "train_loader": "code"}
    samples = families["train_step_duration_seconds"].samples
    of_code = [s for s in samples if s.name.endswith("_bucket") and s.labels["train_loader"] == "code"]
    buckets = {s.labels["le"]: s for s in of_code}
    assert {edge: s.value for edge, s in buckets.items()} == {"0.1": 0, "1.0": 2, "10.0": 3, "+Inf": 3}
    exemplar = buckets["10.0"].exemplar
    assert exemplar.labels == {"trace_id": f"{TRACE_ID:032x}", "span_id": f"{SPAN_ID:016x}"}
    assert (exemplar.value, float(exemplar.timestamp)) == (4.0, 1_700_000_005.0)
    [steps] = families["train_steps"].samples
    assert (steps.name, steps.value, steps.labels) == ("train_steps_total", 7, code)
    [target] = families["target"].samples
    resource = {"service_name": "otel-train", "train_debug": "True", "train_share": "0.5"}
    assert target.labels == LABELS | resource


numbers = st.floats(allow_nan=True)
durations = st.floats(min_value=0, max_value=1e9)
labels = st.text(st.characters(exclude_categories=["Cs"]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(value=durations, gauge=numbers, loader=labels, seen=st.lists(durations, min_size=1, max_size=6))
def test_any_metrics_are_read_back(  # noqa: PLR0917  # hypothesis
    exporter: PrometheusExporter, value: float, gauge: float, loader: str, seen: list[float]
) -> None:
    """Law 6, for quotes, newlines, infinities and values on a bucket's edge."""
    attributes = (("train.loader", loader),)
    exemplars = [Exemplar(each, 1_700_000_000_123_456_789, 1, 2) for each in seen]
    point = step_durations(seen, loader=loader, exemplars=exemplars)
    families = (
        MetricFamily(STEP, (point,)),
        MetricFamily(STEPS, (Point(attributes, value),)),
        MetricFamily(HEARTBEAT, (Point(attributes, gauge),)),
    )
    exporter.export(ExportBatch(snapshot=Snapshot(1, 2, families)))
    for parse, headers in ((parse_openmetrics, OPENMETRICS), (parse_classic, {})):
        read = {f.name: f.samples for f in parse(page(exporter, headers))}
        assert read["train_steps"][0].value == value
        assert read["train_steps"][0].labels["train_loader"] == loader
        assert read["train_heartbeat_time_seconds"][0].value == pytest.approx(
            gauge, rel=0, abs=0, nan_ok=True
        )
        shown = {s.labels["le"]: s.value for s in read["train_step_duration_seconds"] if "le" in s.labels}
        assert list(shown.values()) == [
            sum(each <= bound for each in seen) for bound in (*STEP.bounds, math.inf)
        ]


def test_a_metric_that_was_not_measured_is_not_on_the_page(exporter: PrometheusExporter) -> None:
    """Absent is not zero, and an empty family confuses parsers."""
    exporter.export(ExportBatch(snapshot=Snapshot(1, 2, (MetricFamily(WORKERS, ()),))))
    assert "train_loader_workers" not in page(exporter)


def test_before_the_first_snapshot_the_page_says_who_we_are(exporter: PrometheusExporter) -> None:
    """The target is up from the first second."""
    assert list(families_of(page(exporter, OPENMETRICS))) == ["target"]


def test_an_attribute_with_a_reserved_name_is_left_out() -> None:
    """Prometheus refuses the whole page for a label like ``__name__``, and every metric would be gone."""
    with serving(resource={"__name__": "x", "ключ": "y", "team": "speech"}) as exporter:
        (info,) = families_of(page(exporter, OPENMETRICS))["target"].samples

    assert info.name == "target_info"
    assert info.labels == {**LABELS, "team": "speech"}


def test_a_name_of_bytes_that_are_no_text_is_on_the_page_as_its_escape() -> None:
    """A script or a shard whose name is not UTF-8, as Python spells it, closed the connection of every scrape of the node."""
    loaders = MetricFamily(WORKERS, (Point((("train.loader", "sh\udce9"),), 2.0),))
    with serving(resource={"team": "\udcff"}) as exporter:
        exporter.export(ExportBatch(snapshot=snapshot()._replace(families=(loaders,))))
        families = families_of(page(exporter, OPENMETRICS))

    assert families["target"].samples[0].labels["team"] == "\\udcff"
    (workers,) = (family.samples[0] for name, family in families.items() if "workers" in name)
    assert workers.labels["train_loader"] == "sh\\udce9"


def test_a_page_is_compressed_for_those_who_ask(exporter: PrometheusExporter) -> None:
    """Prometheus always asks; a page of many loaders shrinks tenfold."""
    exporter.export(ExportBatch(snapshot=snapshot()))
    _, headers, body = get(exporter.port, {"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body).decode() == page(exporter)
    for refused in ("gzip;q=0", "gzip; q=0.000", "*;q=0."):
        assert "Content-Encoding" not in get(exporter.port, {"Accept-Encoding": refused})[1]


def test_only_the_page_is_served(exporter: PrometheusExporter) -> None:
    """No path of a request reaches anything else."""
    assert get(exporter.port, path="/")[0] == 200
    assert get(exporter.port, path="/../etc/passwd")[0] == 404
    assert get(exporter.port, method="POST")[0] == 404
    assert get(exporter.port, method="HEAD")[2] == b""


def test_the_target_file_goes_when_the_run_ends(tmp_path: Path) -> None:
    """What stays behind is the mark of a run that was killed; an alert rests on it."""
    exporter = PrometheusExporter("127.0.0.1", 0, LABELS, RESOURCE)
    path = exporter.write_target(tmp_path)

    exporter.close(1)
    exporter.close(1)

    assert not path.exists()


def test_an_address_that_is_not_ours_is_refused() -> None:
    """A wrong setting is found at start."""
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        PrometheusExporter("192.0.2.1", 9464, LABELS, RESOURCE)


@pytest.mark.parametrize("version", ["x.y.z", "1..0", "9" * 5000])
def test_a_format_of_a_version_that_is_none_is_answered_with_plain_text(
    exporter: PrometheusExporter, version: str
) -> None:
    """The connection was closed without an answer."""
    status, headers, _ = get(exporter.port, {"Accept": f"application/openmetrics-text; version={version}"})

    assert (status, headers["Content-Type"].partition(";")[0]) == (200, "text/plain")


def test_without_a_descriptor_for_a_client_nothing_spins(
    exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits to be accepted, so it was tried again at once: a whole core, in a process that has run out of files."""
    tried = []

    def full(_: object) -> None:
        tried.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socketserver.TCPServer, "get_request", full)
        with socket.create_connection(("127.0.0.1", exporter.port)):
            time.sleep(0.7)
    assert 1 <= len(tried) <= 5
    assert get(exporter.port)[0] == 200


def test_clients_that_say_nothing_do_not_block_others(
    exporter: PrometheusExporter, connect: Callable[[], socket.socket]
) -> None:
    """A port scanner must not blind the dashboard, nor hold up the end."""
    for _ in range(10):
        connect()
    assert get(exporter.port)[0] == 200
    start_s = time.monotonic()
    exporter.close(2)
    assert time.monotonic() - start_s < 0.5


def test_a_normal_client_is_served_while_forty_trickle(exporter: PrometheusExporter) -> None:
    """Each sends a byte now and then, so that no silence ends it; threads are memory of the training process."""
    before, sent_s = set(threading.enumerate()), []
    with trickling(exporter.port, 40):
        for _ in range(20):
            begun_s = time.monotonic()
            assert get(exporter.port)[0] == 200
            sent_s.append(time.monotonic() - begun_s)
            time.sleep(0.05)
        ours = [each for each in {*threading.enumerate()} - before if each.name.startswith("Thread")]
        assert len(ours) <= 17

    assert max(sent_s) < 1


def test_of_too_many_clients_the_one_goes_that_has_been_unfinished_for_longest(
    connect: Callable[[], socket.socket],
) -> None:
    """The newest one still waits for its answer."""
    clients = [connect() for _ in range(17)]
    clients[0].settimeout(1)
    assert clients[0].recv(1) == b""
    for client in (clients[16], clients[1]):
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(15) == b"HTTP/1.0 200 OK"


def test_a_request_has_two_seconds_in_all(exporter: PrometheusExporter) -> None:
    """A limit on silence alone is reset by every byte."""
    assert 1.5 < served_s(exporter.port, b"X") < 4


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 2000 + b"\r\n",
    ],
)
def test_a_request_has_eight_kilobytes_in_all(exporter: PrometheusExporter, request_: bytes) -> None:
    """What stands behind them, the name of the host say, is not passed over: nothing is answered."""
    answer = answered(exporter.port, request_)

    assert answer == b"" or answer.startswith(b"HTTP/1.0 431")


@pytest.mark.parametrize("length", ["8193", "1" * 30, "-1", "x"])
def test_a_body_that_is_too_large_is_refused(exporter: PrometheusExporter, length: str) -> None:
    """Before it is read."""
    exporter.answer_captures(lambda body, _: (200, len(body)))

    assert get(exporter.port, {"Content-Length": length}, "/capture", "POST")[0] == 413


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", b"411"),
        (b"Content-Length: 20\r\n\r\n{}", b"400"),
        (b"Content-Length: 2\r\n\r\n{}", b"200"),
    ],
)
def test_a_body_that_has_not_come_as_a_whole_is_not_taken_for_an_empty_one(
    exporter: PrometheusExporter, request_: bytes, status: bytes
) -> None:
    """An empty one asks for a capture as it is by default."""
    exporter.answer_captures(lambda body, _: (200, len(body)))
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=5) as client:
        client.sendall(b"POST /capture HTTP/1.0\r\n" + request_)
        client.shutdown(socket.SHUT_WR)

        assert client.recv(1 << 10).startswith(b"HTTP/1.0 " + status)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:9464", 200),
        ("127.0.0.1:9464", 200),
        ("[::1]:9464", 200),
        ("10.0.0.7", 200),
        ("evil.example", 421),
        ("evil.example:9464", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_a_hostile_site_cannot_have_a_browser_read_or_arm_anything(
    exporter: PrometheusExporter, host: str, status: int
) -> None:
    """It points its own name at 127.0.0.1; the browser says that name."""
    exporter.answer_captures(lambda *_: (200, {}))

    read, _, said = get(exporter.port, {"Host": host})
    armed, _, _ = get(exporter.port, {"Host": host, "Content-Length": "0"}, "/capture", "POST")

    assert (read, armed) == (status, status)
    if status == 421:
        assert b"Use http://127.0.0.1" in said
        assert b"OTEL_TRAIN_PROMETHEUS_ADDRESS" in said


def test_a_request_with_two_names_of_a_host_is_refused(exporter: PrometheusExporter) -> None:
    """RFC 9112. A proxy before it may have decided by the other one."""
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=10) as asking:
        asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        status = asking.makefile("rb").readline()

    assert status.split()[1] == b"400"


def test_an_endpoint_that_is_open_to_a_network_answers_to_every_name() -> None:
    """Prometheus asks by the name of a service."""
    with serving("0.0.0.0") as exporter:
        assert get(exporter.port, {"Host": "trainer-0.trainers:9464"})[0] == 200


def test_a_forked_child_does_not_hold_the_port() -> None:
    """Workers outlive loaders; with their copy of the socket the port would stay taken."""
    # Below the ports that the system gives to clients: no other process takes it between close and the check.
    exporter = PrometheusExporter("127.0.0.1", 20_000 + os.getpid() % 10_000, LABELS, RESOURCE)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"!")  # what is done in a child at a fork is done by now
        signal.pause()
        os._exit(0)
    try:
        assert os.read(reader, 1) == b"!"
        assert get(exporter.port)[0] == 200
        exporter.close(30)
        with socket.create_server(("127.0.0.1", exporter.port), reuse_port=False):
            pass
        with pytest.raises(ConnectionRefusedError):
            get(exporter.port)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def test_a_page_is_one_snapshot(exporter: PrometheusExporter) -> None:
    """A rate of one metric over another must not mix two instants."""
    stop = threading.Event()

    def publish() -> None:
        step = 0.0
        while not stop.is_set():
            step += 1
            families = (MetricFamily(STEPS, (Point((), step),)), MetricFamily(WORKERS, (Point((), step),)))
            exporter.export(ExportBatch(snapshot=Snapshot(1, 2, families)))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        for _ in range(20):
            read = {f.name: f.samples[0].value for f in parse_classic(page(exporter)) if f.samples}
            if "train_steps" in read:
                assert read["train_steps"] == read["train_loader_workers"]
    finally:
        stop.set()
        thread.join()
