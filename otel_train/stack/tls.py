"""Certificates and a token for connections from trainers to the Collector."""

from __future__ import annotations

import ipaddress
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from otel_train.errors import StackError
from otel_train.files import replace_text
from otel_train.stack.configuration import HOST

FOLDER = "keys"
TOKEN, AUTHORITY, CERTIFICATE, KEY, TRAINER = "token", "ca.crt", "server.crt", "server.key", "trainer.env"

VALID_DAYS = 825
"""Longest validity of a server certificate that common TLS clients accept."""

TOKEN_BYTES = 32  # of randomness
OPENSSL_WITHIN_S = 60.0


def folder(state: Path) -> Path:
    """Returns the folder of keys in a stack's state folder, which other users may not enter."""
    return state / FOLDER


def make(state: Path, *, endpoint_port: int, environ: Mapping[str, str] | None = None) -> Path:
    """Creates missing keys, and a file with the variables for trainers.

    Existing user-provided tokens and certificates are kept.
    """
    place = folder(state)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (place / TOKEN).is_file():
        replace_text(place / TOKEN, secrets.token_urlsafe(TOKEN_BYTES))
    if not all((place / name).is_file() for name in (AUTHORITY, CERTIFICATE, KEY)):
        _certify(place, os.environ if environ is None else environ)
    token = (place / TOKEN).read_text(encoding="ascii").strip()
    settings = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"https://{HOST}:{endpoint_port}",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": str((place / AUTHORITY).resolve()),
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{quote(token, safe='')}",
    }
    lines = [f"{name}={shlex.quote(text)}\n" for name, text in settings.items()]
    replace_text(place / TRAINER, "".join(lines))
    return place / TRAINER


def how_to_use(state: Path) -> str:
    """Returns the shell command that sets certificate and token for a training program."""
    return f"set -a; . {shlex.quote(str(folder(state) / TRAINER))}; set +a"


def _certify(place: Path, environ: Mapping[str, str]) -> None:
    """Creates a certificate authority that signs one certificate; the key of the authority is discarded."""
    openssl = shutil.which("openssl", path=environ.get("PATH"))
    if openssl is None:
        raise StackError(
            "--secure makes its certificate with openssl, which is not on PATH. Install it, or put your "
            f"certificates into {place}: {AUTHORITY}, {CERTIFICATE} and {KEY} (PEM)"
        )
    names = ",".join(map(_typed, dict.fromkeys(["localhost", socket.gethostname(), HOST, "::1"])))
    request = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    request += ["-days", str(VALID_DAYS), "-subj"]
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        fresh = Path(scratch)
        signer, signer_key = str(fresh / AUTHORITY), str(fresh / "ca.key")
        authority = ["/O=otel-train/CN=authority", "-keyout", signer_key, "-out", signer]
        authority += _extensions(
            "basicConstraints=critical,CA:TRUE,pathlen:0", "keyUsage=critical,keyCertSign,cRLSign"
        )
        _run([*request, *authority])
        server = ["/O=otel-train/CN=collector", "-CA", signer, "-CAkey", signer_key]
        server += ["-keyout", str(fresh / KEY), "-out", str(fresh / CERTIFICATE)]
        server += _extensions("basicConstraints=critical,CA:FALSE", "keyUsage=critical,digitalSignature")
        server += _extensions("extendedKeyUsage=serverAuth", f"subjectAltName={names}")
        _run([*request, *server])
        for name in (AUTHORITY, CERTIFICATE, KEY):
            replace_text(place / name, (fresh / name).read_text(encoding="ascii"))


def _extensions(*given: str) -> list[str]:
    return [word for each in given for word in ("-addext", each)]


def _typed(name: str) -> str:
    """Returns a name of the server in the format of subjectAltName."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return f"DNS:{name}"
    return f"IP:{name}"


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=OPENSSL_WITHIN_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StackError(f"openssl did not make a certificate: {error}") from error
    if done.returncode:
        output = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise StackError(f"openssl did not make a certificate (version 3 or later is needed): {output}")
