"""Checks, their results, and HTTP requests to local services."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from otel_train.safety import printable
from otel_train.stack.configuration import open_url

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
"""Severity of a result."""

STATES = (OK, NOTE, WARNING, PROBLEM)


class CheckResult(NamedTuple):
    """One line of a diagnosis: a sentence, its remedy, and the area that was checked, which ``run`` fills in."""

    state: str
    what: str
    remedy: str = ""
    area: str = ""


class Check(NamedTuple):
    """A check with a time limit."""

    area: str
    run: Callable[[], Iterable[CheckResult]]
    limit_s: float


def run(checks: Sequence[Check]) -> list[CheckResult]:
    """Returns the results of all checks, in order; none takes longer than its limit.

    Each check runs on a daemon thread that is abandoned at the limit, since a hanging file system or resolver cannot be
    interrupted. Results found by then are kept.
    """
    return [found._replace(area=check.area) for check in checks for found in _bounded(check)]


def worst_state(findings: Iterable[CheckResult]) -> str:
    """Returns the worst state among results; ``ok`` without any."""
    return max((finding.state for finding in findings), key=STATES.index, default=OK)


def _bounded(check: Check) -> list[CheckResult]:
    found: list[CheckResult] = []

    def run() -> None:
        try:
            found.extend(check.run())
        except Exception as error:  # noqa: BLE001 - a check that fails is a result, and the others still run
            what = f"this check failed: {type(error).__name__}: {error}"
            found.append(CheckResult(PROBLEM, what, "please report it, with this line"))

    thread = threading.Thread(target=run, name=f"otel_train-doctor-{check.area}", daemon=True)
    thread.start()
    thread.join(check.limit_s)
    if not thread.is_alive():
        return found
    remedy = "something below hangs: a file system, a resolver or a network that drops packets"
    return [*found, CheckResult(PROBLEM, f"no answer within {check.limit_s:g} s", remedy)]


WITHIN_S = 3.0  # for a connection, a pause, and a whole response body
MOST_BYTES = 1 << 20  # of a response body
SUCCESS = 2
"""Class of HTTP status codes 200 to 299."""


class HttpResult(NamedTuple):
    """Result of an HTTP request: the beginning of the body, or why there is no response."""

    status: int = 0
    body: bytes = b""
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the status is a success."""
        return self.status // 100 == SUCCESS

    def json(self) -> Any:
        """Returns the body as JSON; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


def _body(response: Any) -> bytes:  # Any: a response or an HTTPError
    """Returns the beginning of a body, read within ``WITHIN_S``: the limit of a socket is for each pause between bytes only."""
    until_s, parts, left = time.monotonic() + WITHIN_S, [], MOST_BYTES
    while left and (part := response.read1(left)):
        parts.append(part)
        left -= len(part)
        if time.monotonic() > until_s:
            raise TimeoutError("timed out")
    return b"".join(parts)


def get(url: str, headers: Mapping[str, str] | None = None) -> HttpResult:
    """Sends a GET request; returns the response, or why there is none."""
    try:
        if urlsplit(url).scheme not in {"http", "https"}:
            return HttpResult(reason=f"{url} is not an http address")
        request = urllib.request.Request(url, headers=dict(headers or {}))
        with open_url(request, WITHIN_S) as response:
            return HttpResult(response.status, _body(response))
    except urllib.error.HTTPError as error:
        with error, suppress(OSError, http.client.HTTPException):  # the status is returned without a body
            return HttpResult(error.status or 0, _body(error))
        return HttpResult(error.status or 0)
    except http.client.HTTPException as error:
        return HttpResult(reason=printable(f"no HTTP: {type(error).__name__}: {str(error)[:200]}"))
    except (OSError, ValueError) as error:
        return HttpResult(reason=printable(getattr(error, "reason", error)))
