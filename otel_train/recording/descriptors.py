"""File descriptors that otel_train opens in the training process: moved out of the program's range, and kept few.

DataLoader workers import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from _thread import allocate_lock
from contextlib import suppress
from typing import Any

LEAST_LEFT = 64
"""Descriptors that must be left to the program: each DataLoader worker needs several, and torch waits for ever without one."""

_MAX_DESCRIPTOR = 4096
"""Highest number that a descriptor is moved to: a higher one would make every fork copy a large descriptor table."""

_AGENT_LIMIT = 16384
"""Soft limit of open files in an agent, which needs some ten for each rank of its node."""

_RANGE = 64
"""Size of the range of numbers that descriptors are moved to."""

_limit = allocate_lock()


def set_aside(descriptor: int) -> int:
    """Returns a copy of a descriptor with a number that the program does not reach; -1 if there can be none.

    The number is above the soft limit of open files (RLIMIT_NOFILE) if the hard limit allows it, so the copy does not count
    against that limit. A program that closes all descriptors up to its limit is less likely to close the copy, and a file
    that it opens afterwards does not get the number.

    In a process with threads the kernel takes some 20 ms to enlarge the descriptor table: not for the training thread.
    """
    if not _limit.acquire(timeout=1.0):  # a thread held it while this process was forked
        return -1
    try:
        return _duplicate(descriptor)
    except (ImportError, OSError, ValueError):  # the system has no such limits, or no descriptor is left
        return -1
    finally:
        _limit.release()


def _duplicate(descriptor: int) -> int:
    import fcntl
    import resource

    kind = resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(kind)
    is_above = 0 < soft <= _MAX_DESCRIPTOR and (hard < 0 or soft + _RANGE <= hard)
    lowest = soft if is_above else max(0, (soft if 0 < soft < _MAX_DESCRIPTOR else _MAX_DESCRIPTOR) - _RANGE)
    try:
        if is_above:
            resource.setrlimit(kind, (soft + _RANGE, hard))
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
    finally:
        # The program may have set another limit meanwhile.
        if is_above and resource.getrlimit(kind) == (soft + _RANGE, hard):
            resource.setrlimit(kind, (soft, hard))


def require_descriptors(*, above: bool) -> None:
    """Checks that ``LEAST_LEFT`` descriptors are left to the program.

    Args:
        above: otel_train's descriptors are moved above the soft limit, so the hard limit counts.

    Raises:
        OSError: fewer are left.
    """
    most = -1
    with suppress(ImportError, OSError):  # a system without limits, or a sandbox that hides them
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1 if above else 0]
    ends = os.pipe()
    for end in ends:
        os.close(end)
    if 0 <= most < min(ends) + LEAST_LEFT:
        raise OSError(
            f"the limit of {most} open files (ulimit -n) leaves fewer than {LEAST_LEFT} to the program; raise it"
        )


def raise_soft_limit() -> None:
    """Lets an agent process open more files than the program, whose limits it has inherited."""
    import resource

    with suppress(OSError):  # a sandbox refuses it: the agent works as far as the limit goes
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < _AGENT_LIMIT and soft != hard:
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (_AGENT_LIMIT if hard < 0 else min(_AGENT_LIMIT, hard), hard)
            )


def unnamed_file() -> int:
    """Returns the descriptor of anonymous memory (memfd_create(2)), or of an unlinked file on a system without it.

    Raises:
        OSError: neither can be made.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("otel_train", os.MFD_CLOEXEC)
    from tempfile import TemporaryFile

    with TemporaryFile() as opened:
        return os.dup(opened.fileno())


def mapped(descriptor: int, size_bytes: int) -> memoryview:
    """Maps a file into shared memory and returns that; it is unmapped once nothing references it.

    Raises:
        OSError: it cannot be mapped.
    """
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(descriptor, size_bytes, trackfd=False))
    import ctypes  # torch and numpy have imported it

    # ``mmap.mmap`` keeps a copy of the descriptor and closes it at the end, even if the program has closed that number and
    # opened a file of its own under it.
    library: Any = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    begin = library.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if begin == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    words = (ctypes.c_char * size_bytes).from_address(begin)
    weakref.finalize(words, library.munmap, begin, size_bytes).atexit = False
    return memoryview(words).cast("B")
