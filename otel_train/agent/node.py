"""The agent process of a node: serves all ranks of a run on the node, each on a thread."""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from otel_train.agent.messages import Hello, MessageChannel, user_of
from otel_train.errors import ConfigError
from otel_train.recording.descriptors import raise_soft_limit
from otel_train.safety import daemon_thread

if TYPE_CHECKING:
    from otel_train.agent.rank_connection import RankConnection
    from otel_train.exporters.manager import SharedExporters

DELIVERY_S: Final = 60.0
"""Longest time for delivery after the end of a rank, if the Collector does not answer."""

_SPOOL_WRITE_S = 15.0
"""Longest time in which a disk that answers writes undelivered data to the spool."""

_FIRST_S = 10.0
"""Longest wait for the first rank to connect, and for the first message of a rank that has connected."""

_served: ContextVar[MessageChannel | None] = ContextVar("_served", default=None)


def main(connection: int, listener: int) -> None:
    """Serves ranks until the last one has ended, in the agent's own process.

    Args:
        connection: descriptor of a socket to the rank that has started the agent; -1: that rank connects to ``listener``.
        listener: descriptor of a socket that ranks connect to; -1: there is a single rank.
    """
    agent = NodeAgent(socket.socket(fileno=listener) if listener >= 0 else None)
    handler = LogsToRanks(agent)
    logger = logging.getLogger("otel_train")
    logger.addHandler(handler)
    logger.propagate = False

    raise_soft_limit()
    signal.signal(signal.SIGTERM, lambda *_: agent.terminate())
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the program's signal mask is inherited
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if connection >= 0:
        agent.take(socket.socket(fileno=connection))
    agent.run()


class NodeAgent:
    """Accepts ranks, and exits after the last of them. Without a listener the rank passed to ``take`` is the only one."""

    def __init__(self, listener: socket.socket | None) -> None:
        from otel_train.exporters.manager import SharedExporters

        self.channels: list[MessageChannel] = []
        self._listener = listener
        self._shared = SharedExporters(alone=listener is None)
        self._services: list[RankConnection] = []
        self._lock = threading.Lock()
        self._terminated = False
        self._wake_read, self._wake_write = socket.socketpair()
        if listener is not None:
            listener.setblocking(False)

    def run(self) -> None:
        """Serves until the last rank has ended and all its data is delivered or in the spool."""
        until_s = 0.0 if self.channels or self._listener is None else time.monotonic() + _FIRST_S
        while True:
            # ``select`` takes no descriptor from 1024 on, and the listener keeps the number that it had in the program.
            poll = select.poll()
            for each in filter(None, (self._wake_read, self._listener)):
                poll.register(each, select.POLLIN)
            poll.poll(1e3)
            with suppress(BlockingIOError):
                self._wake_read.recv(1 << 10, socket.MSG_DONTWAIT)
            accepted = self._accept()
            if accepted or self._serves():
                until_s = 0.0
            elif time.monotonic() > until_s:
                break  # a rank that connects from here on reads EOF, and starts another agent
        self._shared.connections.close()

    def _serves(self) -> bool:
        """Returns whether a rank is served, not counting ranks that ended long ago and only wait for a hanging disk."""
        with self._lock:
            services = list(self._services)
        late_s = time.monotonic() - DELIVERY_S - _SPOOL_WRITE_S
        return len(self.channels) > sum(each.left_s < late_s for each in services)

    def take(self, connection: socket.socket) -> None:
        """Serves the rank at the other end, in a thread; closes the connection if no thread can be started."""
        channel = MessageChannel(connection)
        self.channels.append(channel)
        try:
            daemon_thread(lambda: self._serve(channel), "otel-train-rank").start()
        except RuntimeError:  # the other ranks are still served
            self.channels.remove(channel)
            channel.close()

    def terminate(self) -> None:
        """Handles SIGTERM, which the ranks probably receive as well; see ``RankConnection.terminate``."""
        self._terminated = True
        for service in list(self._services):
            service.terminate()

    def _accept(self) -> bool:
        if self._listener is None:
            return False
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # further ranks must start another agent
                self._listener.close()
                self._listener = None
            return False
        connection.setblocking(True)
        if user_of(connection) != os.getuid():
            connection.close()
            return False
        self.take(connection)
        return True

    def _serve(self, channel: MessageChannel) -> None:
        _served.set(channel)  # for this thread, and for the threads that it starts
        service, descriptors = None, list[int]()
        try:
            hello, descriptors = channel.receive_first(2, _FIRST_S)
            process = descriptors[1] if len(descriptors) > 1 else -1
            service = opened(
                channel, hello, descriptors[0], process, deliver_s=DELIVERY_S, shared=self._shared
            )
            if service is not None:
                with self._lock:
                    self._services.append(service)
                if self._terminated:
                    service.terminate()
                service.serve()
        except (EOFError, OSError):
            pass  # the rank has disconnected, or sends no first message
        finally:
            with self._lock:
                if service in self._services:
                    self._services.remove(service)
                self.channels.remove(channel)
            channel.close()
            for descriptor in descriptors:
                os.close(descriptor)
            with suppress(OSError):
                self._wake_write.send(b"x")


def opened(
    channel: MessageChannel,
    hello: Hello,
    memory: int | memoryview,
    process: int,
    *,
    deliver_s: float,
    shared: SharedExporters,
) -> RankConnection | None:
    """Returns a new ``RankConnection``; None if it rejects a setting, after sending the rank the reason."""
    channel.tell("up", os.getpid())  # before the imports, which take long
    from otel_train.agent.rank_connection import RankConnection

    try:
        return RankConnection(channel, hello, memory, process, deliver_s=deliver_s, shared=shared)
    except ConfigError as error:
        channel.tell("refused", str(error))
        return None


class LogsToRanks(logging.Handler):
    """Forwards log records to a rank, whose process has the logging handlers of the program.

    Records of the threads that serve a rank go to that rank, all others to the rank that connected first.
    """

    def __init__(self, agent: NodeAgent) -> None:
        super().__init__()
        self._agent = agent

    def emit(self, record: logging.LogRecord) -> None:
        """Sends one log record."""
        channel = _served.get() or next(iter(self._agent.channels), None)
        if channel is not None:
            channel.tell("log", record.levelno, self.format(record))
