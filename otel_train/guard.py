"""Where our own faults stop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

log = logging.getLogger("otel_train")


class Guard:
    """Keeps a fault in one part of the telemetry from reaching the training loop.

    The first fault is logged with its traceback, later ones are only counted. After ``limit`` faults
    the part is switched off for the rest of the run: ``closed`` is true, and whoever drives the part
    asks before driving. Faults of the user's own loop are never put inside a guard, so never hidden; what
    the user has us call may be.

    One guard belongs to one thread; ``faults`` may be read from any.

    Args:
        part: what is guarded, as it will read in the log: ``"prometheus export"``.
        limit: faults to put up with before switching the part off; at least 1.
        strict: raise instead of swallowing; the fault is counted all the same. For tests.

    Attributes:
        faults: how many there have been.
    """

    __slots__ = ("faults", "limit", "part", "strict")

    def __init__(self, part: str, *, limit: int = 3, strict: bool = False) -> None:
        if limit < 1:
            raise ValueError(f"limit={limit}: expected 1 or more")
        self.part = part
        self.limit = limit
        self.strict = strict
        self.faults = 0

    @property
    def closed(self) -> bool:
        """Whether the part has been switched off."""
        return self.faults >= self.limit

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Ctrl-C and SystemExit are not faults of ours; they belong to the user.
        if not isinstance(fault, Exception):
            return False
        self.faults += 1
        if self.strict:
            return False
        if self.faults == 1:
            log.warning("%s failed; training goes on without it", self.part, exc_info=fault)
        if self.faults == self.limit:
            log.error("%s failed %d times and is now off", self.part, self.faults)
        return True
