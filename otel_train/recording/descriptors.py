"""File descriptors of otel_train in the training process, which may need all that it is allowed.

A worker of a DataLoader imports this module, so it imports nothing heavy.
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
"""Descriptors that must be left to the program: workers of loaders take several each, and torch waits for ever without one."""

_HIGHEST = 4096
"""Numbers above this one would make every fork copy a large table."""

_AGENT = 16384
"""An agent takes some ten for each rank of its node."""

_SPARE = 64
_limit = allocate_lock()


def set_aside(descriptor: int) -> int:
    """Returns a copy of a descriptor under a number that the program does not reach; -1 where there can be none.

    Above the soft limit, where the hard one allows it, it takes none of the program's. A program that closes descriptors it does
    not know of meets it less often, and what it opens then does not get the number.

    Where the process has threads, the kernel takes some 20 ms to enlarge its table to so high a number: not for the training thread.
    """
    if not _limit.acquire(timeout=1.0):  # it was held while this process was forked
        return -1
    try:
        return _copied(descriptor)
    except (ImportError, OSError, ValueError):  # no such limits here, or too few are left
        return -1
    finally:
        _limit.release()


def _copied(descriptor: int) -> int:
    import fcntl
    import resource

    kind = resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(kind)
    is_above = 0 < soft <= _HIGHEST and (hard < 0 or soft + _SPARE <= hard)
    lowest = soft if is_above else max(0, (soft if 0 < soft < _HIGHEST else _HIGHEST) - _SPARE)
    try:
        if is_above:
            resource.setrlimit(kind, (soft + _SPARE, hard))
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
    finally:
        if is_above:
            resource.setrlimit(kind, (soft, hard))


def require_descriptors(*, above: bool) -> None:
    """Checks that enough descriptors are left to the program.

    Args:
        above: otel_train's own are set aside, so the hard limit counts.

    Raises:
        OSError: they are not.
    """
    most = -1
    with suppress(ImportError, OSError):  # a system without limits, or a sandbox that tells none
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
    """Lets this process open more files than the program, whose limits it has inherited; for an agent."""
    import resource

    with suppress(OSError):  # a sandbox refuses it: the agent works as far as the limit goes
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < _AGENT and soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_AGENT if hard < 0 else min(_AGENT, hard), hard))


def unnamed_file() -> int:
    """Returns a descriptor of memory without a name; of a file without one where the system has no such memory.

    Raises:
        OSError: neither can be had.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("otel_train", os.MFD_CLOEXEC)
    from tempfile import TemporaryFile

    with TemporaryFile() as opened:
        return os.dup(opened.fileno())


def mapped(descriptor: int, size_bytes: int) -> memoryview:
    """Returns the memory of a file, shared; it is unmapped once nothing uses it.

    Raises:
        OSError: it cannot be mapped.
    """
    if sys.version_info >= (3, 13):
        return memoryview(mmap.mmap(descriptor, size_bytes, trackfd=False))
    import ctypes  # torch and numpy have imported it

    # ``mmap.mmap`` keeps a copy of the descriptor, and closes its number at the end, whoever has that by then.
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
