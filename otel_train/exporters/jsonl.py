"""Files of JSON lines that stay bounded, survive a crash, and never raise into who writes them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from otel_train.errors import RunDirectoryError
from otel_train.files import lines_of, make_folder, open_binary, open_to_append, parse_json, read_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_TAIL_BYTES = 1 << 16
"""How much is read at once when looking for the last newline."""

_METRICS_TAIL_BYTES = 1 << 22
"""Longer than a line of metrics is at the widest profile."""


class BoundedLines:
    """An append-only file of lines that never holds more than ``max_bytes`` with its predecessor.

    When half of the bound is full the file becomes ``<name>.1``, and the ``.1`` before it is dropped with
    its lines counted. Nothing is created before the first line. A line is whole or not there at all: what
    a crash or a full disk tore off is cut away.

    Args:
        path: the file.
        max_bytes: bound on the file and its predecessor together.
        on_error: told of every ``OSError``; writing goes on trying with the next line.

    Attributes:
        dropped_lines: whole lines given up because of the bound.
        failed_lines: lines that could not be written.
    """

    def __init__(self, path: Path, *, max_bytes: int, on_error: Callable[[OSError], None]) -> None:
        self.path = path
        self.dropped_lines = 0
        self.failed_lines = 0
        self._max_bytes = max_bytes
        self._on_error = on_error
        self._fd = -1
        self._size_bytes = 0

    def append(self, line: str) -> bool:
        """Write one line (without newline). False when it could not be written."""
        data = line.encode("utf-8", "replace") + b"\n"
        if len(data) > self._max_bytes // 2:
            self.dropped_lines += 1
            return False
        try:
            self._open()
            if self._size_bytes + len(data) > self._max_bytes // 2:
                self._rotate()
            self._write(data)
        except OSError as error:
            self.failed_lines += 1
            self.close()
            self._on_error(error)
            return False
        return True

    def close(self) -> None:
        """Let go of the file. A later line opens it again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError as error:
                self._on_error(error)

    def _open(self) -> None:
        if self._fd >= 0 and not self._taken_away():
            return
        self.close()
        make_folder(self.path.parent)
        self._fd = open_to_append(self.path)
        self._size_bytes = _without_torn_line(self._fd)

    def _taken_away(self) -> bool:
        # Somebody tidied up, or rotated it: what we write from then on belongs into a new one.
        try:
            return self.path.stat().st_ino != os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return True

    def _rotate(self) -> None:
        old = predecessor(self.path)
        if old.exists():
            self.dropped_lines += _count_lines(old)
        self.path.replace(old)
        self.close()
        self._open()

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            if written:
                os.ftruncate(self._fd, self._size_bytes)
            raise
        self._size_bytes += len(data)


def predecessor(path: Path) -> Path:
    """Where the older half of a bounded file lies."""
    return path.with_name(path.name + ".1")


def read_jsonl(path: Path) -> Iterator[dict[str, object]]:
    """Every object of a file of JSON lines, oldest first, its rotated predecessor included.

    Lines that a crash tore off, and lines that are no JSON objects, are skipped. A file that does not
    exist has no lines.

    Raises:
        OSError: the file is there but cannot be read.
    """
    for part in (predecessor(path), path):
        if not os.path.lexists(part):
            continue
        with open_binary(part) as file:
            for line in lines_of(file):
                value = parse_line(line)
                if value is not None:
                    yield value


def last_metrics(path: Path) -> dict[str, Any]:
    """The last whole line of OTLP metrics; what a crash tore off is skipped.

    Raises:
        RunDirectoryError: there is none.
    """
    try:
        lines = read_part(path, -_METRICS_TAIL_BYTES, _METRICS_TAIL_BYTES).splitlines()
    except OSError as error:
        raise RunDirectoryError(
            f"{path}: cannot be read: {error.strerror or error}. Has training begun?"
        ) from error
    for line in reversed(lines):
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "resourceMetrics" in value:
            return value
    raise RunDirectoryError(f"{path}: has no line of metrics yet. Has training begun?")


def parse_line(line: bytes) -> dict[str, object] | None:
    """The object on one line, or None for a torn or foreign one."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _without_torn_line(fd: int) -> int:
    size = os.fstat(fd).st_size
    end = size
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return end


def _count_lines(path: Path) -> int:
    with open_binary(path) as lines:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: lines.read(1 << 20), b""))
