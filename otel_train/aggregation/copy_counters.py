"""Bytes that went to devices, as the edges of transfers tell them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from otel_train.recording.events import Instrumented


class Transfers:
    """Adds up what every source of transfers moved, also where the time of it belongs to another stage."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def add(self, moved: np.ndarray) -> None:
        """Take in transfers: int64[n, 2], as in ``ClosedSteps``."""
        for source, size in moved.tolist():
            self._bytes[source] = self._bytes.get(source, 0) + size

    def to_devices(self, sources: Sequence[Instrumented]) -> dict[str, int]:
        """Bytes by device, such as ``cuda:0``. What was pinned or moved by hand names no device."""
        return {sources[n].name: moved for n, moved in self._bytes.items() if ":" in sources[n].name}
