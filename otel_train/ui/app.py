"""The web application: which address shows what, and who may ask."""

from __future__ import annotations

import hashlib
import os
import threading
from importlib import resources
from typing import TYPE_CHECKING, BinaryIO

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from otel_train.analyze.report_style import COLORS, SCRIPT, STYLE
from otel_train.files import Documents, open_below
from otel_train.hosts import is_known_host
from otel_train.ui.artifacts import Captures
from otel_train.ui.listing import files_of
from otel_train.ui.page import TABS, gone_page, run_page
from otel_train.ui.rank_view import Viewer
from otel_train.ui.run_list import RunList
from otel_train.ui.runs_page import runs_page

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    # Bars and flames are as wide as their share: that is a style of the element, and the only one allowed inline.
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; style-src-attr 'unsafe-inline'; script-src 'self'; connect-src 'self'; "
        "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_CHUNK_BYTES = 1 << 18
_LONGEST, _DIGITS = 200, 9


def application(
    root: Path, *, only: str | None = None, hosts: Collection[str] = (), captures: Captures | None = None
) -> ASGIApp:
    """The page over a folder of runs. It reads, and changes nothing.

    Args:
        root: the folder.
        only: the one run to show; None for all.
        hosts: names under which it may be asked for, beside ``localhost`` and addresses that are numbers.
        captures: who looks into captures; one of its own if None.
    """
    site = _Site(root, only, captures or Captures())
    routes = [
        Route("/", site.runs),
        Route("/run/{name}", site.run),
        *(Route(path, site.asset) for path in site.assets),
    ]
    return _OriginCheck(Starlette(routes=routes), hosts)


class _Site:
    """Answers requests, in threads: a lock keeps what has been read whole."""

    def __init__(self, root: Path, only: str | None, captures: Captures) -> None:
        documents = Documents()
        self._root, self._only = root, only
        self._shelf = RunList(root, only=only, documents=documents)
        self._viewer = Viewer(documents=documents)
        self._captures = captures
        self._lock = threading.Lock()
        own = resources.files("otel_train.ui")
        script = own.joinpath("page.js").read_text(encoding="utf-8")
        self.assets = {
            "/style.css": ("text/css", STYLE + COLORS + own.joinpath("page.css").read_text(encoding="utf-8")),
            "/page.js": ("text/javascript", f"function flames() {{{SCRIPT}}}\n{script}"),
            "/icon.svg": ("image/svg+xml", own.joinpath("icon.svg").read_text(encoding="utf-8")),
        }

    def asset(self, request: Request) -> Response:
        """Style, script and icon."""
        kind, body = self.assets[request.url.path]
        return _answer(request, body, kind)

    def runs(self, request: Request) -> Response:
        """The list of runs."""
        if self._only is not None:
            return RedirectResponse(f"/run/{self._only}")
        query = request.query_params
        words, page = query.get("filter", "")[:_LONGEST], _number(query.get("page", "")) or 1
        with self._lock:
            rows = self._shelf.rows()
        return _answer(request, runs_page(rows, self._root, words=words, page=page))

    def run(self, request: Request) -> Response:
        """The page of a run, or one of its files."""
        query = request.query_params
        name, tab, rank = request.path_params["name"], query.get("tab", ""), _number(query.get("rank", ""))
        with self._lock:
            run = self._shelf.find(name)
            if run is None:
                return _answer(request, gone_page(name), status=404)
            if "file" in query:
                return _download(run, rank, query["file"])
            view = self._viewer.view(run, rank)
        tab = tab if tab in TABS else TABS[0]
        return _answer(request, run_page(view, tab, captures=self._captures, capture=query.get("capture")))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else None


def _answer(request: Request, body: str, kind: str = "text/html", *, status: int = 200) -> Response:
    """A page; nothing but its mark where the reader has it already."""
    data = body.encode("utf-8", "replace")
    mark = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
    if request.headers.get("if-none-match") == mark:
        return Response(status_code=304, headers={"ETag": mark})
    return Response(data, status, headers={"ETag": mark, "Content-Type": f"{kind}; charset=utf-8"})


def _download(run: Path, rank: int | None, name: str) -> Response:
    """A file of the run: one that was listed, so that no path of a request reaches the disk."""
    file = next((file for file in files_of(run, rank) if file.name == name), None)
    try:
        if file is None:
            raise FileNotFoundError
        descriptor = open_below(file.path)
    except OSError:
        return PlainTextResponse("There is no such file.\n", 404)
    size = os.fstat(descriptor).st_size
    saved = "".join(
        letter if (letter.isascii() and letter.isalnum()) or letter in "._-" else "_"
        for letter in file.path.name
    )
    return StreamingResponse(
        _bytes(os.fdopen(descriptor, "rb"), size),
        media_type="application/octet-stream",
        headers={"Content-Disposition": f'attachment; filename="{saved}"', "Content-Length": str(size)},
    )


def _bytes(file: BinaryIO, size: int) -> Iterator[bytes]:
    """As many bytes as were promised; the file may grow while it is read."""
    with file:
        while size > 0 and (chunk := file.read(min(_CHUNK_BYTES, size))):
            size -= len(chunk)
            yield chunk


class _OriginCheck:
    """Refuses what is asked for under another site's name, and says on every answer what a browser may do with it."""

    def __init__(self, inside: ASGIApp, hosts: Collection[str]) -> None:
        self._inside = inside
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return
        told = dict(scope["headers"])
        answer: ASGIApp = self._inside
        if not is_known_host(told.get(b"host", b"").decode("latin-1"), self._hosts):
            answer = PlainTextResponse(
                "This page answers to localhost and to addresses only: use http://127.0.0.1 and its port.\n",
                421,
            )
        elif scope["method"] not in ("GET", "HEAD"):
            answer = PlainTextResponse("This page can only be read.\n", 405, headers={"Allow": "GET, HEAD"})

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(key.lower().encode(), value.encode()) for key, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        await answer(scope, receive, marked)
