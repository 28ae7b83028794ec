"""What the standard ``OTEL_*`` variables ask of us."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from otel_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

SIGNALS = ("metrics", "traces")

RUNNING_TIMEOUT_S = 5.0
"""Longest one request may take while training runs, retries included: half the default export interval."""

_DEFAULT_ENDPOINTS = {"http/protobuf": "http://localhost:4318", "grpc": "http://localhost:4317"}
"""Source: OpenTelemetry specification, protocol exporter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpSettings:
    """What to send, and how.

    Attributes:
        protocols: signal (``metrics``, ``traces``) to ``http/protobuf`` or ``grpc``; a signal that is
            switched off is absent.
        endpoints: signal to the address it goes to, for people to read: no user name, no password.
        timeout_s: longest one request may take while training runs.
        endpoint: the base address to use instead of the variables', or "".
        certificates: signal to the PEM file that a collector's certificate is checked with, where one is named.
    """

    protocols: Mapping[str, str]
    endpoints: Mapping[str, str]
    timeout_s: float = RUNNING_TIMEOUT_S
    endpoint: str = ""
    certificates: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, environ: Mapping[str, str], *, endpoint: str = "", wanted: bool = False) -> OtlpSettings:
        """The settings that an environment asks for.

        Args:
            environ: the process environment.
            endpoint: a base address that overrides the variables and switches both signals on.
            wanted: send what no variable switches off, without an endpoint to the standard one.

        Raises:
            ConfigError: a protocol we cannot speak, an address that is none, a time limit that is none.
        """
        protocols = {
            signal: _protocol(environ, signal)
            for signal in SIGNALS
            if endpoint or _signal_on(environ, signal, wanted=wanted)
        }
        certificates = {signal: _certificate(environ, signal) for signal in protocols}
        addresses = {
            signal: _address(environ, signal, protocol, endpoint) for signal, protocol in protocols.items()
        }
        return cls(
            protocols=protocols,
            endpoints=addresses,
            timeout_s=_timeout_s(environ),
            endpoint=endpoint,
            certificates={signal: path for signal, path in certificates.items() if path},
        )

    def explicit_endpoint(self, signal: str) -> str:
        """The address to hand to the SDK's exporter; "" leaves it to the variables."""
        if not self.endpoint or self.protocols[signal] == "grpc":
            return self.endpoint
        return f"{self.endpoint.rstrip('/')}/v1/{signal}"


def otlp_configured(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for OTLP: an endpoint is named and nothing switches it off.

    Source: OpenTelemetry specification, environment variables. An empty variable counts as unset.
    """
    return any(_signal_on(environ, signal) for signal in SIGNALS)


def _signal_on(environ: Mapping[str, str], signal: str, *, wanted: bool = False) -> bool:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip()
    if exporters:
        return "otlp" in (name.strip().lower() for name in exporters.split(","))
    return wanted or bool(_for_signal(environ, signal, "ENDPOINT"))


def _for_signal(environ: Mapping[str, str], signal: str, name: str) -> str:
    own = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", "").strip()
    return own or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "").strip()


def _protocol(environ: Mapping[str, str], signal: str) -> str:
    protocol = _for_signal(environ, signal, "PROTOCOL") or "http/protobuf"
    if protocol not in _DEFAULT_ENDPOINTS:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r} for {signal}: expected 'http/protobuf' or 'grpc'. "
            "Every collector takes http/protobuf; unset the variable to use it."
        )
    return protocol


def _address(environ: Mapping[str, str], signal: str, protocol: str, endpoint: str) -> str:
    address = endpoint or _for_signal(environ, signal, "ENDPOINT") or _DEFAULT_ENDPOINTS[protocol]
    parts = urlsplit(address)
    # The gRPC exporter also takes a bare host:port, which parses as a scheme without a host.
    if protocol == "grpc" and "://" not in address:
        return address
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(
            f"OTLP endpoint {address!r} for {signal}: expected http://host:port or https://host:port. "
            "Set OTEL_EXPORTER_OTLP_ENDPOINT, for example to http://127.0.0.1:4318."
        )
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def _certificate(environ: Mapping[str, str], signal: str) -> str:
    # The SDK's exporters open these when they first send, or log and go on without.
    for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
        path = _for_signal(environ, signal, name)
        if path and not Path(path).is_file():
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_{name}={path!r} for {signal}: expected the path of a PEM file. "
                "Correct or unset the variable."
            )
    path = _for_signal(environ, signal, "CERTIFICATE")
    if path:
        try:
            ssl.create_default_context(cafile=path)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_CERTIFICATE={path!r} for {signal}: expected a PEM file with certificates, and "
                f"it cannot be read as one ({error}). Name the file of the authority that signed the collector's."
            ) from None
    return path


def _timeout_s(environ: Mapping[str, str]) -> float:
    limits = [RUNNING_TIMEOUT_S]
    for signal in SIGNALS:
        text = _for_signal(environ, signal, "TIMEOUT")
        try:
            limits.append(float(text or RUNNING_TIMEOUT_S))
        except ValueError:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_TIMEOUT={text!r}: expected a number of seconds, such as 5."
            ) from None
    timeout_s = min(limits)
    if not timeout_s > 0:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_TIMEOUT={timeout_s:g}: expected more than 0 seconds, such as 5."
        )
    return timeout_s
