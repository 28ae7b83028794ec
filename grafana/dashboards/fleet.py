"""Fleet: all runs, by team. Uses only metrics that a run sends in every export profile."""

from __future__ import annotations

from typing import Final

from grafana.dashboards.board import Board
from grafana.panels import BLUE, NOWHERE, ORANGE, RED, Panel, Row
from grafana.queries import Query

ACTIVE_STATES: Final = "training|evaluating|checkpointing|stalled"
"""As in the recording rule ``run:train_active:bool``."""

_RUN: Final = "train_run_id"
_INFO_LABELS: Final = "train_run_name, train_team, train_owner, train_job, train_cluster, train_namespace"
_INFO: Final = 'run:train_info:last1h{train_team=~"$team"}'
_TRAIN: Final = '{train_phase="train"}'
_FIRING: Final = 'ALERTS{alertstate="firing",train_run_id!=""}'

_ENDED: Final = "last_over_time(run:train_active:bool[1h]) == 0"


def _most(status: str) -> str:
    """Returns the state that most ranks of each run are in."""
    return f"topk by ({_RUN}) (1, count by ({_RUN}, train_run_state) ({status} == 1))"


_LIVE: Final = _most('train_run_status{train_run_state!~"finished|failed|interrupted|terminated"}')
_LEFT: Final = _most(f'last_over_time(train_run_status{{train_run_state!~"{ACTIVE_STATES}"}}[1h])')
# A run is "silent" if it was active within the hour, has no heartbeat now, and was still active when last recorded. Ranks without
# current samples (ended, killed, moved to another host) count only with a state that is not active, such as an end state.
_STATE: Final = (
    f'(label_replace(group by ({_RUN}) (last_over_time(train_run_status{{train_run_state=~"{ACTIVE_STATES}"}}[1h]) == 1)'
    f' unless on ({_RUN}) train_heartbeat_time_seconds unless on ({_RUN}) {_ENDED}, "train_run_state", "silent", "", "")'
    f" or on ({_RUN}) group by ({_RUN}, train_run_state) ({_LIVE} or on ({_RUN}) {_LEFT}))"
)


def _of_team(expr: str) -> str:
    """Limits a query to the runs of the chosen team."""
    return f"{expr} and on ({_RUN}) {_INFO}"


def _by_run(series: str) -> str:
    return _of_team(f"max by ({_RUN}) ({series})")


NOW: Final = Row(
    "Now",
    (
        Panel(
            "Active runs", "stat", "short",
            "Runs that train, evaluate, save a checkpoint, or are stalled.",
            "it is lower than the number of runs that were started",
            [Query(f"count({_of_team('run:train_active:bool == 1')}) or vector(0)")],
            6, 4, first=BLUE, leads=NOWHERE,
        ),
        Panel(
            "Ranks", "stat", "short",
            "Sum of the world sizes that these runs report.",
            "it falls while no run has ended",
            [Query(f"sum({_by_run('train_world_size')})")],
            6, 4, first=BLUE, leads=NOWHERE,
        ),
        Panel(
            "Runs with alerts", "stat", "short",
            "Runs on which any alert fires.",
            "it is not 0; the table says which",
            [Query(f"count({_of_team(f'count by ({_RUN}) ({_FIRING})')}) or vector(0)")],
            6, 4, ((1, RED),), leads=NOWHERE,
        ),
        Panel(
            "Goodput of the fleet, 1 h", "stat", "percentunit",
            "Mean over the runs of the share of the last hour that was productive.",
            "it is below 0.9 for long",
            [Query(f"avg({_of_team('run:train_goodput:ratio1h')})")],
            6, 4, ((0.7, ORANGE), (0.9, "green")), first=RED, leads=NOWHERE,
        ),
        Panel(
            "Runs", "table", "short",
            "Every run that sent telemetry within the last hour. The id links to its overview.",
            "a state is failed, stalled or silent, or alerts fire",
            [
                Query(f"{_STATE} * on ({_RUN}) group_left ({_INFO_LABELS}) {_INFO}", instant=True),
                Query(_by_run("train_world_size"), "ranks", instant=True),
                Query(_by_run("train_step_index"), "step", instant=True),
                Query(_by_run(f"run:train_steps:rate5m{_TRAIN}"), "steps/s", instant=True),
                Query(_by_run(f"run:train_samples:rate5m{_TRAIN}"), "samples/s", instant=True),
                Query(_by_run(f"run:train_tokens:rate5m{_TRAIN}"), "tokens/s", instant=True),
                Query(_by_run("run:train_goodput:ratio1h"), "goodput, 1 h", instant=True, unit="percentunit"),
                Query(_by_run("run:train_mfu:ratio5m"), "MFU", instant=True, unit="percentunit"),
                Query(_of_team(f"count by ({_RUN}) ({_FIRING})"), "alerts", instant=True),
            ],
            24, 12, empty="no run sent telemetry",
            states=(
                ("training", "training", "green"), ("evaluating", "evaluating", "green"),
                ("checkpointing", "checkpointing", "green"), ("stalled", "stalled", RED),
                ("failed", "failed", RED), ("silent", "silent", RED),
            ),
            columns=(
                ("train_team", "team"), ("train_run_id", "run"), ("train_run_name", "name"), ("train_run_state", "state"),
                ("train_owner", "owner"), ("train_job", "job"), ("train_cluster", "cluster"), ("train_namespace", "namespace"),
            ),
        ),
    ),
)  # fmt: skip


def _line(title: str, unit: str, series: str, *, says: str, bad: str, needs: str = "") -> Panel:
    query = Query(_by_run(series), "{{train_run_id}}")
    return Panel(title, "lines", unit, says, bad, [query], 6, needs=needs)


TIME: Final = Row(
    "Over time, a line for each run",
    (
        _line(
            "Goodput", "percentunit", "run:train_goodput:ratio5m",
            says="Share of five minutes that was productive.", bad="a line falls",
        ),
        _line(
            "Model FLOP utilisation by run", "percentunit", "run:train_mfu:ratio5m",
            says="Arithmetic of the model over what the devices can do.", bad="a line falls", needs="device peak",
        ),
        _line(
            "Samples per second by run", "short", f"run:train_samples:rate5m{_TRAIN}",
            says="Samples that all ranks together trained on, per second of wall time.", bad="a line falls",
        ),
        _line(
            "Time since any progress", "s", "run:train_heartbeat_age_seconds:min",
            says="Time since any rank of the run made progress.", bad="a line climbs",
        ),
    ),
)  # fmt: skip

FLEET: Final = Board(
    "otel-train-fleet",
    "Training: fleet",
    "All runs by team: state, throughput, goodput, utilisation, alerts. A row leads to its run.",
    (NOW, TIME),
    leads="overview",
    annotations=(
        (
            "Critical alerts", "red", "{{alertname}} {{train_run_id}}",
            'ALERTS{train_run_id!="",alertstate="firing",severity="critical"}',
        ),
    ),
)  # fmt: skip
