"""Alerts on whether the run is alive and gets anywhere."""

from __future__ import annotations

from typing import Final

from deploy.prometheus.alert import CRITICAL, WARNING, Alert, AlertGroup
from deploy.prometheus.recording import ACTIVE_STATES, SILENT_S

_ACTIVE: Final = "and on (train_run_id) run:train_active:bool == 1"
_THRESHOLD: Final = "max by (train_run_id) (train_stall_threshold_seconds)"
_STATUS: Final = f'train_run_status{{train_run_state=~"{ACTIVE_STATES}"}}'

_STALLED_RANK: Final = f"""\
(time() - max by (train_run_id, train_rank, host_name) (train_heartbeat_time_seconds))
  > on (train_run_id) group_left () ({_THRESHOLD} / 2)
and on (train_run_id, train_rank) (max by (train_run_id, train_rank) ({_STATUS}) == 1)
unless on (train_run_id) (
  run:train_heartbeat_age_seconds:min > on (train_run_id) ({_THRESHOLD} / 4)
)
"""

# What was scraped and is no longer found was closed in order: a run that ends well takes its target
# file away. What was pushed has no `up`, and what was killed leaves a target that does not answer.
_VANISHED: Final = f"""\
(run:train_telemetry_age_seconds:min > {SILENT_S} {_ACTIVE})
or
(
  max by (train_run_id) (
    last_over_time({_STATUS}[20m]) == 1
    unless on (job, instance) (last_over_time(up[20m]) unless on (job, instance) (up == 0))
  )
  unless on (train_run_id) run:train_active:bool
)
"""


def _burn(long: str, short: str, factor: int, seen: int) -> str:
    """Budget 10 %, spent ``factor`` times too fast in both windows, by a run old enough to be judged."""
    return (
        f"(1 - run:train_goodput:ratio{long}) > ({factor} * 0.10)\n"
        f"and (1 - run:train_goodput:ratio{short}) > ({factor} * 0.10)\n"
        f"and count_over_time(run:train_goodput:ratio5m[{long}]) > {seen}\n"
        f"{_ACTIVE}\n"
    )


PROGRESS: Final = AlertGroup(
    "otel_train.alerts.progress",
    (
        Alert(
            "TrainRunStalled",
            f"run:train_heartbeat_age_seconds:min\n  > on (train_run_id) {_THRESHOLD}\n{_ACTIVE}\n",
            "1m",
            CRITICAL,
            "Run {{ $labels.train_run_id }}: no rank has made progress for {{ $value | humanizeDuration }}.",
            "Telemetry still arrives, but the newest heartbeat of any rank is older than the run's own stall threshold (20 median steps, at least 300 s).",
        ),
        Alert(
            "TrainRankStalled",
            _STALLED_RANK,
            "1m",
            CRITICAL,
            "Run {{ $labels.train_run_id }}: rank {{ $labels.train_rank }} on {{ $labels.host_name }} has made no progress for {{ $value | humanizeDuration }} while others go on.",
            "In a synchronous hang all ranks stop within one step and TrainRunStalled fires instead; here one rank stands alone.",
        ),
        Alert(
            "TrainRunVanished",
            _VANISHED,
            "1m",
            CRITICAL,
            "Run {{ $labels.train_run_id }} went silent without reporting its end.",
            "The process was killed (memory, preemption, loss of the node), or the way of its telemetry is broken; the OtelCollector alerts tell which.",
        ),
        Alert(
            "TrainRunFailed",
            'max by (train_run_id) (train_run_status{train_run_state="failed"}) == 1',
            "0m",
            CRITICAL,
            "Run {{ $labels.train_run_id }} ended with an exception.",
            "A rank reported its own failure. A process that is killed cannot do that: see TrainRunVanished.",
        ),
        Alert(
            "TrainRanksMissing",
            f"run:train_ranks_reporting:count\n  < on (train_run_id) max by (train_run_id) (train_ranks_expected)\n{_ACTIVE}\n",
            "3m",
            WARNING,
            "Run {{ $labels.train_run_id }}: only {{ $value }} ranks report.",
            "Sums over ranks are too low and stragglers hide while ranks are mute.",
        ),
        Alert(
            "TrainDigestRanksMissing",
            f"max by (train_run_id) (train_ranks_reporting)\n  < on (train_run_id) max by (train_run_id) (train_world_size)\n{_ACTIVE}\n",
            "3m",
            CRITICAL,
            "Run {{ $labels.train_run_id }}: only {{ $value }} ranks wrote to the digest.",
            "Rank 0 speaks for all in this export profile. A rank that no longer writes is dead, hung or cut off.",
        ),
        Alert(
            "TrainRankEvents",
            'sum by (train_run_id, train_rank_event) (increase(train_ranks_events_total{train_rank_event!="drop"}[10m])) > 0',
            "0m",
            CRITICAL,
            "Run {{ $labels.train_run_id }}: {{ $labels.train_rank_event }} on some rank.",
            "Rank 0 publishes the sum over all ranks, so that events are heard of when it alone exports.",
        ),
        Alert(
            "TrainRestartLoop",
            "max by (train_run_id) (max_over_time(train_run_restarts_total[30m]))\n  - min by (train_run_id) (min_over_time(train_run_restarts_total[30m])) >= 3\n",
            "0m",
            CRITICAL,
            "Run {{ $labels.train_run_id }} restarted {{ $value }} times in 30 minutes.",
            "The launcher starts the run again and again, and the allocation is spent on starting.",
        ),
        Alert(
            "TrainGoodputBurnFast",
            _burn("1h", "5m", 6, 60),
            "2m",
            CRITICAL,
            "Run {{ $labels.train_run_id }} lost {{ $value | humanizePercentage }} of the last hour.",
            "Productive time is the aim of 90 %; more than 60 % was lost in the last hour and is being lost now.",
            (("long", "1h"), ("short", "5m")),
        ),
        Alert(
            "TrainGoodputBurnSlow",
            _burn("6h", "30m", 3, 360),
            "15m",
            WARNING,
            "Run {{ $labels.train_run_id }} lost {{ $value | humanizePercentage }} of the last 6 hours.",
            "Productive time is the aim of 90 %; more than 30 % was lost over 6 hours and in the last half hour.",
            (("long", "6h"), ("short", "30m")),
        ),
    ),
)
