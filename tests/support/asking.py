"""Asks a web application without a network."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from starlette.types import ASGIApp


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8")


def ask(
    application: ASGIApp, target: str, *, method: str = "GET", host: str = "localhost:8420", **headers: str
) -> Answer:
    """One request, as a server hands it on.

    Args:
        application: who is asked.
        target: path and query, as it stands in the request line.
        method: what to do with it.
        host: under which name.
        headers: further ones; ``_`` stands for ``-``.
    """
    from urllib.parse import unquote

    path, _, query = target.partition("?")
    sent_headers = {"host": host, **{key.replace("_", "-"): value for key, value in headers.items()}}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(key.encode(), value.encode()) for key, value in sent_headers.items()],
        "client": ("127.0.0.1", 50000), "server": ("127.0.0.1", 8420),
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    asked: list[bool] = []

    async def receive() -> dict[str, Any]:
        if asked:
            await asyncio.Event().wait()  # no disconnect
        asked.append(True)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        await application(scope, receive, send)

    asyncio.run(answer())
    start = sent[0]
    return Answer(
        start["status"],
        {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in start["headers"]},
        b"".join(message.get("body", b"") for message in sent[1:]),
    )
