"""Bytes that went to devices, as the edges of transfers tell them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_train.aggregate.words import KIND_H2D, OP_END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from otel_train.aggregate.pairing import Edges
    from otel_train.codes import Source

_H2D_BIT = 1 << KIND_H2D


class Transfers:
    """Adds up what every source of transfers moved, also where the time of it belongs to another stage."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def feed(self, edges: Edges) -> None:
        """Take the next slice of a thread."""
        ends = (edges.kinds == KIND_H2D) & (edges.ops == OP_END)
        if not ends.any():
            return
        ends &= (edges.payloads > 0) & ((edges.ancestors & _H2D_BIT) == 0)
        for source in np.unique(edges.sources[ends]).tolist():
            moved = int((edges.payloads[ends & (edges.sources == source)] - 1).sum())
            self._bytes[source] = self._bytes.get(source, 0) + moved

    def to_devices(self, sources: Sequence[Source]) -> dict[str, int]:
        """Bytes by device, such as ``cuda:0``. What was pinned or moved by hand names no device."""
        return {sources[n].name: moved for n, moved in self._bytes.items() if ":" in sources[n].name}
