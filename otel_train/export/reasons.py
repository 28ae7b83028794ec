"""Why a collector did not accept figures, in words that somebody can act on."""

from __future__ import annotations

from typing import Final

from otel_train.text import printable

_UNAUTHORIZED: Final = "refuses the token ({}): set OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20<token> to the one it expects"
_UNTRUSTED: Final = "has a certificate that is not trusted ({}): set OTEL_EXPORTER_OTLP_CERTIFICATE to the PEM file of its authority"

_REASONS: Final = (
    ("code: 401", _UNAUTHORIZED.format("401")),
    ("unauthenticated", _UNAUTHORIZED.format("UNAUTHENTICATED")),
    ("code: 403", _UNAUTHORIZED.format("403")),
    ("permission_denied", _UNAUTHORIZED.format("PERMISSION_DENIED")),
    ("has expired", _UNTRUSTED.format("it has expired")),
    (
        "mismatch",
        "has a certificate for another name: use a host name that the certificate has in OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    ("verify_failed", _UNTRUSTED.format("its issuer is unknown here")),
    (
        "security handshaker",
        "cannot be talked to: the file in OTEL_EXPORTER_OTLP_CERTIFICATE holds no certificate",
    ),
    (
        "wrong_version_number",
        "does not speak TLS: write http:// in place of https:// in OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    (
        "socket closed",
        "closes connections: it may want TLS, https:// in place of http:// in OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    (
        "code: 400",
        "answers 400: it may want TLS, https:// in place of http:// in OTEL_EXPORTER_OTLP_ENDPOINT",
    ),
    *(
        (
            word,
            "closes connections: it may want TLS, https:// in place of http:// in OTEL_EXPORTER_OTLP_ENDPOINT",
        )
        for word in ("connection aborted", "connection broken", "connection reset")
    ),
    (
        "code: 404",
        "answers 404: nothing takes OTLP at this path; 4318 is the usual port for http/protobuf",
    ),
    ("refused", "refuses connections"),
    ("resolve", "has a name that cannot be resolved"),
    ("resolution", "has a name that cannot be resolved"),
    # The SDK says no more than this when its first try takes all the time there is.
    ("due to timeout, max retries", "cannot be reached, or does not answer"),
    ("timed out", "does not answer"),
    ("timeout", "does not answer"),
    ("deadline", "does not answer"),
)
"""What an exporter's messages contain, the telling ones first, and what that means."""

SHOWN_CHARACTERS = 160


def why(said: str) -> str:
    """What an exporter's own messages mean.

    Args:
        said: the messages about one request, one a line; "" when there were none.

    Returns:
        The rest of a sentence that begins with the collector's address.
    """
    text = said.lower()
    for word, reason in _REASONS:
        if word in text:
            return reason
    first = "no reason given"
    if said.strip():
        first = printable(said.strip().splitlines()[0], most=SHOWN_CHARACTERS)
    return f"does not accept figures ({first})"
