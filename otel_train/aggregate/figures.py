"""The run's account as metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_train import catalog as c
from otel_train.aggregate.names import CHECKPOINT
from otel_train.aggregate.sheet import Bounded, Sheet
from otel_train.aggregate.steps import PHASES, Activity

if TYPE_CHECKING:
    from otel_train.aggregate.run import RunAccount

NS_PER_S = 10**9


class Figures:
    """Writes the account of a run into a sheet.

    Args:
        run: the account.
        max_loaders: loader names published as they are.
        max_stages: the user's own stage names published as they are.
    """

    def __init__(self, run: RunAccount, *, max_loaders: int, max_stages: int) -> None:
        self.loaders = Bounded(max_loaders)
        self.stages = Bounded(max_stages)
        self._run = run

    def write(self, sheet: Sheet) -> None:
        """Put everything that the edges have told."""
        self._stages(sheet)
        self._steps(sheet)
        self._loaders(sheet)
        self._rest(sheet)

    def overflows(self) -> dict[str, int]:
        """Names folded into ``_OTHER``, by label."""
        found = {c.LOADER.name: len(self.loaders.overflown), c.STAGE.name: len(self.stages.overflown)}
        return {label: number for label, number in found.items() if number}

    def _stages(self, sheet: Sheet) -> None:
        totals = self._run.totals
        labels: dict[tuple[str, str, str], int] = {}
        into = np.full(len(totals.names.keys), -1, dtype=np.int64)
        for series, key in enumerate(totals.names.keys):
            if key.phase and key.stage not in ("other", CHECKPOINT):
                stage = key.stage if key.stage in c.STAGES else self.stages.fold(key.stage)
                label = (stage, self.loaders.fold(key.loader), key.phase)
                into[series] = labels.setdefault(label, len(labels))
        folded = totals.stages.folded(into, len(labels))
        for label, series in labels.items():
            held = tuple(self._run.teller.exemplars.get(("stage", *label), ()))
            sheet.histogram(c.STAGE_DURATION, folded, series, *label, exemplars=held)

    def _steps(self, sheet: Sheet) -> None:
        totals = self._run.totals
        into = np.full(len(totals.step_pairs), -1, dtype=np.int64)
        labels: dict[tuple[str, str], int] = {}
        for series, (loader, phase) in enumerate(totals.step_pairs):
            label = (self.loaders.fold(totals.names.loaders.names[loader]), PHASES[phase])
            into[series] = labels.setdefault(label, len(labels))
            sheet.put(c.STEPS, int(totals.step_counts[series]), *label)
        folded = totals.steps.folded(into, len(labels))
        for label, series in labels.items():
            held = tuple(self._run.teller.exemplars.get(("step", *label), ()))
            sheet.histogram(c.STEP_DURATION, folded, series, *label, exemplars=held)
        sheet.put(c.STEP_INDEX, self._run.step_number)
        sheet.put(c.HEARTBEAT_STEP, self._run.step_number)
        skipped = totals.skipped_updates
        sheet.put_all(c.STEP_SKIPS, c.SKIP_REASON.values, {"amp_overflow": skipped})

    def _loaders(self, sheet: Sheet) -> None:
        totals = self._run.totals
        for metric, counts in ((c.BATCHES, totals.batches), (c.SAMPLES, totals.samples)):
            for (loader, phase), count in counts.items():
                if phase < len(PHASES):
                    sheet.put(metric, count, self._loader(loader), PHASES[phase])
        for loader_name, errors in self._run.loader_errors.items():
            sheet.put(c.LOADER_ERRORS, errors, self.loaders.fold(loader_name))
        for series, loader_name in enumerate(self._run.evals.loaders):
            sheet.histogram(
                c.EVAL_DURATION, self._run.evals.durations, series, self.loaders.fold(loader_name)
            )

    def _loader(self, number: int) -> str:
        return self.loaders.fold(self._run.totals.names.loaders.names[number])

    def _rest(self, sheet: Sheet) -> None:
        run = self._run
        seconds = run.totals.activity_ns / NS_PER_S
        for activity in Activity:
            sheet.put(c.RUN_TIME, float(seconds[activity]), activity.name.lower())
        state = run.state()
        for value in c.RUN_STATES:
            sheet.put(c.RUN_STATUS, int(value == state), value)
        sheet.put(c.STALL_THRESHOLD, run.stalls.threshold_ns / NS_PER_S)
        sheet.put_all(c.STALL_EVENTS, c.STAGES, dict(run.stalls.events))
        sheet.histogram(c.CHECKPOINT_DURATION, run.checkpoints, 0, "save")
        sheet.put(c.CHECKPOINT_FAILURES, run.checkpoint_failures, "save")
