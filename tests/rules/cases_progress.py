"""Runs that hang, vanish, fail, lose ranks or time."""

from __future__ import annotations

from tests.rules.promtool import Case, Expectation, fires, quiet

R = 'train_run_id="r"'
HEARTBEAT = "train_heartbeat_time_seconds"

RANK = {"train_peer_rank": "1", "train_peer_host": "b", "train_stage": "data"}


def status(state: str, run: str = "r", rank: str = "0", more: str = "") -> str:
    return f'train_run_status{{train_run_id="{run}",train_rank="{rank}",train_run_state="{state}"{more}}}'


def heartbeat(rank: str = "0", host: str = "a", run: str = "r", more: str = "") -> str:
    return f'{HEARTBEAT}{{train_run_id="{run}",train_rank="{rank}",host_name="{host}"{more}}}'


def threshold(rank: str = "0", run: str = "r") -> str:
    return f'train_stall_threshold_seconds{{train_run_id="{run}",train_rank="{rank}"}}'


def ranks_expected(run: str = "r") -> str:
    return f'train_ranks_expected{{train_run_id="{run}",train_rank="0"}}'


def spent(run: str, **activities: str) -> dict[str, str]:
    name = "train_run_time_seconds_total"
    return {
        f'{name}{{train_run_id="{run}",train_run_activity="{activity}"}}': values
        for activity, values in activities.items()
    }


def late(run: str, age_s: str) -> dict[str, str]:
    """A run that trains, whose newest samples are so old."""
    always = (
        f'run:train_active:bool{{train_run_id="{run}"}}',
        f'run:train_collector:last1h{{train_run_id="{run}"}}',
    )
    return {
        f'run:train_telemetry_age_seconds:min{{train_run_id="{run}"}}': age_s,
        **dict.fromkeys(always, "1x80" if run == "skewed" else "1x53"),
    }


def by_collector(run: str, *collectors: str, lasts: int, first: int = 0) -> dict[str, str]:
    """Ranks of a run from the first on, one by each Collector, heard of for as many samples."""
    series = {}
    for rank, collector in enumerate(collectors, first):
        more = f',train_collector="{collector}"'
        series[heartbeat(str(rank), collector, run, more)] = f"0+30x{lasts}"
        series[status("training", run, str(rank), more)] = f"1x{lasts}"
    return series


def scraped(
    run: str, rank: str = "0", host: str = "a", *, up: str, lasts: str = "x10 stale _x50"
) -> dict[str, str]:
    """A rank that is a target of its own."""
    target = f'job="train",instance="{run}/{rank}"'
    return {
        status("training", run, rank, f",{target}"): f"1{lasts}",
        heartbeat(rank, host, run, f",{target}"): f"0+30{lasts}",
        f"up{{{target}}}": up,
    }


def every(alert: str, at_min: float, *instances: dict[str, str]) -> Expectation:
    """It fires then for these, and for nothing else."""
    return Expectation(alert, at_min, tuple((labels, "") for labels in instances))


def down(at_min: float) -> Expectation:
    """The Collector of node n1 is down then."""
    return fires("OtelCollectorDown", at_min, job="otel-collector", instance="n1:8888", train_collector="n1")


def restarted(run: str, *failed: str, expected: str) -> dict[str, str]:
    """Ranks that train when they are not in state failed."""
    trains = str.maketrans("01", "10")
    series = {ranks_expected(run): expected}
    for rank, values in enumerate(failed):
        series[status("failed", run, str(rank))] = values
        series[status("training", run, str(rank))] = " ".join(
            f"{word[0].translate(trains)}{word[1:]}" for word in values.split()
        )
    return series


def ended(run: str, *ends: str, again: bool = False) -> dict[str, str]:
    """Ranks that train for five minutes and end so; ``again``: and train from minute 12 on."""
    trains, has_ended = ("1x9 0 _x13 1x56", "_x10 1 _x13 0x56") if again else ("1x9 0", "_x10 1")
    series = {ranks_expected(run): "2x10 _x13 2x56"}
    for rank, state in enumerate(ends):
        series[status("training", run, str(rank))] = trains
        series[status(state, run, str(rank))] = has_ended
    return series


def alone(run: str, *finished: str) -> dict[str, str]:
    """Rank 0 evaluates; of the others nothing is heard any more."""
    series = {
        heartbeat(run=run): "0+30x120",
        ranks_expected(run): "3x120",
        status("evaluating", run): "1x120",
    }
    for rank, values in enumerate(finished, 1):
        series[heartbeat(str(rank), "b", run)] = "0+30x9 _x120"
        series[status("finished", run, str(rank), ',host_name="b"')] = values
    return series


def without_rank_0(run: str, series: dict[str, str]) -> dict[str, str]:
    """Four ranks that train; of rank 0 nothing is heard after nine and a half minutes but what is given."""
    others = {heartbeat(rank, "b", run): "0+30x80" for rank in "123"}
    trains = {status("training", run, rank): "1x80" for rank in "123"}
    return {heartbeat(run=run): "0+30x19 _x61", **others, **trains, **series}


CASES = (
    Case(
        "all ranks freeze while telemetry still flows",
        30,
        {
            heartbeat("0", "a"): "0x60",
            heartbeat("1", "b"): "0x60",
            threshold(): "300x60",
            status("training"): "1x12 0x48",
            status("stalled"): "0x12 1x48",
            status("training", rank="1"): "1x60",
        },
        (
            quiet("TrainRunStalled", 6),
            fires("TrainRunStalled", 7, "7m 0s", train_run_id="r"),
            fires("TrainRunStalled", 29, "29m 0s", train_run_id="r"),
            quiet("TrainRankStalled", 7),
            quiet("TrainRunVanished", 7),
        ),
    ),
    Case(
        "the threshold is the run's own",
        30,
        {
            heartbeat(): "0x60",
            threshold(): "1500x60",
            status("training"): "1x60",
        },
        (quiet("TrainRunStalled", 20), fires("TrainRunStalled", 28, "28m 0s", train_run_id="r")),
    ),
    Case(
        "a run that takes its time to get ready is not stalled",
        30,
        {
            heartbeat(): "0x60",
            threshold(): "300x60",
            status("initializing"): "1x60",
            status("training"): "0x60",
        },
        (quiet("TrainRunStalled", 25), quiet("TrainRunVanished", 25), quiet("TrainRunFailed", 25)),
    ),
    Case(
        "a rank holds the others up, and moves on",
        30,
        {
            'train_rank_stall_time_seconds{train_run_id="r",train_peer_rank="1",train_peer_host="b",train_stage="data"}': "_x10 300+30x10 0x10",
        },
        (
            quiet("TrainRankStalled", 5),
            fires("TrainRankStalled", 6.5, "6m 30s", train_run_id="r", **RANK),
            quiet("TrainRankStalled", 13),
        ),
    ),
    Case(
        "a program whose loops are over may be silent; one of whose ranks left the loop is judged by the others",
        30,
        {
            heartbeat(run="over"): "-90000x60",
            threshold(run="over"): "86400x60",
            status("training", run="over"): "1x60",
            # Its evaluation may take 20 hours, and began 19 hours and 55 minutes ago.
            heartbeat(run="patient"): "-71700x60",
            threshold(run="patient"): "72000x60",
            status("evaluating", run="patient"): "1x60",
            heartbeat("0"): "0+30x20 600x40",
            heartbeat("1"): "0x60",
            threshold(): "86400x60",
            threshold("1"): "600x60",
            status("training"): "1x60",
        },
        (
            quiet("TrainRunStalled", 5),
            fires("TrainRunStalled", 10, "20h 5m 0s", train_run_id="patient"),
            Expectation(
                "TrainRunStalled",
                15,
                (({"train_run_id": "r"}, "15m 0s"), ({"train_run_id": "patient"}, "20h 10m 0s")),
            ),
        ),
    ),
    Case(
        "of runs that pushed, one was killed and one finished",
        30,
        {
            heartbeat(run="dead"): "0+30x10 _x50",
            status("training", run="dead"): "1x10 _x50",
            heartbeat(run="done"): "0+30x10 _x50",
            status("training", run="done"): "1x8 0 _x50",
            status("finished", run="done"): "0x8 1 _x50",
            # Before it had finished, a rank of it was killed.
            heartbeat("1", "b", run="done"): "0+30x5 _x50",
            status("training", run="done", rank="1"): "1x5 _x50",
        },
        (
            quiet("TrainRunVanished", 6),
            fires("TrainRunVanished", 9, train_run_id="dead"),
            fires("TrainRunVanished", 18, train_run_id="dead"),
            quiet("TrainRunVanished", 29),
        ),
    ),
    Case(
        "of runs that were scraped, one was killed, one took its target away, and one lost a rank",
        30,
        {
            **scraped("lost", up="1x60", lasts="x60"),
            **scraped("lost", "1", "b", up="1x10 0x50"),
            **scraped("dead", up="1x10 0x50"),
            **scraped("done", up="1x10 stale _x50"),
        },
        (
            quiet("TrainRunVanished", 6),
            fires("TrainRunVanished", 9, train_run_id="dead"),
            quiet("TrainRunVanished", 27),
        ),
    ),
    Case(
        "scrapes of a run fail for a minute and three quarters",
        15,
        {
            status("training", more=',job="train",instance="d"'): "1x40 stale _x6 1x40",
            heartbeat(more=',job="train",instance="d"'): "0+15x40 stale _x6 720+15x40",
            'up{job="train",instance="d"}': "1x40 0x6 1x40",
        },
        tuple(quiet("TrainRunVanished", minute) for minute in (11, 11.5, 12, 12.5, 13, 14)),
    ),
    Case(
        # What a host pushes has the time of its own clock.
        "the clock of the only host is 150 s behind; another run on such a host is killed; that of a third one comes late twice",
        15,
        {
            **late("unsteady", "5x20 130x2 5x17 110x8 5x5"),
            **late("skewed", "150x80"),
            **late("killed", "150x40 165+15x12"),
        },
        (
            *(quiet("TrainRunVanished", minute) for minute in (5.5, 6, 10, 12)),
            every("TrainRunVanished", 14, {"train_run_id": "killed"}),
        ),
    ),
    Case(
        # By 145 s: for an hour it is as if the run had been silent for so long.
        "the clock of the only host is set back",
        15,
        {
            'run:train_telemetry_age_seconds:min{train_run_id="r"}': "5x20 150x300",
            'run:train_active:bool{train_run_id="r"}': "1x320",
            'run:train_collector:last1h{train_run_id="r"}': "1x320",
        },
        (fires("TrainRunVanished", 60, train_run_id="r"), quiet("TrainRunVanished", 70)),
    ),
    Case(
        # What waited arrives from the oldest on, which takes minutes.
        "Prometheus was away from minute 10 on; another run was killed before its eyes",
        15,
        {
            **{status("training", run=run): "1x40" for run in ("away", "killed")},
            **{f'run:train_collector:last1h{{train_run_id="{run}"}}': "1x80" for run in ("away", "killed")},
            'run:train_telemetry_age_seconds:min{train_run_id="away"}': "5x31 20+15x8",
            'run:train_telemetry_age_seconds:min{train_run_id="killed"}': "5x40 20+15x18",
        },
        (
            quiet("TrainRunVanished", 10),
            fires("TrainRunVanished", 17, train_run_id="killed"),
        ),
    ),
    Case(
        "a run reports its failure",
        30,
        {
            status("training"): "1x10 0x10",
            status("failed"): "0x10 1x10",
            status("failed", run="good"): "0x20",
        },
        (
            quiet("TrainRunFailed", 6),
            fires("TrainRunFailed", 8, train_run_id="r"),
            quiet("TrainRunFailed", 22),
        ),
    ),
    Case(
        "a run that Ctrl-C ended goes on and fails; another one goes on without the rank that vanished, and fails",
        30,
        {
            status("training", "resumed"): "1x9 0x2 _x4 1x22 0x20",
            status("interrupted", "resumed"): "_x10 1x2 _x50",
            status("failed", "resumed"): "_x39 1x20",
            ranks_expected("resumed"): "1x59",
            status("training", "fewer"): "1x38 0x20",
            status("failed", "fewer"): "0x38 1x20",
            status("training", "fewer", "1"): "1x9 _x50",
            ranks_expected("fewer"): "2x10 1x48",
        },
        (
            quiet("TrainRunFailed", 19),
            every("TrainRunFailed", 23, {"train_run_id": "resumed"}, {"train_run_id": "fewer"}),
        ),
    ),
    Case(
        # Ranks 0 and 1 fail at 5 minutes. The launcher starts the runs again a minute later: one with both ranks, one with
        # rank 0 alone. In the third run rank 1 fails alone, and rank 0 waits for it.
        "failed runs are started again, with as many ranks or fewer",
        30,
        {
            **restarted("same", "0x9 1x1 0x40", "0x9 1x1 0x40", expected="2x50"),
            **restarted("fewer", "0x9 1x1 0x40", "0x9 1x1 _x40", expected="2x11 1x39"),
            **restarted("broken", "0x50", "0x9 1x1 _x40", expected="2x50"),
        },
        (
            quiet("TrainRunFailed", 6),
            fires("TrainRunFailed", 8, train_run_id="broken"),
            fires("TrainRunFailed", 13, train_run_id="broken"),
        ),
    ),
    Case(
        # At 5 minutes. Rank 1 loses its connection to a rank that Ctrl-C ends; torchrun ends the others with SIGTERM when
        # one fails. The scheduler starts `preempted` again at 12 minutes, and `smaller` with one rank of two.
        "Ctrl-C ends a run, a scheduler ends three and starts two of them again, a failure ends one",
        30,
        {
            **ended("interrupted", "interrupted", "failed"),
            **ended("terminated", "terminated", "terminated"),
            **ended("failed", "failed", "terminated"),
            **ended("preempted", "terminated", "terminated", again=True),
            **ended("smaller", "terminated", again=True),
            ranks_expected("smaller"): "2x10 _x13 1x56",
            status("training", "smaller", "1"): "1x9 0",
            status("terminated", "smaller", "1"): "_x10 1",
        },
        (
            every("TrainRunFailed", 8, {"train_run_id": "failed"}),
            every("TrainRunFailed", 13, {"train_run_id": "failed"}),
            quiet("TrainRunTerminated", 14),
            every("TrainRunTerminated", 16, {"train_run_id": "terminated"}),
            every("TrainRunTerminated", 24, {"train_run_id": "terminated"}),
            quiet("TrainRunTerminated", 28),
        ),
    ),
    Case(
        "a rank goes mute",
        30,
        {
            heartbeat("0"): "0+30x40",
            heartbeat("1"): "0+30x4 _x40",
            ranks_expected(): "2x40",
            status("training"): "1x40",
        },
        (quiet("TrainRanksMissing", 4), fires("TrainRanksMissing", 9, "1", train_run_id="r")),
    ),
    Case(
        "rank 0 of one run goes mute, of one continues elsewhere with a rank less, and of one finishes first",
        30,
        {
            **without_rank_0(
                "mute", {status("training", "mute"): "1x19 _x61", ranks_expected("mute"): "4x19 _x61"}
            ),
            **without_rank_0(
                "smaller",
                {
                    heartbeat(host="z", run="smaller"): "_x20 600+30x60",
                    heartbeat("4", "b", "smaller"): "0+30x19 _x61",
                    ranks_expected("smaller").replace("}", ',host_name="z"}'): "_x20 4x60",
                    ranks_expected("smaller"): "5x19 _x61",
                },
            ),
            **without_rank_0(
                "done",
                {
                    status("finished", "done"): "0x17 1x1 _x61",
                    status("training", "done"): "1x17 0x1 _x61",
                    ranks_expected("done"): "4x19 _x61",
                },
            ),
        },
        (
            quiet("TrainRanksMissing", 14),
            *(fires("TrainRanksMissing", minute, "3", train_run_id="mute") for minute in (15, 20, 39)),
        ),
    ),
    Case(
        "ranks that finish one after the other are not missing",
        30,
        {
            heartbeat("0"): "0+30x40",
            heartbeat("1"): "0+30x4 _x40",
            ranks_expected(): "2x40",
            status("training"): "1x4 0x40",
            status("finished"): "0x4 1x40",
        },
        (quiet("TrainRanksMissing", 9),),
    ),
    Case(
        "rank 0 evaluates and saves when the others have ended in order; one was killed in another run",
        30,
        {
            **alone("r", "0x8 1 _x120", "0x8 1 _x120"),
            **alone("k", "0x8 1 _x120", "0x9 _x120"),
        },
        (
            quiet("TrainRanksMissing", 6),
            fires("TrainRanksMissing", 12, "1", train_run_id="k"),
            fires("TrainRanksMissing", 55, "1", train_run_id="k"),
        ),
    ),
    Case(
        "a rank whose reports do not come sends its own telemetry, where every rank exports",
        60,
        {
            f"train_ranks_reporting{{{R}}}": "2x20 1x40",
            f"train_world_size{{{R}}}": "2x60",
            f"train_ranks_expected{{{R}}}": "2x60",
            heartbeat("0"): "0+60x60",
            heartbeat("1"): "0+60x60",
            status("training"): "1x60",
        },
        (quiet("TrainRankReportsMissing", 40), quiet("TrainRanksMissing", 40)),
    ),
    Case(
        "rank 0 counts a rank less, and reports one that ran out of memory",
        60,
        {
            f"train_ranks_reporting{{{R}}}": "8x20 7x40",
            f"train_world_size{{{R}}}": "8x60",
            f"train_ranks_expected{{{R}}}": "1x60",
            status("training"): "1x60",
            f'train_ranks_events_total{{{R},train_rank_event="oom"}}': "0x30 1x30",
            f'train_ranks_events_total{{{R},train_rank_event="nonfinite"}}': "_x42 1x18",
            f'train_ranks_events_total{{{R},train_rank_event="drop"}}': "0+1x60",
            # One that has ended: its ranks leave one after the other.
            'train_ranks_reporting{train_run_id="over"}': "8x20 7x40",
            'train_world_size{train_run_id="over"}': "8x60",
            'train_ranks_expected{train_run_id="over"}': "1x60",
            status("training", run="over"): "1x20 0x40",
            status("finished", run="over"): "0x20 1x40",
        },
        (
            quiet("TrainRankReportsMissing", 22),
            fires("TrainRankReportsMissing", 25, "7", train_run_id="r"),
            quiet("TrainRankEvents", 29),
            fires("TrainRankEvents", 35, train_run_id="r", train_rank_event="oom"),
            # Its first sample is above zero.
            fires("TrainRankEvents", 45, train_run_id="r", train_rank_event="nonfinite"),
            quiet("TrainRankEvents", 55),
        ),
    ),
    Case(
        # `late` is given up eight minutes later; `slowly` starts again every twenty minutes.
        "a run starts again three times, another once, one after each Ctrl-C; one that was started again five times finishes and begins anew",
        30,
        {
            f"train_run_restarts_total{{{R}}}": "0x4 1x4 2x4 3x30",
            status("training"): "1x45",
            'train_run_restarts_total{train_run_id="late"}': "0x80 1x4 2x4 3x16",
            'train_run_restarts_total{train_run_id="slowly"}': "0x39 1x40 2x40 3x30",
            'train_run_restarts_total{train_run_id="once"}': "0x10 1x35",
            'train_run_restarts_total{train_run_id="anew"}': "5x10 0x35",
            'train_run_restarts_total{train_run_id="by-hand"}': "0x4 1x4 2x4 3x30",
            status("interrupted", run="by-hand"): "0x3 1 0x3 1 0x3 1 0x30",
        },
        (
            quiet("TrainRestartLoop", 6),
            fires("TrainRestartLoop", 9, "3", train_run_id="r"),
            quiet("TrainRestartLoop", 40),
            fires("TrainRestartLoop", 60, "3", train_run_id="late"),
            quiet("TrainRestartLoop", 66),
        ),
    ),
    Case(
        "time is lost over an hour, over six, at the start alone, and no more",
        60,
        {
            **spent("bad", productive="0+12x480", data_wait="0+48x480"),
            status("training", run="bad"): "1x480",
            **spent("slow", productive="0+30x480", checkpoint="0+30x480"),
            status("training", run="slow"): "1x480",
            **spent("healed", productive="0+6x60 366+60x419", data_wait="0+54x60 3240x419"),
            status("training", run="healed"): "1x480",
        },
        (
            quiet("TrainGoodputBurnFast", 25),
            quiet("TrainGoodputBurnSlow", 120),
            fires("TrainGoodputBurnFast", 70, "80%", train_run_id="bad"),
            fires("TrainGoodputBurnFast", 400, "80%", train_run_id="bad"),
        ),
    ),
    Case(
        "a run loses most of its time and works again; another one is begun anew after two hours; a third one is idle",
        60,
        {
            **spent("recovered", productive="0+12x100 1260+60x40", data_wait="0+48x100 4800x40"),
            status("training", run="recovered"): "1x140",
            **spent("again", productive="0+55x60 _x140 0+12x60", data_wait="0+5x60 _x140 0+48x60"),
            status("training", run="again"): "1x60 _x140 1x60",
            **spent("idle", productive="0+55x60 3300x200", outside="0+5x60 305+60x199"),
            status("training", run="idle"): "1x60 0x200",
        },
        (
            quiet("TrainGoodputBurnFast", 32),
            fires("TrainGoodputBurnFast", 34, "80%", train_run_id="recovered"),
            fires("TrainGoodputBurnFast", 105, "80%", train_run_id="recovered"),
            quiet("TrainGoodputBurnFast", 108),
            quiet("TrainGoodputBurnFast", 225),
            fires("TrainGoodputBurnFast", 245, "80%", train_run_id="again"),
        ),
    ),
    Case(
        "one run is busy with results after training, another one saves for 13 minutes after each pass of five",
        60,
        {
            # After its last step it is busy with results for two hours.
            **spent("results", productive="0+57x60 3420x120", outside="0+3x60 180+60x119"),
            status("training", run="results"): "1x180",
            heartbeat(run="results"): "0+60x60 3600x119",
            threshold(run="results"): "300x60 86400x119",
            # It trains for 5 minutes, and saves for 13.
            **spent("saves", productive=" ".join(f"{300 * n}+60x4 {300 * n + 300}x12" for n in range(6))),
            **spent("saves", outside=" ".join(f"{780 * n}x4 {780 * n}+60x12" for n in range(6))),
            status("training", run="saves"): "1x107",
            heartbeat(run="saves"): " ".join(f"{1080 * n}+60x4 {1080 * n + 300}x12" for n in range(6)),
            threshold(run="saves"): "300x4 86400x12 " * 6,
        },
        (
            *(
                fires("TrainGoodputBurnFast", minute, "74.58%", train_run_id="saves")
                for minute in (70, 85, 105)
            ),
            quiet("TrainGoodputBurnFast", 125),
            quiet("TrainGoodputBurnFast", 170),
        ),
    ),
    Case(
        "a run evaluates for two hours, and another one saves for as long",
        60,
        {
            **spent("r", productive="0+55x120 6600x120", data_wait="0+5x120 600x120", eval="0x120 0+60x119"),
            status("training"): "1x120 0x120",
            status("evaluating"): "0x120 1x120",
            **spent(
                "saves", productive="0+55x120 6600x120", eval="0+5x120 600x120", checkpoint="0x120 0+60x119"
            ),
            status("checkpointing", run="saves"): "1x240",
        },
        (
            quiet("TrainGoodputBurnFast", 150),
            fires("TrainGoodputBurnFast", 163, "74.4%", train_run_id="saves"),
        ),
    ),
    Case(
        "half of six hours goes into checkpoints; another run is begun anew after as long, and a third one is idle",
        60,
        {
            **spent("r", productive="0+30x400 12060+60x60", checkpoint="0+30x400 12000x60"),
            status("training"): "1x460",
            **spent("fine", productive="0+55x460", checkpoint="0+5x460"),
            status("training", run="fine"): "1x460",
            **spent("again", productive="0+55x200 _x370 0+24x130", checkpoint="0+5x200 _x370 0+36x130"),
            status("training", run="again"): "1x200 _x370 1x130",
            **spent("idle", productive="0+55x120 6600x340", outside="0+5x120 605+60x339"),
            status("training", run="idle"): "1x120 0x340",
        },
        (
            quiet("TrainGoodputBurnSlow", 150),
            quiet("TrainGoodputBurnSlow", 194),
            fires("TrainGoodputBurnSlow", 198, "50%", train_run_id="r"),
            fires("TrainGoodputBurnSlow", 400, "50%", train_run_id="r"),
            quiet("TrainGoodputBurnFast", 400),
            fires("TrainGoodputBurnSlow", 420, "48.47%", train_run_id="r"),
            quiet("TrainGoodputBurnSlow", 425),
            quiet("TrainGoodputBurnSlow", 690),
        ),
    ),
    Case(
        # Runs by the Collectors of their ranks. That of n1 dies in minute 10, and nothing of it is heard any more;
        # at the same time the runs `killed`, on n2, and `killed-on-both` end without a word.
        "the Collector of one node dies, and two runs are killed",
        30,
        {
            **by_collector("alone", "n1", lasts=20),
            **by_collector("other", "n2", lasts=80),
            **by_collector("killed", "n2", lasts=20),
            **by_collector("killed-on-both", "n1", "n2", lasts=20),
            **by_collector("cut", "n2", lasts=80),
            **by_collector("cut", "n1", first=1, lasts=20),
            ranks_expected("cut"): "2x80",
            'up{job="otel-collector",instance="n1:8888",train_collector="n1"}': "1x20 0x60",
            'up{job="otel-collector",instance="n2:8888",train_collector="n2"}': "1x80",
        },
        (
            down(14),
            every(
                "TrainRunVanished",
                14,
                {"train_run_id": "alone", "train_collector": "n1"},
                {"train_run_id": "killed", "train_collector": "n2"},
                {"train_run_id": "killed-on-both", "train_collector": "n2"},
            ),
            fires("TrainRanksMissing", 16, "1", train_run_id="cut", train_collector="n1"),
        ),
    ),
    Case(
        # For ten minutes. The run tries again up to a minute after its return, and sends the oldest first.
        "a Collector is away, and mutes a run until that has sent what waited",
        30,
        {
            heartbeat(more=',train_collector="n1"'): "0+30x20 _x23 1290+30x40",
            status("training", more=',train_collector="n1"'): "1x20 _x23 1x40",
            'up{job="otel-collector",instance="n1:8888",train_collector="n1"}': "1x20 0x19 1x44",
        },
        (
            *(
                fires("TrainRunVanished", minute, train_run_id="r", train_collector="n1")
                for minute in (18, 20.5, 21.5)
            ),
            *(down(minute) for minute in (18, 20.5, 21.5)),
            quiet("TrainRunVanished", 23),
            quiet("OtelCollectorDown", 27),
        ),
    ),
    Case(
        "a rank that was never heard of may be missing for another reason than a dead Collector",
        30,
        {
            **by_collector("r", "n2", lasts=80),
            **by_collector("r", "n1", first=1, lasts=20),
            **by_collector("r", "n2", first=2, lasts=80),
            ranks_expected("r"): "4x80",
            'up{job="otel-collector",instance="n1:8888",train_collector="n1"}': "1x20 0x60",
            'up{job="otel-collector",instance="n2:8888",train_collector="n2"}': "1x80",
        },
        (
            fires("TrainRanksMissing", 9, "3", train_run_id="r"),
            fires("TrainRanksMissing", 20, "2", train_run_id="r"),
        ),
    ),
)
