"""Connections to the page: bounded in size, time and number, so that slow clients keep nobody out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.h11_impl import H11Protocol

from otel_train.hosts import REQUEST_BYTES, REQUEST_S

if TYPE_CHECKING:
    import asyncio

MOST_CONNECTIONS: Final = 64
"""Clients at once. A browser keeps six; one more drops the oldest whose request has not come yet, else the oldest."""

_open: WeakKeyDictionary[Any, dict[BoundedProtocol, None]] = WeakKeyDictionary()
"""By event loop: its connections in the order in which they came."""


class BoundedProtocol(H11Protocol):
    """A connection whose requests come in 2 s and 8 KiB in all, or end."""

    _timer: asyncio.TimerHandle | None = None
    _bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base class has it
        """Count the client, and drop the oldest where there are too many."""
        super().connection_made(transport)
        clients = _open.setdefault(self.loop, {})
        if len(clients) >= MOST_CONNECTIONS:
            oldest = next((each for each in clients if each.unfinished), next(iter(clients)))
            clients.pop(oldest)
            oldest.transport.abort()
        clients[self] = None
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        _open.get(self.loop, {}).pop(self, None)
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what comes, as long as it is within its bounds."""
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
        """Whether a request is coming in."""
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
