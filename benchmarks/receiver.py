"""A collector in a process of its own, so that its work is not measured as overhead."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class _Answer(http.server.BaseHTTPRequestHandler):
    """Accepts every request and discards it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the standard library's name
        pass


def _answer() -> int:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def _swallow() -> int:
    """Accepts connections and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def accept() -> None:
        while True:
            kept.append(listener.accept()[0])

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def serve(mode: str) -> None:
    """Prints the port, then serves until standard input closes, at the latest when the parent ends."""
    print({"answer": _answer, "swallow": _swallow}[mode](), flush=True)
    sys.stdin.read()


def scrape(url: str, seconds: float) -> None:
    """Reads ``url`` over and over until standard input ends."""
    stop = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    while not stop.wait(seconds):
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            answer.read()


@contextlib.contextmanager
def _child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.receiver", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def receiving(mode: str = "answer") -> Iterator[str]:
    """Runs an OTLP endpoint that discards what it receives; every session made inside sends there.

    Args:
        mode: ``answer`` takes everything and says so; ``swallow`` accepts and never answers.
    """
    with _child("serve", mode) as process:
        assert process.stdout is not None
        with endpoint(f"http://127.0.0.1:{int(process.stdout.readline())}") as url:
            yield url


@contextlib.contextmanager
def scraping(url: str, *, every_s: float) -> Iterator[None]:
    """Reads ``url`` every ``every_s`` seconds, from another process."""
    with _child("scrape", url, str(every_s)):
        yield


@contextlib.contextmanager
def endpoint(url: str) -> Iterator[str]:
    """Lets every session made inside send to ``url``."""
    before = os.environ.get(ENDPOINT)
    os.environ[ENDPOINT] = url
    try:
        yield url
    finally:
        if before is None:
            del os.environ[ENDPOINT]
        else:
            os.environ[ENDPOINT] = before


def refusing_url() -> str:
    """Returns an endpoint without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        scrape(sys.argv[2], float(sys.argv[3]))
