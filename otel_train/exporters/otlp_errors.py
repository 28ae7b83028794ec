"""Why a collector did not accept a request, in words that somebody can act on."""

from __future__ import annotations

from typing import Final

from otel_train.safety import printable

UNAUTHORIZED: Final = "refuses the token ({}): set OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20<token> to the one it expects"
_UNTRUSTED: Final = "has a certificate that is not trusted ({}): set OTEL_EXPORTER_OTLP_CERTIFICATE to the PEM file of its authority"

_REASONS: Final = (
    ("unauthenticated", UNAUTHORIZED.format("UNAUTHENTICATED")),
    ("permission_denied", UNAUTHORIZED.format("PERMISSION_DENIED")),
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
    *(
        (
            word,
            "closes connections: it may want TLS, https:// in place of http:// in OTEL_EXPORTER_OTLP_ENDPOINT",
        )
        for word in (
            "socket closed",
            "remotedisconnected",
            "badstatusline",
            "connection reset",
            "broken pipe",
        )
    ),
    ("refused", "refuses connections"),
    ("resolve", "has a name that cannot be resolved"),
    ("resolution", "has a name that cannot be resolved"),
    ("name or service not known", "has a name that cannot be resolved"),
    ("gaierror", "has a name that cannot be resolved"),
    ("timed out", "does not answer"),
    ("timeout", "does not answer"),
    ("deadline", "does not answer"),
)
"""What messages of OpenSSL, sockets and gRPC contain, the telling ones first, and what that means."""

SHOWN_CHARACTERS = 160


def first_line(text: str) -> str:
    """The first line of a text from elsewhere, without control characters and short enough for a log."""
    first = next((line for line in text.splitlines() if line.strip()), "").strip()
    return printable(first, most=SHOWN_CHARACTERS)


def why(said: str) -> str:
    """What the message of a failed request means.

    Args:
        said: the message; "" when there was none.

    Returns:
        The rest of a sentence that begins with the collector's address.
    """
    text = said.lower()
    for word, reason in _REASONS:
        if word in text:
            return reason
    return f"does not accept requests ({first_line(said) or 'no reason given'})"
