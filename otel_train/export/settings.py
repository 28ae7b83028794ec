"""What the standard ``OTEL_*`` variables ask of us."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

from otel_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

SIGNALS = ("metrics", "traces")

HTTP_JSON, HTTP_PROTOBUF, GRPC = "http/json", "http/protobuf", "grpc"

RUNNING_TIMEOUT_S = 5.0
"""Longest one request may take while training runs: half the default export interval."""

_DEFAULT_ENDPOINTS = {
    HTTP_JSON: "http://localhost:4318",
    HTTP_PROTOBUF: "http://localhost:4318",
    GRPC: "http://localhost:4317",
}
"""Source: OpenTelemetry specification, protocol exporter."""

_COMPRESSIONS = {GRPC: ("gzip",), HTTP_JSON: ("gzip", "deflate"), HTTP_PROTOBUF: ("gzip", "deflate")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the requests of one signal go, and how.

    Attributes:
        protocol: ``http/json``, ``http/protobuf`` or ``grpc``.
        url: what requests are posted to; of gRPC the scheme, host and port.
        address: the address that people set, without user name, password and query.
        headers: sent with every request; their values may be secrets, so nothing prints them.
        compression: ``gzip``, ``deflate`` or "".
        tls: whether the connection is encrypted.
        certificate: PEM file that the collector's certificate is checked with; "" takes the system's authorities.
        client_certificate: PEM file that is shown to the collector; "" shows none.
        client_key: PEM file of its key; "" where the certificate's file has it.
    """

    protocol: str
    url: str = field(repr=False)
    address: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    compression: str = ""
    tls: bool = False
    certificate: str = ""
    client_certificate: str = ""
    client_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpSettings:
    """What to send, and how.

    Attributes:
        targets: signal (``metrics``, ``traces``) to where it goes; a signal that is switched off is absent.
        timeout_s: longest one request may take while training runs.
    """

    targets: Mapping[str, Target]
    timeout_s: float = RUNNING_TIMEOUT_S

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
        targets = {
            signal: _target(environ, signal, endpoint)
            for signal in SIGNALS
            if endpoint or _signal_on(environ, signal, wanted=wanted)
        }
        return cls(targets=targets, timeout_s=_timeout_s(environ))

    @property
    def addresses(self) -> str:
        """The addresses that people set, each once, with commas."""
        return ", ".join(dict.fromkeys(target.address for target in self.targets.values()))


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


def _target(environ: Mapping[str, str], signal: str, endpoint: str) -> Target:
    protocol = _protocol(environ, signal)
    address = endpoint or _for_signal(environ, signal, "ENDPOINT") or _DEFAULT_ENDPOINTS[protocol]
    own = not endpoint and environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
    shown = _shown(address, signal, protocol)
    if protocol == GRPC:
        # A bare host:port is encrypted unless a variable says otherwise.
        insecure = _for_signal(environ, signal, "INSECURE").lower() == "true"
        tls = address.startswith("https://") or not (address.startswith("http://") or insecure)
    else:
        tls = address.startswith("https://")
    return Target(
        protocol=protocol,
        # The specification appends the path to the address for all signals, never to that of one.
        url=address if own or protocol == GRPC else f"{address.rstrip('/')}/v1/{signal}",
        address=shown,
        headers=_headers(environ, signal),
        compression=_compression(environ, signal, protocol),
        tls=tls,
        certificate=_certificate(environ, signal),
        client_certificate=_for_signal(environ, signal, "CLIENT_CERTIFICATE"),
        client_key=_for_signal(environ, signal, "CLIENT_KEY"),
    )


def _protocol(environ: Mapping[str, str], signal: str) -> str:
    protocol = _for_signal(environ, signal, "PROTOCOL") or HTTP_JSON
    if protocol not in _DEFAULT_ENDPOINTS:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r} for {signal}: expected 'http/json', 'http/protobuf' or "
            "'grpc'. Every Collector takes the first two; unset the variable to use http/json."
        )
    return protocol


def _shown(address: str, signal: str, protocol: str) -> str:
    # gRPC also takes a bare host:port, which parses as a scheme without a host.
    if protocol == GRPC and "://" not in address:
        return address
    try:
        parts = urlsplit(address)
        known = parts.scheme in {"http", "https"} and parts.hostname and (parts.port or True)
    except ValueError:
        known = False
    if not known:
        raise ConfigError(
            f"OTLP endpoint {address!r} for {signal}: expected http://host:port or https://host:port. "
            "Set OTEL_EXPORTER_OTLP_ENDPOINT, for example to http://127.0.0.1:4318."
        )
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def _headers(environ: Mapping[str, str], signal: str) -> dict[str, str]:
    """``name=value`` with commas between; values are percent-encoded (W3C Baggage). What has no name is left out."""
    headers = {}
    for entry in _for_signal(environ, signal, "HEADERS").split(","):
        name, sign, value = (part.strip() for part in entry.partition("="))
        name, value = unquote(name).strip().lower(), unquote(value).strip()
        if name and sign and (name + value).isprintable():
            headers[name] = value
    return headers


def _compression(environ: Mapping[str, str], signal: str, protocol: str) -> str:
    compression = _for_signal(environ, signal, "COMPRESSION").lower()
    if compression in {"", "none"}:
        return ""
    if compression not in _COMPRESSIONS[protocol]:
        known = " or ".join(repr(name) for name in _COMPRESSIONS[protocol])
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_COMPRESSION={compression!r} for {signal}: expected {known} with {protocol}. "
            "Correct the variable, or unset it to send uncompressed."
        )
    return compression


def _certificate(environ: Mapping[str, str], signal: str) -> str:
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
    shown = _for_signal(environ, signal, "CLIENT_CERTIFICATE")
    if shown:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(
                shown, _for_signal(environ, signal, "CLIENT_KEY") or None
            )
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE={shown!r} for {signal}: expected a PEM file with a certificate "
                f"whose key is in OTEL_EXPORTER_OTLP_CLIENT_KEY or in the same file ({error}). Correct both variables."
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
