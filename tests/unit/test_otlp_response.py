"""What an answer means, against a server that gives it."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from otel_train.exporters.otlp_json import metrics_line, spans_line
from otel_train.exporters.otlp_response import (
    ExportResponse,
    ExportResult,
    HttpResponse,
    read_grpc,
    read_http,
    why,
)
from otel_train.exporters.otlp_settings import OtlpSettings, Target
from otel_train.exporters.otlp_transport import Connections, OtlpTransport, needs_no_proxy
from tests.support.receiver import Received, grpc_receiver, http_receiver
from tests.support.snapshots import RESOURCE, snapshot, spans

ACCEPTED, RETRY, REFUSED = ExportResult.ACCEPTED, ExportResult.RETRY, ExportResult.REFUSED
METRICS = metrics_line(snapshot(), RESOURCE).encode()
SPANS = spans_line(spans(), RESOURCE).encode()
PROTOCOLS = ("http/json", "http/protobuf")


def asked(
    endpoint: str,
    protocol: str = "http/json",
    *,
    signal: str = "metrics",
    timeout_s: float = 5.0,
    **more: str,
) -> ExportResponse:
    """The answer to one request."""
    with closing(to(endpoint, protocol, **more)) as transport:
        return transport.send(signal, METRICS if signal == "metrics" else SPANS, timeout_s)


def read(status: int, body: bytes, kind: str = "application/json", **more: Any) -> ExportResponse:
    """What an answer over HTTP means."""
    headers = {"content-type": kind} if kind else {}
    return read_http(HttpResponse(status, headers | more, body), "metrics")


def to(endpoint: str, protocol: str = "http/json", **more: str) -> OtlpTransport:
    environ = {f"OTEL_EXPORTER_OTLP_{name.upper()}": value for name, value in more.items()}
    environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = protocol
    return OtlpTransport(OtlpSettings.read(environ, endpoint=endpoint).targets)


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """The endpoint of a server that has one connection answered."""

    def serve() -> None:
        with listening.accept()[0] as connection:
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("signal", ["metrics", "traces"])
def test_an_otlp_answer_with_nothing_rejected_is_accepted(
    receiver: Received, protocol: str, signal: str
) -> None:
    """The one answer after which a request may be forgotten."""
    assert asked(receiver.endpoint, protocol, signal=signal).result is ACCEPTED
    assert len(receiver.metrics) + len(receiver.traces) == 1


@pytest.mark.parametrize(
    "kind", ["application/json", "application/x-protobuf", "application/json; charset=utf-8", ""]
)
def test_an_empty_body_is_the_empty_message(kind: str) -> None:
    """Nothing rejected takes no bytes in protobuf, and many answer so in JSON."""
    assert read(200, b"", kind).accepted
    assert not read(200, b"", "text/html").accepted


@pytest.mark.parametrize(
    ("status", "kind", "body"), [(204, "", b""), (202, "", b""), (201, "application/json", b"{}")]
)
def test_any_success_is_read_as_200(status: int, kind: str, body: bytes) -> None:
    """Grafana Cloud answers 204; asked again for ever it would have the first request over and over, and no other."""
    assert read(status, body, kind).accepted
    page = read(status, b"<html>", "text/html")
    assert page.result is RETRY
    assert f"answers {status}" in page.reason


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("html", "login page"), ("text", "text/plain"), ("odd", "no OTLP response"),
        *((status, "redirects") for status in ("301", "302", "307")),
        *((status, "refuses the token") for status in ("401", "403")),
        ("404", "nothing takes OTLP at this path"), ("415", "OTEL_EXPORTER_OTLP_PROTOCOL"), ("429", "asks to wait 30 s"),
        *((status, status) for status in ("405", "408", "500", "502", "503", "504")),
        ("close", "closes connections"),
    ],
)  # fmt: skip
def test_what_an_operator_or_time_can_repair_is_tried_again(receiver: Received, mode: str, says: str) -> None:
    """A wrong address, an expired login, a redirect or an overload must lose nothing."""
    receiver.mode = mode
    receiver.retry_after = "30" if mode == "429" else ""
    receiver.location = f"{receiver.endpoint}/elsewhere" if mode.startswith("3") else ""
    answer = asked(receiver.endpoint)

    assert answer.result is RETRY
    assert says in answer.reason
    assert receiver.requests == 1, "a redirect was followed, or a request was sent twice"


@pytest.mark.parametrize("mode", ["400", "413", "409", "422"])
def test_what_would_be_refused_again_is_refused_for_good(receiver: Received, mode: str) -> None:
    """Sending it again would stop everything behind it."""
    receiver.mode = mode
    answer = asked(receiver.endpoint)

    assert answer.result is REFUSED
    assert mode in answer.reason


@pytest.mark.parametrize("protocol", [*PROTOCOLS, "grpc"])
@pytest.mark.parametrize("signal", ["metrics", "traces"])
def test_rejected_records_are_refused_for_good_and_counted(protocol: str, signal: str) -> None:
    """The specification forbids to send a partly accepted request again. Over gRPC, too, the status is OK."""
    with grpc_receiver() if protocol == "grpc" else http_receiver() as received:
        received.mode, received.rejecting = "partial", 3
        answer = asked(received.endpoint, protocol, signal=signal)

    assert (answer.result, answer.rejected) == (REFUSED, 3)
    assert "too old" in answer.reason


def test_a_warning_without_rejected_records_is_accepted(receiver: Received) -> None:
    """So the specification wants it."""
    receiver.mode, receiver.rejecting = "partial", 0
    answer = asked(receiver.endpoint)

    assert answer.result is ACCEPTED
    assert "too old" in answer.reason


def test_how_long_to_wait_is_read_from_seconds_and_from_a_date(receiver: Received) -> None:
    """Both forms of Retry-After are in use."""
    receiver.mode, receiver.retry_after = "503", "7"
    assert asked(receiver.endpoint).retry_after_s == 7

    receiver.retry_after = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 20))
    assert asked(receiver.endpoint).retry_after_s == pytest.approx(20, abs=3)

    receiver.retry_after = "tomorrow"
    assert asked(receiver.endpoint).retry_after_s is None


@pytest.mark.parametrize(
    ("asked_s", "said"), [("600", "600 s"), ("86400", "more than 600 s, of which 600 s are waited")]
)
def test_a_wait_that_is_not_granted_is_said_with_the_one_that_is(asked_s: str, said: str) -> None:
    """A reader of the log would look for the next attempt tomorrow."""
    assert read(503, b"", "", **{"retry-after": asked_s}).reason.endswith(f", and asks to wait {said}")


@pytest.mark.parametrize("ahead_s", [-7200, 0, 7200])
def test_a_date_to_wait_for_is_read_by_the_clock_of_the_collector(ahead_s: int) -> None:
    """One that is an hour ahead asks for 20 seconds, not for an hour; one that is behind asks for as long."""
    date, after = (
        time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + ahead_s + more_s))
        for more_s in (0, 20)
    )
    answer = read(503, b"", "", date=date, **{"retry-after": after})

    assert answer.retry_after_s == pytest.approx(20, abs=1.5)


@pytest.mark.parametrize(
    "text", ["", " ", ",", "-5", "1e3", "Mon, 99 Foo 20", "Mon, 01 Jan 999999 00:00:00 GMT", "9" * 400]
)
def test_an_absurd_pause_is_no_fault(text: str) -> None:
    """It is no pause, or the longest that is granted."""
    answer = read(503, b"", "", date=text, **{"retry-after": text})

    assert answer.result is RETRY
    assert answer.retry_after_s is None or answer.retry_after_s > 1e9


@pytest.mark.parametrize(
    ("partial", "result", "rejected", "reason"),
    [
        (b'{"rejectedDataPoints":null,"errorMessage":null}', ACCEPTED, None, ""),
        (b'{"rejectedDataPoints":"2","errorMessage":null}', REFUSED, 2, "rejects 2 records"),
        *((b'{"rejectedDataPoints":%b}' % number, RETRY, None, "no OTLP response") for number in (b"1e300", b"-1e300", b"1e999")),
    ],
)  # fmt: skip
def test_a_count_may_have_any_form_that_protobuf_has_in_json(
    partial: bytes, result: ExportResult, rejected: int | None, reason: str
) -> None:
    """Taken for no answer, what was accepted would be sent for ever, and everything behind it wait."""
    answer = read(200, b'{"partialSuccess":%b}' % partial)

    assert (answer.result, answer.rejected) == (result, rejected)
    assert reason in answer.reason
    assert bool(reason) == bool(answer.reason)


def resolve(monkeypatch: pytest.MonkeyPatch, ports: list[int], *, after_s: float = 0.0) -> str:
    """A name with several addresses: those of these ports; the endpoint of a Collector there."""
    real = socket.getaddrinfo

    def found(host: str, *more: Any, **options: Any) -> list[Any]:
        if host != "collector.test":
            return real(host, *more, **options)
        time.sleep(after_s)
        return [entry for port in ports for entry in real("127.0.0.1", port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return f"http://collector.test:{ports[-1]}"


def test_an_address_that_swallows_everything_does_not_take_the_time_of_the_next(
    receiver: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPv6 is tried first, and where a firewall drops it no request would ever arrive."""
    with socket.socket() as silent, socket.socket() as first, socket.socket() as second:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for each in (first, second):  # its queue is full: it takes no further connection
            each.setblocking(False)
            each.connect_ex(silent.getsockname())
        port = int(receiver.endpoint.rpartition(":")[2])
        endpoint = resolve(monkeypatch, [silent.getsockname()[1], port])
        begun_s = time.monotonic()

        assert asked(endpoint, timeout_s=2.0).accepted
        assert time.monotonic() - begun_s < 2.5


def test_a_name_that_is_looked_up_for_long_is_reached(
    receiver: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first name server of two is dead: each look-up takes five seconds more, and no limit ends it."""
    endpoint = resolve(monkeypatch, [int(receiver.endpoint.rpartition(":")[2])], after_s=1.2)

    assert asked(endpoint, timeout_s=1.0).accepted


def test_a_request_too_large_for_grpc_is_refused_for_good() -> None:
    """Sent again it is as large, and everything behind it waits."""
    said = "grpc: received message larger than max (5000000 vs. 4194304)"

    assert read_grpc("RESOURCE_EXHAUSTED", said).result is REFUSED
    assert read_grpc("RESOURCE_EXHAUSTED", "too many requests").result is RETRY


def test_an_endless_answer_is_bounded_in_bytes_and_time(receiver: Received) -> None:
    """Such a body took 805 MiB."""
    receiver.mode = "endless"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.monotonic()
    answer = asked(receiver.endpoint, timeout_s=2)

    assert answer.result is RETRY
    assert "more than 65536 bytes" in answer.reason
    assert time.monotonic() - start_s < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


def test_an_answer_that_trickles_is_bounded_in_time(receiver: Received) -> None:
    """A byte now and then keeps every timeout of a single read from firing."""
    receiver.mode = "trickle"
    start_s = time.monotonic()
    answer = asked(receiver.endpoint, timeout_s=0.7)

    assert answer.result is RETRY
    assert "does not answer" in answer.reason
    assert time.monotonic() - start_s < 1.5


HEAD = "HTTP/1.1 200 OK\r\nContent-Type: {}\r\nContent-Length: 40\r\n\r\n"


@pytest.mark.parametrize(
    ("protocol", "sent"),
    [
        *(("http/json", HEAD.format("application/json").encode() + part) for part in (b"", b"{")),
        *(
            ("http/protobuf", HEAD.format("application/x-protobuf").encode() + part)
            for part in (b"", b"\n\x02")
        ),
        # A proxy that dies while it answers: the request was taken for accepted, and removed from the spool.
        ("http/json", b"HTTP/1.1 200 OK\r\n"),
        ("http/json", b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Ty"),
    ],
)
def test_half_an_answer_is_no_answer(sent: bytes, protocol: str) -> None:
    """What the rest would have said, such as that records were rejected, is unknown."""

    def half(connection: socket.socket) -> None:
        connection.recv(1 << 20)
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_RDWR)

    with answering(half) as endpoint:
        found = asked(endpoint, protocol, timeout_s=3)

    assert found.result is RETRY
    assert "half" in found.reason


@pytest.mark.parametrize("length", [1000, 10_000])
def test_headers_without_end_are_bounded(length: int) -> None:
    """A client that waits for the blank line reads for ever."""

    def flood(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        with suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while True:
                connection.sendall(b"X: " + b"y" * length + b"\r\n")

    with answering(flood) as endpoint:
        assert asked(endpoint, timeout_s=3).result is RETRY


def test_a_refusal_before_the_body_was_read_is_understood() -> None:
    """A body over the limit is refused by its length, and the rest of it meets a closed connection."""

    def refuse(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 413 Payload Too Large\r\nContent-Length: 0\r\n\r\n")
        connection.shutdown(socket.SHUT_RD)
        time.sleep(0.5)

    line = b'{"resourceMetrics":[' + b" " * (8 << 20) + b"]}"
    with answering(refuse) as endpoint, closing(to(endpoint)) as transport:
        answer = transport.send("metrics", line, 5)

    assert answer.result is REFUSED
    assert "max_request_body_size" in answer.reason


def test_closing_ends_a_request_that_waits_for_its_answer(receiver: Received) -> None:
    """The end of a program does not wait for a collector."""
    receiver.mode, receiver.slow_s = "slow", 30
    transport = to(receiver.endpoint)
    answers: list[ExportResponse] = []
    thread = threading.Thread(target=lambda: answers.append(transport.send("metrics", METRICS, 20)))
    thread.start()
    while not receiver.requests:
        time.sleep(0.01)
    transport.close()
    thread.join(5)

    assert [answer.result for answer in answers] == [RETRY]


@pytest.mark.parametrize(("kind", "body", "setting"), [
    # Some say so with 400; a setting repairs it.
    pytest.param("text/plain", b"cannot read: json encoding isn't supported for opentelemetry format. Use protobuf encoding",
                 "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf", id="protobuf alone"),
    # One with compression_algorithms: [""]; every request would be rejected for a variable that can be corrected.
    pytest.param("application/json", b'{"code":3, "message":"unsupported Content-Encoding: gzip"}',
                 "OTEL_EXPORTER_OTLP_COMPRESSION=none", id="no compression"),
])  # fmt: skip
def test_a_collector_that_takes_requests_in_another_form_loses_nothing(
    kind: str, body: bytes, setting: str
) -> None:
    """It answers 400."""
    answer = read(400, body, kind)

    assert answer.result is RETRY
    assert setting in answer.reason


def test_a_plain_request_to_a_tls_port_is_tried_again() -> None:
    """Servers answer 400 to it, and it is the address that is wrong."""
    body = b"Client sent an HTTP request to an HTTPS server.\n"
    assert read_http(HttpResponse(400, {}, body), "metrics").result is RETRY
    assert read_http(HttpResponse(400, {}, body), "metrics", tls=True).result is REFUSED


@pytest.mark.parametrize(
    ("line", "signal"),
    [
        *((line, "metrics") for line in (b"not JSON", b'{"resourceMetrics": [', b'{"resourceLogs": []}')),
        *((line, "traces") for line in (METRICS, b"\xff\xfe")),
    ],
)
def test_what_is_no_request_is_refused_without_asking(receiver: Received, line: bytes, signal: str) -> None:
    """It would be answered 400 at best, and by a lenient collector be accepted as nothing."""
    with closing(to(receiver.endpoint)) as transport:
        answer = transport.send(signal, line, 5)

    assert answer.result is REFUSED
    assert "is not asked" in answer.reason
    assert receiver.requests == 0


def test_lines_are_posted_as_they_are_stored(receiver: Received) -> None:
    """What another exporter wrote survives, also fields that we never write."""
    line = (
        b'{ "resourceMetrics" : [{"scopeMetrics":[{"metrics":[{"name":"theirs","histogram":{"dataPoints":[{"count":"1",'
        b'"bucketCounts":["1"]}],"aggregationTemporality":2}}, {"name":"whole","sum":{"dataPoints":[{"asInt":"3"}]}}]}]}]}'
    )
    with closing(to(receiver.endpoint)) as transport:
        assert transport.send("metrics", line, 5).accepted

    assert receiver.headers["Content-Type"] == "application/json"
    assert receiver.points()["theirs"].histogram.data_points[0].count == 1
    assert receiver.points()["whole"].sum.data_points[0].as_int == 3


@pytest.mark.parametrize("compression", ["gzip", "deflate", "none"])
def test_compression_is_honoured(receiver: Received, compression: str) -> None:
    """It saves the link; clusters set it."""
    answer = asked(receiver.endpoint, compression=compression)
    said = receiver.headers.get("Content-Encoding")

    assert said == (None if compression == "none" else compression)
    # This receiver cannot read deflate.
    assert answer.result is (REFUSED if compression == "deflate" else ACCEPTED)


def test_the_connection_is_kept_and_made_anew_when_it_was_closed(receiver: Received) -> None:
    """A handshake for every request would cost a collector of a thousand ranks a core."""
    transport = to(receiver.endpoint)
    assert transport.send("metrics", METRICS, 5).accepted
    assert transport.send("metrics", METRICS, 5).accepted
    assert receiver.connections == 1

    transport.close()
    assert transport.send("metrics", METRICS, 5).accepted
    assert receiver.connections == 2
    transport.close()
    assert len(receiver.metrics) == 3


def test_many_that_send_to_one_collector_share_a_connection(receiver: Received) -> None:
    """An agent sends for all ranks of a node: metrics and spans, one after another."""
    connections = Connections()
    targets = OtlpSettings.read({}, endpoint=receiver.endpoint).targets
    for _ in range(4):
        transport = OtlpTransport(targets, connections)
        assert transport.send("metrics", METRICS, 5).accepted
        transport.close()
    connections.close()
    assert receiver.connections == 1


def test_a_proxy_of_the_environment_is_used(receiver: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of clusters often reach nothing else."""
    monkeypatch.setenv("http_proxy", receiver.endpoint.replace("http://", "http://me:secret@"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    answer = asked("http://collector.example:4318")

    assert answer.accepted
    assert receiver.headers["Host"] == "collector.example:4318"
    assert receiver.headers["proxy-authorization"] == "Basic bWU6c2VjcmV0"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_asks_for_a_login_is_not_taken_for_the_collector(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """The log said that the collector answers 407, or does not accept requests, and no remedy."""

    def deny(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")

    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering(deny) as proxy:
        monkeypatch.setenv(f"{scheme}_proxy", proxy)
        answer = asked(f"{scheme}://collector.example:4318")

    assert answer.result is RETRY
    assert answer.reason.startswith(
        "is behind a proxy that asks for a login (407): set HTTP_PROXY and HTTPS_PROXY to http://user:password@host:port"
    )


def test_a_port_for_http_that_is_asked_over_grpc_is_said_with_the_usual_port(receiver: Received) -> None:
    """The two ports of a collector are taken for each other: the log repeated what the C library says, with no remedy."""
    answer = asked(receiver.endpoint, "grpc")

    assert answer.result is RETRY
    assert answer.reason == (
        "does not speak gRPC: name its port for gRPC, usually 4317, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
    )


@pytest.mark.parametrize("protocol", ["grpc", "http/json"])
def test_a_proxy_that_cannot_be_reached_is_named_and_hosts_without_it_are_asked_directly(
    monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """It reads as if the collector refused. gRPC reads such variables in lower case alone."""
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.2")
    proxied, direct = (asked(f"http://127.0.0.{host}:1", protocol).reason for host in (1, 2))

    assert proxied == (
        "is asked through the proxy 127.0.0.1:9, which refuses connections: "
        "correct HTTP_PROXY or HTTPS_PROXY, or name the collector's host in NO_PROXY"
    )
    assert direct == "refuses connections"


@pytest.mark.parametrize(
    ("named", "around"),
    [
        *((named, True) for named in ("127.0.0.0/8", "10.0.0.0/8, 127.0.0.0/16", "localhost,127.0.0.1")),
        *((named, False) for named in ("10.0.0.0/8", "127.0.0.0/99", "")),
    ],
)
def test_no_proxy_may_name_a_network(
    receiver: Received, monkeypatch: pytest.MonkeyPatch, named: str, around: bool
) -> None:
    """As in pods of clusters, and as requests and curl understand it: the proxy was asked for an address it cannot reach."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", named)

    assert asked(receiver.endpoint).accepted == around
    assert needs_no_proxy("::1", 4318) is False


def test_what_is_wrong_with_a_proxy_is_said_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the host behind it, the password is where the port would be."""
    monkeypatch.setenv("http_proxy", "http://me:hunter2")
    monkeypatch.setenv("no_proxy", "")

    answer = asked("http://collector.example:4318")

    assert answer.result is RETRY
    assert "HTTP_PROXY, whose port is no number" in answer.reason
    assert "hunter2" not in answer.reason


MAY_WANT = "it may want a certificate of its client"
DISTRUSTS = "does not trust the certificate of its client: set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("RemoteDisconnected: Remote end closed connection without response", MAY_WANT),
        ("SSLEOFError: EOF occurred in violation of protocol (_ssl.c:2427)", MAY_WANT),
        ("SSLError: tlsv13 alert certificate required (_ssl.c:2580)", "wants a certificate of its client: set OTEL_"),
        ("SSLError: [SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca (_ssl.c:2580)", DISTRUSTS),
        ("SSLError: [SSL: SSLV3_ALERT_CERTIFICATE_EXPIRED] sslv3 alert certificate expired (_ssl.c:2580)", DISTRUSTS),
        ("UNAVAILABLE: failed to connect to all addresses; last error: UNAVAILABLE: Unwrap failed (TSI_DATA_CORRUPTED)",
         f"{MAY_WANT}, OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE, or not trust that one"),
        ("UNAUTHENTICATED: Hostname Verification Check failed.", "has a certificate for another name"),
        ("SSLError: [X509: KEY_VALUES_MISMATCH] key values mismatch (_ssl.c:3926)", "OTEL_EXPORTER_OTLP_CLIENT_KEY is not the key of"),
    ],
)  # fmt: skip
def test_a_connection_that_is_encrypted_is_not_said_to_want_encryption(said: str, means: str) -> None:
    """A collector that closes after the handshake misses a certificate, not TLS."""
    assert means in why(said, tls=True)


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.example"])
def test_a_name_that_cannot_be_asked_for_is_said_to_be_unresolvable(host: str) -> None:
    """The log said that the Collector does not accept requests: UnicodeError, encoding with 'idna' codec failed."""
    assert asked(f"http://{host}:4318").reason == "has a name that cannot be resolved"


@pytest.mark.parametrize("protocol", ["http/json", "http/protobuf"])
def test_http_to_a_port_for_grpc_says_so(protocol: str) -> None:
    """4317 for 4318, the most frequent mistake. A Collector resets the connection, and it was said to want TLS."""
    with grpc_receiver() as received:
        reason = asked(received.endpoint, protocol).reason

    assert (
        "may speak gRPC (name its port for OTLP over HTTP, usually 4318, or set OTEL_EXPORTER_OTLP_PROTOCOL=grpc)"
        in reason
    )
    assert why("ConnectionResetError: [Errno 104] Connection reset by peer") == reason


@pytest.mark.parametrize(
    ("status", "result"),
    [
        *((status, RETRY) for status in (
            "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "UNAUTHENTICATED", "PERMISSION_DENIED",
            "UNIMPLEMENTED", "INTERNAL",
        )),
        ("INVALID_ARGUMENT", REFUSED), ("FAILED_PRECONDITION", REFUSED), ("ok", ACCEPTED),
    ],
)  # fmt: skip
def test_grpc_statuses_mean_the_same(status: str, result: ExportResult) -> None:
    """One rule, whatever carries it."""
    with grpc_receiver() as received:
        received.mode = status
        assert asked(received.endpoint, "grpc").result is result
        assert received.requests == 1


def test_a_binary_header_is_sent_over_grpc() -> None:
    """The library refuses text in one, with a TypeError at each request."""
    with grpc_receiver() as received:
        assert asked(received.endpoint, "grpc", headers="tenant-bin=a%20b").result is ACCEPTED


def test_a_connection_of_grpc_to_a_host_that_is_gone_is_given_up() -> None:
    """All ranks of a process share it, and each would wait for the kernel: for a quarter of an hour."""
    with grpc_receiver() as received, closing(to(received.endpoint, "grpc")) as transport:
        assert transport.send("metrics", METRICS, 5.0).accepted
        limits_ms = acknowledged_within(int(received.endpoint.rpartition(":")[2]))

    assert limits_ms
    assert all(0 < limit_ms <= 30_000 for limit_ms in limits_ms)


def acknowledged_within(port: int) -> list[int]:
    """TCP_USER_TIMEOUT of our connections to a port."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:
            if connection.getpeername()[1:2] == (port,):
                found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found


def test_a_name_that_grpc_cannot_resolve_is_said_as_over_http() -> None:
    """Its own message repeats the name three times, and says nothing more."""
    for protocol in ("grpc", "http/json"):
        assert "a name that cannot be resolved" in asked("http://no-such-host.invalid:1", protocol).reason


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize(
    ("left", "fault"), [((), "missing"), (("crt",), "empty or damaged"), (("key",), "empty or damaged")]
)
def test_a_key_that_is_gone_while_it_is_replaced_loses_nothing(
    tmp_path: Path, protocol: str, left: tuple[str, ...], fault: str
) -> None:
    """Whoever renews certificates may remove or empty the old ones first. gRPC ends the process if one of two is empty."""
    if left:
        for name in ("crt", "key"):
            (tmp_path / name).write_text("damaged" * (name in left), encoding="utf-8")
    target = Target(
        protocol=protocol, url="https://127.0.0.1:1", address="https://127.0.0.1:1", headers={}, compression="", tls=True,
        certificate="", client_certificate=str(tmp_path / "crt"),
        client_key=str(tmp_path / "key"),
    )  # fmt: skip
    with closing(OtlpTransport({"metrics": target})) as transport:
        answer = transport.send("metrics", b'{"resourceMetrics":[]}', 5.0)

    assert answer.result is RETRY
    assert f"the file of a certificate or key is {fault}" in answer.reason
