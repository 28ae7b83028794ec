"""Reading files of run directories, which may hold anything, while somebody writes or deletes them."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.errors import RunDirectoryError

if TYPE_CHECKING:
    from pathlib import Path

MOST_DOCUMENT_BYTES = 4 << 20
"""A summary of ours has some kilobytes; a page reads it every second."""

_NO_SURPRISES = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link would lead out of the folder, and a pipe would wait for ever."""


class Mark(NamedTuple):
    """What tells one version of a file from the next."""

    inode: int
    size_bytes: int
    changed_ns: int


def mark_of(path: Path) -> Mark | None:
    """The version of a plain file that lies there now; None if there is none."""
    try:
        told = path.lstat()
    except OSError:
        return None
    return Mark(told.st_ino, told.st_size, told.st_mtime_ns) if stat.S_ISREG(told.st_mode) else None


def is_folder(path: Path) -> bool:
    """Whether it is a folder of its own; a link to one is not."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def folders_in(path: Path) -> list[str]:
    """Names of the folders in a folder, links left out; none if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def rank_folders(run: Path) -> dict[int, Path]:
    """The folder of each rank of a run, by rank."""
    found = {
        int(name[4:]): run / name
        for name in folders_in(run)
        if name.startswith("rank")
        and name[4:].isascii()
        and name[4:].isdecimal()
        and name == f"rank{int(name[4:])}"
    }
    return dict(sorted(found.items()))


def opened(path: Path) -> int:
    """A descriptor of a plain file.

    Raises:
        OSError: there is none: it is gone, a link, a pipe, or may not be read.
    """
    descriptor = os.open(path, _NO_SURPRISES)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(0, "no plain file")


def read_part(path: Path, start: int, most_bytes: int) -> bytes:
    """Bytes of a plain file; from its end where ``start`` is negative.

    Raises:
        OSError: it cannot be read.
    """
    with os.fdopen(opened(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(start if start >= 0 else max(0, size + start))
        return file.read(most_bytes)


def document(path: Path) -> dict[str, Any]:
    """A JSON object in a file of its own.

    Raises:
        RunDirectoryError: it is not there, not plain, too large, or no such object.
    """
    try:
        data = read_part(path, 0, MOST_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise RunDirectoryError(f"{path.name} cannot be read: {error.strerror or error}.") from error
    if len(data) > MOST_DOCUMENT_BYTES:
        raise RunDirectoryError(f"{path.name} is larger than any of ours.")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path.name} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path.name} is no JSON object.")
    return value


class Documents:
    """JSON objects by path, read again only when their file has changed.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._kept: dict[Path, tuple[Mark, dict[str, Any]]] = {}

    def get(self, path: Path) -> dict[str, Any]:
        """What the file says.

        Raises:
            RunDirectoryError: as ``document``.
        """
        mark = mark_of(path)
        kept = self._kept.get(path)
        if mark is not None and kept is not None and kept[0] == mark:
            return kept[1]
        value = document(path)
        if mark is not None:
            while len(self._kept) >= self._most:
                self._kept.pop(next(iter(self._kept)))
            self._kept[path] = (mark, value)
        return value

    def get_or_empty(self, path: Path, notes: list[str]) -> dict[str, Any]:
        """As ``get``; what cannot be read is empty, and a note says why unless it is not there."""
        try:
            return self.get(path)
        except RunDirectoryError as error:
            if os.path.lexists(path):
                notes.append(str(error))
            return {}
