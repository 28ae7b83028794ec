"""The doctor names the true cause: each against a server that behaves so, over a real socket."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from otel_train.cli import doctor
from otel_train.config import Config
from otel_train.doctor import end_to_end, endpoint, environment
from otel_train.doctor.checks import NOTE, PROBLEM, WARNING, CheckResult
from otel_train.stack import tls
from tests.support.receiver import black_hole, grpc_receiver, http_receiver, refusing_address

GRPC = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "no_proxy", "all_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is waited for less long."""
    monkeypatch.setattr(endpoint, "WITHIN_S", 1.0)


def problem(address: str, **environ: str) -> CheckResult:
    """The one thing that is wrong."""
    found = list(endpoint.check_endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": address, **environ}))
    [finding] = [each for each in found if each.state == PROBLEM]
    assert finding.remedy
    return finding


def fine(address: str, **environ: str) -> list[str]:
    found = list(endpoint.check_endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": address, **environ}))
    assert not [each for each in found if each.state == PROBLEM], found
    return [each.what for each in found]


@contextmanager
def server(
    answer: Callable[[socket.socket], None], context: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Host and port of a server that treats each connection so."""

    def serve(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            if context is None:
                answer(sock)
                return
            with context.wrap_socket(sock, server_side=True) as secured:
                answer(secured)

    def accept() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listening.accept()
                sock.settimeout(5)
                threading.Thread(target=serve, args=(sock,), daemon=True).start()

    with socket.create_server((host, 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"{host}:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def answering(status: str, *headers: str, body: str = "") -> Callable[[socket.socket], None]:
    """Read a request and answer so; what is left unread would reset the connection, and the answer with it."""
    text = "\r\n".join([f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", body])

    def answer(sock: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request and (piece := sock.recv(1 << 16)):
            request += piece
        head, _, body_read = request.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        left = int(length[1]) - len(body_read) if length else 0
        while left > 0 and (piece := sock.recv(left)):
            left -= len(piece)
        sock.sendall(text.encode())

    return answer


# --- HTTP and gRPC ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("receiver", "environ", "said", "port"),
    [
        (grpc_receiver, {}, "expects gRPC, and the request came over HTTP/1", "4318"),
        (http_receiver, GRPC, "expects HTTP/1, and the request came over gRPC", "4317"),
    ],
    ids=["HTTP to a gRPC port", "gRPC to an HTTP port"],
)
def test_the_port_of_the_other_protocol_is_named(
    receiver: Any, environ: dict[str, str], said: str, port: str
) -> None:
    """It read as a closed connection that may want TLS, or as a collector that does not answer."""
    with receiver() as received:
        finding = problem(received.endpoint, **environ)

    assert finding.what == f"{received.endpoint} {said}"
    assert port in finding.remedy


def test_both_protocols_are_fine_where_they_belong() -> None:
    """And nothing of the empty request is taken for data."""
    with grpc_receiver() as grpc, http_receiver() as http:
        assert "accepts an empty request (grpc)" in fine(grpc.endpoint, **GRPC)[0]
        assert "accepts an empty request (http/json)" in fine(http.endpoint)[0]
        protobuf = fine(http.endpoint, OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf")
        assert "accepts an empty request (http/protobuf)" in protobuf[0]
        assert not any(request.resource_metrics for request in (*grpc.metrics, *http.metrics))


def test_a_refusal_over_grpc_is_named() -> None:
    """What listens there speaks gRPC, and no OTLP, or wants a token."""
    with grpc_receiver() as received:
        received.mode = "UNAUTHENTICATED"
        assert "refuses the token" in problem(received.endpoint, **GRPC).what
        received.mode = "UNIMPLEMENTED"
        assert "UNIMPLEMENTED" in problem(received.endpoint, **GRPC).what


# --- proxies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "scheme", "environ"),
    [("http_proxy", "http", {}), ("https_proxy", "https", {}), ("https_proxy", "http", GRPC)],
)
def test_a_dead_proxy_is_named_and_not_the_collector(
    variable: str, scheme: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that a login script sets for the browser reaches every program."""
    with refusing_address() as proxy:
        monkeypatch.setenv(variable, proxy)
        finding = problem(f"{scheme}://collector.example:4318", **environ)

    assert (
        finding.what == f"the proxy {proxy.removeprefix('http://')} ({variable.upper()}) refuses connections"
    )
    assert "NO_PROXY=collector.example" in finding.remedy


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("403 Forbidden", ("refuses to connect to collector.example:4318 (answers 403)", "allowed there")),
        ("407 Proxy Authentication Required", ("asks for a login (407)", "user:password@")),
        ("503 Service Unavailable", ("(answers 503)", "NO_PROXY=collector.example")),
    ],
)
def test_a_proxy_that_denies_is_named(
    scheme: str, status: str, said: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """403 of a proxy is not the token's fault."""
    with server(answering(status)) as proxy:
        monkeypatch.setenv(f"{scheme}_proxy", f"http://me:secret@{proxy}")
        finding = problem(f"{scheme}://collector.example:4318")

    assert finding.what.startswith(f"the proxy {proxy} ({scheme.upper()}_PROXY) ")
    assert said[0] in finding.what
    assert said[1] in finding.remedy
    assert "secret" not in finding.what + finding.remedy


def test_a_collector_that_answers_without_its_proxy_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is NO_PROXY, and not a word to the collector's administrator."""
    with http_receiver() as received, server(answering("502 Bad Gateway")) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        finding = problem(received.endpoint)
        assert "set NO_PROXY=127.0.0.1: 127.0.0.1 answers without it" in finding.remedy
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        fine(received.endpoint)


def test_a_login_page_of_a_proxy_and_a_proxy_that_is_none_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hotels, and a SOCKS address in the wrong variable."""
    with server(answering("200 OK", "Content-Type: text/html", body="<html>log in</html>")) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        assert (
            "a login page or a proxy stands in its place" in problem("http://collector.example:4318").remedy
        )
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1080")
    assert problem("http://collector.example:4318").what == "HTTP_PROXY names no http:// proxy"


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up takes 25 s of both clocks; ``gone.test`` is no name, ``collector.test`` is one of this machine."""
    real, spent_s = socket.getaddrinfo, [0.0]

    def found(host: str, *more: Any, **options: Any) -> list[Any]:
        if not host.endswith(".test"):  # an address
            return real(host, *more, **options)
        spent_s[0] += 25.0
        if host == "gone.test":
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return real("127.0.0.1", *more, **options)

    def later(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + spent_s[0]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    for name in ("time", "monotonic"):
        monkeypatch.setattr(time, name, later(getattr(time, name)))


@pytest.mark.usefixtures("slow_names")
def test_a_name_server_that_does_not_answer_is_named_and_no_clock_is_blamed() -> None:
    """Of two, the first was dead: only the clock of the Collector, which was right, was said to be 12 s ahead."""
    with http_receiver() as received:
        address = received.endpoint.replace("127.0.0.1", "collector.test")
        found = list(endpoint.check_endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": address}))

    [finding] = [each for each in found if each.state == WARNING]
    assert finding.what == f"the name of {address} takes 25 s to resolve; every new connection waits for it"
    assert "/etc/resolv.conf" in finding.remedy


@pytest.mark.usefixtures("slow_names")
def test_a_name_that_no_server_answers_for_is_not_called_wrong() -> None:
    """The host name was to be corrected, and was correct."""
    finding = problem("http://gone.test:4318")

    assert finding.what == "http://gone.test:4318 has a name that cannot be resolved in 25 s"
    assert "/etc/resolv.conf" in finding.remedy


# --- answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("500", "answers 500 (Internal Server Error)"),
        ("502", "answers 502 (Bad Gateway)"),
        ("503", "answers 503 (Service Unavailable)"),
        ("html", "answers 200 with the content type text/html, which is no OTLP answer"),
        ("odd", "is no OTLP response"),
        ("302", "redirects to http://login.example (302), which is not followed"),
        ("401", "refuses the token (401)"),
        ("404", "answers 404"),
        ("close", "answers HTTP requests, but no OTLP request"),
    ],
)
def test_what_answers_otherwise_is_named(mode: str, said: str) -> None:
    """5xx, login pages, redirects, tokens and paths."""
    with http_receiver(mode) as received:
        received.location = "http://login.example/" if mode == "302" else ""
        finding = problem(received.endpoint)

    assert finding.what == f"{received.endpoint} {said}" or said in finding.what


@pytest.mark.parametrize(
    ("mode", "said"),
    [("endless", "200 with more than 65536 bytes"), ("trickle", "does not complete it within")],
)
def test_an_answer_without_end_is_cut_off(mode: str, said: str) -> None:
    """The doctor does not wait with the server."""
    with http_receiver(mode) as received:
        assert said in problem(received.endpoint).what


@pytest.mark.parametrize("environ", [{}, GRPC])
def test_silence_is_named(environ: dict[str, str]) -> None:
    """A process that is stopped, or a port of something else."""
    with black_hole() as address:
        assert "takes connections and does not answer" in problem(address, **environ).what
        # It was said that the service does not speak TLS, and to write http://, which it does not answer either.
        assert "takes connections and does not answer" in problem(f"https{address[4:]}", **environ).what


@pytest.mark.parametrize("environ", [{}, GRPC])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_connection_that_is_closed_at_once_is_not_called_silent(
    pems: Path, scheme: str, environ: dict[str, str]
) -> None:
    """A proxy without a collector behind it: it read as one that is overloaded."""
    with secure(pems, reading=False) if scheme == "https" else server(lambda _: None) as there:
        finding = problem(f"{scheme}://{there}", **environ, **(trusted(pems) if scheme == "https" else {}))
    assert finding.what == f"{scheme}://{there} takes connections and closes them without an answer"


def test_what_speaks_neither_is_named() -> None:
    """A mail server greets first."""
    with server(lambda sock: sock.sendall(b"220 mail.example ESMTP\r\n")) as there:
        assert "something other than HTTP" in problem(f"http://{there}").what


# --- certificates -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a stack, one that has expired (``old.crt``), and one that is for clients only (``client.crt``)."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH")
    state = tmp_path_factory.mktemp("keys")
    tls.make(state, endpoint_port=4318)
    folder = tls.folder(state)
    made = ["req", "-new", "-key", str(folder / tls.KEY), "-subj", "/CN=127.0.0.1", "-out", str(folder / "r")]
    subprocess.run(["openssl", *made], check=True, capture_output=True)
    signed = ["openssl", "x509", "-req", "-in", str(folder / "r"), "-signkey", str(folder / tls.KEY)]
    signed += ["-extfile", str(folder / "names"), "-out"]
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    old = [*signed, str(folder / "old.crt")]
    if subprocess.run([*old, "-days", "-1"], check=False, capture_output=True).returncode:  # OpenSSL 3.4 on
        over = ["-not_before", "20200101000000Z", "-not_after", "20200102000000Z"]
        subprocess.run([*old, *over], check=True, capture_output=True)
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=clientAuth")
    client = [*signed, str(folder / "client.crt"), "-days", "9"]
    subprocess.run(client, check=True, capture_output=True)
    return folder


@contextmanager
def secure(
    pems: Path,
    certificate: str = tls.CERTIFICATE,
    *,
    client: bool = False,
    host: str = "127.0.0.1",
    reading: bool = True,
) -> Iterator[str]:
    """A collector behind TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pems / certificate, pems / tls.KEY)
    if client:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(pems / tls.AUTHORITY)
    kind = "Content-Type: application/json"
    answer = answering("200 OK", kind, body="{}") if reading else lambda _: None
    with server(answer, context, host) as there:
        yield there


def trusted(pems: Path, name: str = tls.AUTHORITY) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(pems / name)}


def test_certificates_that_are_in_order_are_fine(pems: Path) -> None:
    """With the authority that signed them."""
    with secure(pems) as there:
        assert any(
            "its certificate is trusted until" in what for what in fine(f"https://{there}", **trusted(pems))
        )


def test_what_is_wrong_with_a_certificate_is_named(pems: Path) -> None:
    """Unknown, expired, of another name: three remedies."""
    with secure(pems) as there, secure(pems, "old.crt") as old, secure(pems, host="127.0.0.2") as other_name:
        unknown = problem(f"https://{there}")
        assert "certificate that is not trusted" in unknown.what
        assert "OTEL_EXPORTER_OTLP_CERTIFICATE" in unknown.remedy
        expired = problem(f"https://{old}", **trusted(pems, "old.crt"))
        assert "expired" in expired.what
        assert "renewed" in expired.remedy
        other = problem(f"https://{other_name}", **trusted(pems))
        assert "certificate for another name than 127.0.0.2" in other.what


def test_a_certificate_with_another_fault_is_not_said_to_lack_its_authority(pems: Path) -> None:
    """The file of the authority was asked for, which was given and changes nothing."""
    with secure(pems, "client.crt") as there:
        finding = problem(f"https://{there}", **trusted(pems, "client.crt"))

    assert finding.what.endswith("that is not trusted: unsuitable certificate purpose")
    assert finding.remedy == "have it, or the certificate of its authority, issued again without this fault"


def client(certificate: Path, key: Path) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(certificate),
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(key),
    }


def test_a_certificate_of_the_client_that_is_missed_or_not_trusted_is_named(pems: Path) -> None:
    """It read as a connection that was closed. Where it is set, to set it is no remedy."""
    with secure(pems, client=True) as there:
        missed = problem(f"https://{there}", **trusted(pems))
        distrusted = problem(f"https://{there}", **trusted(pems), **client(pems / "old.crt", pems / tls.KEY))

    assert "requires a certificate of the client" in missed.what
    assert "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE" in missed.remedy
    assert "does not trust the certificate of its client" in distrusted.what
    assert "one that its authority has signed" in distrusted.remedy


def test_a_key_with_a_password_is_named_and_the_password_is_not_asked_for(pems: Path, tmp_path: Path) -> None:
    """A training waits for no terminal."""
    encrypt = ["pkey", "-aes256", "-passout", "pass:x", "-in", str(pems / tls.KEY)]
    encrypt += ["-out", str(tmp_path / "key")]
    subprocess.run(["openssl", *encrypt], check=True, capture_output=True)
    own = client(pems / tls.CERTIFICATE, tmp_path / "key")

    assert "the key has a password" in problem("https://127.0.0.1:1", **own).what


def test_files_of_certificates_that_are_none_are_named(pems: Path, tmp_path: Path) -> None:
    """A path that moved read as a collector that speaks no TLS."""
    (tmp_path / "empty").write_text("")
    with secure(pems) as there:
        missing = problem(f"https://{there}", **trusted(tmp_path, "gone.pem"))
        assert "gone.pem' for metrics: expected the path of a PEM file" in missing.what
        assert "no certificate or crl found" in problem(f"https://{there}", **trusted(tmp_path, "empty")).what


@pytest.mark.parametrize("environ", [{}, GRPC])
def test_tls_where_there_is_none_and_none_where_there_is(pems: Path, environ: dict[str, str]) -> None:
    """One letter."""
    with secure(pems) as there, http_receiver() as http, grpc_receiver() as grpc:
        finding = problem(f"http://{there}", **environ)
        assert finding.what == f"http://{there} expects TLS, and the request came without it"
        assert "https://" in finding.remedy
        plain = problem(http.endpoint.replace("http", "https"), **environ)
        assert "does not speak TLS but HTTP without it" in plain.what
        plain = problem(grpc.endpoint.replace("http", "https"), **environ)
        assert "does not speak TLS but gRPC without it" in plain.what


# --- what follows -----------------------------------------------------------------------------------


def test_nothing_more_is_sent_to_an_endpoint_that_takes_no_empty_request(tmp_path: Path) -> None:
    """A second opinion on the same cause, in other words, is noise."""
    with grpc_receiver() as received:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint, "OTEL_TRAIN_RUN_DIR": str(tmp_path)}
        found = doctor.run_all_checks(environ, end_to_end.ProbeTargets(urls={}), wait_s=1)

    [last] = [each for each in found if each.area == end_to_end.AREA]
    assert last.state == NOTE
    assert "nothing is sent" in last.what


@pytest.mark.parametrize("kind", ["a file", "a link that leads nowhere"])
def test_a_run_directory_below_a_file_is_named(tmp_path: Path, kind: str) -> None:
    """It said that the folder can be written, and that the first run makes it."""
    above = tmp_path / "runs"
    if kind == "a file":
        above.write_text("")
    else:
        above.symlink_to(tmp_path / "gone")

    def no_disk(_: Path) -> Any:
        raise AssertionError

    config = Config(run_dir=str(above / "mine"))
    [finding] = environment.check_run_directory(config, environment.Machine(file_system=no_disk))

    assert finding.state == PROBLEM
    assert finding.what == f"{above / 'mine'} cannot be made: {above} is {kind}"
