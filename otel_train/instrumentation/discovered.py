"""Models that were found rather than given: recorded, and looked for again when something new begins."""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from otel_train.children import free_in_forks
from otel_train.instrumentation.module import is_compiled, is_or_wraps
from otel_train.instrumentation.patching import replace
from otel_train.instrumentation.root_modules import FIRST_CALLS, SHORT_LOOK

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from otel_train.instrumentation.module import ModuleProbe
    from otel_train.instrumentation.registry import Probes
    from otel_train.instrumentation.root_modules import RootFinder

SHORT_LOOK_EVERY_S = 1.0
"""Passes over a known loader may be short and many: one look in so many seconds."""


class FoundModels:
    """Records every model that ``finder`` meets.

    It looks in the beginning, when a loader or an optimizer is new, and briefly when a known loader starts
    again. A model that is a part of one that is recorded is not recorded, and no longer once the whole is.

    Args:
        finder: meets models.
        probes: records them.
        monotonic_s: seconds of a monotonic clock.
    """

    def __init__(
        self, finder: RootFinder, probes: Probes, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        import torch

        self._finder = finder
        self._probes = probes
        self._monotonic_s = monotonic_s
        self._next_s = 0.0
        self._found: list[ModuleProbe] = []
        self._lock = free_in_forks(threading.Lock())
        self._forget_optimizers = replace(torch.optim.Optimizer, "__init__", self._told_of_optimizers)
        if probes.models:  # given, so there is nothing to find
            self.remove()
            return
        finder.tell = self._take
        finder.settle_for(FIRST_CALLS)

    def loader_starts(self, *, new: bool) -> None:
        """An iterator of a loader is made."""
        if new:
            self._finder.look(FIRST_CALLS)
        elif not self._finder.looking and self._monotonic_s() >= self._next_s:
            self._next_s = self._monotonic_s() + SHORT_LOOK_EVERY_S
            self._finder.look(SHORT_LOOK)

    def give_way(self) -> None:
        """The program says itself which models it has: find no more, and drop what was found."""
        self.remove()
        self._probes.drop_models(self._found)
        self._found = []

    def remove(self) -> None:
        """Find no more."""
        self._finder.remove()
        self._forget_optimizers()

    def _take(self, model: torch.nn.Module) -> None:
        with self._lock:  # two threads may begin at once
            self._record(model)

    def _record(self, model: torch.nn.Module) -> None:
        wholes = [whole for probe in self._probes.models if (whole := probe.model()) is not None]
        if is_compiled(model) and any(is_or_wraps(model, whole) for whole in wholes):
            self._probes.follow(model, model)
            return
        if any(id(model) in _parts(whole) for whole in wholes):
            return
        parts = _parts(model)
        inside = [probe for probe in self._found if id(probe.model()) in parts]
        self._probes.drop_models(inside)
        made = self._probes.add_found_model(model)
        self._found = [probe for probe in self._found if probe.model() is not None and probe not in inside]
        self._found += [made] if made else []

    def _told_of_optimizers(self, original: Callable[..., None]) -> Callable[..., None]:
        finder = self._finder

        @functools.wraps(original)
        def told(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            finder.look(FIRST_CALLS)
            original(optimizer, *args, **kwargs)

        return told


def _parts(model: torch.nn.Module) -> set[int]:
    """Ids of every module below ``model``, and its own."""
    import torch

    return {id(module) for module in torch.nn.Module.modules(model)}
