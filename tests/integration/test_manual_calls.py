"""What a program marks and logs manually, through a whole session."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import otel_train
from otel_train.agent.reports import ReportBuilder
from otel_train.instrumentation.logged_values import CacheSizes
from tests.integration.loops.truth import Net, Watch, loader, loss_of, sgd
from tests.integration.test_loops import exported


def test_epochs_over_two_loaders_that_begin_again_give_a_block_each(
    watch: Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Passes of the shorter one would make four epochs of two."""
    model, short, long = Net(), loader(2), loader(4)
    session = watch(model, {"short": short, "long": long}, console_metrics="throughput")
    optimizer = sgd(model)
    for _ in otel_train.epoch(range(2)):
        for batches in (zip(short, long, strict=False), zip(short, long, strict=False)):
            for one, other in batches:
                (loss_of(model, one) + loss_of(model, other)).backward()
                optimizer.step()
                optimizer.zero_grad()
    session.close()

    said = capfd.readouterr().err
    assert [line for line in said.splitlines() if line.startswith("[Throughput]")] == [
        "[Throughput] Epoch 1:", "[Throughput] Epoch 2:"
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_passes_that_are_left_are_epochs_and_are_counted(
    options: dict[str, Any], watch: Watch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A number of steps per epoch, by ``break`` or ``islice``: the loader comes to no end, and persistent workers keep its iterator."""
    model, train = Net(), loader(4, **options)
    session = watch(model, {"train": train}, console_metrics="throughput")
    for _ in range(3):
        steps(model, islice(train, 2))
    del train  # and its iterator, if its workers persist
    session.close()

    said = capfd.readouterr().err
    assert re.findall(r"^\[Throughput\] Epoch (\d+):$", said, re.MULTILINE) == ["1", "2", "3"]
    assert exported(tmp_path / "runs")["train.epoch.index"] == {("train",): 3.0}


def steps(model: Net, batches: Any, *, end: Callable[[], None] = lambda: None) -> None:
    """Train on these, calling ``end`` after every step."""
    optimizer = sgd(model)
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        end()


def test_operations_are_in_every_metric_and_in_no_steps_time(
    watch: Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ten uploads of 5 ms in a thread of their own, and one that lasts over all steps."""
    model, batches = Net(), loader(10)
    session = watch(model, batches, console_metrics="profiling")

    def upload() -> None:
        for _ in range(10):
            token = otel_train.begin("upload")
            time.sleep(0.005)
            otel_train.end(token)

    thread = threading.Thread(target=upload)
    thread.start()
    whole = session.begin("whole")
    steps(model, batches)
    session.end(whole)
    thread.join()
    rows = {row["stage"]: row for row in otel_train.summary()["stages"] if row["stage"] != "other"}
    session.close()

    assert (rows["upload"]["count"], rows["whole"]["count"]) == (10, 1)
    assert rows["upload"]["inclusive_seconds"] >= 0.05
    assert rows["upload"]["self_seconds"] == rows["whole"]["self_seconds"] == 0
    assert rows["forward"]["count"] == 10
    said = capfd.readouterr().err
    assert re.search(r"upload: avg=0\.\d{4}s, .* count=10", said)
    assert "threads" not in str(session.instrumentation_gaps())


def test_a_report_waits_for_the_steps_before_it_while_the_state_is_collected(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program goes on while the service thread reads how far the rings are: what it asks for then is of the next reading."""
    session = watch(Net(), loader(1))
    recording = session._recording
    positions = recording.recorder.positions

    def program_goes_on() -> Any:
        before = positions()
        if threading.current_thread() is threading.main_thread():
            session.report()
        return before

    monkeypatch.setattr(recording.recorder, "positions", program_goes_on)
    builder = ReportBuilder(recording, session._service.components, CacheSizes(), 1)

    assert [builder.make().reports for _ in range(2)] == [0, 1]


def test_a_report_is_logged_while_the_program_goes_on(
    watch: Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between two rows of the schedule, or without any; the step that had its update is in it."""
    model, batches = Net(), loader(30)
    session = watch(model, batches, console_metrics="profiling", tuning={"poll_interval_s": 0.05})
    steps(model, batches)
    session.report()
    said, deadline = "", time.monotonic() + 60
    while "(Step 30)" not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
        time.sleep(0.05)
    session.report()

    assert "--- Profiling Metrics (Step 30) ---" in said
    assert "training_step: " in said


def test_a_callback_of_a_stage_that_never_ran_is_logged_at_the_end(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    """A misspelt user-defined stage is found at no other time. A built-in one may need a device."""
    model, batches = Net(), loader(3)
    session = watch(model, {"code": batches})
    for stage in ("fwd", "forward", "h2d", "augment"):
        session.on(stage, before=lambda: None).remove()
    with otel_train.stage("augment"):
        steps(model, batches)
    assert "fwd" not in caplog.text
    session.close()

    [said] = [line for line in caplog.messages if line.startswith("on(")]
    assert said.startswith("on('fwd'): no such stage ran; its functions were not called. Stages: data, ")
    assert said.endswith(", augment")


def test_code_around_stages_runs_in_a_real_loop_and_the_weights_are_the_same(watch: Watch) -> None:
    """As often as the stage is counted, and it can read where the batch came from."""
    torch.manual_seed(0)
    bare = Net()
    instrumented = copy.deepcopy(bare)
    steps(bare, loader(10))
    called: list[tuple[str, str | None, bool]] = []
    batches, here = loader(10), threading.current_thread()
    session = watch(instrumented, {"code": batches})
    for stage in ("data", "forward", "backward", "optimizer"):
        session.on(
            stage,
            before=lambda s=stage: called.append(
                (s, session.last_loader_name, threading.current_thread() is here)
            ),
        )
    handle = session.on("forward", after=lambda: called.append(("after", None, True)))
    steps(instrumented, batches)
    handle.remove()

    count = Counter(stage for stage, *_ in called)
    assert count == {"data": 11, "forward": 10, "after": 10, "backward": 10, "optimizer": 10}
    assert {name for stage, name, _ in called if stage == "backward"} == {"code"}
    assert all(same for *_, same in called)
    assert session.last_batch_fetch_ms > 0
    metrics = {row["stage"]: row["count"] for row in session.summary()["stages"] if row["phase"] == "train"}
    assert (metrics["forward"], metrics["backward"]) == (10, 10)
    assert torch.equal(
        torch.cat([p.flatten() for p in bare.parameters()]),
        torch.cat([p.flatten() for p in instrumented.parameters()]),
    )


def test_a_cache_that_fails_is_a_fault_that_the_summary_names(watch: Watch) -> None:
    """Nothing of it reaches the loop."""
    session = watch()
    session.cache("images", size=lambda: 1 // 0)

    assert session._service.caches.read() == {}
    assert session.summary()["telemetry"]["faults"] == {"logged values": 1}
