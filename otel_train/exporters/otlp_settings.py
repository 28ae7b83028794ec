"""Reads the standard ``OTEL_*`` variables."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import unquote, urlsplit, urlunsplit

from otel_train.errors import ConfigError

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

_PREFIX = "OTEL_EXPORTER_OTLP_"

_OTLP, _DISABLED = "otlp", "OTEL_SDK_DISABLED"
_OTHER_EXPORTERS = {
    "metrics": ("none", "prometheus", "console", "logging"),
    "traces": ("none", "zipkin", "jaeger", "console", "logging"),
}
"""Exporter names of the specification other than ``otlp``: set without it, they switch OTLP off for the signal."""

_COMPRESSIONS = {GRPC: ("gzip",), HTTP_JSON: ("gzip", "deflate"), HTTP_PROTOBUF: ("gzip", "deflate")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Destination of one signal. Headers and URL may contain secrets, so they are never printed."""

    protocol: str
    url: str = field(repr=False)  # URL that requests are posted to; for gRPC scheme, host and port
    address: str  # as set by the user, without user name, password and query
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    compression: str = ""  # gzip or deflate
    tls: bool = False
    certificate: str = ""  # PEM file of the CAs that sign the Collector's certificate; "": the system's
    client_certificate: str = ""  # PEM file of the certificate that is sent to the Collector
    client_key: str = ""  # PEM file of its key; "": the key is in the file of the certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpSettings:
    """Destination by signal; a disabled signal is absent."""

    targets: Mapping[str, Target]
    timeout_s: float = RUNNING_TIMEOUT_S

    @classmethod
    def read(
        cls, environ: Mapping[str, str], *, endpoint: str = "", wanted: bool = False,
        on_wrong: OnWrong | None = None,
    ) -> OtlpSettings:  # fmt: skip
        """Reads the settings from an environment.

        Args:
            environ: environment variables of the process.
            endpoint: a base address that overrides the variables and switches both signals on.
            wanted: send each signal that no variable switches off, to the standard endpoint if none is set.
            on_wrong: called with each wrong variable, the problem, and the value used instead; without it a ConfigError is
                raised. A signal whose address, certificate or key cannot be used is not sent.
        """
        reported: set[str] = set()

        def tell(variable: str, problem: str, used: str) -> None:
            if on_wrong is None:
                raise ConfigError(problem)
            if variable not in reported:
                reported.add(variable)
                on_wrong(variable, problem, used)

        signals = [_Variables(environ, signal, tell) for signal in SIGNALS]
        on = [each for each in signals if endpoint or each.is_on(wanted=wanted)]
        targets = {each.signal: each.target(endpoint) for each in on}
        known = {signal: target for signal, target in targets.items() if target is not None}
        return cls(targets=known, timeout_s=min((each.timeout_s() for each in on), default=RUNNING_TIMEOUT_S))

    @property
    def addresses(self) -> str:
        """The addresses as set by the user, each once, separated by commas."""
        return ", ".join(dict.fromkeys(target.address for target in self.targets.values()))


def otlp_configured(environ: Mapping[str, str]) -> bool:
    """Returns whether the environment enables OTLP: an endpoint is set and no variable disables it. Empty counts as unset."""
    return any(_Variables(environ, signal).is_on() for signal in SIGNALS)


def switched_off(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that disable OTLP, each with the signal that it is about; "" for both."""
    signals = [_Variables(environ, signal) for signal in SIGNALS]
    if signals[0].disabled:
        return {_DISABLED: ""}
    return {each.selection: each.signal for each in signals if each.exporters and _OTLP not in each.exporters}


def no_password() -> str:
    """Raises OSError for a key with a password; as OpenSSL's callback it keeps OpenSSL from prompting on the terminal."""
    raise OSError("the key has a password: write one without it, which this user alone can read")


_HEADER_NAME: Final = re.compile(r"(?!(?:content-length|transfer-encoding)$)[!#$%&'*+.^_`|~0-9a-z-]+")
"""Without the headers that delimit the body of a request: with a wrong one the Collector would wait for more."""


def headers_of(text: str) -> dict[str, str]:
    """Parses ``name=value`` pairs separated by commas; values are percent-encoded (W3C Baggage). Invalid pairs are skipped."""
    return dict(filter(None, _header_entries(text)))


def _header_entries(text: str) -> Iterator[tuple[str, str] | None]:
    """Yields name and value of each entry that is not empty; None for an entry that is no valid header."""
    for entry in filter(str.strip, text.split(",")):
        name, sign, value = (part.strip() for part in entry.partition("="))
        name, value = unquote(name).strip().lower(), unquote(value).strip()
        is_header = sign and _HEADER_NAME.fullmatch(name) and value.isprintable() and value.isascii()
        yield (name, value) if is_header else None


def _lower_scheme(address: str) -> str:
    """Returns an address with its scheme in lower case: ``HTTPS://`` is encrypted as well."""
    scheme, colon, rest = address.partition("://")
    return f"{scheme.lower()}{colon}{rest}" if colon else address


def _with_path(address: str, path: str) -> str:
    """Appends to the path of an address, before its query."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + path))


_SCHEME: Final = re.compile(r"\A(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)


def _without_secrets(address: str) -> str:
    """Returns any text, set as an address, without user name, password and query, and without what may be a part of them."""
    shown = re.split("[?#]", address, maxsplit=1)[0]
    host = _SCHEME.sub("", shown)
    may_be_password = "@" in address[len(shown) :]
    return shown.removesuffix(host) + ("..." if may_be_password else host.rpartition("@")[2])


class _Variables:
    """The variables of a signal: its own, else the general ones. ``tell`` is called with each wrong variable."""

    def __init__(
        self, environ: Mapping[str, str], signal: str, tell: OnWrong = lambda _name, _problem, _used: None
    ) -> None:
        self.signal = signal
        self._environ = environ
        self._tell = tell

    @property
    def selection(self) -> str:
        """Name of the variable that selects the exporters of the signal."""
        return f"OTEL_{self.signal.upper()}_EXPORTER"

    @property
    def disabled(self) -> bool:
        """Whether a variable disables all signals. Reports a value that is neither true nor false."""
        value = self._environ.get(_DISABLED, "").strip()
        if value.lower() not in {"", "true", "false"}:
            problem = f"{_DISABLED}={value!r}: expected 'true' or 'false'. Correct or unset the variable."
            self._tell(_DISABLED, problem, "false")
        return value.lower() == "true"

    @property
    def exporters(self) -> list[str]:
        """Exporters that the variable of the signal names, without unknown ones, which are reported."""
        known = (_OTLP, *_OTHER_EXPORTERS[self.signal])
        named = self._environ.get(self.selection, "").lower().split(",")
        names = [name for name in map(str.strip, named) if name]
        found = [name for name in names if name in known]
        for name in (name for name in names if name not in known):
            problem = (
                f"{self.selection}={name!r}: there is no such exporter; expected 'otlp', which sends {self.signal}, or "
                f"{', '.join(map(repr, known[1:]))}, which do not. Correct or unset the variable."
            )
            self._tell(self.selection, problem, ",".join(found) or "unset")
        return found

    def is_on(self, *, wanted: bool = False) -> bool:
        if self.disabled:
            return False
        return _OTLP in found if (found := self.exporters) else wanted or bool(self._get("ENDPOINT"))

    def target(self, endpoint: str) -> Target | None:
        """Returns the destination of the signal; None if its variables cannot be used."""
        protocol = self._protocol()
        usable = self._has_files() and self._has_certificates()
        address = _lower_scheme(endpoint or self._get("ENDPOINT") or _DEFAULT_ENDPOINTS[protocol])
        own = not endpoint and self._name("ENDPOINT") != f"{_PREFIX}ENDPOINT"
        remedy = "Give --endpoint" if endpoint else "Set OTEL_EXPORTER_OTLP_ENDPOINT, for example to"
        shown = self._shown(address, protocol, remedy)
        if not usable or not shown:
            return None
        tls = address.startswith("https://")
        if protocol == GRPC and not address.startswith("http://"):
            # A bare host:port is encrypted unless a variable says otherwise.
            tls = tls or self._get("INSECURE").lower() != "true"
        return Target(
            protocol=protocol,
            # The specification appends the path to the address for all signals, never to that of one.
            url=address if own or protocol == GRPC else _with_path(address, f"/v1/{self.signal}"),
            address=shown,
            headers=self._headers(),
            compression=self._compression(protocol),
            tls=tls,
            certificate=self._get("CERTIFICATE"),
            client_certificate=self._get("CLIENT_CERTIFICATE"),
            client_key=self._get("CLIENT_KEY"),
        )

    def timeout_s(self) -> float:
        text, used = self._get("TIMEOUT"), f"{RUNNING_TIMEOUT_S:g} s"
        try:
            timeout_s = float(text or RUNNING_TIMEOUT_S)
        except ValueError:
            self._wrong("TIMEOUT", f"{text!r}: expected a number of seconds, such as 5.", used)
            return RUNNING_TIMEOUT_S
        if timeout_s > 0:
            return min(timeout_s, RUNNING_TIMEOUT_S)
        self._wrong("TIMEOUT", f"{text}: expected more than 0 seconds, such as 5.", used)
        return RUNNING_TIMEOUT_S

    def _name(self, name: str) -> str:
        own = f"{_PREFIX}{self.signal.upper()}_{name}"
        return own if self._environ.get(own, "").strip() else _PREFIX + name

    def _get(self, name: str) -> str:
        return self._environ.get(self._name(name), "").strip()

    def _wrong(self, name: str, problem: str, used: str) -> None:
        self._tell(self._name(name), f"{self._name(name)}={problem}", used)

    def _protocol(self) -> str:
        protocol = self._get("PROTOCOL") or HTTP_JSON
        if protocol in _DEFAULT_ENDPOINTS:
            return protocol
        rule = (
            "expected 'http/json', 'http/protobuf' or 'grpc'. Every Collector takes the first two; unset the variable to "
            "use http/json."
        )
        self._wrong("PROTOCOL", f"{protocol!r} for {self.signal}: {rule}", HTTP_JSON)
        return HTTP_JSON

    def _shown(self, address: str, protocol: str, remedy: str) -> str:
        """Returns an address without user name, password and query; "" if it is not an address."""
        # gRPC also takes a bare host:port, which parses as a scheme without a host.
        is_clean = address.isprintable() and " " not in address
        shown = _without_secrets(address)
        if protocol == GRPC and "://" not in address and is_clean and shown:
            return shown
        try:
            parts = urlsplit(address)
            if is_clean and parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
                netloc = parts.netloc.rpartition("@")[2]
                return urlunsplit(parts._replace(netloc=netloc, query="", fragment=""))
        except ValueError:  # a port that is no number, an incomplete IPv6 address
            pass
        problem = (
            f"OTLP endpoint {shown!r} for {self.signal}: "
            "expected http://host:port or https://host:port, with a port from 1 to 65535. "
            f"{remedy} http://127.0.0.1:4318."
        )
        self._tell(self._name("ENDPOINT"), problem, "OTLP off")
        return ""

    def _headers(self) -> dict[str, str]:
        entries = list(_header_entries(self._get("HEADERS")))
        if wrong := entries.count(None):
            rule = (
                f"(not shown): {wrong} of {len(entries)} entries are no header, expected name=value in ASCII, separated by "
                "commas, values percent-encoded, such as authorization=Bearer%20abc. Correct the variable."
            )
            self._wrong("HEADERS", rule, f"the other {len(entries) - wrong}")
        return dict(filter(None, entries))

    def _compression(self, protocol: str) -> str:
        compression = self._get("COMPRESSION").lower()
        if compression in {"", "none"}:
            return ""
        if compression in _COMPRESSIONS[protocol]:
            return compression
        known = " or ".join(repr(name) for name in _COMPRESSIONS[protocol])
        rule = f"expected {known} with {protocol}. Correct the variable, or unset it to send uncompressed."
        self._wrong("COMPRESSION", f"{compression!r} for {self.signal}: {rule}", "none")
        return ""

    def _has_files(self) -> bool:
        for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
            path, rule = self._get(name), "expected the path of a PEM file. Correct or unset the variable."
            if name == "CLIENT_KEY" and path and not self._get("CLIENT_CERTIFICATE"):
                rule = "expected OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE beside it. Set that to the key's certificate, or unset both."
            elif not path or Path(path).is_file():
                continue
            self._wrong(name, f"{path!r} for {self.signal}: {rule}", "OTLP off")
            return False
        return True

    def _has_certificates(self) -> bool:
        name, path, shown = "CERTIFICATE", self._get("CERTIFICATE"), self._get("CLIENT_CERTIFICATE")
        rule = (
            "expected a PEM file with certificates, and it cannot be read as one ({}). "
            "Name the file of the authority that signed the collector's."
        )
        try:
            if path:
                ssl.create_default_context(cafile=path)
            if shown:
                name, path = "CLIENT_CERTIFICATE", shown
                rule = (
                    "expected a PEM file with a certificate whose key is in "
                    "OTEL_EXPORTER_OTLP_CLIENT_KEY or in the same file ({}). Correct both variables."
                )
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.load_cert_chain(shown, self._get("CLIENT_KEY") or None, no_password)
        except (ssl.SSLError, OSError) as error:
            self._wrong(name, f"{path!r} for {self.signal}: {rule.format(error)}", "OTLP off")
            return False
        return True
