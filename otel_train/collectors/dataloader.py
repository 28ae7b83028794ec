"""Metrics of DataLoaders: workers, queues, build times, ends of passes, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from otel_train import catalog as c
from otel_train.aggregation.metrics import LabelLimiter, MetricBuilder
from otel_train.bottleneck.dataloader import LoaderFacts

if TYPE_CHECKING:
    from otel_train.aggregation.run_state import RunState
    from otel_train.datamodel import Clock
    from otel_train.instrumentation.dataloader_workers import BatchBuildTimes, LoaderState, WorkerExit
    from otel_train.instrumentation.loader_probe import LoaderReport

_USUAL_EXITS = ("SIGKILL", "SIGBUS", "SIGSEGV", "exit_1")


class LoaderWatch:
    """Collects facts about loaders that events do not contain, and writes them to a MetricBuilder.

    Args:
        loaders: returns what the rank reports of each loader, by name.
    """

    def __init__(
        self,
        run: RunState,
        loaders: Callable[[], Mapping[str, LoaderReport]],
        *,
        clock: Clock,
    ) -> None:
        self.worker_exits: dict[tuple[str, str], int] = {}
        """Unexpected exits of workers, by loader and cause."""
        self._errors = LabelLimiter(c.ERROR_TYPE.bound)
        self._run = run
        self.loaders = loaders
        self._clock = clock

    def add_builds(self, builds: Iterable[tuple[str, BatchBuildTimes]]) -> None:
        """Adds batches that workers have built, by loader."""
        for name, built in builds:
            self._run.totals.loaders.add_builds(name, *built)

    def add_exits(self, exits: Iterable[tuple[str, WorkerExit]]) -> None:
        """Adds worker exits, by loader, and records an event for each."""
        for loader, (worker, pid, cause) in exits:
            self.worker_exits[loader, cause] = self.worker_exits.get((loader, cause), 0) + 1
            attributes: dict[str, str | int] = {
                c.STEP_NUMBER.name: self._run.step_number,
                c.SPAN_LOADER.name: loader,
                c.SPAN_ERROR_TYPE.name: cause,
                c.WORKER_NUMBER.name: worker,
                c.WORKER_PID.name: pid,
            }
            self._run.spans.event(c.LOADER_WORKER_EXIT_EVENT.name, self._clock(), attributes)

    def facts(self) -> dict[str, LoaderFacts]:
        """Returns the facts about each loader that events do not contain."""
        return {name: self._facts(name, report) for name, report in list(self.loaders().items())}

    def write(self, builder: MetricBuilder, folded: LabelLimiter, unshared_of: Callable[[int], int]) -> None:
        """Writes the current values.

        Args:
            builder: takes them.
            folded: bounds loader names.
            unshared_of: returns the resident bytes that a process does not share.
        """
        for name, report in list(self.loaders().items()):
            label = folded.limit(name)
            self._write_endings(builder, name, label, sized=report.sized)
            self._write_errors(builder, name, label, report)
            if report.token_count:
                builder.put(c.TOKENS, report.token_count, label, report.phase or "train")
            if report.state is not None:
                self._write_workers(builder, label, report, report.state)
                builder.put(c.MEMORY_USAGE, sum(map(unshared_of, report.state.pids)), label, "workers")
        for (name, how), number in self.worker_exits.items():
            builder.put(c.LOADER_WORKER_EXITS, number, folded.limit(name), how)
        loaders = self._run.totals.loaders
        labels = [(folded.limit(name),) for name in loaders.numbers]
        builder.histograms(c.LOADER_BATCH_BUILD_DURATION, loaders.builds, labels)
        builder.histograms(c.LOADER_START_DURATION, loaders.start_ups, labels)

    def _facts(self, name: str, report: LoaderReport) -> LoaderFacts:
        exits = {how: n for (loader, how), n in self.worker_exits.items() if loader == name}
        return LoaderFacts(
            report.workers, report.prefetch_factor, report.persistent, report.token_count,
            report.weights.row(), dict(report.failures), exits, report.given
        )  # fmt: skip

    def _write_endings(self, builder: MetricBuilder, name: str, label: str, *, sized: bool) -> None:
        loaders = self._run.totals.loaders
        born = ("epoch_end", "short", "error") if sized else ("streaming_end", "error")
        for reason in c.EXHAUSTION_REASON.values:  # from 0 on: increase() does not see a first value of 1
            number = loaders.endings.get((name, reason), 0)
            if number or reason in born:
                builder.put(c.LOADER_EXHAUSTIONS, number, label, reason)
        builder.put(c.EPOCH_INDEX, loaders.passes[name], label)

    def _write_errors(self, builder: MetricBuilder, name: str, label: str, report: LoaderReport) -> None:
        failures = dict(report.failures)
        # Exported from 0 on, without a class. Errors of unknown class (Ctrl-C) are counted here.
        rest = max(0, self._run.loader_errors.get(name, 0) - sum(failures.values()))
        builder.put(c.LOADER_ERRORS, rest, label)
        for error, number in failures.items():
            builder.put(c.LOADER_ERRORS, number, label, self._errors.limit(error))

    @staticmethod
    def _write_workers(builder: MetricBuilder, label: str, report: LoaderReport, state: LoaderState) -> None:
        for how in _USUAL_EXITS:  # as above
            builder.put(c.LOADER_WORKER_EXITS, 0, label, how)
        builder.put(c.LOADER_WORKER_COUNT, state.alive, label, "alive")
        builder.put(c.LOADER_WORKER_COUNT, state.dead, label, "dead")
        builder.put(c.LOADER_WORKER_COUNT, state.expected, label, "expected")
        builder.put(c.LOADER_QUEUE_LIMIT, state.limit, label)
        if state.queued is None:
            return
        builder.put(c.LOADER_QUEUE_SIZE, state.queued, label)
        mean = report.weights.mean
        if mean is not None:
            builder.put(c.MEMORY_USAGE, round(mean * (state.queued - state.pinned)), label, "prefetch_queue")
            if state.pinned:
                builder.put(c.MEMORY_USAGE, round(mean * state.pinned), label, "pinned")
