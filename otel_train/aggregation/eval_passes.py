"""Evaluation passes: neighbouring evaluation steps of one loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_train.accounting.types import PHASES, TRAIN
from otel_train.aggregation.histogram import Histograms

if TYPE_CHECKING:
    from otel_train.accounting.types import StepRows
    from otel_train.aggregation.series_names import Names


class Pass(NamedTuple):
    """One pass.

    Attributes:
        phase: name of the phase.
        loader: name of the loader; "" for none.
        started_ns: first instant.
        ended_ns: last instant.
        batches: steps in it.
    """

    phase: str
    loader: str
    started_ns: int
    ended_ns: int
    batches: int


class EvalPasses:
    """Puts evaluation steps together to passes; a pass is over when something else follows."""

    def __init__(self) -> None:
        self.durations = Histograms()
        self.loaders: list[str] = []
        self._open: Pass | None = None

    def feed(self, steps: StepRows, names: Names) -> list[Pass]:
        """Passes that the newly closed steps end."""
        if not len(steps.phase):
            return []
        over = []
        loaders = names.loader(steps.loader)
        change = (np.diff(steps.phase, prepend=-1) != 0) | (np.diff(loaders, prepend=-1) != 0)
        starts = np.flatnonzero(change)
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(change)], strict=True):
            phase = int(steps.phase[start])
            if phase == TRAIN:
                over += self.close()
                continue
            within = (int(steps.started_ns[start]), int(steps.ended_ns[stop - 1]))
            over += self._extend(PHASES[phase], names.loaders.names[loaders[start]], within, stop - start)
        return over

    def close(self) -> list[Pass]:
        """End the pass that is open, if any."""
        done, self._open = self._open, None
        if done is None:
            return []
        if done.loader not in self.loaders:
            self.loaders.append(done.loader)
            self.durations.grow(len(self.loaders))
        self.durations.add([self.loaders.index(done.loader)], [done.ended_ns - done.started_ns])
        return [done]

    def _extend(self, phase: str, loader: str, within: tuple[int, int], batches: int) -> list[Pass]:
        same = self._open
        if same is not None and (same.phase, same.loader) == (phase, loader):
            self._open = same._replace(ended_ns=within[1], batches=same.batches + batches)
            return []
        over = self.close()
        self._open = Pass(phase, loader, *within, batches)
        return over
