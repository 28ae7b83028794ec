"""How long a run stood still between two of its starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from otel_train.clock import NS_PER_S
from otel_train.errors import RunDirectoryError
from otel_train.exporters.run_directory import state_of
from otel_train.recording.flight_recorder import read_flight

if TYPE_CHECKING:
    from pathlib import Path


def down_s(rank_dir: Path, previous: int, started_unix_ns: int) -> float | None:
    """Seconds from the last edge of the attempt before to this start.

    Args:
        rank_dir: folder of the rank, where the flight file of that attempt has been put aside.
        previous: that attempt; negative if there was none.
        started_unix_ns: when this one started.

    Returns:
        None if there was none, if it had finished (then nobody waited), or if its file tells nothing.
    """
    if previous < 0 or state_of(rank_dir) == "finished":
        return None
    try:
        flight = read_flight(rank_dir / f"flight-{previous}.bin")
    except RunDirectoryError:
        return None
    edges = [int(thread.times[-1]) for thread in flight.threads if len(thread.times)]
    if not edges:
        return None
    last_unix_ns = flight.anchor_unix_ns + max(edges) - flight.anchor_clock_ns
    return max(0, started_unix_ns - last_unix_ns) / NS_PER_S
