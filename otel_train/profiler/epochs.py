"""Captures of chosen epochs: begun by the training thread where an epoch begins, ended with it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from otel_train.profiler.capture_context import Loop
    from otel_train.profiler.controller import CaptureController
    from otel_train.profiler.endpoint import CaptureEndpoint

ROOM_S = 30.0
"""Longest wait for the capture before it, which may still be written when the next epoch begins."""

_POLL_S = 0.02


class EpochCaptures:
    """Asked by the training thread, between two steps. What it asks for is armed when the call returns.

    A request that the pump takes begins up to a turn later: an epoch may be over by then.

    Args:
        desk: makes captures; None where none can be made.
        office: reads requests.
        loop: looks at the loop.
        settled: a block in which everything recorded is settled, and the pump does nothing.
    """

    def __init__(
        self, desk: CaptureController | None, office: CaptureEndpoint | None, *,
        loop: Callable[[], Loop], settled: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._desk = desk
        self._office = office
        self._loop = loop
        self._settled = settled

    def begin(self, epoch: int, request: dict[str, Any], *, output_dir: str = "") -> str:
        """Capture steps of the epoch that begins here.

        Args:
            epoch: its number.
            request: as for ``otel_train.capture``; ``wait`` counts from its first step.
            output_dir: folder that gets the trace as plain ``epoch_N.json``, in the place of one that is there.

        Returns:
            "" if it will be made, else why not.

        Raises:
            ConfigError: something in the request cannot be honoured.
        """
        if self._desk is None or self._office is None:
            return "captures are off, or there is no run directory to write to"
        plan = self._office.read(request)._replace(
            trigger="schedule", reason=f"epoch {epoch}", epoch=epoch, at_once=True, output_dir=output_dir
        )
        deadline_s = time.monotonic() + ROOM_S
        while True:
            with self._settled():
                loop = self._loop()
                self._desk.turn(loop, last=True)
                if not self._desk.busy:
                    return self._desk.begin(plan, loop)
                if self._desk.running:
                    break
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        return "a capture is under way: one at a time"

    def end(self) -> None:
        """The epoch is over, and so is its capture."""
        if self._desk is not None:
            self._desk.gate.over()

    def finish(self, timeout_s: float) -> None:
        """Wait until everything captured is written, looked into and told, for this long at most."""
        deadline_s = time.monotonic() + timeout_s
        while self._desk is not None and time.monotonic() < deadline_s:
            with self._settled():
                self._desk.turn(self._loop(), last=True)
                if self._desk.told:
                    return
            time.sleep(_POLL_S)


class NoEpochCaptures:
    """Where nothing is observed, nothing is captured."""

    def begin(self, *_: object, **__: object) -> str:
        """None is made."""
        return "otel_train is disabled"

    def end(self) -> None:
        """Nothing."""

    def finish(self, timeout_s: float) -> None:
        """Nothing."""
