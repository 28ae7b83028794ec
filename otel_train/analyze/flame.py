"""The calls of the training thread as a tree: what a flame graph shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from otel_train.analyze.scene import Scene

LEAST_SHARE = 0.002
"""Of the whole, from which a call is wide enough to be seen."""
MOST_CALLS = 1500


def flame(scene: Scene) -> list[dict[str, Any]]:
    """Calls with the same callers put together, parents before children.

    Returns:
        ``name``, ``parent`` (a place in this list; -1 for the outermost), ``depth``, ``start_share`` and ``share``
        (where it begins and how wide it is, of the whole), ``seconds``, ``count``. Children lie within their
        parent. All threads of the host are put together; steps are left out, so that all steps are one.
    """
    calls, names = scene.calls, scene.trace.names
    name = scene.trace.spans.name[calls.row]
    length = calls.end_ns - scene.trace.spans.start_ns[calls.row]
    steps = np.array([text.startswith("ProfilerStep#") for text in names], np.bool_)[name]
    parent = _without(calls.parent, steps)
    group, rows = _grouped(parent, name, ~steps)
    if not rows:
        return []
    count = np.bincount(group[group >= 0], minlength=len(rows))
    total = np.bincount(group[group >= 0], length[group >= 0], len(rows))
    whole = float(sum(total[place] for place, (outer, _) in enumerate(rows) if outer < 0)) or 1.0
    return _laid_out(rows, _Sums(total / whole, total / NS_PER_S, count), names)


def _without(parent: Any, dropped: Any) -> Any:  # Any: intp[call], bool[call]
    """Parents, where the children of what is dropped go to its own parent."""
    found = parent.copy()
    for _ in range(8):  # steps do not nest deeper
        through = (found >= 0) & dropped[np.maximum(found, 0)]
        if not through.any():
            break
        found[through] = parent[found[through]]
    return found


def _grouped(parent: Any, name: Any, kept: Any) -> tuple[Any, list[tuple[int, int]]]:  # Any: columns of calls
    """For each call the number of its path; each path as (path of the parent, name)."""
    group = np.full(parent.size, -1, np.int64)
    rows: list[tuple[int, int]] = []
    here = np.flatnonzero(kept & (parent < 0))
    while here.size and len(rows) < 100 * MOST_CALLS:
        outer = np.where(parent[here] < 0, -1, group[np.maximum(parent[here], 0)])
        paths, index = np.unique(np.stack([outer, name[here]]), axis=1, return_inverse=True)
        group[here] = len(rows) + index.reshape(-1)
        rows += [(int(above), int(code)) for above, code in paths.T]
        below = np.zeros(parent.size, np.bool_)
        below[here] = True
        here = np.flatnonzero(kept & (parent >= 0) & below[np.maximum(parent, 0)])
    return group, rows


class _Sums(NamedTuple):
    """What is known of each path: columns of the same length."""

    share: NDArray[np.float64]
    seconds: NDArray[np.float64]
    calls: NDArray[np.int64]


def _laid_out(rows: list[tuple[int, int]], sums: _Sums, names: Sequence[str]) -> list[dict[str, Any]]:
    share = sums.share
    order = sorted(range(len(rows)), key=lambda place: (rows[place][0], -share[place]))
    found: list[dict[str, Any]] = []
    place_of: dict[int, int] = {-1: -1}
    filled: dict[int, float] = {}
    # Paths are numbered level by level, so that a parent always comes before its children.
    for place in order:
        outer, code = rows[place]
        if outer not in place_of or share[place] < LEAST_SHARE or len(found) >= MOST_CALLS:
            continue
        above = found[place_of[outer]] if outer >= 0 else None
        start = filled.get(outer, above["start_share"] if above else 0.0)
        filled[outer] = start + float(share[place])
        place_of[place] = len(found)
        found.append(
            {
                "name": names[code],
                "parent": place_of[outer],
                "depth": above["depth"] + 1 if above else 0,
                "start_share": start,
                "share": float(share[place]),
                "seconds": float(sums.seconds[place]),
                "count": int(sums.calls[place]),
            }
        )
    return found
