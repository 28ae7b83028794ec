"""Clients that are slow on purpose."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def trickling(port: int, number: int) -> Iterator[None]:
    """Clients that send a request a byte at a time, and come again when they are dropped."""
    stop = threading.Event()

    def trickle() -> None:
        while not stop.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as client:
                client.settimeout(0.05)
                while not stop.wait(0.1):
                    client.sendall(b"G")

    clients = [threading.Thread(target=trickle, name=f"client {number}") for number in range(number)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()
