"""Alerts on whether the run is alive and gets anywhere."""

from __future__ import annotations

from typing import Final

from deploy.prometheus.alert import CRITICAL, RATIO_KEEP, WARNING, Alert, AlertGroup, by_carrier, grown
from deploy.prometheus.recording import ACTIVE_STATES, SILENT_S

_ACTIVE: Final = "and on (train_run_id) run:train_active:bool == 1"
_STATUS: Final = f'train_run_status{{train_run_state=~"{ACTIVE_STATES}"}}'

# A program whose loops are over may be silent: its ranks say so by a threshold of a day.
_IN_LOOP: Final = "on (train_run_id, train_rank) (train_stall_threshold_seconds < 86400)"
_STALLED: Final = f"""\
(
  time() - max by (train_run_id) (train_heartbeat_time_seconds and {_IN_LOOP})
)
  > on (train_run_id) max by (train_run_id) (train_stall_threshold_seconds < 86400)
{_ACTIVE}
"""

# What was scraped and is no longer found was closed in order: a run that ends well takes its target
# file away. What was pushed has no `up`, and what was killed leaves a target that does not answer.
_VANISHED: Final = by_carrier(
    f"""\
(run:train_telemetry_age_seconds:min > {SILENT_S} {_ACTIVE})
or
(
  max by (train_run_id) (
    last_over_time({_STATUS}[20m]) == 1
    unless on (job, instance) (last_over_time(up[20m]) unless on (job, instance) (up == 0))
  )
  unless on (train_run_id) run:train_active:bool
)
""",
    "run:train_collector:last1h",
)

_MISSING: Final = (
    "run:train_ranks_reporting:count\n  < on (train_run_id) max by (train_run_id) (train_ranks_expected)"
)
# Of ranks that were never heard of nobody knows by which Collector they would have come.
_MISSING_BY: Final = (
    "(run:train_missing_collector:last1h and on (train_run_id) (\n"
    "  run:train_ranks_reporting:count + on (train_run_id)\n"
    "    count by (train_run_id) (count by (train_run_id, train_rank) (last_over_time(train_heartbeat_time_seconds[1h]))\n"
    f"      unless on (train_run_id, train_rank) (time() - timestamp(train_heartbeat_time_seconds) < {SILENT_S}))\n"
    "    >= on (train_run_id) max by (train_run_id) (train_ranks_expected)))"
)


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
            _STALLED,
            "1m",
            CRITICAL,
            "Run {{ $labels.train_run_id }}: no rank has made progress for {{ $value | humanizeDuration }}.",
            "Telemetry still arrives, but the newest heartbeat of any rank is older than the threshold that the run has set for what it is doing: 20 median steps and at least 300 s in training, more in evaluations and checkpoints.",
        ),
        Alert(
            "TrainRankStalled",
            "max by (train_run_id, train_peer_rank, train_peer_host, train_stage) (train_rank_stall_time_seconds) > 0",
            "1m",
            CRITICAL,
            "Run {{ $labels.train_run_id }}: rank {{ $labels.train_peer_rank }} on {{ $labels.train_peer_host }} holds the others up in {{ $labels.train_stage }}, without progress for {{ $value | humanizeDuration }}.",
            "Rank 0 compares the records of all ranks and names up to three that are behind the others and do not move. A rank that evaluates or saves while the others wait for it is not named.",
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
            "Run {{ $labels.train_run_id }} ended with an exception, or was killed.",
            "The agent of a rank reported its failure, or its death. An agent that is gone as well, with its container or machine, cannot do that: see TrainRunVanished.",
        ),
        Alert(
            "TrainRanksMissing",
            by_carrier(f"{_MISSING}\n{_ACTIVE}\n", _MISSING_BY),
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
            grown(
                "train_ranks_events_total",
                "train_run_id, train_rank_event",
                "10m",
                'train_rank_event=~"oom|loader_worker_exit|nonfinite"',
            )
            + "\nand on (train_run_id) (max by (train_run_id) (train_ranks_expected) < on (train_run_id) max by (train_run_id) (train_world_size))\n",
            "0m",
            CRITICAL,
            "Run {{ $labels.train_run_id }}: {{ $labels.train_rank_event }} on some rank.",
            "Where rank 0 alone exports, it publishes the sum over all ranks. Elsewhere the alert on the event itself names the rank.",
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
            "5m",
        ),
        Alert(
            "TrainGoodputBurnSlow",
            _burn("6h", "30m", 3, 360),
            "15m",
            WARNING,
            "Run {{ $labels.train_run_id }} lost {{ $value | humanizePercentage }} of the last 6 hours.",
            "Productive time is the aim of 90 %; more than 30 % was lost over 6 hours and in the last half hour.",
            (("long", "6h"), ("short", "30m")),
            RATIO_KEEP,
        ),
    ),
)
