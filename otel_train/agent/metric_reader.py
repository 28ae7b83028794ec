"""Builds metric snapshots from the totals of the run and from sampled values: memory, logged values, self metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from otel_train import catalog as c
from otel_train.accounting.types import TRAIN
from otel_train.aggregation.metrics import LoggedSignals, MetricBuilder, RunMetrics
from otel_train.catalog import PHASES
from otel_train.datamodel import NS_PER_S, Snapshot
from otel_train.distributed.export_profile import REDUCED_EVENTS, REDUCED_METRICS, profile_of
from otel_train.instrumentation.logged_values import UserEvent, Value

if TYPE_CHECKING:
    from collections import deque

    from otel_train.aggregation.run_state import RunState
    from otel_train.collectors.dataloader import LoaderWatch
    from otel_train.collectors.hardware import AcceleratorReader, HardwareReader
    from otel_train.collectors.process import ProcessReader
    from otel_train.config import Config
    from otel_train.resource import RunInfo


class SelfMetrics(NamedTuple):
    """Functions that return the losses, faults, overhead and instrumentation gaps of otel_train."""

    drops: Callable[[], Mapping[tuple[str, str], int]]
    faults: Callable[[], Mapping[str, int]]
    overhead_s: Callable[[], float]
    gaps: Callable[[], list[dict[str, str]]]


class MetricSources(NamedTuple):
    """Sources of metrics that are not computed from events."""

    signals: LoggedSignals
    process: ProcessReader
    accelerators: AcceleratorReader
    hardware: HardwareReader
    health: SelfMetrics
    watch: LoaderWatch


class MetricReader:
    """Makes a snapshot of every metric."""

    def __init__(self, run: RunState, readings: MetricSources, *, info: RunInfo, config: Config) -> None:
        self.state = ""
        """State at the end of the run, one of ``catalog.RUN_STATES``; "" while it runs."""
        self.about: tuple[str, ...] = ()
        """Label values of ``catalog.RUN_INFO``, once they are known."""
        self.step_flops: Callable[[], int] = lambda: 0
        """Model FLOP of one step of this rank, counted; 0 if that is not known."""
        self._per_sample = 0.0
        self._counted: dict[
            tuple[str, str, str], None
        ] = {}  # keys of ``counted``, in the order of their first counts
        self._samples: dict[
            tuple[int, int], int
        ] = {}  # by loader and phase, those of batches that belong to steps
        self.more: list[Callable[[MetricBuilder], None]] = []
        """Functions that write the metrics of other components."""
        self._run = run
        self._info = info
        self._config = config
        self._sources = readings
        self._profile = profile_of(config, info)
        most = config.max_label_values
        self._run_metrics = RunMetrics(
            run, max_loaders=most, max_stages=most // 2, reduced=self._profile.reduced
        )
        self._emitters = {
            c.Emit.ALL: True,
            c.Emit.RANK0: info.rank == 0,
            c.Emit.DP_LEADER: info.dp_leader,
            c.Emit.NODE: info.local_rank == 0,
        }

    def snapshot(self, now_ns: int) -> Snapshot:
        """Returns every metric of this process; ``now_ns`` is on the monotonic clock."""
        reduced = self._profile.reduced
        builder = MetricBuilder(
            self._emitters.__getitem__,
            only=REDUCED_METRICS if reduced else None,
            events=REDUCED_EVENTS if reduced else (),
        )
        self._run_metrics.write(builder)
        self._sources.signals.write(builder)
        self._sources.process.write(builder)
        self._sources.accelerators.write(builder)
        self._sources.hardware.write(builder)
        self._write_run(builder)
        self._sources.watch.write(builder, self._run_metrics.loaders, self._sources.process.unshared_of)
        self._write_throughput(builder)
        self._write_health(builder)
        builder.put(c.RANK_TIME, max(0, self._run.ended_by(now_ns) - self._run.started_ns) / NS_PER_S)
        if self._profile.speaks:  # this rank exports the sums over all ranks, which contain its own counts
            builder.drop(c.SAMPLES)
            builder.drop(c.TOKENS)
        for write in self.more:
            write(builder)
        self._write_flops(builder)
        start_ns = self._run.began_unix(self._info.started_unix_ns)
        return Snapshot(start_ns, time.time_ns(), builder.families())

    def counted(self) -> dict[tuple[str, str, str], int]:
        """Returns the samples and tokens that this rank counts for its model replica, by metric, loader and phase.

        Each stays in its place: a report names the loaders of the first ones, and a name that goes lets a counter fall.
        """
        if not self._info.dp_leader:
            return {}
        totals, tokens = self._run.totals, c.TOKENS.name
        # A loader that is left out from now on keeps its number, because a counter must not fall.
        self._samples.update(
            {pair: totals.samples[pair] for pair in totals.rated() if pair in totals.samples}
        )
        found = {
            (c.SAMPLES.name, totals.names.loaders.names[loader], PHASES[phase]): number
            for (loader, phase), number in self._samples.items()
        }
        for name, probe in list(self._sources.watch.loaders().items()):
            if probe.token_count:
                found[tokens, name, probe.phase or PHASES[TRAIN]] = probe.token_count
        if self._sources.signals.tokens:
            found[tokens, "", PHASES[TRAIN]] = self._sources.signals.tokens
        self._counted.update(dict.fromkeys(found))
        return {key: found[key] for key in self._counted if key in found}

    def events(self) -> dict[str, int]:
        """Returns the counts that other ranks need, by ``train.rank.event``."""
        lost = sum(n for (_, reason), n in self._sources.health.drops().items() if reason != "sampled_out")
        return {
            "oom": self._sources.accelerators.ooms(),
            "loader_worker_exit": sum(self._sources.watch.worker_exits.values()),
            # Without gradients: gradient scalers make them overflow on purpose.
            "nonfinite": self._sources.signals.nonfinite["loss"],
            "exception": int(self._run.totals.failed.sum()),
            "drop": lost,
            "stall": sum(self._run.stalls.events.values()),
        }

    def _write_run(self, builder: MetricBuilder) -> None:
        run, info, config = self._run, self._info, self._config
        state = self.state or run.state()
        for value in c.RUN_STATES:
            if value == state or value not in c.SIGNAL_ENDS or info.attempt:
                builder.put(c.RUN_STATUS, int(value == state), value)
        if self.about:
            builder.put(c.RUN_INFO, 1, *self.about)
        builder.put(c.HEARTBEAT_TIME, run.unix(run.stalls.last_ns) / NS_PER_S)
        builder.put(c.RUN_RESTARTS, info.attempt)
        builder.put(c.WORLD_SIZE, info.world_size)
        builder.put(c.RANKS_EXPECTED, self._profile.expected)
        if config.total_steps:
            builder.put(c.RUN_PROGRESS_RATIO, run.step_number / config.total_steps)
        last = run.checkpoints.last_ns or run.started_ns
        builder.put(c.CHECKPOINT_LAST_SUCCESS_TIME, run.unix(last) / NS_PER_S)
        if config.checkpoint_every_s or run.checkpoints.interval_s:
            builder.put(c.CHECKPOINT_INTERVAL, config.checkpoint_every_s or run.checkpoints.interval_s)

    def _write_throughput(self, builder: MetricBuilder) -> None:
        """Writes the samples per second that the slower of loader and compute would reach alone.

        Only for loaders without workers: the time inside ``next`` is then the time of the loader itself.
        """
        totals = self._run.totals
        if self._sources.signals.tokens:
            builder.put(c.TOKENS, self._sources.signals.tokens, "", "train")
        names = totals.names.loaders.names
        trained = {
            names[loader]: count for (loader, phase), count in totals.samples.items() if phase == TRAIN
        }
        spent = totals.train_s_by_loader()
        for name, probe in list(self._sources.watch.loaders().items()):
            data_s, rest_s = spent.get(name, (0.0, 0.0))
            if probe.workers == 0 and name in trained and min(data_s, rest_s) > 0:
                slower_s = max(data_s, rest_s) * self._info.replica_ranks / self._info.world_size
                builder.put(
                    c.THROUGHPUT_THEORETICAL, trained[name] / slower_s, self._run_metrics.loaders.limit(name)
                )

    def _write_flops(self, builder: MetricBuilder) -> None:
        per_sample = self._config.flops_per_sample or self._counted_per_sample()
        if not per_sample:
            return
        trained = [
            number
            for attributes, number in builder.values(c.SAMPLES).items()
            if dict(attributes)[c.PHASE.name] == PHASES[TRAIN]
        ]
        if trained:
            builder.put(c.MODEL_FLOPS, sum(trained) * per_sample)

    def _counted_per_sample(self) -> float:
        """Returns FLOP of the counted step over the mean samples per step up to it; constant afterwards."""
        step_flops, totals = self.step_flops(), self._run.totals
        samples = sum(number for (_, phase), number in totals.samples.items() if phase == TRAIN)
        if not self._per_sample and step_flops and samples:
            self._per_sample = step_flops * totals.steps_by_phase().get(PHASES[TRAIN], 0) / samples
        return self._per_sample

    def _write_health(self, builder: MetricBuilder) -> None:
        for (signal, reason), number in self._sources.health.drops().items():
            # The reduced profile drops the labels, so deliberately omitted spans would count as lost.
            if not (self._profile.reduced and reason == "sampled_out"):
                builder.put(c.TELEMETRY_DROPS, number, signal, reason)
        builder.put(c.TELEMETRY_OVERHEAD_TIME, self._sources.health.overhead_s())
        for part, faults in self._sources.health.faults().items():
            builder.put(c.TELEMETRY_FAULTS, faults, part)
        for label, number in {**self._run_metrics.overflows(), **self._sources.signals.overflows()}.items():
            builder.put(c.TELEMETRY_ATTRIBUTE_OVERFLOWS, number, label)
        for gap in self._sources.health.gaps():
            if gap["cause"]:
                builder.put(c.INSTRUMENTATION_GAPS, 1, gap["what"], gap["cause"])


_MOST_WARNINGS = 16

_log = logging.getLogger("otel_train")


class LoggedValueReader:
    """Turns logged values (see ``logged_values.plain``) into metrics and events."""

    def __init__(self, logged: deque[Value | UserEvent], signals: LoggedSignals, run: RunState) -> None:
        self.refused = 0
        self._logged = logged
        self._signals = signals
        self._run = run
        self._pending: list[UserEvent] = []
        self._warned: set[str] = set()

    def read(self) -> None:
        """Reads the values that were reported since the last call."""
        while self._logged:
            entry = self._logged.popleft()
            if isinstance(entry, Value):
                self._log(entry)
            else:
                self._pending.append(entry)

    def emit_events(self) -> None:
        """Emits the events that were read, with the number of their step, which is known now."""
        pending, self._pending = self._pending, []
        for event in pending:
            number = self._run.recent.at(event.at_ns, self._run.step_number)
            self._run.spans.event(event.name, event.at_ns, {c.STEP_NUMBER.name: number, **event.attributes})

    def _log(self, entry: Value) -> None:
        if entry.value is None:
            self._refuse(entry.name)
        elif kind := self._signals.take(entry.name, entry.value):
            self._run.sampler.nonfinite(entry.at_ns)
            attributes = {c.SPAN_NONFINITE_KIND.name: kind, "name": entry.name}
            self._pending.append(UserEvent(entry.at_ns, c.NONFINITE_EVENT.name, attributes))

    def _refuse(self, name: str) -> None:
        self.refused += 1
        if name not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(name)
            _log.warning("log(%s=...): expected a number or a tensor of one element; it is left out", name)
