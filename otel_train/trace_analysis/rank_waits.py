"""Which rank waits for which: the traces of several ranks, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.datamodel import NS_PER_S
from otel_train.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from otel_train.trace_analysis.timeline import Scene

    Ints = NDArray[np.int64]
    Collective = tuple[str, str]


def waits(scenes: Sequence[Scene]) -> dict[str, Any]:
    """How long each rank waited in collectives, and for which rank.

    The same collective takes every rank to the same instant, so the rank that came last spends the least time in
    it, and each other rank waited for the difference. This needs no common clock. Collectives are matched by
    group, kind and order, over the steps that all ranks have.

    Raises:
        TraceError: two traces are of one rank, or fewer than two of them say which rank they are.
    """
    by_rank = _by_rank(scenes)
    lengths = {rank: _collectives(scene, _common_steps(scenes)) for rank, scene in by_rank.items()}
    waited = dict.fromkeys(by_rank, 0)
    caused = dict.fromkeys(by_rank, 0)
    matched = unmatched = 0
    for which in sorted({key for of_rank in lengths.values() for key in of_rank}):
        members = [rank for rank, of_rank in lengths.items() if which in of_rank]
        columns = [lengths[rank][which] for rank in members]
        count = min(column.size for column in columns)
        unmatched += sum(column.size - count for column in columns)
        if len(members) <= 1:
            continue
        table = np.stack([column[:count] for column in columns])
        matched += count
        last = table.argmin(axis=0)
        excess = table - table.min(axis=0)
        for place, rank in enumerate(members):
            waited[rank] += int(excess[place].sum())
            caused[rank] += int(excess.sum(axis=0)[last == place].sum())
    return {
        "collectives": matched,
        "unmatched": unmatched,
        "ranks": [
            {
                "rank": rank,
                "waited_seconds": waited[rank] / NS_PER_S,
                "caused_seconds": caused[rank] / NS_PER_S,
                "step_seconds": _median_step_s(by_rank[rank]),
            }
            for rank in sorted(by_rank)
        ],
    }


def _by_rank(scenes: Sequence[Scene]) -> Mapping[int, Scene]:
    by_rank: dict[int, Scene] = {}
    for scene in scenes:
        rank = scene.trace.rank
        if rank is None:
            raise TraceError(
                f"{scene.trace.path}: does not say which rank it is, so it cannot be put beside others"
            )
        if rank in by_rank:
            raise TraceError(f"{scene.trace.path} and {by_rank[rank].trace.path}: both are of rank {rank}")
        by_rank[rank] = scene
    if len(by_rank) <= 1:
        raise TraceError("waiting takes two: give the traces of at least two ranks")
    return by_rank


def _common_steps(scenes: Sequence[Scene]) -> Ints | None:
    """Steps that all ranks recorded; None where one does not say which step is which."""
    if not all(scene.steps.counted for scene in scenes):
        return None
    common = scenes[0].steps.number
    for scene in scenes[1:]:
        common = np.intersect1d(common, scene.steps.number)
    return common


def _collectives(scene: Scene, steps: Ints | None) -> dict[Collective, Ints]:
    """Length of each collective, in order, by group and kind. int64[collective], nanoseconds."""
    spans, names = scene.trace.spans, scene.trace.names
    rows = scene.collectives
    if steps is not None:
        rows = rows[np.isin(scene.step_of(spans.start_ns[rows]), steps)]
    found: dict[Collective, Ints] = {}
    kinds = np.where(spans.collective[rows] > 0, spans.collective[rows], spans.name[rows])
    for group, kind in sorted({*zip(spans.group[rows].tolist(), kinds.tolist(), strict=True)}):
        here = rows[(spans.group[rows] == group) & (kinds == kind)]
        found[names[group], names[kind]] = spans.dur_ns[here]
    return found


def _median_step_s(scene: Scene) -> float | None:
    if not scene.steps.counted:
        return None
    return float(np.median(scene.steps.end_ns - scene.steps.start_ns)) / NS_PER_S
