"""Classifies the response to an OTLP request: accepted, retryable or rejected, with the reason."""

from __future__ import annotations

import enum
import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import responses
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from otel_train.exporters.otlp_json import load_protobuf
from otel_train.safety import printable

LONGEST_ASKED_S: Final = 600.0
"""Longest ``Retry-After`` that is followed."""

UNAUTHORIZED: Final = "refuses the token ({}): set OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20<token> to the one it expects"
_UNTRUSTED: Final = "has a certificate that is not trusted ({}): {}"
_VERIFY_REASON: Final = re.compile(r"verify.failed: (.+?)(?= \(_ssl|: OK$|$)", re.IGNORECASE)
_NO_ISSUER: Final = ("local issuer", "get issuer", "in certificate chain", "first certificate")
"""Parts of OpenSSL's messages if the authority of a certificate is not among the trusted ones."""

_NOT_VALID: Final = "has a certificate that {}: have it renewed, or correct the clock of this machine"

_CLOSED_HTTP: Final = ("connectionreseterror", "remotedisconnected", "badstatusline")
_CLOSED: Final = ("socket closed", "connection reset", "broken pipe", "eof occurred", "unwrap failed")
_CLOSED_TLS: Final = "closes connections: it may want a certificate of its client, OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE, or not trust that one"
UNTRUSTED_CLIENT: Final = "does not trust the certificate of its client"
SIGNED: Final = (
    "set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE to one that its authority has signed and that has not expired"
)
_NOT_TRUSTED: Final = (
    "unknown ca",
    "bad certificate",
    "certificate expired",
    "certificate unknown",
    "certificate revoked",
)
_NO_NAME: Final = ("resolv", "resolution", "name or service not known", "gaierror", "'idna' codec")
_ENDPOINT: Final = "in OTEL_EXPORTER_OTLP_ENDPOINT"

_OTHER_NAME: Final = (
    f"has a certificate for another name: use a host name that the certificate has {_ENDPOINT}"
)

_NO_FILE: Final = "is not asked: the file of a certificate or key {}; correct OTEL_EXPORTER_OTLP_CERTIFICATE and CLIENT_CERTIFICATE"

_NO_GRPC: Final = "does not speak gRPC: name its port for gRPC, usually 4317, or set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"

PROXY_LOGIN: Final = "is behind a proxy that asks for a login (407): set HTTP_PROXY and HTTPS_PROXY to http://user:password@host:port"

_REASONS: Final = {
    "tunnel connection failed: 407": PROXY_LOGIN,
    "hostname verification": _OTHER_NAME,
    "unauthenticated": UNAUTHORIZED.format("UNAUTHENTICATED"),
    "permission_denied": UNAUTHORIZED.format("PERMISSION_DENIED"),
    "has expired": _NOT_VALID.format("has expired"),
    "not yet valid": _NOT_VALID.format("is not valid yet"),
    "key values mismatch": "is not asked: OTEL_EXPORTER_OTLP_CLIENT_KEY is not the key of OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE; correct both",
    "mismatch": _OTHER_NAME,
    "verify_failed": _UNTRUSTED,
    "security handshaker": "cannot be talked to: OTEL_EXPORTER_OTLP_CERTIFICATE or CLIENT_CERTIFICATE names a file without a certificate, or one that "
    "does not belong to OTEL_EXPORTER_OTLP_CLIENT_KEY",
    "certificate required": "wants a certificate of its client: set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE to the PEM file",
    **dict.fromkeys((f"alert {word}" for word in _NOT_TRUSTED), f"{UNTRUSTED_CLIENT}: {SIGNED}"),
    "wrong_version_number": f"does not speak TLS: write http:// in place of https:// {_ENDPOINT}",
    **dict.fromkeys(("pem lib", "is empty"), _NO_FILE.format("is empty or damaged")),
    "no such file": _NO_FILE.format("is missing"),
    "permission denied": _NO_FILE.format("cannot be read, or the system forbids the connection"),
    "incompleteread": "gives half an answer and closes the connection",
    **dict.fromkeys(
        _CLOSED_HTTP,
        "closes connections: it may speak gRPC (name its port for OTLP over HTTP, usually 4318, or set OTEL_EXPORTER_OTLP_PROTOCOL=grpc) "
        f"or want TLS (https:// in place of http:// {_ENDPOINT})",
    ),
    **dict.fromkeys(
        _CLOSED, f"closes connections: it may want TLS, https:// in place of http:// {_ENDPOINT}"
    ),
    **dict.fromkeys(("parsing http/2", "http1.x"), _NO_GRPC),
    "refused": "refuses connections",
    **dict.fromkeys(_NO_NAME, "has a name that cannot be resolved"),
    **dict.fromkeys(("timed out", "timeout", "deadline"), "does not answer"),
}
"""Parts of messages of OpenSSL, sockets and gRPC, and what they mean. The first that matches counts: specific ones come first."""

SHOWN_CHARACTERS = 160


def first_line(text: str) -> str:
    """Returns the first line of a text from another program, without control characters and short enough for a log."""
    first = next((line for line in text.splitlines() if line.strip()), "").strip()
    return printable(first, most=SHOWN_CHARACTERS)


def why(said: str, *, tls: bool = False) -> str:
    """Returns what the message of a failed request means: the rest of a sentence that begins with the collector's address."""
    text = said.lower()
    if tls and any(word in text for word in (*_CLOSED_HTTP, *_CLOSED)):
        return _CLOSED_TLS
    unknown = f"does not accept requests ({first_line(said) or 'no reason given'})"
    reason = next((reason for word, reason in _REASONS.items() if word in text), unknown)
    if reason is not _UNTRUSTED:
        return reason
    found = _VERIFY_REASON.search(said)
    return _UNTRUSTED.format(*why_untrusted(first_line(found[1] if found else said)))


def why_untrusted(said: str) -> tuple[str, str]:
    """Returns why a certificate is not trusted, from OpenSSL's message about it, and the remedy."""
    text = said.lower()
    if any(words in text for words in _NO_ISSUER):
        remedy = "set OTEL_EXPORTER_OTLP_CERTIFICATE to the PEM file of its authority"
        return "its issuer is unknown here", remedy
    if text in {"self-signed certificate", "self signed certificate"}:
        return said, "set OTEL_EXPORTER_OTLP_CERTIFICATE to its own PEM file"
    return said, "have it, or the certificate of its authority, issued again without this fault"


MOST_ANSWER_BYTES: Final = 64 << 10
"""Longest answer that is read. The response messages hold one number and one sentence."""

_LARGEST: Final = 2**63 - 1

JSON, PROTOBUF = "application/json", "application/x-protobuf"

_RETRIED_4XX: Final = frozenset({401, 402, 403, 404, 405, 406, 407, 408, 415, 421, 425, 426, 429})
"""Client errors about the address, the login, the encoding or the load, not about the request itself: they are retried."""

_OVERLOADED: Final = frozenset({429, 502, 503, 504})
"""Statuses after which the OTLP specification lets a client retry."""

_STATUS_REASONS: Final = {
    404: "answers 404: nothing takes OTLP at this path; 4318 is the usual port for OTLP over HTTP, and "
    "OTEL_EXPORTER_OTLP_ENDPOINT names it without a path",
    407: PROXY_LOGIN,
    415: "does not take this encoding (415): set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf, or to http/json; or "
    "OTEL_EXPORTER_OTLP_COMPRESSION=none",
}

_OTHER_ENCODING: Final = (b"use protobuf", b"unsupported content-encoding")
"""What VictoriaMetrics and the Collector write in a 400 that means 415."""

_GRPC_REFUSALS: Final = frozenset({"INVALID_ARGUMENT", "FAILED_PRECONDITION", "ALREADY_EXISTS"})


class ExportResult(enum.Enum):
    """What to do with a request after its response."""

    ACCEPTED = "accepted"
    RETRY = "retry"
    REFUSED = "refused"


class ExportResponse(NamedTuple):
    """Result of one request.

    ACCEPTED removes the request. RETRY keeps it and sends it again later: nothing that an operator or time can repair
    (an address, a login, an expired certificate, a redirect, an overload) loses data. REFUSED is about the request
    itself: the same bytes would be refused again.

    ``reason`` is the rest of a sentence that begins with the collector's address; what to do follows a colon. ``poison``: a
    server error that the specification does not let a client retry, so that this request alone may be the cause of it.
    """

    result: ExportResult
    reason: str = ""
    retry_after_s: float | None = None  # how long the collector asks to wait
    rejected: int | None = None  # records of the request that were not taken; None for all of a refused one
    poison: bool = False

    @property
    def accepted(self) -> bool:
        """Whether the Collector has the whole request."""
        return self.result is ExportResult.ACCEPTED


ACCEPTED: Final = ExportResponse(ExportResult.ACCEPTED)


def retry(reason: str, retry_after_s: float | None = None, *, poison: bool = False) -> ExportResponse:
    """Returns the response after which a request stays, and is sent again."""
    return ExportResponse(ExportResult.RETRY, reason, retry_after_s, poison=poison)


def refused(reason: str, rejected: int | None = None) -> ExportResponse:
    """Returns the response to a request that would be refused again."""
    return ExportResponse(ExportResult.REFUSED, reason, rejected=rejected)


class HttpResponse(NamedTuple):
    """An HTTP response: headers by lower-case name, body cut at one byte more than the limit."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content_type(self) -> str:
        """The media type, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


def read_http(answer: HttpResponse, signal: str, *, tls: bool = False) -> ExportResponse:
    """Classifies an HTTP response.

    Accepted is only a 2xx with an OTLP content type and a body that is the response message with nothing rejected. The
    specification has 200 alone, but some backends answer 202 or 204 (Grafana Cloud does), and a retry would store the request
    twice. An empty body is the empty response message, also without a content type (Prometheus answers so). Every other
    2xx comes from something else, a login page or a proxy: retry. Retried are also redirects, which are never followed, 401,
    403, 404, other statuses about address, login or encoding, and all of 5xx. 400, 413 and the remaining 4xx are refusals,
    and so are rejected records in ``partial_success``.
    """
    status = answer.status
    if 200 <= status < 300:  # noqa: PLR2004 - the successes
        return _read_success(answer, signal)
    if reason := _correctable(answer, tls=tls):
        return retry(reason)
    detail = _reason_in_body(answer)
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return refused(
            f"refuses a request as too large (413{detail}): raise max_request_body_size of its receiver"
        )
    if 400 <= status < 500 and status not in _RETRIED_4XX:  # noqa: PLR2004 - the client errors
        return refused(f"refuses a request ({status}{detail})")
    wait_s = _retry_after_s(answer.headers)
    wait = f", and asks to wait {_waited(wait_s)}" if wait_s is not None else ""
    poison = status >= HTTPStatus.INTERNAL_SERVER_ERROR and status not in _OVERLOADED
    phrase = responses.get(status, "no known status")
    return retry(f"answers {status} ({phrase}{detail}){wait}", wait_s, poison=poison)


def _correctable(answer: HttpResponse, *, tls: bool) -> str:
    """Returns what is wrong with address, credentials or encoding, which the user can correct; "" for other responses."""
    status = answer.status
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return UNAUTHORIZED.format(status)
    if 300 <= status < 400:  # noqa: PLR2004 - the redirects
        return _redirect(answer)
    if status == HTTPStatus.BAD_REQUEST and not tls and b"https" in answer.body.lower():
        return "speaks TLS only: write https:// in place of http:// in OTEL_EXPORTER_OTLP_ENDPOINT"
    if status == HTTPStatus.BAD_REQUEST and any(words in answer.body.lower() for words in _OTHER_ENCODING):
        status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    return _STATUS_REASONS.get(status, "")


def read_grpc(
    code: str, details: str, retry_after_s: float | None = None, *, tls: bool = False
) -> ExportResponse:
    """Classifies a gRPC status other than OK by its name and message, with the rules of ``read_http``."""
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        return refused(
            f"refuses a request as too large ({first_line(details)}): raise max_recv_msg_size_mib of its receiver"
        )
    if code in _GRPC_REFUSALS:
        return refused(f"refuses a request ({code}, {first_line(details)})")
    return retry(why(f"{code}: {details}", tls=tls), retry_after_s, poison=code in {"INTERNAL", "UNKNOWN"})


def read_message(body: bytes, signal: str) -> ExportResponse:
    """Classifies a protobuf response message. An empty one accepts everything. ValueError if ``body`` is no such message."""
    if not body:
        return ACCEPTED
    from google.protobuf.message import DecodeError

    _, _, response = load_protobuf(signal)
    try:
        partial = response.FromString(body).partial_success
    except DecodeError as error:
        raise ValueError(str(error)) from error
    rejected = partial.rejected_data_points if signal == "metrics" else partial.rejected_spans
    return _partial(int(rejected), partial.error_message)


def _read_success(answer: HttpResponse, signal: str) -> ExportResponse:
    status, kind = answer.status, answer.content_type
    if not answer.body and kind in {"", JSON, PROTOBUF}:
        return ACCEPTED
    if kind not in {JSON, PROTOBUF}:
        what = f"the content type {first_line(kind)}" if kind else "no content type"
        return retry(
            f"answers {status} with {what}, which is no OTLP answer: a login page or a proxy stands in its place; correct "
            "OTEL_EXPORTER_OTLP_ENDPOINT or log in"
        )
    if len(answer.body) > MOST_ANSWER_BYTES:
        return retry(
            f"answers {status} with more than {MOST_ANSWER_BYTES} bytes, which is no OTLP answer: correct "
            "OTEL_EXPORTER_OTLP_ENDPOINT"
        )
    try:
        return _read_json(answer.body, signal) if kind == JSON else read_message(answer.body, signal)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return retry(
            f"answers {status} with {kind} that is no OTLP response: correct OTEL_EXPORTER_OTLP_ENDPOINT"
        )


def _read_json(body: bytes, signal: str) -> ExportResponse:
    value = json.loads(body)
    # An empty object accepts everything. Any other object without the key is a response of another API: LookupError.
    partial = {} if value == {} else value["partialSuccess"] or {}
    # In protobuf's JSON mapping null stands for the default value of a field.
    rejected = int(partial.get("rejectedDataPoints" if signal == "metrics" else "rejectedSpans") or 0)
    if abs(rejected) > _LARGEST:
        raise ValueError("more than 64 bits")
    return _partial(rejected, str(partial.get("errorMessage") or ""))


def _partial(rejected: int, message: str) -> ExportResponse:
    detail = f" ({first_line(message)})" if message else ""
    if rejected > 0:
        return refused(f"rejects {rejected} records of a request{detail}", rejected)
    return ExportResponse(ExportResult.ACCEPTED, f"accepts with a warning{detail}" if detail else "")


def _redirect(answer: HttpResponse) -> str:
    try:
        to = urlsplit(answer.headers.get("location", ""))
        host = to.netloc.rpartition("@")[2]
        where = f"{to.scheme}://{host}" if to.scheme and host else to.path
    except ValueError:
        where = ""
    place = f" to {first_line(where)}" if where else ""
    return (
        f"redirects{place} ({answer.status}), which is not followed: set OTEL_EXPORTER_OTLP_ENDPOINT to the address "
        "that takes OTLP, or log in"
    )


def _reason_in_body(answer: HttpResponse) -> str:
    """Returns the text in the body of a rejection, after a comma: the message of a ``Status``, or plain text."""
    kind, text = answer.content_type, ""
    if kind == JSON:
        with suppress(ValueError, RecursionError):
            value = json.loads(answer.body)
            text = str(value.get("message", "")) if isinstance(value, dict) else ""
    elif kind == PROTOBUF:
        from google.protobuf.message import DecodeError
        from google.rpc.status_pb2 import Status

        with suppress(DecodeError):
            text = str(Status.FromString(answer.body).message)
    elif kind == "text/plain":
        text = answer.body.decode("utf-8", "replace")
    return f", {shown}" if (shown := first_line(text)) else ""


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Returns ``Retry-After`` in seconds. A date in it is relative to the ``Date`` header, by the same clock. None for neither."""
    text = headers.get("retry-after", "").strip()
    if text.isdecimal():
        return float(text)
    until_s = _unix_s(text)
    now_s = _unix_s(headers.get("date", ""))
    return None if until_s is None else max(0.0, until_s - (time.time() if now_s is None else now_s))


def _waited(asked_s: float) -> str:
    most_s = f"{LONGEST_ASKED_S:.0f} s"
    return (
        f"{asked_s:.0f} s"
        if asked_s <= LONGEST_ASKED_S
        else f"more than {most_s}, of which {most_s} are waited"
    )


def _unix_s(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError, LookupError, TypeError):
        return None
