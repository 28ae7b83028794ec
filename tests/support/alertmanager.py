"""A server that answers as an Alertmanager does, well or badly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

STARTED = "2026-01-01T10:00:00.000Z"


class FakeAlertmanager:
    """What is asked of it, and what it answers.

    Attributes:
        url: where it listens.
        alerts: the answer; filters are not looked at.
        mode: ``ok``, ``hang``, ``trickle``, ``huge``, ``redirect``, or a status.
        body: the answer in place of ``alerts``.
        asked: path, parameters and Authorization header of each request.
    """

    def __init__(self) -> None:
        self.url = ""
        self.alerts: list[Any] = []
        self.mode = "ok"
        self.body: bytes | None = None
        self.asked: list[tuple[str, dict[str, list[str]], str]] = []


def alert(
    name: str = "TrainInputBound", *, fingerprint: str = "f1", started: str = STARTED, state: str = "active",
    **labels: str,
) -> dict[str, Any]:  # fmt: skip
    """An alert that wants a capture of run ``r``, unless labels say otherwise."""
    known = {"alertname": name, "train_run_id": "r", "capture": "true", **labels}
    return {
        "labels": known, "annotations": {}, "fingerprint": fingerprint, "startsAt": started,
        "status": {"state": state, "silencedBy": [], "inhibitedBy": []},
    }  # fmt: skip


@contextmanager
def alertmanager() -> Iterator[FakeAlertmanager]:
    """Listen until the block ends."""
    made, over = FakeAlertmanager(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
            made.asked.append((path, query, self.headers.get("Authorization", "")))
            with suppress(OSError):
                self._answer()

        def _answer(self) -> None:
            if made.mode == "hang":
                over.wait(30)
                return
            body = json.dumps(made.alerts).encode() if made.body is None else made.body
            length = 40 << 20 if made.mode == "huge" else len(body)
            self.send_response(
                {"redirect": 302}.get(made.mode) or int(made.mode if made.mode.isdigit() else 200)
            )
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(length))
            if made.mode == "redirect":
                self.send_header("Location", f"{made.url}/elsewhere")
            self.end_headers()
            if made.mode == "huge":
                for _ in range(40 * 16):
                    self.wfile.write(b" " * (1 << 16))
            elif made.mode == "trickle":
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.2)
            else:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield made
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.socket.close()
