"""Whether a loader's workers can build batches as fast as the loop would ask for them."""

from __future__ import annotations

import math
from typing import NamedTuple

ROOM = 0.9
"""Share of their time that workers may be busy. Without room every batch that takes longer is waited for."""

UNEVEN = 3.0
"""99th percentile of the build time over its mean from which batches are called uneven."""

MS_PER_S = 1e3


class Supply(NamedTuple):
    """How a loader gets its batches. Seconds; None where it is not known.

    Attributes:
        workers: worker processes; 0 for none, None for a loader without that setting.
        build_s: mean time of a worker for a batch.
        build_p50_s: median.
        build_p99_s: 99th percentile.
        prefetch_factor: batches each worker reads ahead.
        persistent: the workers live on from pass to pass.
        passes: passes of training that gave a batch.
        making_s: time to make their iterators.
        first_s: wait for their first batches.
        processors: those this process may use.
    """

    workers: int | None = None
    build_s: float | None = None
    build_p50_s: float | None = None
    build_p99_s: float | None = None
    prefetch_factor: int | None = None
    persistent: bool | None = None
    passes: int = 0
    making_s: float = 0.0
    first_s: float = 0.0
    processors: int | None = None

    @property
    def start_s(self) -> float:
        """What beginning all passes has cost."""
        return self.making_s + self.first_s


def needed(build_s: float, ask_s: float) -> int:
    """Workers that keep up: each takes ``build_s`` for a batch, the loop asks every ``ask_s``."""
    return max(1, math.ceil(build_s / ask_s / ROOM))


def milliseconds(seconds: float) -> str:
    """For a sentence."""
    return f"{seconds * MS_PER_S:.3g} ms"


def compared(supply: Supply, ask_s: float) -> str:
    """What the workers take against what the loop asks for, as a sentence; "" where it is not known."""
    if not supply.workers or supply.build_s is None or ask_s <= 0:
        return ""
    each = milliseconds(supply.build_s)
    who = "Its worker takes" if supply.workers == 1 else f"Its {supply.workers} workers take"
    every = f", one every {milliseconds(supply.build_s / supply.workers)}" if supply.workers > 1 else ""
    return f" {who} {each} per batch{every}; the loop asks every {milliseconds(ask_s)}."


def loader_advice(name: str, supply: Supply, *, wait_s: float, ask_s: float) -> str:
    """What to change about a loader that training waits for.

    Args:
        name: the loader.
        supply: how it gets its batches.
        wait_s: wait per batch.
        ask_s: time between its batches if it made nobody wait; 0 where that is not known.
    """
    if supply.workers is None:
        return f"Load `{name}` ahead of need: in a thread, or as a torch DataLoader with num_workers > 0."
    if supply.workers == 0:
        return _for_none(name, supply, wait_s=wait_s, ask_s=ask_s)
    if supply.build_s is None or ask_s <= 0:
        return (
            f"`{name}` has {supply.workers} workers and they do not keep up: raise num_workers or "
            "prefetch_factor, move decoding out of __getitem__, or look at the storage."
        )
    enough = needed(supply.build_s, ask_s)
    if enough > supply.workers:
        return _for_too_few(name, supply, enough)
    return _for_enough(name, supply)


def _for_none(name: str, supply: Supply, *, wait_s: float, ask_s: float) -> str:
    number = needed(wait_s, ask_s) if ask_s > 0 and wait_s > 0 else 4
    limit = supply.processors
    more = f" It would take {number} workers to keep up." if limit and number > limit else ""
    number = min(number, limit) if limit else number
    return (
        f"`{name}` is read on the training thread (num_workers=0): DataLoader(..., num_workers={number}, "
        f"persistent_workers=True) reads it beside the training.{more}"
    )


def _for_too_few(name: str, supply: Supply, enough: int) -> str:
    limit = supply.processors
    if limit and enough > limit:
        return (
            f"`{name}` would need num_workers={enough} to keep up, and this process has {limit} "
            f"{'processor' if limit == 1 else 'processors'}: make a batch cheaper to build (decode beforehand, "
            "smaller images, fewer transforms), or give it more processors."
        )
    return f"`{name}` keeps up with num_workers={enough} (it has {supply.workers})."


def _for_enough(name: str, supply: Supply) -> str:
    assert supply.build_s is not None
    assert supply.workers is not None
    uneven = supply.build_p99_s is not None and supply.build_p99_s > UNEVEN * supply.build_s
    if uneven:
        factor = 2 * (supply.prefetch_factor or 2)
        return (
            f"The workers of `{name}` keep up on average, but their batches are uneven (p99 "
            f"{milliseconds(supply.build_p99_s or 0.0)}): prefetch_factor={factor} evens it out."
        )
    if supply.processors and supply.workers >= supply.processors:
        return (
            f"The workers of `{name}` build fast enough on average, but they and the training share "
            f"{supply.processors} processors: make a batch cheaper to build, or use fewer workers."
        )
    return (
        f"The workers of `{name}` build fast enough, so more of them do not help: look at how batches are handed "
        "over. Fewer and larger tensors in a batch and pin_memory make that cheaper."
    )


def start_advice(name: str, supply: Supply) -> str:
    """What to change about a loader whose passes are slow to begin."""
    if supply.workers and not supply.persistent:
        return f"DataLoader(..., persistent_workers=True) for `{name}`: its workers then start once, not every pass."
    if supply.workers:
        return (
            f"The first batch of `{name}` is built while training waits: smaller batches, or an iterator made "
            "before the pass before has ended."
        )
    return f"`{name}` does much before its first batch: do that once, when its dataset is made."
