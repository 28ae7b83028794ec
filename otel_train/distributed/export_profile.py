"""Export profiles: what each rank of a run exports, by world size or by setting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from otel_train import catalog as c
from otel_train.aggregation.spans import UNDECIDED, SamplingRules

if TYPE_CHECKING:
    from otel_train.config import Config
    from otel_train.resource import RunInfo

MOST_FULL, MOST_REDUCED = 64, 2048
"""Largest world sizes for profiles ``full`` and ``reduced``.
Source: about 120 series per rank in full and 24 in reduced, against 50,000 per run in a shared Prometheus."""

MOST_TRACING_NODES: Final = 64
"""Nodes whose first rank traces ordinary steps. A step of 64 ranks is a trace of about 70 kB; stores refuse several MB."""

REDUCED_METRICS: Final = frozenset(
    metric.name
    for metric in (
        c.STAGE_DURATION, c.STEP_DURATION, c.STEPS, c.SAMPLES, c.TOKENS, c.MODEL_FLOPS, c.RUN_STATUS,
        c.HEARTBEAT_TIME, c.STALL_THRESHOLD, c.RANK_TIME, c.PROCESS_MEMORY_USAGE, c.ACCELERATOR_MEMORY_ALLOCATED,
        c.ACCELERATOR_MEMORY_RESERVED, c.ACCELERATOR_MEMORY_LIMIT
    )
)  # fmt: skip
"""Metrics of ranks other than 0 in profile ``reduced``. Rules that read others, such as host memory and ends of loaders, see rank 0 alone."""

REDUCED_EVENTS: Final = frozenset(
    metric.name
    for metric in (
        c.ACCELERATOR_MEMORY_OOMS, c.ACCELERATOR_MEMORY_ALLOC_RETRIES, c.LOADER_WORKER_EXITS, c.LOADER_ERRORS,
        c.NONFINITE_DETECTIONS, c.TELEMETRY_DROPS, c.TELEMETRY_FAULTS, c.INSTRUMENTATION_GAPS, c.PROFILER_ACTIVE,
        c.STALL_EVENTS
    )
)  # fmt: skip
"""Metrics that these ranks also publish once the value is above zero."""

MOST_INTERVAL_S: Final = 60.0
"""Longest export interval that the alert rules assume: a rank is silent after two of them."""


class Profile(NamedTuple):
    """What one rank exports.

    Attributes:
        name: ``full``, ``reduced``, ``rank0_aggregate`` or ``rank0``.
        metrics: whether it sends metrics and serves ``/metrics``.
        reduced: whether it sends ``REDUCED_METRICS`` and ``REDUCED_EVENTS`` alone, durations of training, sums over devices.
        spans: whether it sends spans.
        traces: whether spans include ordinary steps; else only steps that are slow or failed on this rank.
        expected: number of ranks of the run that send metrics.
        speaks: whether it is the only rank that sends metrics, and publishes the sample counts of all ranks.
    """

    name: str
    metrics: bool
    reduced: bool
    spans: bool
    traces: bool
    expected: int
    speaks: bool = False

    def interval_s(self, every_s: float) -> float:
        """Returns the seconds between two exports: twice the setting in ``reduced``, unless alerts would take it for silence."""
        return max(every_s, min(2 * every_s, MOST_INTERVAL_S)) if self.reduced else every_s


def profile_of(config: Config, info: RunInfo) -> Profile:
    """Returns the profile of this rank."""
    name, world, first = config.export_profile, info.world_size, info.rank == 0
    if name == "auto":
        name = "full" if world <= MOST_FULL else "reduced" if world <= MOST_REDUCED else "rank0_aggregate"
    speaks = first and world > 1
    leads_node = first or (info.local_rank == 0 and info.node_rank < MOST_TRACING_NODES)
    if name == "rank0":
        return Profile(name, first, reduced=False, spans=first, traces=first, expected=1, speaks=speaks)
    if name == "rank0_aggregate":
        return Profile(
            name, first, reduced=False, spans=leads_node, traces=leads_node, expected=1, speaks=speaks
        )
    traces = leads_node or world <= MOST_FULL
    return Profile(
        name, True, reduced=name == "reduced" and not first, spans=True, traces=traces, expected=world
    )


def sampling_rules(config: Config, profile: Profile) -> SamplingRules:
    """Returns the rules by which this rank selects the steps that it keeps a trace of."""
    ordinary, tuned = profile.traces, config.tuned()
    return SamplingRules(
        tuned.trace_warmup_steps if ordinary else 0,
        tuned.trace_every_steps if ordinary else UNDECIDED,
        config.trace_slow_factor,
        config.trace_rate_per_s,
        tuned.trace_burst,
    )
