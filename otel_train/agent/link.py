"""Messages over a socket: whole, in order, one writer at a time."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

from otel_train.safety import free_in_forks

_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # unix(7), struct ucred: process, user, group
_MOST_BYTES = 1 << 30
_SEND_TIMEOUT_S = 5.0


class Link:
    """One end of a connection between a rank and its agent.

    A message is a pickle: both ends are ours, of one user, and nobody else can come by the socket.

    Args:
        connection: a stream socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = free_in_forks(threading.Lock())
        seconds = int(_SEND_TIMEOUT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def fileno(self) -> int:
        """Of the socket; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, message: object, descriptors: tuple[int, ...] = ()) -> None:
        """Send one message, with descriptors.

        Raises:
            OSError: the other end is gone, or takes nothing for seconds.
        """
        text = pickle.dumps(message, protocol=5)
        with self._sending:
            if descriptors:
                socket.send_fds(self._socket, [_LENGTH.pack(len(text))], list(descriptors))
            else:
                self._socket.sendall(_LENGTH.pack(len(text)))
            self._socket.sendall(text)

    def receive(self) -> Any:
        """The next message; waits for it.

        Raises:
            EOFError: the other end is gone.
        """
        return self._read(self._exactly(_LENGTH.size))

    def receive_first(self, descriptors: int) -> tuple[Any, list[int]]:
        """The next message, with up to so many descriptors.

        Raises:
            EOFError: the other end is gone.
        """
        head, found, _, _ = socket.recv_fds(self._socket, _LENGTH.size, descriptors)
        if len(head) < _LENGTH.size:
            raise EOFError
        return self._read(head), list(found)

    def wait(self, timeout_s: float, *others: int) -> list[int]:
        """Wait for a message, or for one of these descriptors; which of them are ready."""
        poll = select.poll()
        for descriptor in (self.fileno(), *others):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN | select.POLLHUP | select.POLLERR)
        return [descriptor for descriptor, _ in poll.poll(max(0.0, timeout_s) * 1e3)]

    def close(self) -> None:
        """End the connection: the other end is told, whatever processes have inherited this one."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def let_go(self) -> None:
        """In a forked child: the connection is the parent's."""
        with suppress(OSError):
            os.close(self._socket.detach())

    def _read(self, head: bytes) -> Any:
        (length,) = _LENGTH.unpack(head)
        if length > _MOST_BYTES:
            raise EOFError
        return pickle.loads(self._exactly(length))  # noqa: S301 - see the class

    def _exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            try:
                part = self._socket.recv(min(1 << 20, length - len(parts)))
            except OSError:
                part = b""
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def user_of(connection: socket.socket) -> int:
    """Number of the user at the other end of a Unix socket."""
    text = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(text)[1])
