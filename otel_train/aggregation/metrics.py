"""Builds metric families from counters and histograms."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from otel_train import catalog as c
from otel_train.accounting.types import TRAIN, Activity
from otel_train.aggregation.series_names import CHECKPOINT, Key
from otel_train.catalog import ALL, DEVICE, OTHER_VALUE, PHASES, Emit, Kind, Metric
from otel_train.datamodel import CAPTURES_FOLDER, NS_PER_S, MetricFamily, Point

if TYPE_CHECKING:
    from otel_train.aggregation.histogram import Histograms
    from otel_train.aggregation.run_state import RunState
    from otel_train.datamodel import Attributes, Exemplar, HistogramPoint


_NO_EXEMPLARS: Final[Mapping[tuple[str, ...], Iterable[Exemplar]]] = MappingProxyType({})


class MetricBuilder:
    """Collects points and returns them as metric families.

    Args:
        emits: whether this process publishes metrics of a given kind of emitter.
        only: names of the metrics to collect, with all devices added up; None for all.
        events: names of further metrics, which are collected only when their value is not zero.
    """

    def __init__(
        self,
        emits: Callable[[Emit], bool] = lambda _: True,
        *,
        only: Container[str] | None = None,
        events: Container[str] = (),
    ) -> None:
        self._emits = emits
        self._only = only
        self._events = events
        self._points: dict[str, dict[Attributes, float]] = {}
        self._histograms: dict[str, list[HistogramPoint]] = {}

    def put(self, metric: Metric, value: float, *labels: str) -> None:
        """Sets one series. Values of a counter with equal labels add up, as those of names replaced by ``_OTHER``."""
        if self._only is not None:
            if metric.name not in self._only and not (value and metric.name in self._events):
                return
            labels = tuple(
                "" if label is DEVICE else text for label, text in zip(metric.labels, labels, strict=False)
            )
        series = self._points.setdefault(metric.name, {})
        attributes = _attributes(metric, labels)
        before = series.get(attributes, 0) if metric.kind in (Kind.COUNTER, Kind.UPDOWN) else 0
        series[attributes] = before + value

    def drop(self, metric: Metric) -> None:
        """Removes the series of a counter or gauge."""
        self._points.pop(metric.name, None)

    def values(self, metric: Metric) -> dict[Attributes, float]:
        """Returns the values of a counter or gauge, by labels."""
        return dict(self._points.get(metric.name, {}))

    def histograms(
        self, metric: Metric, found: Histograms, labels: Iterable[tuple[str, ...] | None],
        exemplars: Mapping[tuple[str, ...], Iterable[Exemplar]] = _NO_EXEMPLARS,
    ) -> None:  # fmt: skip
        """Adds the series that are not empty. ``labels``: of each series, None to leave it out; equal ones are merged."""
        if self._only is not None and metric.name not in self._only:
            return
        numbers, folded = found.folded(labels)
        for label, series in numbers.items():
            if folded.count(series):
                point = folded.point(series, _attributes(metric, label), tuple(exemplars.get(label, ())))
                self._histograms.setdefault(metric.name, []).append(point)

    def families(self) -> tuple[MetricFamily, ...]:
        """Returns the collected metrics that this process publishes, in catalog order."""
        found = []
        for metric in ALL:
            if not self._emits(metric.emit):
                continue
            if metric.name in self._points:
                points = tuple(Point(*series) for series in self._points[metric.name].items())
                found.append(MetricFamily(metric, points))
            elif metric.name in self._histograms:
                found.append(MetricFamily(metric, tuple(self._histograms[metric.name])))
        return tuple(found)


def _attributes(metric: Metric, labels: tuple[str, ...]) -> Attributes:
    return tuple(
        (label.name, value) for label, value in zip(metric.labels, labels, strict=False) if value != ""
    )


MOST_OVERFLOWN: Final = 4096
"""Most different values beyond the bound of a label that are counted."""


class LabelLimiter:
    """Replaces label values beyond a bound by ``_OTHER``; the first values are kept."""

    def __init__(self, bound: int) -> None:
        self._overflown: set[str] = set()
        self._names: set[str] = set()
        self._bound = bound

    @property
    def overflown(self) -> int:
        """Number of different values that were replaced; it stops at ``MOST_OVERFLOWN``."""
        return len(self._overflown)

    def limit(self, name: str) -> str:
        """Returns ``name``, or ``_OTHER`` if the bound is reached and the name is new."""
        if name in self._names or name in ("", OTHER_VALUE):
            return name
        if len(self._names) < self._bound:
            self._names.add(name)
            return name
        if len(self._overflown) < MOST_OVERFLOWN:
            self._overflown.add(name)
        return OTHER_VALUE


class RunMetrics:
    """Writes the state of a run to a metric builder."""

    def __init__(self, run: RunState, *, max_loaders: int, max_stages: int, reduced: bool = False) -> None:
        self.loaders = LabelLimiter(max_loaders)
        self.stages = LabelLimiter(max_stages)
        self._run = run
        self._reduced = reduced
        self._rated: dict[tuple[int, int], None] = {}

    def write(self, builder: MetricBuilder) -> None:
        """Adds all metrics derived from events."""
        self._stages(builder)
        self._steps(builder)
        self._loaders(builder)
        self._rest(builder)

    def overflows(self) -> dict[str, int]:
        """Returns the number of names replaced by ``_OTHER``, by label."""
        return {c.LOADER.name: self.loaders.overflown, c.STAGE.name: self.stages.overflown}

    def _stages(self, builder: MetricBuilder) -> None:
        totals = self._run.totals
        labels = [self._stage_labels(key) for key in totals.names.keys]
        builder.histograms(c.STAGE_DURATION, totals.stages, labels, self._run.spans.exemplars["stage"])
        builder.histograms(c.STAGE_DEVICE_DURATION, totals.device, labels)

    def _stage_labels(self, key: Key) -> tuple[str, ...] | None:
        left_out = self._reduced and key.phase != PHASES[TRAIN]
        if left_out or not key.phase or key.stage in ("other", CHECKPOINT):
            return None
        stage = key.stage if key.stage in c.STAGES else self.stages.limit(key.stage)
        return stage, self.loaders.limit(key.loader), key.phase

    def _steps(self, builder: MetricBuilder) -> None:
        totals = self._run.totals
        labels: list[tuple[str, ...] | None] = []
        for (loader, phase), series in totals.step_pairs.items():
            label = None if self._reduced and phase != TRAIN else (self._loader(loader), PHASES[phase])
            labels.append(label)
            if label is not None:
                builder.put(c.STEPS, int(totals.step_counts[series]), *label)
        builder.histograms(c.STEP_DURATION, totals.steps, labels, self._run.spans.exemplars["step"])
        builder.put(c.STEP_INDEX, self._run.step_number)
        builder.put(c.HEARTBEAT_STEP, self._run.step_number)
        if totals.skips is not None:
            builder.put(c.STEP_SKIPS, totals.skips, "amp_overflow")

    def _loaders(self, builder: MetricBuilder) -> None:
        totals = self._run.totals
        # A counter that was exported once stays, even if it turns out that its loader fills a queue (see ``Totals.rated``).
        self._rated.update(dict.fromkeys(totals.rated()))
        for metric, counts in ((c.BATCHES, totals.batches), (c.SAMPLES, totals.samples)):
            for loader, phase in self._rated:
                if (loader, phase) in counts:
                    builder.put(metric, counts[loader, phase], self._loader(loader), PHASES[phase])
        for (loader, phase), ns in totals.loader_ns.items():
            if phase < len(PHASES):
                builder.put(c.BATCH_TIME, ns / NS_PER_S, self._loader(loader), PHASES[phase])
        evals = self._run.evals
        labels = [(self.loaders.limit(name),) for name in evals.loaders]
        builder.histograms(c.EVAL_DURATION, evals.durations, labels)

    def _loader(self, number: int) -> str:
        return self.loaders.limit(self._run.totals.names.loaders.names[number])

    def _rest(self, builder: MetricBuilder) -> None:
        run = self._run
        seconds = run.totals.publish() / NS_PER_S
        spent = {activity.name.lower(): float(seconds[activity]) for activity in Activity}
        for activity in c.ACTIVITIES:
            builder.put(c.RUN_TIME, spent.get(activity, 0.0), activity)
        builder.put(c.RUN_TIME, run.total_down_s, "restart")
        builder.put(c.STALL_THRESHOLD, run.stalls.threshold_ns / NS_PER_S)
        for stage in {**dict.fromkeys(c.STAGES, 0), **run.stalls.events}:
            label = stage if stage in c.STAGES else self.stages.limit(stage)
            builder.put(c.STALL_EVENTS, run.stalls.events.get(stage, 0), label)
        captures = run.captures
        builder.put(c.PROFILER_ACTIVE, int(captures.active))
        for (trigger, error), number in captures.of_trigger().items():
            builder.put(c.PROFILER_CAPTURES, number, trigger, error)
        builder.histograms(
            c.PROFILER_CAPTURE_DURATION, captures.durations, [(each,) for each in c.PROFILER_TRIGGER.values]
        )
        if captures.bytes:
            builder.put(c.PROFILER_CAPTURE_SIZE, captures.bytes)
        if newest := captures.newest:
            file = f"{CAPTURES_FOLDER}/{newest.metadata.get('file', '')}"
            builder.put(
                c.PROFILER_CAPTURE_TIME, newest.ended_s, file, newest.rule, newest.trigger, newest.alert
            )
        builder.histograms(c.COMPILE_DURATION, run.compiles.durations, [()])
        if run.compiles.judged:
            builder.put(c.COMPILE_RECOMPILES, run.totals.recompiled.count)
        builder.histograms(c.CHECKPOINT_DURATION, run.checkpoints.durations, [("save",)])
        builder.put(c.CHECKPOINT_FAILURES, run.checkpoints.failures, "save")


_NORMS = ("grad_norm", "gradient_norm", "total_norm")
_RATES = ("lr", "learning_rate")
_SCALES = ("amp_scale", "loss_scale")


class LoggedSignals:
    """Last values passed to ``log``, and how often one was not finite."""

    def __init__(self) -> None:
        self.nonfinite = dict.fromkeys(c.NONFINITE_KIND.values, 0)
        self.tokens = 0
        self._losses: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        self._values: dict[str, float] = {}
        self._single: dict[str, float] = {}
        self._loss_names = LabelLimiter(c.LOSS_NAME.bound)
        self._rate_names = LabelLimiter(c.OPTIMIZER_GROUP.bound)
        self._value_names = LabelLimiter(c.METRIC_NAME.bound)

    def take(self, name: str, value: float) -> str:
        """Stores one value; returns its ``train.nonfinite.kind`` if it is counted as not finite, else ""."""
        finite, kind = math.isfinite(value), ""
        if name == "tokens":
            self.tokens += int(value) if finite else 0
        elif name in _NORMS:
            self._single[c.GRADIENT_NORM.name] = value
            kind = "gradient"
        elif name in _SCALES:
            self._single[c.AMP_SCALE.name] = value
        elif name.split("/", maxsplit=1)[0] in _RATES:
            self._rates[self._rate_names.limit(name.partition("/")[2] or "0")] = value
        elif "loss" in name:
            self._losses[self._loss_names.limit(name)] = value
            kind = "loss"
        else:
            self._values[self._value_names.limit(name)] = value
        if finite or not kind:
            return ""
        self.nonfinite[kind] += 1
        return kind

    def overflows(self) -> dict[str, int]:
        """Returns the number of names replaced by ``_OTHER``, by label."""
        return {
            c.LOSS_NAME.name: self._loss_names.overflown,
            c.OPTIMIZER_GROUP.name: self._rate_names.overflown,
            c.METRIC_NAME.name: self._value_names.overflown,
        }

    def write(self, builder: MetricBuilder) -> None:
        """Adds the last values, all under phase ``train``."""
        for name, value in self._losses.items():
            builder.put(c.LOSS, value, name, PHASES[TRAIN])
        for group, value in self._rates.items():
            builder.put(c.LEARNING_RATE, value, group)
        for name, value in self._values.items():
            builder.put(c.METRIC_VALUE, value, name, PHASES[TRAIN])
        for metric in (c.GRADIENT_NORM, c.AMP_SCALE):
            if metric.name in self._single:
                builder.put(metric, self._single[metric.name])
        for kind, number in self.nonfinite.items():
            builder.put(c.NONFINITE_DETECTIONS, number, kind)
