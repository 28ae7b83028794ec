"""Certificates and tokens: made once, closed to others, understood by clients."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from otel_train.cli.main import main
from otel_train.errors import ConfigError, StackError
from otel_train.exporters.otlp_response import ExportResult, why
from otel_train.exporters.otlp_settings import OtlpSettings
from otel_train.exporters.otlp_transport import OtlpTransport
from otel_train.stack import configuration, local, tls
from otel_train.stack.compose import Compose
from otel_train.stack.local import ORDER, LocalStack
from tests.support.stack import free_ports

SECRET = re.compile(r"PRIVATE KEY|(?i:password|token|secret)\s*[:=]\s*[\"']?[A-Za-z0-9_-]{8,}")
"""A key, or a value where a reference to a file or to a variable should be."""
NAMES = (tls.TOKEN, tls.AUTHORITY, tls.CERTIFICATE, tls.KEY, tls.TRAINER)


@pytest.fixture
def openssl() -> None:
    """Certificates are made by it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on PATH")


@pytest.fixture
def made(tmp_path: Path, openssl: None) -> Path:
    tls.make(tmp_path, endpoint_port=4318)
    return tls.folder(tmp_path)


def test_no_other_user_can_read_them(made: Path) -> None:
    """On a login node many users have accounts."""
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert {stat.S_IMODE((made / name).stat().st_mode) for name in NAMES} == {0o600}
    assert sorted(path.name for path in made.iterdir()) == sorted(NAMES), "the authority's key must be gone"


def test_any_token_reaches_the_collector_unchanged(made: Path) -> None:
    """One of the user may have characters that separate headers."""
    token = "ab%41,c=d/e+f"
    (made / tls.TOKEN).write_text(token)
    variables = tls.make(made.parent, endpoint_port=4318).read_text()
    headers = re.search(r"^OTEL_EXPORTER_OTLP_HEADERS='?([^'\n]*)", variables, re.MULTILINE)
    assert headers is not None
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318", "OTEL_EXPORTER_OTLP_HEADERS": headers[1]}

    (target, *_) = OtlpSettings.read(environ).targets.values()
    assert target.headers == {"authorization": f"Bearer {token}"}


def test_they_are_made_once(made: Path) -> None:
    """Trainers that have them go on after a restart of the stack; two stacks have different ones."""
    before = {name: (made / name).read_bytes() for name in NAMES}
    tls.make(made.parent, endpoint_port=4318)
    tls.make(made.parent / "other", endpoint_port=4318)

    assert {name: (made / name).read_bytes() for name in NAMES} == before
    assert (tls.folder(made.parent / "other") / tls.TOKEN).read_bytes() != before[tls.TOKEN]


def test_existing_keys_are_kept(tmp_path: Path) -> None:
    """A cluster has an authority already."""
    place = tls.folder(tmp_path)
    place.mkdir()
    for name in (tls.AUTHORITY, tls.CERTIFICATE, tls.KEY):
        (place / name).write_text("mine")
    (place / tls.TOKEN).write_text("my-token\n")
    # Nothing is left to make, so openssl is not needed either.
    trainer = tls.make(tmp_path, endpoint_port=1, environ={"PATH": ""})

    assert (place / tls.CERTIFICATE).read_text() == "mine"
    assert "authorization=Bearer%20my-token\n" in trainer.read_text()


def test_without_openssl_it_says_what_to_do(tmp_path: Path) -> None:
    """Half a secure stack would be an open one."""
    with pytest.raises(StackError, match=r"openssl.*not on PATH.*put your certificates"):
        tls.make(tmp_path, endpoint_port=1, environ={"PATH": str(tmp_path)})


def served(made: Path, server: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made / tls.CERTIFICATE, made / tls.KEY)
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        # A client that does not trust the certificate ends the handshake.
        with suppress(OSError), connection, context.wrap_socket(connection, server_side=True) as secured:
            said = secured.recv(4096)
            # What is left unread resets the connection.
            while said.startswith(b"POST") and not said.endswith(b"}"):
                said += secured.recv(4096)
            secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")


@pytest.fixture
def server(made: Path) -> Iterator[str]:
    """A server with the certificate, for one connection after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=served, args=(made, listening))
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(30)


def test_the_strictest_client_accepts_the_certificate_by_address(made: Path, server: str) -> None:
    """Python 3.13 checks every extension; so does this, on any version."""
    context = ssl.create_default_context(cafile=made / tls.AUTHORITY)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    host, _, port = server.partition(":")
    with (
        socket.create_connection((host, int(port)), 10) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        certificate = secured.getpeercert() or {}
        secured.sendall(b"x")
        secured.recv(4096)

    assert ("IP Address", "127.0.0.1") in certificate["subjectAltName"]
    assert ("DNS", "localhost") in certificate["subjectAltName"]


def test_the_named_certificate_wins_over_the_bundle_of_the_machine(
    made: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters set REQUESTS_CA_BUNDLE for all users; the collector's own authority is not in it."""
    tls.make(tmp_path / "machine", endpoint_port=1)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tls.folder(tmp_path / "machine") / tls.AUTHORITY))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    environ = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(made / tls.AUTHORITY)}
    transport = OtlpTransport(OtlpSettings.read(environ, endpoint=f"https://{server}").targets)
    answer = transport.send("metrics", b'{"resourceMetrics":[]}', 10)
    transport.close()

    assert "answers 200" in answer.reason  # which that server does with a body that is no OTLP


def test_certificates_that_are_replaced_are_trusted_without_a_restart(
    made: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of weeks outlives certificates of days."""
    tls.make(tmp_path / "former", endpoint_port=1)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    authority = tls.folder(tmp_path / "former") / tls.AUTHORITY
    environ = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(authority)}
    transport = OtlpTransport(OtlpSettings.read(environ, endpoint=f"https://{server}").targets)
    before = transport.send("metrics", b'{"resourceMetrics":[]}', 10)
    shutil.copy(made / tls.AUTHORITY, authority)
    after = transport.send("metrics", b'{"resourceMetrics":[]}', 10)
    transport.close()

    assert (before.result, "not trusted" in before.reason) == (ExportResult.RETRY, True)
    assert "answers 200" in after.reason


def test_a_file_that_is_no_certificate_is_refused_before_training(tmp_path: Path) -> None:
    """The exporters would find out when they first send, in words of C."""
    (tmp_path / "not.pem").write_text("certainly not")
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://h:1",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "not.pem"),
    }
    with pytest.raises(ConfigError, match=r"expected a PEM file with certificates.*authority"):
        OtlpSettings.read(environ)


@pytest.mark.parametrize(
    ("said", "meaning", "remedy"),
    [
        ("UNAUTHENTICATED: x", "token", "OTLP_HEADERS"),
        (
            "SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] unable to get local issuer",
            "not trusted",
            "OTLP_CERT",
        ),
        (
            "CERTIFICATE_VERIFY_FAILED: self signed certificate in certificate chain: OK",
            "its issuer is unknown here",
            "OTLP_CERTIFICATE to the PEM file of its authority",
        ),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)",
            "not trusted (self-signed certificate)",
            "OTLP_CERTIFICATE to its own PEM file",
        ),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: EE certificate key too weak (_ssl.c:1006)",
            "not trusted (EE certificate key too weak)",
            "issued again",
        ),
        (
            "CERTIFICATE_VERIFY_FAILED: unsupported certificate purpose: OK",
            "not trusted (unsupported certificate purpose)",
            "issued again",
        ),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "expired", "have it renewed"),
        ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "not valid yet", "correct the clock"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] Hostname mismatch", "another name", "OTLP_ENDPOINT"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", "not speak TLS", "http://"),
        ("UNAVAILABLE: ipv4:127.0.0.1:4317: Socket closed", "closes connections", "https://"),
        ("RemoteDisconnected: Remote end closed connection", "closes connections", "https://"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "refuses connections", ""),
        ("gaierror: [Errno -2] Name or service not known", "cannot be resolved", ""),
        ("TimeoutError: timed out", "does not answer", ""),
        ("something\x1b[2J\nnew", "something\\x1b[2J", ""),
        ("", "no reason given", ""),
    ],
)
def test_what_a_failed_request_says_becomes_what_to_do(said: str, meaning: str, remedy: str) -> None:
    """The words of sockets, gRPC and OpenSSL are for those who wrote them."""
    assert meaning in why(said)
    assert remedy in why(said)
    assert why(said).isprintable()


@pytest.fixture
def programs_there(tmp_path: Path) -> dict[str, str]:
    """An environment in which the programs of the stack are installed; none of them is run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for component in ORDER:
        program = folder / local.NAMES[component][0]
        program.touch(mode=0o700)
    return {**os.environ, "OTEL_TRAIN_TEST_BIN": str(folder)}


def test_a_secure_stack_is_still_one_when_another_process_finds_it(
    tmp_path: Path, programs_there: dict[str, str], openssl: None
) -> None:
    """`stack status` must not print http addresses."""
    state = tmp_path / "state"
    LocalStack(state, free_ports(), programs_there, secure=True).configure()
    found = LocalStack.of(state, programs_there)

    assert found is not None
    assert found.addresses()["send OTLP to"].startswith("https://")
    assert str(tls.folder(state) / tls.TRAINER) in found.addresses()["before training"]
    found.forget(data=True)
    assert not tls.folder(state).exists()


def test_compose_gets_the_second_file_and_no_secret(tmp_path: Path, openssl: None) -> None:
    """What is on a command line or in an environment is in `docker inspect` and in `ps`."""
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\n[ "$*" = "compose version" ] || (echo "$*"; env) >>"$SAID"\n')
    docker.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(tmp_path / "said")}
    compose = Compose({}, environ, secure=tmp_path / "state")
    compose.up([])
    said = (tmp_path / "said").read_text()
    token = (tls.folder(tmp_path / "state") / tls.TOKEN).read_text()

    assert "deploy/collector/secure.yml up" in said
    assert f"COLLECTOR_KEYS={tls.folder(tmp_path / 'state')}" in said
    assert token not in said
    assert compose.addresses()["send OTLP to"].startswith("https://")


def test_no_secret_is_in_a_file_that_ships() -> None:
    """What is in git is public, for good."""
    root = configuration.folder()
    shipped = [path for name in ("deploy", "grafana") for path in (root / name).rglob("*") if path.is_file()]
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in shipped}
    texts |= {root / name: (root / name).read_text(encoding="utf-8") for name in (".env", configuration.MARK)}

    assert {str(path): found[0] for path, text in texts.items() if (found := SECRET.search(text))} == {}
    assert SECRET.search("admin_password: hunter2hunter2"), "the pattern finds nothing at all"


def test_the_model_in_a_container_has_no_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Starting one that no server accepts looks like success."""
    assert main(["stack", "up", "--secure", "--demo", "--state", str(tmp_path)]) == 2
    assert "--secure and --demo" in capsys.readouterr().err
