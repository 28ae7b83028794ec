"""How the process of a rank ended."""

from __future__ import annotations

import mmap
import os

from otel_train.agent.rank_end import MappedFile, maps_file
from otel_train.recording.descriptors import mapped, unnamed_file


def test_a_process_that_maps_the_memory_of_a_rank_has_not_executed_another_program() -> None:
    """A program that closes all its descriptors goes on to record."""
    descriptor = unnamed_file()
    os.ftruncate(descriptor, mmap.PAGESIZE)
    file = MappedFile.of(descriptor)
    assert file is not None
    assert not maps_file(os.getpid(), file)
    memory = mapped(descriptor, mmap.PAGESIZE)
    os.close(descriptor)

    assert maps_file(os.getpid(), file)
    assert not maps_file(os.getpid(), file._replace(name=b"/usr/lib/libc.so"))
    assert not maps_file(os.getppid(), file)
    memory.release()
