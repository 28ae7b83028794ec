"""The edges that a killed process had written and not counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.aggregate.run import SLICE_EDGES
from otel_train.errors import RunDirectoryError
from otel_train.export.estate import Position
from otel_train.flight import ThreadEdges, read_flight

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.export.estate import Estate

    Columns = tuple[np.ndarray, np.ndarray]
    """Times and codes."""

_NEW_THREAD = 1 << 62
"""From here on threads are numbered that the account does not know; it numbers its own by address."""


class Rest(NamedTuple):
    """What was found behind an account.

    Attributes:
        last_ns: the last sign of life, on the monotonic clock.
        edges: counted.
        lost: overwritten before anybody counted them.
    """

    last_ns: int
    edges: int
    lost: int


def count_the_rest(estate: Estate, flight_path: Path) -> Rest:
    """Feed the account of an estate every edge in the flight file that is not in it yet."""
    run, anchor = estate.run, estate.anchor
    try:
        flight = read_flight(flight_path)
    except RunDirectoryError:  # no flight file was wanted, or possible: what was counted last stands
        return Rest(run.settled_ns, 0, 0)
    run.learn(list(flight.sources))
    last_ns = max(run.settled_ns, flight.turn_unix_ns - anchor.unix_ns + anchor.clock_ns)
    edges = lost = 0
    found = []
    for thread in flight.threads:
        position = _position(thread, estate)
        rest = max(0, thread.ended - position.taken)
        kept = min(rest, len(thread.times))
        lost += rest - kept
        first = len(thread.times) - kept
        found.append((position, (thread.times[first:], thread.codes[first:])))
    for position, (times, codes) in _by_caller(found, estate.engine):
        for start in range(0, len(times), SLICE_EDGES):
            part = slice(start, start + SLICE_EDGES)
            run.feed(position.key, times[part], codes[part], name=position.name, main=position.main)
        edges += len(times)
        last_ns = max(last_ns, int(times[-1]))
    return Rest(last_ns, edges, lost)


def _position(thread: ThreadEdges, estate: Estate) -> Position:
    """How far a ring is in the account; a thread that came later had the ring from its beginning."""
    slot, entry = thread.slot, thread.entry
    for position in estate.positions:
        if (position.slot, position.ident, position.name) == (slot, entry.ident, entry.thread):
            return position
    key = _NEW_THREAD + slot
    return Position(slot, entry.ident, entry.thread, key=key, main=slot == 0, engine=False, taken=0)


def _by_caller(
    found: list[tuple[Position, Columns]], waiting: list[Columns]
) -> list[tuple[Position, Columns]]:
    """Edges by thread; those of autograd's threads are put among those of the thread that waits for them."""
    engine = [*waiting, *(columns for position, columns in found if position.engine)]
    threads = [
        (position, _together([columns, *engine]) if position.main and engine else columns)
        for position, columns in found
        if not position.engine
    ]
    return [(position, columns) for position, columns in threads if len(columns[0])]


def _together(parts: list[Columns]) -> Columns:
    times = np.concatenate([part[0] for part in parts])
    order = np.argsort(times, kind="stable")
    return times[order], np.concatenate([part[1] for part in parts])[order]
