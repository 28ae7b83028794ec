"""The course of a run, from its lines of metrics, followed as they are written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, BinaryIO

from otel_train.artifacts.run_reader import METRICS
from otel_train.exporters.series import histograms_of, moment_of, series_of
from otel_train.files import lines_of, open_binary, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_MOMENTS = 300
"""Points of a chart: more than that no screen can show."""

_CHUNK_BYTES = 1 << 20
_FOREIGN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""What a line that is not ours may raise; RuntimeError: a generator came to an end too soon, or nesting is too deep."""


class History:
    """One rank's lines, read once each.

    Args:
        folder: of the rank.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inode = -1
        self._read_bytes = 0
        self._moments: list[dict[str, Any]] = []
        self._series: dict[str, Any] = {}
        self._histograms: list[dict[str, Any]] = []

    def turn(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Read what is new; what ``series_of`` and ``histograms_of`` make of all. Both are empty without lines."""
        path = self._folder / METRICS
        try:
            file = open_binary(path)
        except OSError:
            return self._series, self._histograms
        with file:
            told = os.fstat(file.fileno())
            if told.st_ino != self._inode or told.st_size < self._read_bytes:
                if self._inode < 0:
                    self._older()
                self._inode, self._read_bytes = told.st_ino, 0
            if told.st_size > self._read_bytes:
                self._take(file)
        return self._series, self._histograms

    def _older(self) -> None:
        """The half that was put aside before we came."""
        try:
            file = open_binary(self._folder / f"{METRICS}.1")
        except OSError:
            return
        with file:
            self._take(file)
        self._read_bytes = 0

    def _take(self, file: BinaryIO) -> None:
        file.seek(self._read_bytes)
        total = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""))
        every = max(1, total // MOST_MOMENTS)
        file.seek(self._read_bytes)
        last: dict[str, Any] = {}
        for number, line in enumerate(self._whole_lines(file), 1):
            if (total - number) % every:
                continue
            try:
                value: Any = parse_json(line)
                self._moments.append(moment_of(value))
            except _FOREIGN:
                continue
            last = value
        if len(self._moments) > 2 * MOST_MOMENTS:
            self._moments = [*self._moments[:-1:2], self._moments[-1]]
        if last:
            self._settle(last)

    def _whole_lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Lines up to the last that is whole; the next turn begins behind it."""
        for line in lines_of(file):
            if line.endswith(b"\n"):
                self._read_bytes = file.tell()
                yield line

    def _settle(self, last: dict[str, Any]) -> None:
        try:
            self._series = series_of(self._moments)
            self._histograms = histograms_of(last)
        except _FOREIGN:
            self._moments, self._series, self._histograms = [], {}, []
