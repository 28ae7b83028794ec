"""Memory of rings that no agent maps, and that may be a file as well, for tests of what reads such files."""

from __future__ import annotations

import mmap
from pathlib import Path

from otel_train.datamodel import Anchor
from otel_train.recording.shared_memory import HEADER, STEPS, STEPS_OFFSET, FlightMemory, Header

ZERO = Anchor(0, 0)


class PrivateMemory(FlightMemory):
    """Takes no descriptor. With a ``path`` it can be read there at once."""

    def __init__(self, main_edges: int, anchor: Anchor = ZERO, path: Path | None = None) -> None:
        self._path = path
        super().__init__(main_edges, anchor)

    def poll(self, unix_ns: int, steps: tuple[int, int] = (0, 0)) -> None:
        """Writes when the agent polled, and the steps that it had seen end, as its copy of the memory has them."""
        header = Header(*HEADER.unpack_from(self.view))
        HEADER.pack_into(self.view, 0, *header._replace(polled_unix_ns=unix_ns))
        STEPS.pack_into(self.view, STEPS_OFFSET, *steps)

    def _allocate(self, size: int) -> memoryview:
        if self._path is None:
            return memoryview(mmap.mmap(-1, size))
        with self._path.open("w+b") as file:
            file.truncate(size)
            return memoryview(mmap.mmap(file.fileno(), size))
