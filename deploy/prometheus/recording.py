"""Recording rules: what dashboards and alerts ask, asked once."""

from __future__ import annotations

from typing import Final, NamedTuple

RUN: Final = "train_run_id"
PHASE: Final = f"{RUN}, train_phase"
LOADER: Final = f"{PHASE}, train_loader"
STAGE: Final = f"{LOADER}, train_stage"
RANK: Final = f"{RUN}, train_rank"
DEVICE: Final = f"{RANK}, hw_name"

ACTIVE_STATES: Final = "training|evaluating|checkpointing|stalled"
"""A run in one of these states owes progress. Getting ready may take as long as it likes."""

SILENT_S: Final = 120
"""Age of a rank's last sample from which the rank counts as mute: eight scrapes of 15 s."""

STEP: Final = "train_step_duration_seconds"
QUANTILES: Final = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
LOCAL_STAGES: Final = "data|h2d|forward"
"""Work no other rank can prolong. Backward and the optimizer wait for the slowest rank."""


class Record(NamedTuple):
    """One recording rule.

    Attributes:
        name: ``level:metric:operation``; the level names the labels that are left.
        expr: PromQL.
    """

    name: str
    expr: str


class Group(NamedTuple):
    """Rules that are evaluated one after the other.

    Attributes:
        name: unique among all files.
        interval: how often.
        rules: in the order of evaluation.
    """

    name: str
    interval: str
    rules: tuple[Record, ...]


class Form:
    """How a histogram is asked: one question, in two spellings.

    Args:
        name: ``native`` or ``classic``.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def sum(self, metric: str, by: str, window: str, matchers: str = "") -> str:
        """Seconds per second."""
        if self.name == "classic":
            return f"sum by ({by}) (rate({metric}_sum{matchers}[{window}]))"
        return f"sum by ({by}) (histogram_sum(rate({metric}{matchers}[{window}])))"

    def count(self, metric: str, by: str, window: str) -> str:
        """Occurrences per second."""
        if self.name == "classic":
            return f"sum by ({by}) (rate({metric}_count[{window}]))"
        return f"sum by ({by}) (histogram_count(rate({metric}[{window}])))"

    def quantile(self, share: float, metric: str, by: str, window: str) -> str:
        """What that share of the occurrences did not exceed."""
        if self.name == "classic":
            return f"histogram_quantile({share}, sum by ({by}, le) (rate({metric}_bucket[{window}])))"
        return f"histogram_quantile({share}, sum by ({by}) (rate({metric}[{window}])))"


COLLECTOR: Final = "train_collector"
"""Label that a Collector puts on the runs it carries, and on itself where it is scraped."""

INFO: Final = "run:train_info:last1h"
WHOSE: Final = "train_run_name, train_team, train_owner, train_job, train_cluster, train_namespace"
"""Labels of a run that every alert on it carries. One set per run, and kept for an hour after the run was heard of."""

NATIVE: Final = Form("native")
CLASSIC: Final = Form("classic")


_STAGES: Final = ("train_stage_duration_seconds", "train_stage_device_duration_seconds")
_DURATIONS: Final = (
    *(("run_loader_stage", metric, STAGE) for metric in _STAGES),
    ("run_loader", STEP, LOADER),
)
"""(level, metric, labels) of what is recorded per loader."""

_WORK: Final = "run_rank:train_local_work_seconds"
_SAMPLES_PER_BATCH_TIME: Final = "run_loader:train_samples_per_batch_time:ratio5m"
_MEDIAN_WORK: Final = "run:train_local_work_seconds:median5m"
_RANK_TIME: Final = "run_rank:train_rank_time_seconds:rate5m"
_RATE_OF_TIME: Final = f"on ({RANK}) group_left () ({_RANK_TIME} > 0)"
"""A rate over this is right for runs younger than the window, and up to the last sample of one that has ended:
both are extrapolated in the same way, from the same moments."""


def histogram_groups(form: Form) -> tuple[Group, ...]:
    """The rules that read histograms. Both forms record the same names.

    Every rule here reads a histogram itself. One that read only what others recorded would go on recording
    where both files are loaded and its form of histogram is missing: twice, at two moments.
    """
    return (
        *(_durations(form, level, metric, by) for level, metric, by in _DURATIONS),
        _whole_run(form),
        _ranks(form),
        _checkpoints(form),
    )


def _durations(form: Form, level: str, metric: str, by: str) -> Group:
    name = f"{level}:{metric}"
    rules = (
        Record(f"{name}_sum:rate5m", form.sum(metric, by, "5m")),
        Record(f"{name}_count:rate5m", form.count(metric, by, "5m")),
        *(Record(f"{name}:{p}_5m", form.quantile(share, metric, by, "5m")) for share, p in QUANTILES),
    )
    return Group(f"otel_train.{form.name}.{metric}", "30s", rules)


def _whole_run(form: Form) -> Group:
    rules = (
        Record(f"run:{STEP}_sum:rate5m", form.sum(STEP, PHASE, "5m")),
        Record(f"run:{STEP}_count:rate5m", form.count(STEP, PHASE, "5m")),
        *(Record(f"run:{STEP}:{p}_5m", form.quantile(share, STEP, PHASE, "5m")) for share, p in QUANTILES),
    )
    return Group(f"otel_train.{form.name}.run", "30s", rules)


def _ranks(form: Form) -> Group:
    stage = "train_stage_duration_seconds"
    steps = f'on ({RANK}) (sum by ({RANK}) (rate(train_steps_total{{train_phase="train"}}[5m])) > 0)'
    local = f'{{train_phase="train",train_stage=~"{LOCAL_STAGES}"}}'
    backward = '{train_phase="train",train_stage="backward"}'
    rules = (
        Record(f"{_WORK}:mean5m", f"{form.sum(stage, RANK, '5m', local)} / {steps}"),
        Record(
            "run_rank:train_backward_seconds:mean5m", f"{form.sum(stage, RANK, '5m', backward)} / {steps}"
        ),
    )
    return Group(f"otel_train.{form.name}.ranks", "30s", rules)


def _checkpoints(form: Form) -> Group:
    metric = "train_checkpoint_duration_seconds"
    by = f"{RUN}, train_checkpoint_operation"
    rules = (
        Record(f"run_op:{metric}_sum:rate1h", form.sum(metric, by, "1h")),
        Record(f"run_op:{metric}:p95_1h", form.quantile(0.95, metric, by, "1h")),
    )
    return Group(f"otel_train.{form.name}.checkpoints", "1m", rules)


def plain_groups() -> tuple[Group, ...]:
    """The rules that do not care how histograms are kept."""
    return (_derived(), _goodput(), _liveness(), _memory())


def _derived() -> Group:
    stages = "run_loader_stage:train_stage_duration_seconds_sum:rate5m"
    step = f"run:{STEP}_sum:rate5m"
    # Rank 0 alone tells the limit in some profiles; all ranks have devices of a kind.
    flops_limit = (
        f"(avg by ({RUN}) (sum by ({RANK}) (train_accelerator_flops_limit_per_second > 0))"
        f" * on ({RUN}) max by ({RUN}) (train_world_size))"
    )
    return Group(
        "otel_train.derived",
        "30s",
        (
            Record(_RANK_TIME, f"max by ({RANK}) (rate(train_rank_time_seconds_total[5m]))"),
            *(
                Record(
                    f"{level}:{metric}:mean5m",
                    f"{level}:{metric}_sum:rate5m / ({level}:{metric}_count:rate5m > 0)",
                )
                for level, metric in (*(each[:2] for each in _DURATIONS), ("run", STEP))
            ),
            Record(_MEDIAN_WORK, f"quantile by ({RUN}) (0.5, {_WORK}:mean5m)"),
            Record(
                "run:train_straggler_excess:ratio5m",
                f"max by ({RUN}) ({_WORK}:mean5m) / ({_MEDIAN_WORK} > 0) - 1",
            ),
            # Of the time of all steps of the run: a step that takes a batch of each of two loaders is
            # booked under one of them.
            Record(
                "run_loader_stage:train_stage_share:ratio5m",
                f"{stages} / on ({PHASE}) group_left () ({step} > 0)",
            ),
            Record(
                "run:train_data_wait:ratio5m",
                f'sum by ({PHASE}) ({stages}{{train_stage="data"}}) / ({step} > 0)',
            ),
            # Inside a step, but in no stage. Stages inside stages count twice: never below nothing.
            Record(
                "run:train_unattributed:ratio5m",
                f"clamp_min(1 - sum by ({PHASE}) ({stages}) / ({step} > 0), 0)",
            ),
            # All ranks do the same steps: the most of any, never the sum.
            Record(
                "run:train_steps:rate5m",
                f"max by ({PHASE}) (sum by ({PHASE}, train_rank) (rate(train_steps_total[5m])) / {_RATE_OF_TIME})",
            ),
            # Throughput: over wall time, with all that was not training. Only data-parallel leaders count
            # samples and tokens, or rank 0 for all: the sum.
            *(
                Record(
                    f"run:train_{counted}:rate5m",
                    f"sum by ({PHASE}) (sum by ({PHASE}, train_rank) (rate(train_{counted}_total[5m])) / {_RATE_OF_TIME})",
                )
                for counted in ("samples", "tokens")
            ),
            # A loader's rate: over the time of its own batches. All ranks work at once, and rank 0 says how long.
            Record(
                _SAMPLES_PER_BATCH_TIME,
                f"sum by ({LOADER}) (sum by ({LOADER}, train_rank) (rate(train_samples_total[5m])) / {_RATE_OF_TIME})"
                f" / (max by ({LOADER}) (sum by ({LOADER}, train_rank) (rate(train_batch_time_seconds_total[5m]))"
                f" / {_RATE_OF_TIME}) > 0)",
            ),
            Record(
                "run_loader:train_efficiency:ratio5m",
                f'sum by ({RUN}, train_loader) ({_SAMPLES_PER_BATCH_TIME}{{train_phase="train"}})'
                f" / sum by ({RUN}, train_loader) (train_throughput_theoretical_per_second > 0)",
            ),
            Record(
                "run:train_mfu:ratio5m",
                f"sum by ({RUN}) (sum by ({RANK}) (rate(train_model_flops_total[5m])) / {_RATE_OF_TIME}) / {flops_limit}",
            ),
        ),
    )


def _goodput() -> Group:
    spent = "train_run_time_seconds_total"
    by_activity = f"{RUN}, train_run_activity"

    def ratio(window: str) -> Record:
        productive = f'sum by ({RUN}) (rate({spent}{{train_run_activity="productive"}}[{window}]))'
        return Record(
            f"run:train_goodput:ratio{window}",
            f"{productive} / (sum by ({RUN}) (rate({spent}[{window}])) > 0)",
        )

    return Group(
        "otel_train.goodput",
        "30s",
        (
            *(ratio(window) for window in ("5m", "30m", "1h", "6h")),
            Record(
                "run_activity:train_run_time:ratio5m",
                f"sum by ({by_activity}) (rate({spent}[5m]))"
                f" / on ({RUN}) group_left () (sum by ({RUN}) (rate({spent}[5m])) > 0)",
            ),
        ),
    )


def _liveness() -> Group:
    beat = "train_heartbeat_time_seconds"
    # timestamp() tells the time of the sample only when it is asked of a bare selector.
    return Group(
        "otel_train.liveness",
        "15s",
        (
            Record(
                INFO,
                f"topk by ({RUN}) (1, max by ({RUN}, {WHOSE}) (last_over_time(train_run_info[1h])))",
            ),
            Record(
                "run:train_collector:last1h",
                _carrier(f"count by ({RUN}, {COLLECTOR}) (last_over_time({beat}[1h]))"),
            ),
            Record(
                "run:train_missing_collector:last1h",
                _carrier(
                    f"count by ({RUN}, {COLLECTOR}) (last_over_time({beat}[1h])"
                    f" unless on ({RANK}) (time() - timestamp({beat}) < {SILENT_S}))"
                ),
            ),
            Record("run:train_heartbeat_age_seconds:min", f"time() - max by ({RUN}) ({beat})"),
            Record("run:train_heartbeat_age_seconds:max", f"time() - min by ({RUN}) ({beat})"),
            Record("run:train_telemetry_age_seconds:min", f"time() - max by ({RUN}) (timestamp({beat}))"),
            Record(
                "run:train_ranks_reporting:count",
                f"count by ({RUN}) (min by ({RANK}) (time() - timestamp({beat})) < {SILENT_S})",
            ),
            Record(
                "run:train_active:bool",
                f'max by ({RUN}) (train_run_status{{train_run_state=~"{ACTIVE_STATES}"}})',
            ),
        ),
    )


def _carrier(ranks: str) -> str:
    """One Collector of those that ranks came by: one that is up before one that is not, then that of most ranks.

    So an alert that carries it is muted only where all of them are down.
    """
    up = f'1e6 * max by ({COLLECTOR}) (up{{job="otel-collector"}})'
    return f"group by ({RUN}, {COLLECTOR}) (topk by ({RUN}) (1, {ranks} + on ({COLLECTOR}) group_left () {up} or {ranks}))"


def _memory() -> Group:
    reserved = "train_accelerator_memory_reserved_bytes"
    return Group(
        "otel_train.memory",
        "30s",
        (
            Record(
                "run_rank:train_accelerator_memory_reserved:ratio",
                f"max by ({DEVICE}) ({reserved}) / max by ({DEVICE}) (train_accelerator_memory_limit_bytes > 0)",
            ),
            # What the container or the host counts: the resident memory of workers has shared pages in it.
            Record(
                "host:train_host_memory:ratio",
                f"max by ({RUN}, host_name) (train_host_memory_usage_bytes)"
                f" / max by ({RUN}, host_name) (train_host_memory_limit_bytes > 0)",
            ),
        ),
    )
