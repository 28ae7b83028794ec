"""What the standard ``OTEL_*`` variables ask of us."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, urlsplit, urlunsplit

from otel_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OnWrong: TypeAlias = "Callable[[str, str, str], object]"

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
            on_wrong: reported of each wrong variable: its name, the problem, and what holds in its place. A protocol and a
                time limit have a default that holds. An address, a certificate and a key have none: what is meant for
                them is not sent.

        Raises:
            ConfigError: without ``on_wrong``: a protocol we cannot speak, an address that is none, a time limit that is
                none, a file that is no certificate.
        """
        tell = _once_each(on_wrong)
        targets = {
            signal: _target(environ, signal, endpoint, tell)
            for signal in SIGNALS
            if endpoint or _signal_on(environ, signal, wanted=wanted)
        }
        known = {signal: target for signal, target in targets.items() if target is not None}
        return cls(targets=known, timeout_s=_timeout_s(environ, tell))

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


def _once_each(on_wrong: OnWrong | None) -> OnWrong:
    """What is called with the name, the problem and the substitute of a wrong variable; once for each."""
    reported: set[str] = set()

    def tell(variable: str, problem: str, used: str) -> None:
        if on_wrong is None:
            raise ConfigError(problem)
        if variable not in reported:
            reported.add(variable)
            on_wrong(variable, problem, used)

    return tell


def _variable(environ: Mapping[str, str], signal: str, name: str) -> str:
    """The variable that holds for a signal: its own, else that of all."""
    own = f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}"
    return own if environ.get(own, "").strip() else f"OTEL_EXPORTER_OTLP_{name}"


def _for_signal(environ: Mapping[str, str], signal: str, name: str) -> str:
    return environ.get(_variable(environ, signal, name), "").strip()


def _target(environ: Mapping[str, str], signal: str, endpoint: str, tell: OnWrong) -> Target | None:
    """Where a signal goes; None where what is set for it cannot be used."""
    protocol = _protocol(environ, signal, tell)
    certificate = _certificate(environ, signal, tell)
    address = endpoint or _for_signal(environ, signal, "ENDPOINT") or _DEFAULT_ENDPOINTS[protocol]
    own = not endpoint and environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
    shown = _shown(environ, address, signal, protocol, tell)
    if certificate is None or not shown:
        return None
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
        headers=headers_of(_for_signal(environ, signal, "HEADERS")),
        compression=_compression(environ, signal, protocol, tell),
        tls=tls,
        certificate=certificate,
        client_certificate=_for_signal(environ, signal, "CLIENT_CERTIFICATE"),
        client_key=_for_signal(environ, signal, "CLIENT_KEY"),
    )


def _protocol(environ: Mapping[str, str], signal: str, tell: OnWrong) -> str:
    protocol = _for_signal(environ, signal, "PROTOCOL") or HTTP_JSON
    if protocol in _DEFAULT_ENDPOINTS:
        return protocol
    name = _variable(environ, signal, "PROTOCOL")
    rule = (
        "expected 'http/json', 'http/protobuf' or 'grpc'. Every Collector takes the first two; unset the variable to "
        "use http/json."
    )
    tell(name, f"{name}={protocol!r} for {signal}: {rule}", HTTP_JSON)
    return HTTP_JSON


def _shown(environ: Mapping[str, str], address: str, signal: str, protocol: str, tell: OnWrong) -> str:  # noqa: PLR0917  # one caller, and each is in its message
    """An address without user name, password and query; "" where it is none."""
    # gRPC also takes a bare host:port, which parses as a scheme without a host.
    if protocol == GRPC and "://" not in address:
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


def headers_of(text: str) -> dict[str, str]:
    """``name=value`` with commas between; values are percent-encoded (W3C Baggage). What has no name is left out."""
    headers = {}
    for entry in text.split(","):
        name, sign, value = (part.strip() for part in entry.partition("="))
        name, value = unquote(name).strip().lower(), unquote(value).strip()
        if name and sign and (name + value).isprintable():
            headers[name] = value
    return headers


def _compression(environ: Mapping[str, str], signal: str, protocol: str, tell: OnWrong) -> str:
    compression = _for_signal(environ, signal, "COMPRESSION").lower()
    if compression in {"", "none"}:
        return ""
    if compression in _COMPRESSIONS[protocol]:
        return compression
    known = " or ".join(repr(name) for name in _COMPRESSIONS[protocol])
    name = _variable(environ, signal, "COMPRESSION")
    rule = f"expected {known} with {protocol}. Correct the variable, or unset it to send uncompressed."
    tell(name, f"{name}={compression!r} for {signal}: {rule}", "none")
    return ""


def _certificate(environ: Mapping[str, str], signal: str, tell: OnWrong) -> str | None:
    """The authority that is named for a signal; "" for none, None where a file is not what it should be."""
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
    shown = _for_signal(environ, signal, "CLIENT_CERTIFICATE")
    if shown:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(
                shown, _for_signal(environ, signal, "CLIENT_KEY") or None
            )
        except (ssl.SSLError, OSError) as error:
            name = _variable(environ, signal, "CLIENT_CERTIFICATE")
            tell(
                name,
                f"{name}={shown!r} for {signal}: expected a PEM file with a certificate whose key is in "
                f"OTEL_EXPORTER_OTLP_CLIENT_KEY or in the same file ({error}). Correct both variables.",
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
