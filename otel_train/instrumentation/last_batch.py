"""Which batch a thread fetched last, read from what it wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_train.recording.events import FLAG_SHIFT, OP_MASK, SOURCE_MASK, SOURCE_SHIFT, Flag, Op, SourceKind

if TYPE_CHECKING:
    from otel_train.recording.recorder import Recorder
    from otel_train.recording.ring_buffer import Ring, Slice

NS_PER_MS = 1e6
_START = int(Flag.START) << FLAG_SHIFT
_MANY = 512
"""Edges from which on numpy is quicker than Python."""


class LastBatch:
    """Looks at the edges since the last look: nothing is written for it, and each edge is looked at once.

    Args:
        recorder: where the edges are.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._ring: Ring | None = None
        self._begin(None)

    def _begin(self, ring: Ring | None) -> None:
        self._ring = ring
        self._looked = 0
        self._open: dict[int, int] = {}
        self._source = -1
        self._fetch_ns: int | None = None

    @property
    def loader(self) -> str | None:
        """Its loader; None if the calling thread has fetched none."""
        self._look()
        return self._recorder.sources[self._source].name if self._source >= 0 else None

    @property
    def fetch_ms(self) -> float | None:
        """Milliseconds that the calling thread waited for it; None if that is not known."""
        self._look()
        return self._fetch_ns / NS_PER_MS if self._fetch_ns is not None else None

    def _look(self) -> None:
        thread = self._recorder.here()
        ring = thread.ring if thread is not None else None
        if ring is not self._ring:
            self._begin(ring)
        if ring is None or ring.written == self._looked:
            return
        new = ring.look(self._looked)
        self._looked += new.missed + len(new.codes)
        if new.missed:
            self._open.clear()
        sources = self._recorder.sources
        for word, at_ns in zip(*self._asks(new), strict=True):
            op, source = word & OP_MASK, word >> SOURCE_SHIFT & SOURCE_MASK
            if sources[source].kind is not SourceKind.DATA or word & _START:
                continue
            if op == Op.BEGIN:
                self._open[source] = at_ns
                continue
            begun_ns = self._open.pop(source, None)
            if op == Op.END:
                self._source = source
                self._fetch_ns = at_ns - begun_ns if begun_ns is not None else None

    def _asks(self, new: Slice) -> tuple[list[int], list[int]]:
        """Codes and times that may be about a batch."""
        codes, times = new.codes, new.times
        if len(codes) > _MANY:
            data = [n for n, source in enumerate(self._recorder.sources) if source.kind is SourceKind.DATA]
            mine = np.isin(codes >> SOURCE_SHIFT & SOURCE_MASK, data)
            codes, times = codes[mine], times[mine]
        return codes.tolist(), times.tolist()
