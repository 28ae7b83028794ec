"""The run's account as metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otel_train import catalog as c
from otel_train.accounting.types import PHASES, TRAIN, Activity
from otel_train.aggregation.captures import CAPTURES_FOLDER, TRIGGERS
from otel_train.aggregation.metric_builder import LabelLimiter, MetricBuilder
from otel_train.aggregation.series_names import CHECKPOINT
from otel_train.clock import NS_PER_S

if TYPE_CHECKING:
    from otel_train.aggregation.run_state import RunState


class RunMetrics:
    """Writes the account of a run into a sheet.

    Args:
        run: the account.
        max_loaders: loader names published as they are.
        max_stages: the user's own stage names published as they are.
        lean: durations and steps of training alone.
    """

    def __init__(self, run: RunState, *, max_loaders: int, max_stages: int, lean: bool = False) -> None:
        self.loaders = LabelLimiter(max_loaders)
        self.stages = LabelLimiter(max_stages)
        self._run = run
        self._lean = lean

    def write(self, sheet: MetricBuilder) -> None:
        """Put everything that the edges have told."""
        self._stages(sheet)
        self._steps(sheet)
        self._loaders(sheet)
        self._rest(sheet)

    def overflows(self) -> dict[str, int]:
        """Names folded into ``_OTHER``, by label."""
        return {c.LOADER.name: len(self.loaders.overflown), c.STAGE.name: len(self.stages.overflown)}

    def _stages(self, sheet: MetricBuilder) -> None:
        totals = self._run.totals
        labels: dict[tuple[str, str, str], int] = {}
        into = np.full(len(totals.names.keys), -1, dtype=np.int64)
        for series, key in enumerate(totals.names.keys):
            if self._lean and key.phase != PHASES[TRAIN]:
                continue
            if key.phase and key.stage not in ("other", CHECKPOINT):
                stage = key.stage if key.stage in c.STAGES else self.stages.fold(key.stage)
                label = (stage, self.loaders.fold(key.loader), key.phase)
                into[series] = labels.setdefault(label, len(labels))
        folded = totals.stages.folded(into, len(labels))
        on_device = totals.device.folded(into, len(labels))
        for label, series in labels.items():
            held = tuple(self._run.teller.exemplars.get(("stage", *label), ()))
            sheet.histogram(c.STAGE_DURATION, folded, series, *label, exemplars=held)
            sheet.histogram(c.STAGE_DEVICE_DURATION, on_device, series, *label)

    def _steps(self, sheet: MetricBuilder) -> None:
        totals = self._run.totals
        into = np.full(len(totals.step_pairs), -1, dtype=np.int64)
        labels: dict[tuple[str, str], int] = {}
        for series, (loader, phase) in enumerate(totals.step_pairs):
            if self._lean and phase != TRAIN:
                continue
            label = (self.loaders.fold(totals.names.loaders.names[loader]), PHASES[phase])
            into[series] = labels.setdefault(label, len(labels))
            sheet.put(c.STEPS, int(totals.step_counts[series]), *label)
        folded = totals.steps.folded(into, len(labels))
        for label, series in labels.items():
            held = tuple(self._run.teller.exemplars.get(("step", *label), ()))
            sheet.histogram(c.STEP_DURATION, folded, series, *label, exemplars=held)
        sheet.put(c.STEP_INDEX, self._run.step_number)
        sheet.put(c.HEARTBEAT_STEP, self._run.step_number)
        skips = totals.skips
        known = [reason for reason in c.SKIP_REASON.values if reason != "amp_overflow" or skips is not None]
        sheet.put_all(c.STEP_SKIPS, known, {"amp_overflow": skips or 0})

    def _loaders(self, sheet: MetricBuilder) -> None:
        totals = self._run.totals
        for metric, counts in ((c.BATCHES, totals.batches), (c.SAMPLES, totals.samples)):
            for (loader, phase), count in counts.items():
                if phase < len(PHASES):
                    sheet.put(metric, count, self._loader(loader), PHASES[phase])
        for (loader, phase), ns in totals.loader_ns.items():
            if phase < len(PHASES):
                sheet.put(c.BATCH_TIME, ns / NS_PER_S, self._loader(loader), PHASES[phase])
        self._evals(sheet)

    def _evals(self, sheet: MetricBuilder) -> None:
        evals = self._run.evals
        labels: dict[str, int] = {}
        into = [labels.setdefault(self.loaders.fold(name), len(labels)) for name in evals.loaders]
        folded = evals.durations.folded(np.array(into, dtype=np.int64), len(labels))
        for label, series in labels.items():
            sheet.histogram(c.EVAL_DURATION, folded, series, label)

    def _loader(self, number: int) -> str:
        return self.loaders.fold(self._run.totals.names.loaders.names[number])

    def _rest(self, sheet: MetricBuilder) -> None:
        run = self._run
        seconds = run.totals.activity_ns / NS_PER_S
        spent = {activity.name.lower(): float(seconds[activity]) for activity in Activity}
        for activity in c.ACTIVITIES:
            sheet.put(c.RUN_TIME, spent.get(activity, 0.0), activity)
        sheet.put(c.RUN_TIME, run.down_s or 0.0, "restart")
        state = run.state()
        for value in c.RUN_STATES:
            sheet.put(c.RUN_STATUS, int(value == state), value)
        sheet.put(c.STALL_THRESHOLD, run.stalls.threshold_ns / NS_PER_S)
        for stage in {**dict.fromkeys(c.STAGES, 0), **run.stalls.events}:
            label = stage if stage in c.STAGES else self.stages.fold(stage)
            sheet.put(c.STALL_EVENTS, run.stalls.events.get(stage, 0), label)
        captures = run.captures
        sheet.put(c.PROFILER_ACTIVE, int(captures.active))
        for (trigger, error), number in captures.of_trigger().items():
            sheet.put(c.PROFILER_CAPTURES, number, trigger, error)
        for series, trigger in enumerate(TRIGGERS):
            sheet.histogram(c.PROFILER_CAPTURE_DURATION, captures.durations, series, trigger)
        if captures.bytes:
            sheet.put(c.PROFILER_CAPTURE_SIZE, captures.bytes)
        if newest := captures.newest:
            file = f"{CAPTURES_FOLDER}/{newest.record.get('file', '')}"
            sheet.put(
                c.PROFILER_CAPTURE_TIME, newest.ended_s, file, newest.rule, newest.trigger, newest.alert
            )
        sheet.histogram(c.COMPILE_DURATION, run.compiles.durations, 0)
        if run.compiles.judged:
            sheet.put(c.COMPILE_RECOMPILES, run.compiles.again)
        sheet.histogram(c.CHECKPOINT_DURATION, run.checkpoints.durations, 0, "save")
        sheet.put(c.CHECKPOINT_FAILURES, run.checkpoints.failures, "save")
