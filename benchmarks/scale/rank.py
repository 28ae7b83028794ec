"""One simulated rank: its account, its metric reader and its spans."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.scale.fakes import readings_of
from benchmarks.scale.workload import SOURCES, TRAIN, Workload
from otel_train.agent.metric_reader import MetricReader
from otel_train.aggregation.run_state import RunState
from otel_train.aggregation.spans import Ids
from otel_train.distributed.export_profile import profile_of, sampling_rules
from otel_train.resource import about_run

if TYPE_CHECKING:
    from otel_train.config import Config
    from otel_train.datamodel import Anchor, Snapshot, Span
    from otel_train.resource import RunInfo

_REMEMBERED_SPANS = 4096
"""Spans kept for ranks that have not sent them yet."""


class Reading(NamedTuple):
    """Metrics and spans of a rank at one instant.

    Attributes:
        at_ns: when, on the monotonic clock.
        snapshot: every metric.
        spans_until: number of spans made so far.
    """

    at_ns: int
    snapshot: Snapshot
    spans_until: int


class SimulatedRank:
    """Runs the synthetic loop through the account and the reporter of a real rank.

    Args:
        info: its identity.
        config: as of a real run.
        anchor: when the run began, on both clocks.
        workload: the loop that it runs.
    """

    def __init__(self, info: RunInfo, config: Config, *, anchor: Anchor, workload: Workload) -> None:
        self.info = info
        self.lock = threading.Lock()
        """Held while the account is advanced or read."""
        self.profile = profile_of(config, info)
        self.run = RunState(
            anchor.clock_ns, anchor=anchor, ids=Ids(info.run_id, info.attempt, info.rank),
            rules=sampling_rules(config, self.profile), stall_after_s=config.stall_after_s,
        )  # fmt: skip
        self.run.learn(SOURCES)
        self.readings = readings_of(self.run)
        self.reporter = MetricReader(self.run, self.readings, info=info, config=config)
        self.reporter.about = about_run({"train.run.name": info.run_name})
        self._workload = workload
        self._spans: list[Span] = []
        self._forgotten = 0
        self.run.spans.start(anchor.clock_ns, anchor.clock_ns)

    def read(self, now_ns: int) -> Reading:
        """Advances to ``now_ns`` and returns what the rank reports."""
        self.advance(now_ns)
        return self._look(now_ns)

    def advance(self, now_ns: int) -> None:
        """Advances to ``now_ns``."""
        written = self._workload.until(now_ns)
        self.run.device.add(written.device)
        self.run.totals.loaders.add_builds(TRAIN, written.builds_ns, 0)
        self.run.feed(0, written.times, written.codes, name="MainThread", main=True)
        self.run.check_stalls(now_ns)

    def end(self, now_ns: int) -> Reading:
        """Finishes the run at ``now_ns`` and returns the last report."""
        self.read(now_ns)
        self.run.close(now_ns)
        self.run.spans.end(now_ns, self.run.step_number)
        self.reporter.state = "finished"
        return self._look(now_ns)

    def spans(self, begin: int, end: int) -> list[Span]:
        """Returns the spans from number ``begin`` up to number ``end``, as far as they are kept."""
        return self._spans[max(0, begin - self._forgotten) : max(0, end - self._forgotten)]

    def _look(self, now_ns: int) -> Reading:
        spans, _ = self.run.spans.drain()
        self._spans += spans
        surplus = max(0, len(self._spans) - _REMEMBERED_SPANS)
        del self._spans[:surplus]
        self._forgotten += surplus
        return Reading(now_ns, self.reporter.snapshot(now_ns), self._forgotten + len(self._spans))
