"""Where time comes from.

Durations are differences of a monotonic clock, in integer nanoseconds. Wall-clock time is only ever
derived from it through one ``Anchor``, so that a stepped system clock cannot bend a duration.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

NS_PER_S = 10**9

Clock = Callable[[], int]
"""Monotonic nanoseconds. Tests pass a ``FakeClock``."""

system_clock: Clock = time.perf_counter_ns
"""The clock of the training thread. On Linux it is one clock for all processes of a host."""


class Anchor(NamedTuple):
    """One instant, read from both clocks.

    Attributes:
        unix_ns: nanoseconds since the Unix epoch.
        clock_ns: the same instant on the monotonic clock.
    """

    unix_ns: int
    clock_ns: int

    @classmethod
    def now(cls, clock: Clock = system_clock) -> "Anchor":
        """Read both clocks, one right after the other."""
        return cls(time.time_ns(), clock())

    def unix(self, clock_ns: int) -> int:
        """The Unix time, in nanoseconds, of an instant on the monotonic clock."""
        return self.unix_ns + clock_ns - self.clock_ns
