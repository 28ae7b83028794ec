"""Distributed: which rank holds up the others."""

from __future__ import annotations

from typing import Final

from grafana.dashboards.board import Board
from grafana.panels import BLUE, ORANGE, RED, Panel, Row
from grafana.queries import LINES, Query, devices_of_the_run, highest, lowest, of, reporting, run

_RANK: Final = 'train_rank=~"$rank"'
_HEARTBEAT: Final = "train_heartbeat_time_seconds"
_TRAINING: Final = 'train_phase="train"'
_STEPS: Final = f"sum by (train_rank) ({run('train_steps_total', _TRAINING)})"
_STEPS_SHOWN: Final = f"sum by (train_rank) ({run('train_steps_total', _TRAINING, _RANK)})"
_WORK: Final = "run_rank:train_local_work_seconds:mean5m"
_BACK: Final = "run_rank:train_backward_seconds:mean5m"

NOW: Final = Row(
    "Now",
    (
        Panel(
            "Ranks", "stat", "short",
            "Ranks that report, that are expected to, that the run has, and that wrote a report to rank 0.",
            "fewer report than are expected",
            [
                Query(reporting(), "reporting"),
                Query(f"max({run('train_ranks_expected')})", "expected"),
                Query(f"max({run('train_world_size')})", "world"),
                Query(f"max({run('train_ranks_reporting')})", "with a report"),
            ],
            6, 5, first=BLUE, runbook="TrainRanksMissing",
        ),
        Panel(
            "Slowest rank", "stat", "s",
            "The rank with the most work of its own per step: data, transfer, forward.",
            "it is over 20 % above the median rank",
            [Query(f"topk(1, {run(_WORK)})", "rank {{train_rank}}", instant=True)],
            6, 5, first=BLUE, runbook="TrainStraggler",
        ),
        Panel(
            "Restarts", "stat", "short",
            "How often the launcher has started this run again.",
            "it grows by three in half an hour",
            [Query(f"max({run('train_run_restarts_total')})")],
            4, 5, ((1, ORANGE), (3, RED)), runbook="TrainRestartLoop",
        ),
        Panel(
            "Events on ranks", "stat", "short",
            "Events of all ranks in the last hour, from the reports that rank 0 reads.",
            "any is not 0",
            [Query(f"round(sum by (train_rank_event) (increase({run('train_ranks_events_total')}[1h])))", "{{train_rank_event}}")],
            8, 5, ((1, RED),), runbook="TrainRankEvents", needs="ranks",
        ),
    ),
)  # fmt: skip

STRAGGLERS: Final = Row(
    "Who holds up the others?",
    (
        Panel(
            "Excess of the slowest rank", "lines", "percentunit",
            "How much more work of its own the slowest rank has than the median rank.",
            "it stays over 20 %",
            [Query(run("run:train_straggler_excess:ratio5m"), "all ranks export")],
            limits=((0.2, RED),), runbook="TrainStraggler",
        ),
        Panel(
            "Ranks with the most work of their own", "lines", "percentunit",
            "How much more work of its own a rank has than the median rank: the ranks with the most, named by rank 0 in every export profile.",
            "a line stays over 20 %",
            [Query(run("train_straggler_excess_ratio"), "rank {{train_peer_rank}} {{train_peer_host}} {{train_stage}}")],
            limits=((0.2, RED),), runbook="TrainStraggler", needs="stragglers", empty="no rank costs the others 5 % of a step",
        ),
        Panel(
            "Own work per step and rank", "lines", "s",
            f"Data, transfer and forward, which no other rank can prolong: the {LINES} ranks with the most.",
            "one line lies above the others",
            [
                Query(of(run(_WORK, _RANK), highest(_WORK, _RANK)), "rank {{train_rank}}"),
                Query(run("run:train_local_work_seconds:median5m"), "median of all", dashed=True),
            ],
            runbook="TrainStraggler",
        ),
        Panel(
            "Backward per step and rank", "lines", "s",
            f"Backward waits for gradients of the others: the {LINES} ranks with the least.",
            "one line lies below the others: that rank waits least, the others wait for it",
            [Query(of(run(_BACK, _RANK), lowest(_BACK, _RANK)), "rank {{train_rank}}")],
            runbook="TrainStraggler",
        ),
        Panel(
            "Spread of work over the ranks, from their reports", "lines", "s",
            "Minimum, median, 95th percentile and maximum over the ranks of the mean time of data, transfer and forward per step.",
            "the maximum is far above the median",
            [Query(run("train_rank_work_time_seconds", 'train_stage=~"data|h2d|forward"'), "{{train_stage}} {{train_statistic}}")],
            needs="ranks", runbook="TrainStraggler",
        ),
    ),
)  # fmt: skip

HANGS: Final = Row(
    "Which ranks are stalled or missing?",
    (
        Panel(
            "Ranks that hold the others up", "table", "s",
            "Time without progress of ranks that are behind the others and do not move, named by rank 0 in every export profile.",
            "there is a row",
            [Query(f"max by (train_peer_rank, train_peer_host, train_stage) ({run('train_rank_stall_time_seconds')}) > 0", "stands still for", instant=True)],
            8, 7, runbook="TrainRankStalled", needs="stalls", empty="no rank",
        ),
        Panel(
            "Age of the heartbeat per rank", "bargauge", "s",
            f"Time since a rank made progress of any kind: the {LINES} ranks with the longest, and the longest of all, also of ranks that are not selected.",
            "one is far longer than the others",
            [Query(run("run:train_heartbeat_age_seconds:max"), "longest"),
             Query(f"topk({LINES}, max by (train_rank, host_name) (time() - {run(_HEARTBEAT, _RANK)}))", "rank {{train_rank}} {{host_name}}", instant=True)],
            8, 7, first=BLUE, runbook="TrainRankStalled",
        ),
        Panel(
            "Steps behind the first rank", "bargauge", "short",
            f"How many steps a rank is behind: the {LINES} ranks that are furthest.",
            "it grows",
            [Query(f"topk({LINES}, scalar(max({_STEPS})) - {_STEPS_SHOWN})", "rank {{train_rank}}", instant=True)],
            8, 7, ((2, ORANGE), (10, RED)), runbook="TrainRankStalled",
        ),
        Panel(
            "Stalls by stage", "table", "short",
            "Stalls that each rank has seen, by the stage it hung in.",
            "there is a row; the rank whose stage differs from the others is the suspect",
            [Query(f"max by (train_rank, host_name, train_stage) ({run('train_stall_events_total')}) > 0", "stalls", instant=True)],
            8, 7, runbook="TrainRunStalled", needs="stalls", empty="no stalls",
        ),
        Panel(
            "Every rank", "table", "s",
            "Own work, backward and age of the heartbeat of every rank.",
            "a row differs from the others",
            [
                Query(f"max by (train_rank) ({run(_WORK)})", "own work", instant=True),
                Query(f"max by (train_rank) ({run(_BACK)})", "backward", instant=True),
                Query(f"max by (train_rank) (time() - {run(_HEARTBEAT)})", "heartbeat age", instant=True),
            ],
            8, 7, runbook="TrainStraggler",
        ),
        Panel(
            "Silent ranks", "table", "s",
            "Ranks that sent telemetry within the last hour but not in the last two minutes, and the time since their last progress.",
            "there is a row while the run goes on",
            [Query(
                f"max by (train_rank, host_name) (time() - last_over_time({run(_HEARTBEAT)}[1h]))"
                f" unless on (train_rank) (time() - timestamp({run(_HEARTBEAT)}) < 120)",
                "silent for", instant=True,
            )],
            8, 7, runbook="TrainRanksMissing", needs="ranks", empty="all ranks report",
        ),
        Panel(
            "Clock of the devices", "lines", "suffix: MHz",
            "Clock of the devices on the hosts of this run, from the DCGM exporter.",
            "one host is slower than the others: heat, or a power limit",
            [Query(devices_of_the_run("DCGM_FI_DEV_SM_CLOCK", "bottomk"), "{{host_name}} {{gpu}}")],
            8, 7, needs="DCGM exporter",
        ),
    ),
)  # fmt: skip

DISTRIBUTED: Final = Board(
    "otel-train-distributed",
    "Training: distributed",
    "Which ranks hold up the others, are stalled, or are missing.",
    (NOW, STRAGGLERS, HANGS),
    leads="hardware",
)
