"""Questions over http, with an answer or a reason in bounded time."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from otel_train.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

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
