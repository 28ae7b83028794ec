"""Which epochs are profiled, and which of their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from otel_train.errors import ConfigError
from otel_train.integrations.shared import plain
from otel_train.profiler.request_schema import activities

SKIP_FIRST_STEPS, WAIT_STEPS = 10, 5
"""Of an epoch that is profiled: ``skip_first`` and ``wait`` of ``torch.profiler.schedule`` in the earlier callback."""


def fitted(steps: int | None, warmup: int, active: int) -> tuple[int, int, int]:
    """Steps to let pass, to warm up in, and to record, in an epoch of ``steps``; None where that is not known."""
    wait = SKIP_FIRST_STEPS + WAIT_STEPS
    if steps is None:
        return wait, warmup, active
    if steps <= wait + warmup:
        warmup = min(warmup, steps // 2)
        wait = max(0, min(wait, steps - warmup - active))
    return wait, warmup, max(1, min(active, steps - wait - warmup))


def steps_of_an_epoch(batches: float, accumulated: int) -> int | None:
    """Steps of an epoch of so many batches, of which so many make one; None where it has no end."""
    return math.ceil(batches / max(accumulated, 1)) if math.isfinite(batches) else None


def chosen(given: Any) -> frozenset[int]:  # Any: the user's own
    """Epochs from a number, or any sequence of them; the first where there are none.

    Raises:
        ConfigError: one of them is none.
    """
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if given is None or not several:
        return frozenset({1})
    for epoch in several:
        if isinstance(epoch, bool) or not hasattr(epoch, "__index__") or epoch.__index__() < 1:
            raise ConfigError(
                f"profile_epochs={plain(given)!r}: {epoch!r} is no epoch. They count from 1: for the first write [1]"
            )
    return frozenset(epoch.__index__() for epoch in several)


def activities_of(given: Any) -> tuple[str, ...]:  # Any: text, or some of texts and of torch's own
    """What to record, in our settings' words.

    Raises:
        ConfigError: one of them does not exist, or there is none.
    """
    words = given.split(",") if isinstance(given, str) else given
    several = list(words) if isinstance(words, (Sequence, AbstractSet)) else [words]
    return activities([str(word).rpartition(".")[2] for word in several])
