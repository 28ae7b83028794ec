"""Rules on what ranks really send, in every export profile: metrics against the truth, and what pages."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale.rank import SimulatedRank
from grafana.build import BOARDS
from tests.rules.promtool import VARIANTS, answers, check
from tests.rules.wire import (
    BACKWARD,
    EXCHANGE_S,
    PROFILES,
    STEP_S,
    TRAIN,
    Loop,
    Run,
    scenario,
)
from tests.support.dashboard_queries import filled_in
from tests.support.promql import asked
from tools.alerts_pages import rules

pytestmark = pytest.mark.stack

RANKS = 4
SAMPLES_PER_S = RANKS * 8 / STEP_S
TOKENS_PER_S = RANKS * 1000 / EXCHANGE_S
EXACT, NATIVE_BUCKET, CLASSIC_BUCKET = 0.02, 0.05, 0.19
STAGE = 'run_loader_stage:train_stage%s{train_stage="%s",train_phase="train",train_loader="train"}'
LOADER = 'run_loader:train_%s{train_phase="train",train_loader="train"}'
TRAINING = 'run:train_%s{train_phase="train"}'

TRUTH = {
    'run_rank:train_rank_time_seconds:rate5m{train_rank="0"}': 1.0,
    '1 + run_rank:train_start_time_seconds:max{train_rank="0"}': 1.0,
    STAGE % ("_duration_seconds:mean5m", "data"): 0.06 * STEP_S,
    STAGE % ("_duration_seconds:mean5m", "backward"): 0.51 * STEP_S,
    STAGE % ("_share:ratio5m", "forward"): 0.27,
    STAGE % ("_device_duration_seconds:mean5m", "forward"): 0.9 * 0.27 * STEP_S,
    LOADER % "step_duration_seconds:mean5m": STEP_S,
    LOADER % "samples_per_batch_time:ratio5m": SAMPLES_PER_S,
    TRAINING % "step_duration_seconds:mean5m": STEP_S,
    TRAINING % "data_wait:ratio5m": 0.06,
    TRAINING % "unattributed:ratio5m": 0.05,
    TRAINING % "steps:rate5m": 1 / STEP_S,
    TRAINING % "samples:rate5m": SAMPLES_PER_S,
    TRAINING % "tokens:rate5m": TOKENS_PER_S,
    "run:train_goodput:ratio5m": 0.94,
    'run_activity:train_run_time:ratio5m{train_run_activity="data_wait"}': 0.06,
    'run_rank:train_local_work_seconds:mean5m{train_rank="0"}': 0.35 * STEP_S,
    'run_rank:train_backward_seconds:mean5m{train_rank="0"}': 0.51 * STEP_S,
    "run:train_local_work_seconds:median5m": 0.35 * STEP_S,
    "1 + run:train_straggler_excess:ratio5m": 1.0,
    "run:train_active:bool": 1.0,
    'run_rank:train_accelerator_memory_reserved:ratio{train_rank="0"}': 0.75,
}
"""What must come out within 2 % in each profile, of a run whose every step is half a second and alike."""

QUANTILES = ("p50_5m", "p95_5m", "p99_5m")
STEP_QUANTILES = {
    shape % f"step_duration_seconds:{quantile}": STEP_S
    for shape in (TRAINING, LOADER)
    for quantile in QUANTILES
}
"""As near as buckets are wide: 4.4 % natively, 19 % in classic histograms."""

STAGE_QUANTILES = {
    STAGE % (f"{clock}duration_seconds:{quantile}", "forward"): factor * 0.27 * STEP_S
    for clock, factor in (("_", 1.0), ("_device_", 0.9))
    for quantile in QUANTILES
}
"""Natively; the classic buckets of stages are wide."""

PER_SENDER = {
    STAGE % ("_duration_seconds_sum:rate5m", "forward"): 0.27,
    STAGE % ("_duration_seconds_count:rate5m", "forward"): 1 / STEP_S,
    STAGE % ("_device_duration_seconds_sum:rate5m", "forward"): 0.9 * 0.27,
    STAGE % ("_device_duration_seconds_count:rate5m", "forward"): 1 / STEP_S,
    LOADER % "step_duration_seconds_sum:rate5m": 1.0,
    LOADER % "step_duration_seconds_count:rate5m": 1 / STEP_S,
    TRAINING % "step_duration_seconds_sum:rate5m": 1.0,
    TRAINING % "step_duration_seconds_count:rate5m": 1 / STEP_S,
}
"""Sums over the ranks that send, which others divide by each other: device time of rank 0 alone outside ``full``."""

PRESENT = {
    "run:train_info:last1h", "run:train_collector:last1h",
    "run:train_goodput:ratio30m", "run:train_goodput:ratio1h", "run:train_goodput:ratio6h",
    "run:train_heartbeat_age_seconds:min", "run:train_heartbeat_age_seconds:max",
    "run:train_telemetry_age_seconds:min", "run:train_ranks_reporting:count", "run:train_ranks_awaited:count",
    "run:train_ranks_expected:last1h",
    "host:train_host_memory:ratio",
    "run_op:train_checkpoint_duration_seconds_sum:rate1h", "run_op:train_checkpoint_duration_seconds:p95_1h",
}  # fmt: skip
"""Of the same kind as another one, of this machine, or judged below."""

WITHOUT_DATA = {
    "run:train_mfu:ratio5m", "run_loader:train_efficiency:ratio5m", "run:train_missing_collector:last1h",
    "run:train_step_duration_seconds:median1h",
}  # fmt: skip
"""No rank publishes the limit of its devices; the simulated loader has workers, and no theoretical limit; no rank is mute; eleven
minutes have no median of an hour, which histories of slow steps are judged by."""


def busy(profile: str, *, more: Iterable[str] = ()) -> Run:
    """A run of four ranks that has saved once; every second rank could be asked for tokens."""
    run = Run(
        profile, [Loop(rank, ((2.0, lambda loop: loop.save(8.0)),)) for rank in range(RANKS)], more=more
    )
    run.logged = lambda account: account.readings.signals.take("tokens", 1000)
    return run


@functools.cache
def finished(profile: str) -> Run:
    """Such a run of twelve minutes, with all that panels read. To simulate it takes seconds, and nothing changes it."""
    read = {selector.metric for expr in PANELS.values() for selector in asked(expr)}
    return busy(profile, more=read).until(12, end=True)


def near(minute: float, expr: str, truth: float, within: float) -> str:
    return f"{minute} scalar(abs({expr} / {truth} - 1)) < bool {within}"


def test_every_recorded_rule_is_compared_with_the_truth() -> None:
    """One that is added and not looked at is where the next profile reads wrong."""
    recorded = set(rules("histograms-native", "recording"))
    compared = {
        expr.removeprefix("1 + ").partition("{")[0]
        for expr in (*TRUTH, *STEP_QUANTILES, *STAGE_QUANTILES, *PER_SENDER)
    }

    assert recorded == compared | PRESENT | WITHOUT_DATA


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_recorded_metric_is_the_truth_in_every_profile(profile: str, variant: str, tmp_path: Path) -> None:
    """Throughput that is too low by the number of ranks looks like a slow run, not like a rule that is wrong."""
    run = finished(profile)
    asks = [near(11, expr, truth, EXACT) for expr, truth in TRUTH.items()]
    bucket = NATIVE_BUCKET if variant == "native" else CLASSIC_BUCKET
    asks += [near(11, expr, truth, bucket) for expr, truth in STEP_QUANTILES.items()]
    if variant == "native":
        asks += [near(11, expr, truth, bucket) for expr, truth in STAGE_QUANTILES.items()]
    for expr, truth in PER_SENDER.items():
        of = 1 if "_device_" in expr and profile != "full" else run.senders
        asks.append(near(11, expr, truth * of, EXACT))
    asks += [f"11 scalar(count({name}) > bool 0)" for name in PRESENT]
    asks.append(f"11 scalar(run:train_ranks_reporting:count == bool {run.senders})")
    expected = {ask: {"{}": 1.0} for ask in asks}

    check(tmp_path, variant, [scenario(run, variant, expected)])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_young_run_and_one_that_has_ended_read_right(profile: str, tmp_path: Path) -> None:
    """At two minutes a rate over five reads 40 %, and after the end it sinks; both would look like trouble."""
    run = finished(profile)
    asks = [
        near(minute, TRAINING % f"{counted}:rate5m", truth, EXACT)
        for minute in (1.75, 12, 13, 14, 15, 16)
        for counted, truth in (("samples", SAMPLES_PER_S), ("steps", 1 / STEP_S))
    ]
    expected: dict[str, dict[str, float]] = {ask: {"{}": 1.0} for ask in asks}
    expected[f"18 {TRAINING % 'samples:rate5m'}"] = {}

    check(tmp_path, "native", [scenario(run, "native", expected)])


def every_rank(act: Any) -> list[Loop]:
    return [Loop(rank, ((4.0, act),)) for rank in range(RANKS)]


def one(who: int, act: Any, lasts_s: float) -> list[Loop]:
    """One rank does it while the others are in a step that it comes late to."""
    return [
        Loop(rank, ((4.0, act if rank == who else lambda loop: loop.step(0.0, lasts_s)),))
        for rank in range(RANKS)
    ]


PANELS = {
    f"{board.file}: {panel.title} #{number}": filled_in(query.expr, "r")
    for board in BOARDS
    for row in board.rows
    for panel in row.panels
    for number, query in enumerate(panel.queries)
}
OF_THE_SENDERS = {
    "overview: Ranks #0",
    "overview: Ranks #1",
    "distributed: Ranks #0",
    "distributed: Ranks #1",
}
"""How many ranks send, and should."""

OF_THIS_MACHINE = re.compile(r"process_|host_memory|train_memory_usage|__name__|timestamp|topk( by|\(1,)")
"""Memory and processors of the process that plays the ranks, the number of series, and the first of equals."""


@pytest.fixture(scope="module")
def panels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, float]]]:
    """What every panel shows, by profile."""
    shown = {}
    for profile in PROFILES:
        series = finished(profile).series("native")
        found = answers(tmp_path_factory.mktemp(profile), "native", series, list(PANELS.values()), at_min=11)
        shown[profile] = dict(zip(PANELS, found, strict=True))
    return shown


@pytest.mark.parametrize("profile", ["reduced", "rank0_aggregate"])
def test_a_panel_shows_in_every_profile_what_it_shows_in_full(
    profile: str, panels: dict[str, dict[str, dict[str, float]]]
) -> None:
    """A panel by rank has fewer lines where fewer ranks send; what all ranks come to together is the same."""
    wrong = {}
    for name, full in panels["full"].items():
        found = {without_device(labels): value for labels, value in panels[profile][name].items()}
        for labels, value in full.items():
            by_rank, got = "train_rank=" in labels, found.get(without_device(labels))
            if name in OF_THE_SENDERS or OF_THIS_MACHINE.search(PANELS[name]) or (by_rank and got is None):
                continue
            if got is None or not math.isclose(got, value, rel_tol=EXACT, abs_tol=1e-6):
                wrong[f"{name} {labels}"] = (value, got)

    assert wrong == {}


RUNS = {
    panel.title: panel for board in BOARDS if board.file == "fleet" for row in board.rows for panel in row.panels
}["Runs"]  # fmt: skip


@pytest.mark.parametrize("profile", PROFILES)
def test_the_fleet_has_a_row_for_each_run_in_every_profile(profile: str, tmp_path: Path) -> None:
    """Four ranks that train; then nothing is heard of them any more, and no one has said that they ended."""
    run = busy(profile, more={"train_world_size", "train_step_index"})
    for rank in range(RANKS):
        run.account(rank).reporter.about = ("gpt", "speech", "ann", "4711", "berlin", "gpu")
    whose = (
        'train_run_id="r", train_run_name="gpt", train_team="speech", train_owner="ann",'
        ' train_job="4711", train_cluster="berlin", train_namespace="gpu"'
    )
    state, *others = [filled_in(query.expr, "", team="speech|vision") for query in RUNS.queries]
    metrics = dict(zip([query.legend for query in RUNS.queries[1:]], others, strict=True))
    truth = {"ranks": RANKS, "steps/s": 1 / STEP_S, "samples/s": SAMPLES_PER_S, "tokens/s": TOKENS_PER_S}
    asks: dict[str, dict[str, float]] = {
        f"11 {state}": {f'{{{whose}, train_run_state="training"}}': 1.0},
        f"25 {state}": {f'{{{whose}, train_run_state="silent"}}': 1.0},
        f"11 {filled_in(RUNS.queries[0].expr, '', team='vision')}": {},
        f"11 count({metrics['step']})": {"{}": 1.0},
        f"18 {metrics['alerts']}": {'{train_run_id="r"}': 1.0},
    }
    asks |= {near(11, f"({metrics[name]})", value, EXACT): {"{}": 1.0} for name, value in truth.items()}

    check(tmp_path, "native", [scenario(run.until(12), "native", asks)])


def without_device(labels: str) -> str:
    """A reduced rank adds up the memory of its devices."""
    return re.sub(r'hw_name="[^"]*",? ?', "", labels)


NORMAL = {
    "all ranks evaluate for six minutes, and nothing is heard meanwhile": lambda: every_rank(
        lambda loop: loop.evaluate(360, 1)
    ),
    "all ranks save for seven minutes": lambda: every_rank(lambda loop: loop.save(420)),
    "rank 0 saves for seven minutes and the others wait for it": lambda: one(
        0, lambda loop: loop.save(420), 421
    ),
    "rank 2 evaluates for six minutes and the others wait for it": lambda: one(
        2, lambda loop: loop.evaluate(360, 40), 361
    ),
    "rank 0 evaluates for six minutes in one call and the others wait for it": lambda: one(
        0, lambda loop: loop.evaluate(360, 1), 361
    ),
    "code that is not seen runs for six minutes between two passes": lambda: every_rank(
        lambda loop: loop.pause(360)
    ),
    "the first step compiles for ten minutes": lambda: [
        Loop(rank, ((0.0, lambda loop: loop.step(0.0, 600.0)),)) for rank in range(RANKS)
    ],
}
PAGES = '18 count by (alertname) (count_over_time(ALERTS{alertstate="firing",severity="critical"}[18m]))'


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", NORMAL)
def test_no_alert_pages_when(name: str, profile: str, tmp_path: Path) -> None:
    """Who was woken by an evaluation turns the alert off, and then the hang is not seen."""
    run = Run(profile, NORMAL[name]()).until(18)

    check(tmp_path, "native", [scenario(run, "native", {PAGES: {}})])


@pytest.mark.parametrize("profile", PROFILES)
def test_the_threshold_in_force_is_that_of_the_open_activity(profile: str, tmp_path: Path) -> None:
    """Half an hour for the first checkpoint; after one of seven minutes three times that; five minutes in training."""

    def save(loop: Loop) -> None:
        loop.save(420)

    run = Run(profile, [Loop(rank, ((4.0, save), (13.0, save))) for rank in range(2)]).until(15)
    thresholds = {3: 300.0, 6: 1800.0, 12.5: 300.0, 15: 1260.0}
    asks = {
        f"{minute} max(train_stall_threshold_seconds)": {"{}": value} for minute, value in thresholds.items()
    }

    check(tmp_path, "native", [scenario(run, "native", asks)])


@pytest.mark.parametrize("profile", PROFILES)
def test_no_alert_pages_for_what_the_program_handles_itself(profile: str, tmp_path: Path) -> None:
    """A gradient scaler makes gradients overflow on purpose, and a program may catch its own exceptions."""
    run = Run(profile, [Loop(rank, [(m, Loop.fail) for m in range(2, 16)]) for rank in range(RANKS)])

    def overflow(account: SimulatedRank) -> None:
        account.readings.signals.take("grad_norm", math.inf)
        account.run.totals.skipped_updates += run.now_s % 60 == 0

    run.logged = overflow
    check(tmp_path, "native", [scenario(run.until(18), "native", {PAGES: {}})])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_hang_pages_and_names_the_rank_in_every_profile(profile: str, tmp_path: Path) -> None:
    """Of thousands of ranks one holds up the others, and the alert has to name it."""
    loops = [
        Loop(rank, ((4.0, partial(Loop.hang, source=TRAIN if rank == 3 else BACKWARD)),))
        for rank in range(RANKS)
    ]
    firing = 'ALERTS{alertstate="firing",alertname=~"TrainRunStalled|TrainRankStalled"}'
    asks = {
        f"8 {firing}": {},
        f"12 count by (alertname, train_peer_rank, train_stage) ({firing})": {
            '{alertname="TrainRunStalled"}': 1.0,
            '{alertname="TrainRankStalled", train_peer_rank="3", train_stage="data"}': 1.0,
        },
    }

    check(tmp_path, "native", [scenario(Run(profile, loops).until(12), "native", asks)])


@pytest.mark.parametrize("profile", PROFILES)
def test_an_alert_carries_whose_run_it_is_and_where(profile: str, tmp_path: Path) -> None:
    """ExportManager go by team; and a run that was killed cannot be asked any more."""
    run = Run(profile, [Loop(rank) for rank in range(2)])
    for rank in range(2):
        run.account(rank).reporter.about = ("gpt", "speech", "ann", "4711", "berlin", "gpu")
    fired = 'count by (alertname, train_run_name, train_team, train_owner, train_job, train_cluster, train_namespace) (ALERTS{alertstate="firing",severity="critical"})'
    expected = (
        '{alertname="TrainRunVanished", train_run_name="gpt", train_team="speech", train_owner="ann",'
        ' train_job="4711", train_cluster="berlin", train_namespace="gpu"}'
    )

    check(tmp_path, "native", [scenario(run.until(6), "native", {f"14 {fired}": {expected: 1.0}})])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_straggler_is_named_in_every_profile(profile: str, tmp_path: Path) -> None:
    """From rank 0, whether or not the straggler sends anything itself."""
    loops = [Loop(rank) for rank in range(RANKS)]
    for rank, loop in enumerate(loops):
        loop.late_s = 0.2 if rank == 2 else -0.2
    asks = {
        '24 count by (train_peer_rank, train_peer_host, train_stage) (ALERTS{alertstate="firing",alertname="TrainStraggler"})': {
            '{train_peer_rank="2", train_peer_host="node0", train_stage="data"}': 1.0
        }
    }

    check(tmp_path, "native", [scenario(Run(profile, loops).until(24), "native", asks)])


@functools.cache
def lengthened(profile: str) -> Run:
    """Steps of 0.5 s, and after 52 minutes of 0.7 s."""

    def slower(loop: Loop) -> None:
        loop.longer = 1.4

    return Run(profile, [Loop(rank, ((52.0, slower),)) for rank in range(2)]).until(72)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("profile", PROFILES)
def test_steps_that_take_longer_than_before_show_in_their_mean(
    profile: str, variant: str, tmp_path: Path
) -> None:
    """Between two bounds of a coarse histogram, where a quantile sees nothing of it."""
    run = lengthened(profile)
    firing = 'ALERTS{alertstate="firing",alertname="TrainStepTimeRegression"}'
    asks = {f"51 {firing}": {}, f"70 count({firing})": {"{}": 1.0}}

    check(tmp_path, variant, [scenario(run, variant, asks)])


@pytest.mark.parametrize("profile", PROFILES)
def test_an_event_counter_that_is_born_at_1_pages(profile: str, tmp_path: Path) -> None:
    """Ranks send some counters from their first event on; what begins at 1 has not increased."""
    run = Run(profile, [Loop(rank) for rank in range(RANKS)]).until(5)
    run.account(2).readings.watch.worker_exits["train", "SIGKILL"] = 1
    run.account(1).readings.signals.take("loss", math.nan)
    run.until(8)
    asked = '8 count by (alertname, train_rank, train_rank_event) (ALERTS{alertstate="firing",severity="critical"})'
    expected: dict[str, float] = {
        '{alertname="TrainLoaderWorkerDied", train_rank="2"}': 1.0,
        '{alertname="TrainNonFinite"}': 1.0,
    }
    if profile == "rank0_aggregate":
        expected = {
            f'{{alertname="TrainRankEvents", train_rank_event="{event}"}}': 1.0
            for event in ("loader_worker_exit", "nonfinite")
        }

    check(tmp_path, "native", [scenario(run, "native", {asked: expected})])
