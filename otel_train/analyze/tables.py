"""Sums over events of the same name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


def by_name(
    name: NDArray[np.int32], weight_ns: NDArray[np.int64], *, most: int, more: Mapping[str, NDArray[np.int64]]
) -> list[dict[str, Any]]:
    """One entry per name, the heaviest first.

    Args:
        name: int32[event].
        weight_ns: int64[event], what to sort by; its sum is in ``seconds``.
        most: entries at most.
        more: further columns to sum, in nanoseconds, by the key they get.

    Returns:
        ``name`` (a number), ``count``, ``seconds``, ``share`` of the whole, and the further sums in seconds.
    """
    if not name.size:
        return []
    seen, index, count = np.unique(name, return_inverse=True, return_counts=True)
    total = np.bincount(index, weight_ns, seen.size)
    sums = {key: np.bincount(index, column, seen.size) for key, column in more.items()}
    whole = float(total.sum())
    return [
        {
            "name": int(seen[place]),
            "count": int(count[place]),
            "seconds": float(total[place]) / NS_PER_S,
            "share": float(total[place]) / whole if whole else 0.0,
            **{key: float(column[place]) / NS_PER_S for key, column in sums.items()},
        }
        for place in np.argsort(-total, kind="stable")[:most]
    ]
