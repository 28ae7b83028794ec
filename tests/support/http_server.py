"""A small HTTP server on a free port of loopback, for fakes of programs that are asked over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler, bytes], "tuple[int, bytes]"]


@contextmanager
def http_server(answer: Answer, content_type: str = "") -> Iterator[str]:
    """Answers every GET and POST with the status and the body that ``answer`` gives; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self, self.rfile.read(int(self.headers["Content-Length"] or 0)))
            self.send_response(status)
            if content_type:
                self.send_header("Content-Type", content_type)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815  # the name that the server calls

        def log_message(self, *_: Any) -> None:
            """Discards the access log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
