"""Serving the page: a port that is free, a browser, and an end at once."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import webbrowser
from typing import TYPE_CHECKING

from otel_train.errors import ConfigError
from otel_train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

PORT = 8420
_TRIED = 50
_LAST = 65535
_SIX = 6
EXTRA = "web"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on the port, or on the next that is free.

    Args:
        host: name or address to listen on.
        port: the first to try; 0 takes any.

    Raises:
        ConfigError: none is free, or there is no such host.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"host {host!r}: {error.strerror or error}. Give a name or an address of this machine"
        ) from error
    problem = ""
    for each in range(port, min(port + _TRIED, _LAST + 1)) if port else (0,):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address[0], each))
            sock.listen(128)
        except OSError as error:
            sock.close()
            problem = error.strerror or str(error)
            continue
        return sock
    raise ConfigError(f"port {port}: {problem}, and so for the {_TRIED} after it. Give another with --port")


def serve(root: Path, sock: socket.socket, *, only: str | None = None, hosts: tuple[str, ...] = ()) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Args:
        root: the folder of runs.
        sock: a listening socket; it is closed at the end.
        only: the one run to show; None for all.
        hosts: names the page answers to, beside localhost and addresses.

    Raises:
        MissingExtraError: Starlette or uvicorn is not installed.
        KeyboardInterrupt: Ctrl-C ended it.
    """
    with served(root, sock, only=only, hosts=hosts) as server:
        server()


@contextlib.contextmanager
def served(
    root: Path, sock: socket.socket, *, only: str | None = None, hosts: tuple[str, ...] = ()
) -> Iterator[Callable[[], None]]:
    """A function that serves until the block is left in another thread, or a signal comes in this one."""
    require("starlette", extra=EXTRA)
    uvicorn = require("uvicorn", extra=EXTRA)
    from otel_train.ui.app import application
    from otel_train.ui.connections import BoundedProtocol

    # A page that a browser is still asking for must not hold up Ctrl-C.
    config = uvicorn.Config(
        application(root, only=only, hosts=hosts), log_level="warning", access_log=False, lifespan="off",
        timeout_graceful_shutdown=1, server_header=False, ws="none", http=BoundedProtocol,
    )  # fmt: skip
    server = uvicorn.Server(config)
    try:
        yield lambda: server.run(sockets=[sock])
    finally:
        server.should_exit = True


def address_of(sock: socket.socket) -> str:
    """What to type into a browser."""
    host, port = sock.getsockname()[:2]
    place = ipaddress.ip_address(host)
    if place.is_unspecified:
        place = ipaddress.ip_address("127.0.0.1")
    return f"http://[{place}]:{port}/" if place.version == _SIX else f"http://{place}:{port}/"


def has_screen(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a browser could be seen: not over SSH, and not without a display."""
    return not environ.get("SSH_CONNECTION") and bool(
        environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY")
    )


def show(address: str) -> None:
    """Open the address in a browser, which may take its time."""
    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
