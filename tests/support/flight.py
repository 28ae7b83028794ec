"""Memory of rings that is a file as well, for tests of what reads such files."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path


def in_file(path: Path) -> Callable[[int], mmap.mmap]:
    """What ``FlightMemory`` makes its memory with, so that it can be read at this path at once."""

    def make(size: int) -> mmap.mmap:
        with path.open("w+b") as file:
            file.truncate(size)
            return mmap.mmap(file.fileno(), size)

    return make
