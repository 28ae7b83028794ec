"""Clients that are slow on purpose."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def served_s(port: int, byte: bytes) -> float:
    """How long a client is served that sends this byte again and again and is never silent: at most 10 s."""
    begun_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as client, suppress(OSError):
        client.settimeout(0.1)
        while time.monotonic() < begun_s + 10:
            client.sendall(byte)
            with suppress(TimeoutError):
                if client.recv(1) == b"":
                    break
    return time.monotonic() - begun_s


def answered(port: int, request: bytes) -> bytes:
    """The beginning of the answer; empty where the connection is closed, be it while we still send."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(5)
        with suppress(OSError):
            client.sendall(request)
        with suppress(ConnectionResetError):
            return client.recv(1000)
    return b""


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
