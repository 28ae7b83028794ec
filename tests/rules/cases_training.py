"""Runs that are slow, wrong, short of data or short of memory."""

from __future__ import annotations

from tests.rules.promtool import Case, Durations, Expectation, fires, quiet, with_capture

R = 'train_run_id="r"'
STAGE = "train_stage_duration_seconds"
STEP = "train_step_duration_seconds"


def stage(name: str, rank: str, seconds: float, intervals: int, *, run: str = "r") -> Durations:
    labels = f'train_run_id="{run}",train_rank="{rank}",train_phase="train",train_loader="main",train_stage="{name}"'
    return Durations(STAGE, labels, [(seconds, 30, intervals)])


def step(rank: str, seconds: float, intervals: int, *, run: str = "r") -> Durations:
    labels = f'train_run_id="{run}",train_rank="{rank}",train_phase="train",train_loader="main"'
    return Durations(STEP, labels, [(seconds, 30, intervals)])


def status(state: str, run: str = "r") -> str:
    return f'train_run_status{{train_run_id="{run}",train_run_state="{state}"}}'


def progress(run: str) -> str:
    return f'train_heartbeat_time_seconds{{train_run_id="{run}"}}'


def excess(rank: str, host: str, name: str = "data", *, run: str = "r") -> str:
    labels = f'train_run_id="{run}",train_peer_rank="{rank}",train_peer_host="{host}",train_stage="{name}"'
    return f"train_straggler_excess_ratio{{{labels}}}"


def straggles(at_min: float, share: str, *, run: str = "r") -> Expectation:
    """The alert on stragglers fires then for rank 2 of this run, in its stage data."""
    rank = {"train_peer_rank": "2", "train_peer_host": "b", "train_stage": "data"}
    return fires("TrainStraggler", at_min, share, train_run_id=run, **rank)


def waits(at_min: float, share: str = "30%") -> Expectation:
    return fires("TrainInputBound", at_min, share, train_run_id="r", train_phase="train")


def slower(at_min: float, duration: str, *, run: str = "r") -> Expectation:
    return fires("TrainStepTimeRegression", at_min, duration, train_run_id=run, train_phase="train")


def rare(seconds: float, every: int, times: int) -> list[tuple[float, int, int]]:
    """One after so many intervals, and so on."""
    return [(seconds, 1, 1), (seconds, 0, every - 1)] * times


def captured(file: str, finding: str, *, run: str = "r", rank: str = "0", alert: str = "") -> str:
    """The series of a capture."""
    labels = f'train_run_id="{run}",train_rank="{rank}",train_profiler_file="{file}",train_profiler_trigger="alert"'
    said = f',train_profiler_finding_name="{finding}"' if finding else ""
    by = f',train_profiler_alert="{alert}"' if alert else ""
    return f"train_profiler_capture_time_seconds{{{labels}{said}{by}}}"


def counted_one(run: str, there: str, detections: str) -> dict[str, str]:
    """A run whose rank was there for so long, and found losses that are not finite."""
    rank = f'train_run_id="{run}",train_rank="0"'
    return {
        f"train_rank_time_seconds_total{{{rank}}}": there,
        f'train_nonfinite_detections_total{{{rank},train_nonfinite_kind="loss"}}': detections,
    }


def one_of_each(at_min: float, *runs: str) -> Expectation:
    """The alert on losses fires then for these runs, and for no other."""
    found = tuple(({"train_run_id": run, "train_nonfinite_kind": "loss"}, "") for run in runs)
    return Expectation("TrainNonFinite", at_min, found)


def host_memory(run: str, used: str) -> dict[str, str]:
    """A run on one host with 1,000 bytes of memory."""
    labels = f'train_run_id="{run}",host_name="n"'
    return {
        f"train_host_memory_usage_bytes{{{labels}}}": used,
        f"train_host_memory_limit_bytes{{{labels}}}": "1000x265",
    }


def full(at_min: float, **reserved: str) -> Expectation:
    """The alert on device memory fires then for these ranks, which have reserved so much, and for no other."""
    ranks = ((name.removeprefix("rank_"), share) for name, share in reserved.items())
    found = (({"train_run_id": "r", "train_rank": rank, "hw_name": "cuda:0"}, share) for rank, share in ranks)
    return Expectation("TrainAcceleratorMemoryHigh", at_min, tuple(found))


def grows(at_min: float, *runs: str) -> Expectation:
    """The alert on host memory fires then for these runs, and for no other."""
    return Expectation(
        "TrainHostMemoryLeak", at_min, tuple(({"train_run_id": run, "host_name": "n"}, "") for run in runs)
    )


def utilisation(run: str, flops: str, *, productive: str = "") -> dict[str, str]:
    """A run of one rank, sampled once a minute, whose device can do 100 FLOP per second."""
    rank = f'train_run_id="{run}",train_rank="0"'
    minutes = sum(int(part.rpartition("x")[2]) for part in flops.split())
    steady = f"0+60x{minutes}"
    activities = {"productive": productive or steady}
    if productive:
        fast, slow = (part.rpartition("x") for part in productive.split())
        rate = 60 - float(slow[0].rpartition("+")[2])
        activities["eval"] = f"0x{int(fast[2])} 0+{rate:g}x{slow[2]}"
    return {
        f"train_model_flops_total{{{rank}}}": flops,
        f"train_accelerator_flops_limit_per_second{{{rank}}}": f"100x{minutes}",
        f"train_world_size{{{rank}}}": f"1x{minutes}",
        f"train_rank_time_seconds_total{{{rank}}}": steady,
        **{
            f'train_run_time_seconds_total{{{rank},train_run_activity="{name}"}}': values
            for name, values in activities.items()
        },
    }


CASES = (
    Case(
        "one run waits for data a third of the time, another a tenth, and in its evaluation half",
        30,
        {},
        (
            quiet("TrainInputBound", 10),
            waits(20),
        ),
        (
            stage("data", "0", 0.3, 80),
            step("0", 1.0, 80),
            stage("data", "0", 0.1, 80, run="fed"),
            step("0", 1.0, 80, run="fed"),
            *(
                made._replace(labels=made.labels.replace('train_phase="train"', 'train_phase="eval"'))
                for made in (stage("data", "0", 0.5, 80, run="fed"), step("0", 1.0, 80, run="fed"))
            ),
        ),
    ),
    Case(
        "steps of seven minutes wait for data a third of the time, in another run a tenth; shorter ones begin to wait after an hour",
        60,
        {status("training", run): "1x140" for run in ("r", "fed", "later")},
        (
            quiet("TrainInputBound", 30),
            waits(60),
            waits(75),
            Expectation(
                "TrainInputBound",
                84,
                tuple(({"train_run_id": run, "train_phase": "train"}, "30%") for run in ("r", "later")),
            ),
            waits(120),
        ),
        tuple(
            Durations(metric, f'train_run_id="{run}",train_phase="train",train_loader="main"{more}', parts)
            for run, *series in (
                ("r", rare(126, 7, 20), rare(280, 7, 20), rare(420, 7, 20)),
                ("fed", rare(42, 7, 20), rare(364, 7, 20), rare(420, 7, 20)),
                ("later", rare(9, 3, 20) + rare(54, 3, 12), rare(100, 3, 32), rare(180, 3, 32)),
            )
            for (metric, more), parts in zip(
                ((STAGE, ',train_stage="data"'), (STAGE, ',train_stage="forward"'), (STEP, "")),
                series,
                strict=True,
            )
        ),
    ),
    Case(
        # `once` has one step of 20 minutes; `last` ends with one, and evaluates. Steps of three minutes are judged by five.
        "steps of seven minutes take ten, shorter ones a third longer; in other runs one step takes twenty",
        60,
        {status("training", run): "1x400" for run in ("r", "once", "last", "shorter")},
        (
            quiet("TrainStepTimeRegression", 280),
            slower(304, "4m 10s", run="shorter"),
            slower(340, "10m 0s"),
            *(slower(at, "10m 0s") for at in range(355, 400, 5)),
        ),
        tuple(
            Durations(STEP, f'train_run_id="{run}",train_phase="train",train_loader="main"', parts)
            for run, parts in (
                ("r", rare(420, 7, 40) + rare(600, 10, 12)),
                ("once", rare(420, 7, 40) + rare(1200, 20, 1) + rare(420, 7, 14)),
                ("last", rare(420, 7, 40) + rare(1200, 20, 1) + [(1200, 0, 100)]),
                ("shorter", rare(180, 3, 95) + rare(250, 4, 8)),
            )
        ),
    ),
    Case(
        "a run that waits for data was captured twice, and its alert tells the newer one",
        30,
        {
            captured("captures/epoch_1-step_90-rank0.json.gz", "heavy_op"): "120x39 _x41",
            captured("captures/epoch_1-step_200-rank1.json.gz", "input_bound", rank="1"): "_x12 240x68",
            captured("captures/epoch_1-step_300-rank0.json.gz", "no_finding", run="fed"): "900x80",
        },
        (
            quiet("TrainInputBound", 10),
            with_capture(
                waits(20),
                "captures/epoch_1-step_200-rank1.json.gz: input_bound",
            ),
        ),
        (stage("data", "0", 0.3, 80), step("0", 1.0, 80)),
    ),
    Case(
        "a run that waits for data was captured for another reason after the alert's own capture, which stays beside it",
        30,
        {
            captured(
                "captures/epoch_1-step_90-rank0.json.gz", "input_bound", alert="TrainInputBound"
            ): "840x20 _x60",
            captured(
                "captures/epoch_1-step_150-rank0.json.gz", "heavy_op", alert="TrainMFUDrop"
            ): "_x21 960x59",
            captured("captures/epoch_1-step_200-rank1.json.gz", "no_finding", rank="1"): "_x22 990x58",
        },
        (
            quiet("TrainInputBound", 10),
            with_capture(
                waits(20),
                "captures/epoch_1-step_90-rank0.json.gz: input_bound",
            ),
        ),
        (stage("data", "0", 0.3, 80), step("0", 1.0, 80)),
    ),
    Case(
        "a capture that was not analysed is reported without a finding",
        30,
        {captured("captures/epoch_1-step_90-rank0.json.gz", ""): "120x80"},
        (
            quiet("TrainInputBound", 10),
            with_capture(
                waits(20),
                "captures/epoch_1-step_90-rank0.json.gz",
            ),
        ),
        (stage("data", "0", 0.3, 80), step("0", 1.0, 80)),
    ),
    Case(
        "steps take longer than they did, and a capture mutes that",
        60,
        {f"train_profiler_active{{{R}}}": "0x420 1x40"},
        (
            quiet("TrainStepTimeRegression", 100),
            quiet("TrainStepTimeRegression", 408),
            slower(418, "150ms"),
            slower(425, "150ms"),
            quiet("TrainStepTimeRegression", 435),
        ),
        (
            Durations(
                STEP,
                f'{R},train_phase="train",train_loader="main"',
                [(0.05, 60, 400), (0.15, 60, 60)],
            ),
        ),
    ),
    Case(
        "rank 0 names a straggler, whatever the other ranks export; its own capture stands beside its alert",
        60,
        {
            excess("2", "b"): "0.5x60",
            excess("7", "c", "forward"): "0.1x60",
            status("training"): "1x60",
            captured(
                "captures/epoch_1-step_90-rank2.json.gz", "heavy_op", rank="2", alert="TrainStraggler"
            ): "1500x60",
            captured(
                "captures/epoch_1-step_95-rank5.json.gz", "no_finding", rank="5", alert="TrainStraggler"
            ): "1600x60",
        },
        (
            quiet("TrainStraggler", 10),
            with_capture(
                straggles(40, "50%"),
                "captures/epoch_1-step_90-rank2.json.gz: heavy_op",
            ),
        ),
    ),
    Case(
        "a slow rank is not among the first in every third window; another is in every third",
        60,
        {
            excess("2", "b"): " ".join(["0.5 0.5 0"] * 20),
            excess("7", "c"): " ".join(["0 0 0.9"] * 20),
            status("training"): "1x60",
        },
        (
            quiet("TrainStraggler", 10),
            straggles(40, "50%"),
        ),
    ),
    Case(
        # `over` is above a fifth until minute 40; it is one alert for ten minutes more.
        "a rank has a quarter more work, another one a sixth; of one run nothing comes any more",
        60,
        {
            excess("2", "b", run="over"): "0.25x40 0x35",
            excess("2", "b", run="under"): "0.16x75",
            excess("2", "b", run="lost"): "0.25x9 _x66",
            **{
                status("training", run): f"1x{minutes}"
                for run, minutes in (("over", 75), ("under", 75), ("lost", 9))
            },
        },
        (
            quiet("TrainStraggler", 14),
            *(straggles(minute, "25%", run="over") for minute in (17, 40, 50)),
            quiet("TrainStraggler", 56),
        ),
    ),
    Case(
        "a rank has more work in the last steps before an evaluation of an hour; another run evaluates every two minutes",
        60,
        {
            excess("2", "b"): "0x8 0.5x60",
            status("training"): "1x10 0x60",
            status("evaluating"): "0x10 1x60",
            excess("2", "b", run="often"): "0.5x70",
            status("training", "often"): " ".join(["1 1 0 0"] * 18),
            status("evaluating", "often"): " ".join(["0 0 1 1"] * 18),
        },
        (
            quiet("TrainStraggler", 10),
            straggles(40, "50%", run="often"),
        ),
    ),
    Case(
        "a wait for data that comes and goes is one alert",
        30,
        {},
        (
            waits(20),
            waits(35, "21%"),
            quiet("TrainInputBound", 42),
        ),
        (
            Durations(
                STAGE,
                f'{R},train_rank="0",train_phase="train",train_loader="main",train_stage="data"',
                [(0.3, 30, 50), (0.03, 30, 60)],
            ),
            step("0", 1.0, 110),
        ),
    ),
    Case(
        "arithmetic is slow for an hour, and fast again; in another run it is as slow as in the six hours before",
        60,
        {
            **utilisation("r", "0+3000x400 1200000+1200x60 1272000+3000x40"),
            **utilisation("slow", "0+3000x60 180000+1200x440"),
        },
        (
            quiet("TrainMFUDrop", 420),
            fires("TrainMFUDrop", 426, "20%", train_run_id="r"),
            fires("TrainMFUDrop", 470, "30%", train_run_id="r"),
            quiet("TrainMFUDrop", 478),
            quiet("TrainMFUDrop", 495),
        ),
    ),
    Case(
        "arithmetic slows down where training takes a seventh of the time, a fourteenth, and inside a capture",
        60,
        {
            **utilisation("seventh", "0+3000x400 1200000+180x60", productive="0+60x400 24000+9x60"),
            **utilisation("fourteenth", "0+3000x400 1200000+84x60", productive="0+60x400 24000+4.2x60"),
            **utilisation("captured", "0+3000x400 1200000+1200x60"),
            'train_profiler_active{train_run_id="captured",train_rank="0"}': "0x399 1x61",
        },
        (quiet("TrainMFUDrop", 395), fires("TrainMFUDrop", 440, "20%", train_run_id="seventh")),
    ),
    Case(
        "an evaluation takes forty minutes, and the program goes on after its last loop",
        60,
        {
            f"train_model_flops_total{{{R}}}": "0+3000x400 1200000x40 1203000+3000x60 1383000x60",
            f"train_accelerator_flops_limit_per_second{{{R}}}": "100x562",
            f"train_world_size{{{R}}}": "1x562",
            f"train_rank_time_seconds_total{{{R}}}": "0+60x562",
            f'train_run_time_seconds_total{{{R},train_run_activity="productive"}}': "0+60x400 24000x40 24060+60x60 27660x60",
            f'train_run_time_seconds_total{{{R},train_run_activity="eval"}}': "0x400 0+60x40 2400x121",
            f'train_run_time_seconds_total{{{R},train_run_activity="outside"}}': "0x501 60+60x60",
        },
        tuple(quiet("TrainMFUDrop", at_min) for at_min in (395, 425, 435, 441, 443, 446, 460, 520, 540, 560)),
    ),
    Case(
        "the compiler never comes to rest; in another run it does",
        60,
        {
            f"train_compile_recompiles_total{{{R}}}": "0+2x60",
            'train_compile_recompiles_total{train_run_id="warm"}': "0+2x4 8x55",
        },
        (
            quiet("TrainRecompileStorm", 5),
            fires("TrainRecompileStorm", 40, "30", train_run_id="r"),
        ),
    ),
    Case(
        # In 15 minutes `over` recompiles 11 times, until minute 40, and `under` seven or eight times.
        "the compiler recompiles a little more often than allowed until minute 40; in another run a little less",
        60,
        {
            'train_compile_recompiles_total{train_run_id="over"}': "0+0.75x40 30x20",
            'train_compile_recompiles_total{train_run_id="under"}': "0+0.5x60",
        },
        (
            quiet("TrainRecompileStorm", 16),
            *(fires("TrainRecompileStorm", minute, "11", train_run_id="over") for minute in (20, 40)),
            fires("TrainRecompileStorm", 51, "10", train_run_id="over"),
            quiet("TrainRecompileStorm", 58),
        ),
    ),
    Case(
        "a loss is not finite; gradients alone may be",
        30,
        {
            f'train_nonfinite_detections_total{{{R},train_nonfinite_kind="loss"}}': "0x10 1x30",
            'train_nonfinite_detections_total{train_run_id="amp",train_nonfinite_kind="gradient"}': "0+1x40",
        },
        (
            quiet("TrainNonFinite", 4),
            fires("TrainNonFinite", 6, train_run_id="r", train_nonfinite_kind="loss"),
            quiet("TrainNonFinite", 18),
        ),
    ),
    Case(
        # Each counts one, in minute 5 and once more later: `again` starts anew in minute 20, `soon` in minute 11. Of `gap` nothing
        # is heard for twenty minutes, and it counts no more; of `late` the start of the rank is recorded later than that.
        "a loss is not finite in two attempts of a run, once in each",
        30,
        {
            **counted_one("again", "0+30x20 _x19 0+30x60", "_x10 1x10 _x39 1x40"),
            **counted_one("soon", "0+30x20 _x1 0+30x78", "_x10 1x10 _x7 1x72"),
            **counted_one("gap", "0+30x20 _x39 1800+30x40", "_x10 1x10 _x39 1x40"),
            **counted_one("late", "0+30x20 _x44 1950+30x35", "_x10 1x10 _x39 1x40"),
        },
        (
            one_of_each(6, "again", "soon", "gap", "late"),
            one_of_each(15, "soon"),
            one_of_each(22, "soon"),
            one_of_each(27),
            one_of_each(31, "again"),
            one_of_each(39, "again"),
            one_of_each(43),
        ),
    ),
    Case(
        # `r` evaluates as well, and its scaler finds its scale after 40 minutes.
        "a scaler skips every fifth update; another every fifteenth",
        60,
        {
            f'train_steps_total{{{R},train_rank="0",train_phase="train"}}': "0+60x80",
            f'train_steps_total{{{R},train_rank="0",train_phase="eval"}}': "0+600x80",
            f'train_step_skips_total{{{R},train_rank="0",train_step_skip_reason="amp_overflow"}}': "0+12x40 480x40",
            'train_steps_total{train_run_id="fine",train_phase="train"}': "0+90x80",
            'train_step_skips_total{train_run_id="fine",train_step_skip_reason="amp_overflow"}': "0+6x80",
        },
        (
            quiet("TrainAmpSkipRatioHigh", 8),
            fires("TrainAmpSkipRatioHigh", 16, "20%", train_run_id="r"),
            fires("TrainAmpSkipRatioHigh", 40, "20%", train_run_id="r"),
            fires("TrainAmpSkipRatioHigh", 56, "11.43%", train_run_id="r"),
            quiet("TrainAmpSkipRatioHigh", 62),
        ),
    ),
    Case(
        # For three minutes, or to a level that is the median of an hour half an hour later. `rare` logs every fourth minute.
        "the gradient norm jumps to fifteen times; at the start it may, and to eight times always",
        60,
        {
            f"train_gradient_norm{{{R}}}": "1x28 15x3 1x130",
            'train_gradient_norm{train_run_id="new"}': "1x12 15x6 1x140",
            'train_gradient_norm{train_run_id="mild"}': "1x28 8x3 1x130",
            'train_gradient_norm{train_run_id="rare"}': "1 _x3 " * 30 + "15 _x3 15 _x3 " + "1 _x3 " * 8,
            'train_gradient_norm{train_run_id="level"}': "1x100 15x60",
        },
        (
            *(quiet("TrainGradientNormSpike", minute) for minute in (17, 29, 30, 45, 101, 147)),
            fires("TrainGradientNormSpike", 31, "15", train_run_id="r"),
            fires("TrainGradientNormSpike", 41, "15", train_run_id="r"),
            fires("TrainGradientNormSpike", 110, "15", train_run_id="level"),
            fires("TrainGradientNormSpike", 126, "15", train_run_id="level"),
        ),
    ),
    Case(
        "a worker is killed",
        30,
        {
            f'train_loader_worker_exits_total{{{R},train_loader="main",train_rank="3",host_name="n",error_type="SIGKILL"}}': "0x6 1x30",
            f'train_loader_worker_exits_total{{{R},train_loader="main",train_rank="3",error_type=""}}': "0+8x36",
        },
        (
            quiet("TrainLoaderWorkerDied", 2),
            fires(
                "TrainLoaderWorkerDied",
                5,
                train_run_id="r",
                train_rank="3",
                host_name="n",
                train_loader="main",
                error_type="SIGKILL",
            ),
            quiet("TrainLoaderWorkerDied", 18),
        ),
    ),
    Case(
        "a loader ends early, others as they should",
        60,
        {
            f'train_loader_exhaustions_total{{{R},train_loader="main",train_loader_exhaustion_reason="short"}}': "0x30 1x30",
            f'train_loader_exhaustions_total{{{R},train_loader="main",train_loader_exhaustion_reason="epoch_end"}}': "0+1x60",
            f'train_loader_exhaustions_total{{{R},train_loader="web",train_loader_exhaustion_reason="streaming_end"}}': "0+1x60",
        },
        (
            quiet("TrainLoaderExhausted", 29),
            fires("TrainLoaderExhausted", 35, train_run_id="r", train_loader="main"),
            quiet("TrainLoaderExhausted", 48),
        ),
    ),
    Case(
        "exceptions leave a loader",
        60,
        {
            f'train_loader_errors_total{{{R},train_loader="main"}}': "0x30 3x30",
            f'train_loader_errors_total{{{R},train_loader="val"}}': "0x60",
        },
        (
            quiet("TrainLoaderErrors", 29),
            fires("TrainLoaderErrors", 40, "3", train_run_id="r", train_loader="main"),
            # The window begins and ends between two samples, and increase() gives 3.1.
            fires("TrainLoaderErrors", 40.5, "3", train_run_id="r", train_loader="main"),
        ),
    ),
    Case(
        "checkpoints stop; the interval is the run's own",
        60,
        {
            f"train_checkpoint_last_success_time_seconds{{{R}}}": "0x100",
            f"train_checkpoint_interval_seconds{{{R}}}": "600x100",
            status("training"): "1x100",
            'train_checkpoint_last_success_time_seconds{train_run_id="rare"}': "0x100",
            'train_checkpoint_interval_seconds{train_run_id="rare"}': "3600x100",
            status("training", "rare"): "1x100",
            'train_checkpoint_last_success_time_seconds{train_run_id="never"}': "0x100",
            status("training", "never"): "1x100",
            **{progress(run): "0+60x100" for run in ("r", "rare", "never", "over")},
            'train_checkpoint_last_success_time_seconds{train_run_id="over"}': "0x100",
            'train_checkpoint_interval_seconds{train_run_id="over"}': "600x100",
            status("training", "over"): "1x9 0x91",
            status("finished", "over"): "0x9 1x91",
            # Its last step is in minute 15; it writes results in the hour after that.
            'train_checkpoint_last_success_time_seconds{train_run_id="writes"}': "0x100",
            'train_checkpoint_interval_seconds{train_run_id="writes"}': "600x100",
            status("training", "writes"): "1x100",
            progress("writes"): "0+60x15 900x84",
        },
        (
            quiet("TrainCheckpointStale", 22),
            fires("TrainCheckpointStale", 30, "30m 0s", train_run_id="r"),
        ),
    ),
    Case(
        "a run saves every two seconds, until it saves no more",
        15,
        {
            progress("r"): "0+15x120",
            f"train_checkpoint_last_success_time_seconds{{{R}}}": "-2+15x60 898x60",
            f"train_checkpoint_interval_seconds{{{R}}}": "2x121",
            status("training"): "1x121",
        },
        (
            quiet("TrainCheckpointStale", 14),
            fires("TrainCheckpointStale", 24, "9m 2s", train_run_id="r"),
        ),
    ),
    Case(
        "a run that saves every ten minutes evaluates for forty; in another one saving ends",
        60,
        {
            f"train_checkpoint_last_success_time_seconds{{{R}}}": "600x50 3600x49",
            f"train_checkpoint_interval_seconds{{{R}}}": "600x100",
            status("evaluating"): "1x100",
            progress("r"): "0+60x100",
            progress("bad"): "0+60x100",
            f'train_run_time_seconds_total{{{R},train_run_activity="eval"}}': "0x10 0+60x40 2400x49",
            'train_checkpoint_last_success_time_seconds{train_run_id="bad"}': "600x100",
            'train_checkpoint_interval_seconds{train_run_id="bad"}': "600x100",
            status("training", "bad"): "1x100",
            'train_run_time_seconds_total{train_run_id="bad",train_run_activity="eval"}': "0+6x100",
            'train_run_time_seconds_total{train_run_id="bad",train_run_activity="productive"}': "0+54x100",
        },
        (
            quiet("TrainCheckpointStale", 30),
            fires("TrainCheckpointStale", 45, "30m 30s", train_run_id="bad"),
            fires("TrainCheckpointStale", 60, "44m 0s", train_run_id="bad"),
        ),
    ),
    Case(
        "a checkpoint fails",
        60,
        {
            f'train_checkpoint_failures_total{{{R},train_checkpoint_operation="save"}}': "0x30 1x40",
            'train_checkpoint_failures_total{train_run_id="fine",train_checkpoint_operation="save"}': "0x70",
        },
        (
            quiet("TrainCheckpointFailed", 29),
            fires("TrainCheckpointFailed", 35, train_run_id="r", train_checkpoint_operation="save"),
            quiet("TrainCheckpointFailed", 64),
        ),
    ),
    Case(
        "a device runs out of memory",
        30,
        {f'train_accelerator_memory_ooms_total{{{R},train_rank="3",host_name="n"}}': "0x6 1x30"},
        (
            quiet("TrainAcceleratorOOM", 2),
            fires("TrainAcceleratorOOM", 5, train_run_id="r", train_rank="3", host_name="n"),
        ),
    ),
    Case(
        # Rank 0 retries once a minute up to minute 40, rank 1 at its start alone, rank 3 at minute 20 alone: of them the counter
        # is there from then on.
        "memory is full and allocations are retried; full alone is usual, and so are retries while some is free",
        60,
        {
            f'train_accelerator_memory_{name}{{{R},train_rank="{rank}",hw_name="cuda:0"}}': values
            for rank, reserved, retries in (
                ("0", "98x80", "0+1x40 40x40"),
                ("1", "98x80", "3x80"),
                ("2", "90x80", "0+1x80"),
                ("3", "97x80", "_x20 1x60"),
            )
            for name, values in (
                ("reserved_bytes", reserved),
                ("limit_bytes", "100x80"),
                ("alloc_retries_total", retries),
            )
        },
        (
            quiet("TrainAcceleratorMemoryHigh", 3),
            full(18, rank_0="98%", rank_1="98%"),
            full(24, rank_0="98%", rank_1="98%"),
            full(28, rank_0="98%", rank_3="97%"),
            full(40, rank_0="98%", rank_3="97%"),
            full(48, rank_0="98%"),
            full(63, rank_0="98%"),
            quiet("TrainAcceleratorMemoryHigh", 67),
        ),
    ),
    Case(
        # At minute 160 `r` is four hours from its limit (600 + 160 + 240 = 1000), at 205 all is free again. `late` begins to grow
        # at minute 130, and `step` grows for fifty minutes alone. `slow` has five hours, `small` has used less than half.
        "host memory grows towards its limit; another is high but flat",
        60,
        {
            **host_memory("r", "600+1x205 400x60"),
            **host_memory("late", "600x130 602+2x80 600x54"),
            **host_memory("step", "520x45 522+2x49 620x170"),
            **host_memory("slow", "600+0.6x160 696x105"),
            **host_memory("small", "20+3x155 485x110"),
            **host_memory("flat", "900x265"),
        },
        (
            *(quiet("TrainHostMemoryLeak", minute) for minute in (60, 93, 150, 188, 228)),
            grows(195, "r"),
            grows(203, "late", "r"),
            grows(213, "late", "r"),
            grows(219, "late"),
        ),
    ),
    Case(
        "a run reads its data into memory when it starts, and needs no more",
        30,
        {
            'train_host_memory_usage_bytes{train_run_id="r",host_name="n"}': "200+20x20 600x300",
            'train_host_memory_limit_bytes{train_run_id="r",host_name="n"}': "1000x320",
        },
        tuple(quiet("TrainHostMemoryLeak", at_min) for at_min in (30, 40, 45, 50, 60, 70, 120)),
    ),
)
