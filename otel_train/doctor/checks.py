"""Checks, their findings, and what they ask over http."""

from __future__ import annotations

import json
import ssl
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from otel_train.safety import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
"""How bad it is: as it should be; worth knowing; may hurt; does hurt."""

STATES = (OK, NOTE, WARNING, PROBLEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a diagnosis.

    Attributes:
        area: what was looked at, such as ``endpoint``.
        state: one of ``STATES``.
        what: a sentence with what was found.
        remedy: what to do; "" when there is nothing to do.
    """

    area: str
    state: str
    what: str
    remedy: str = ""


class Check(NamedTuple):
    """One room that is looked into.

    Attributes:
        area: its name.
        look: looks, and says what it found. May take long, may raise.
        limit_s: how long it may take.
    """

    area: str
    look: Callable[[], Iterable[Finding]]
    limit_s: float


def run(checks: Sequence[Check]) -> list[Finding]:
    """What all checks found, in their order; none takes longer than its limit.

    A check runs in a thread of its own that nobody waits for at the end, since a file system or a resolver that
    hangs cannot be interrupted. What it had found by then is kept.
    """
    return [finding for check in checks for finding in _bounded(check)]


def worst(findings: Iterable[Finding]) -> str:
    """The worst state among findings, ``ok`` when there are none."""
    return max((finding.state for finding in findings), key=STATES.index, default=OK)


def _bounded(check: Check) -> list[Finding]:
    found: list[Finding] = []

    def look() -> None:
        with _CheckErrorGuard(check.area, found):
            found.extend(check.look())

    thread = threading.Thread(target=look, name=f"otel_train-doctor-{check.area}", daemon=True)
    thread.start()
    thread.join(check.limit_s)
    if not thread.is_alive():
        return found
    late = Finding(
        area=check.area,
        state=PROBLEM,
        what=f"no answer within {check.limit_s:g} s",
        remedy="something below hangs: a file system, a resolver or a network that drops packets",
    )
    return [*found, late]


class _CheckErrorGuard:
    """A doctor who faints helps nobody: a check that raises becomes a finding, and the rest is still looked at."""

    def __init__(self, area: str, found: list[Finding]) -> None:
        self._area = area
        self._found = found

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: object) -> bool:
        if not isinstance(fault, Exception):
            return False
        what = f"this check failed: {type(fault).__name__}: {fault}"
        remedy = "please report it, with this line"
        self._found.append(Finding(area=self._area, state=PROBLEM, what=what, remedy=remedy))
        return True


WITHIN_S = 3.0
MOST_BYTES = 1 << 20
SUCCESS = 2
"""The class of statuses that mean it: 200 to 299."""


class Answer(NamedTuple):
    """What came back.

    Attributes:
        status: of http; 0 when nothing came.
        headers: names in lower case.
        body: its beginning.
        reason: why nothing came; "" when something did.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is what was asked for."""
        return self.status // 100 == SUCCESS

    def json(self) -> Any:
        """The body as JSON; None when it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def get(url: str, *, headers: Mapping[str, str] | None = None, certificate: str = "") -> Answer:
    """Ask an address.

    Args:
        url: with http or https.
        headers: to send.
        certificate: PEM file to check the server with; "" takes the system's.
    """
    if urlsplit(url).scheme not in {"http", "https"}:
        return Answer(0, {}, b"", f"{url} is not an http address")
    request = urllib.request.Request(url, headers=dict(headers or {}))
    context = ssl.create_default_context(cafile=certificate or None)
    try:
        with urllib.request.urlopen(request, timeout=WITHIN_S, context=context) as response:
            return _answer(response)
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error)
    except (OSError, ValueError) as error:
        return Answer(0, {}, b"", printable(getattr(error, "reason", error)))


def _answer(response: Any) -> Answer:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(response.status, headers, response.read(MOST_BYTES))
