"""The web application and its server."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import logging
import os
import re
import socket
import threading
import webbrowser
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, Final
from urllib.parse import unquote_to_bytes
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from otel_train.config.validation import MOST_PORT
from otel_train.errors import ConfigError, shown
from otel_train.exporters.prometheus import REQUEST_BYTES, REQUEST_S, is_known_host
from otel_train.files import open_below
from otel_train.rundata.files import files_of
from otel_train.rundata.live_view import RankReader, RunList, row_cache
from otel_train.ui.components import asset, url_of
from otel_train.ui.pages import TABS, busy_page, no_such_run_page, run_page, runs_page

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


HEADERS = {
    # The width of bars and flames is a style attribute: the only style allowed inline.
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
_LONGEST, _DIGITS = 200, 9  # characters of the filter; digits of a number in a query


def application(root: Path, *, only: str | None = None, hosts: Collection[str] = ()) -> ASGIApp:
    """Returns the application for a folder of runs, or for the run ``only`` in it. It is read-only.

    ``hosts`` are allowed names in the Host header, beside ``localhost`` and IP addresses.
    """
    site = _Site(root, only)
    routes = [
        Route("/", site.runs),
        Route("/run/{name}", site.run),
        *(Route(path, site.asset) for path in site.assets),
    ]
    return _OriginCheck(Starlette(routes=routes), hosts)


WAIT_S = 10.0
"""Longest wait of a request for another that reads the same run. A thread that waits for a disk serves no page."""


class _ReadLocks:
    """Locks by name: one request at a time reads a run, or the list of runs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken: set[str] = set()

    @contextmanager
    def of(self, thing: str) -> Iterator[bool]:
        """Waits for the lock of ``thing``, at most ``WAIT_S``; yields whether it was acquired."""
        with self._changed:
            granted = self._changed.wait_for(lambda: thing not in self._taken, WAIT_S)
            if granted:
                self._taken.add(thing)
        try:
            yield granted
        finally:
            if granted:
                with self._changed:
                    self._taken.discard(thing)
                    self._changed.notify_all()


class _Site:
    """Answers requests on threads. Those that read the same run, or the list, are answered one after another."""

    def __init__(self, root: Path, only: str | None) -> None:
        rows = row_cache()
        self._root, self._only = root, only
        self._run_list = RunList(root, only=only, cached_rows=rows)
        self._ranks = RankReader(cached_rows=rows)
        self._read_locks = _ReadLocks()
        self.assets = {
            "/style.css": ("text/css", asset("page.css")),
            "/page.js": ("text/javascript", asset("flames.js") + asset("page.js")),
            "/icon.svg": ("image/svg+xml", asset("icon.svg")),
        }

    def asset(self, request: Request) -> Response:
        """Returns a stylesheet, a script or the icon."""
        kind, body = self.assets[request.url.path]
        return _answer(request, body, kind)

    def runs(self, request: Request) -> Response:
        """Returns the list of runs."""
        if self._only is not None:
            return RedirectResponse(url_of(self._only))
        query = request.query_params
        words, page = query.get("filter", "")[:_LONGEST], _number(query.get("page", "")) or 1
        with self._read_locks.of("") as granted:
            if not granted:
                return _busy(request, "The list of runs is")
            rows = self._run_list.rows()
        return _answer(request, runs_page(rows, self._root, words=words, page=page))

    def run(self, request: Request) -> Response:
        """Returns the page of a run, or one of its files."""
        query = request.query_params
        # Not ``path_params``, which are text: the name of a folder need not be UTF-8.
        path: bytes = request.scope["raw_path"]
        name = os.fsdecode(unquote_to_bytes(path).rpartition(b"/")[2])
        tab, rank = query.get("tab", ""), _number(query.get("rank", ""))
        with self._read_locks.of(name) as granted:
            if not granted:
                return _busy(request, "The files of this run are")
            run = self._run_list.find(name)
            if run is None:
                return _answer(request, no_such_run_page(name), status=404)
            if "file" in query:
                return _download(run, rank, query["file"])
            view = self._ranks.view(run, rank)
        tab = tab if tab in TABS else TABS[0]
        return _answer(request, run_page(view, tab, capture=query.get("capture")))


def _busy(request: Request, what: str) -> Response:
    return _answer(request, busy_page(what, WAIT_S), status=503)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else None


def _answer(request: Request, body: str, kind: str = "text/html", *, status: int = 200) -> Response:
    """Returns a page, or 304 if the client has it."""
    data = body.encode("utf-8", "replace")
    mark = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
    if request.headers.get("if-none-match") == mark:
        return Response(status_code=304, headers={"ETag": mark})
    return Response(data, status, headers={"ETag": mark, "Content-Type": f"{kind}; charset=utf-8"})


def _download(run: Path, rank: int | None, name: str) -> Response:
    """Returns a file of the run that ``files_of`` lists: no path of a request is opened."""
    file = next((file for file in files_of(run, rank) if file.name == name), None)
    try:
        if file is None:
            raise FileNotFoundError
        descriptor = open_below(file.path)
    except OSError:
        return PlainTextResponse("There is no such file.\n", 404)
    size = os.fstat(descriptor).st_size  # not sent as Content-Length: the file may shrink meanwhile
    saved = re.sub(r"[^A-Za-z0-9._-]", "_", file.path.name)
    return StreamingResponse(
        _bytes(os.fdopen(descriptor, "rb"), size),
        media_type="application/octet-stream",
        headers={"Content-Disposition": f'attachment; filename="{saved}"'},
    )


def _bytes(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields at most ``size`` bytes of a file, which may grow and shrink while it is read."""
    with file:
        while size > 0 and (chunk := file.read(min(_CHUNK_BYTES, size))):
            size -= len(chunk)
            yield chunk


class _OriginCheck:
    """Refuses requests under another site's host name, and sets security headers."""

    def __init__(self, inside: ASGIApp, hosts: Collection[str]) -> None:
        self._inside = inside
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return
        headers = dict(scope["headers"])
        answer: ASGIApp = self._inside
        if not is_known_host(headers.get(b"host", b"").decode("latin-1"), self._hosts):
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


_TRIED = 50  # further ports to try
_SIX = 6  # version of IP


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket on the port, or on the next free one; 0 is any. Raises ConfigError if none is free."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name has more than 63 letters
        raise _no_such_host(host, error) from error
    problem, ports = "", range(port, min(port + _TRIED, MOST_PORT) + 1) if port else (0,)
    for each in ports:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address[0], each))
            sock.listen(128)
        except OSError as error:
            sock.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise _no_such_host(host, error) from error
            problem = error.strerror or str(error)
            continue
        return sock
    raise ConfigError(f"ports {ports[0]} to {ports[-1]}: {problem}. Give another with --port")


def _no_such_host(host: str, error: OSError | UnicodeError) -> ConfigError:
    why = getattr(error, "strerror", error)
    return ConfigError(f"host {shown(host)}: {why}. Give a name or an address of this machine with --host")


class PageServer(Server):
    """Serves ``application``: ``run(sockets=[...])`` returns after Ctrl-C, SIGTERM or ``should_exit``, and closes the sockets."""

    def __init__(self, root: Path, *, only: str | None = None, hosts: Collection[str] = ()) -> None:
        # An open connection of a browser must not delay the end after Ctrl-C.
        super().__init__(
            Config(
                application(root, only=only, hosts=hosts), log_level="warning", access_log=False, lifespan="off",
                timeout_graceful_shutdown=1, server_header=False, ws="none", http=BoundedProtocol,
            )
        )  # fmt: skip

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections. A page that is cut off, since a disk does not answer for example, is not logged as an error."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)


def browser_url(sock: socket.socket) -> str:
    """Returns the URL of the server, for a browser on this machine."""
    host, port = sock.getsockname()[:2]
    place = ipaddress.ip_address(host)
    if place.is_unspecified:
        place = ipaddress.ip_address("127.0.0.1")
    return f"http://[{place}]:{port}/" if place.version == _SIX else f"http://{place}:{port}/"


def has_screen(environ: Mapping[str, str]) -> bool:
    """Returns whether a browser would be visible: there is a display, and no SSH connection."""
    shown = environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY")
    return bool(shown) and not environ.get("SSH_CONNECTION")


def show(address: str) -> None:
    """Opens the address in a browser, on a thread since that may take long."""
    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


MOST_CONNECTIONS: Final = 64
"""Connections at once; a browser has six. One more closes the oldest without a complete request, else the oldest."""

_open: WeakKeyDictionary[Any, dict[BoundedProtocol, None]] = WeakKeyDictionary()
"""Connections by event loop, the oldest first."""


class BoundedProtocol(H11Protocol):
    """A connection whose requests are limited to 2 s and 8 KiB."""

    _timer: asyncio.TimerHandle | None = None
    _bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base class has it
        """Adds the connection, and closes the oldest if there are too many."""
        super().connection_made(transport)
        clients = _open.setdefault(self.loop, {})
        if len(clients) >= MOST_CONNECTIONS:
            oldest = next((each for each in clients if each.unfinished), next(iter(clients)))
            clients.pop(oldest)
            oldest.transport.abort()
        clients[self] = None
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection."""
        _open.get(self.loop, {}).pop(self, None)
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Passes data on; closes the connection if a request exceeds ``REQUEST_BYTES``."""
        if not self.unfinished and not self._answering():
            self._begin()
        self._bytes += len(data)
        if self._bytes > REQUEST_BYTES:
            self.transport.abort()
            return
        super().data_received(data)
        if self._answering():
            self._end()

    @property
    def unfinished(self) -> bool:
        """Whether a request is being received."""
        return self._timer is not None

    def _answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _begin(self) -> None:
        self._bytes = 0
        self._timer = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
