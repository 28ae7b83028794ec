"""What the standard ``OTEL_*`` variables ask of us."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from otel_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OnWrong: TypeAlias = "Callable[[str, str, str], object]"

SIGNALS = ("metrics", "traces")

RUNNING_TIMEOUT_S = 5.0
"""Longest one request may take while training runs, retries included: half the default export interval."""

_HTTP = "http/protobuf"

_DEFAULT_ENDPOINTS = {_HTTP: "http://localhost:4318", "grpc": "http://localhost:4317"}
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
    def read(
        cls,
        environ: Mapping[str, str],
        *,
        endpoint: str = "",
        wanted: bool = False,
        on_wrong: OnWrong | None = None,
    ) -> OtlpSettings:
        """The settings that an environment asks for.

        Args:
            environ: the process environment.
            endpoint: a base address that overrides the variables and switches both signals on.
            wanted: send what no variable switches off, without an endpoint to the standard one.
            on_wrong: told of each wrong variable: its name, the problem, and what holds in its place. A protocol and a
                time limit have a default that holds. An address, a certificate and a key have none: what is meant for
                them is not sent.

        Raises:
            ConfigError: without ``on_wrong``: a protocol we cannot speak, an address that is none, a time limit that is
                none, a file that is no certificate.
        """
        tell = _teller(on_wrong)
        protocols, certificates, addresses = {}, {}, {}
        for signal in SIGNALS:
            if not (endpoint or _signal_on(environ, signal, wanted=wanted)):
                continue
            protocol = _protocol(environ, signal, tell)
            certificate = _certificate(environ, signal, tell)
            address = _address(environ, signal, protocol, endpoint, tell)
            if certificate is not None and address:
                protocols[signal], certificates[signal], addresses[signal] = protocol, certificate, address
        return cls(
            protocols=protocols,
            endpoints=addresses,
            timeout_s=_timeout_s(environ, tell),
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


def _teller(on_wrong: OnWrong | None) -> OnWrong:
    """What is called with the name, the problem and the substitute of a wrong variable; once for each."""
    told: set[str] = set()

    def tell(variable: str, problem: str, used: str) -> None:
        if on_wrong is None:
            raise ConfigError(problem)
        if variable not in told:
            told.add(variable)
            on_wrong(variable, problem, used)

    return tell


def _variable(environ: Mapping[str, str], signal: str, name: str) -> str:
    """The variable that holds for a signal: its own, else that of all."""
    own = f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}"
    return own if environ.get(own, "").strip() else f"OTEL_EXPORTER_OTLP_{name}"


def _for_signal(environ: Mapping[str, str], signal: str, name: str) -> str:
    return environ.get(_variable(environ, signal, name), "").strip()


def _protocol(environ: Mapping[str, str], signal: str, tell: OnWrong) -> str:
    protocol = _for_signal(environ, signal, "PROTOCOL") or _HTTP
    if protocol in _DEFAULT_ENDPOINTS:
        return protocol
    name = _variable(environ, signal, "PROTOCOL")
    rule = "expected 'http/protobuf' or 'grpc'. Every collector takes http/protobuf; unset the variable to use it."
    tell(name, f"{name}={protocol!r} for {signal}: {rule}", _HTTP)
    return _HTTP


def _address(environ: Mapping[str, str], signal: str, protocol: str, endpoint: str, tell: OnWrong) -> str:  # noqa: PLR0917  # one caller, and each is in its message
    """Where a signal goes; "" where that is no address."""
    address = endpoint or _for_signal(environ, signal, "ENDPOINT") or _DEFAULT_ENDPOINTS[protocol]
    # The gRPC exporter also takes a bare host:port, which parses as a scheme without a host.
    if protocol == "grpc" and "://" not in address:
        return address
    try:
        parts = urlsplit(address)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))
    except ValueError:  # a port that is no number, half an IPv6 address
        pass
    scheme, slashes, rest = address.rpartition("//")
    tell(
        _variable(environ, signal, "ENDPOINT"),
        f"OTLP endpoint {f'{scheme}{slashes}' + rest.rpartition('@')[2]!r} for {signal}: "
        "expected http://host:port or https://host:port. "
        "Set OTEL_EXPORTER_OTLP_ENDPOINT, for example to http://127.0.0.1:4318.",
        "OTLP off",
    )
    return ""


def _certificate(environ: Mapping[str, str], signal: str, tell: OnWrong) -> str | None:
    """The authority that is named for a signal; "" for none, None where a file is not what it should be."""
    # The SDK's exporters open these when they first send, or log and go on without.
    for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
        path, variable = _for_signal(environ, signal, name), _variable(environ, signal, name)
        if path and not Path(path).is_file():
            rule = "expected the path of a PEM file. Correct or unset the variable."
            tell(variable, f"{variable}={path!r} for {signal}: {rule}", "OTLP off")
            return None
    path, variable = _for_signal(environ, signal, "CERTIFICATE"), _variable(environ, signal, "CERTIFICATE")
    if path:
        try:
            ssl.create_default_context(cafile=path)
        except (ssl.SSLError, OSError) as error:
            tell(
                variable,
                f"{variable}={path!r} for {signal}: expected a PEM file with certificates, and "
                f"it cannot be read as one ({error}). Name the file of the authority that signed the collector's.",
                "OTLP off",
            )
            return None
    return path


def _timeout_s(environ: Mapping[str, str], tell: OnWrong) -> float:
    limits = [RUNNING_TIMEOUT_S]
    for signal in SIGNALS:
        text, variable = _for_signal(environ, signal, "TIMEOUT"), _variable(environ, signal, "TIMEOUT")
        used = f"{RUNNING_TIMEOUT_S:g} s"
        try:
            timeout_s = float(text or RUNNING_TIMEOUT_S)
        except ValueError:
            tell(variable, f"{variable}={text!r}: expected a number of seconds, such as 5.", used)
            continue
        if timeout_s > 0:
            limits.append(timeout_s)
        else:
            tell(variable, f"{variable}={text}: expected more than 0 seconds, such as 5.", used)
    return min(limits)
