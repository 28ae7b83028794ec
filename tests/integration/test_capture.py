"""Captures with torch's own profiler, in real loops."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import otel_train
from otel_train.session import Session
from tests.integration.loops.truth import QUIET
from tests.support.zero_code import printed_by

FAST: dict[str, Any] = {**QUIET, "tuning": {"poll_interval_s": 0.02}}
FIFTY = 50 + 2
"""Requests taken until fifty captures are surely over: two may still wait."""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """A session that writes below the test's folder."""
    made = otel_train.instrument(run_dir=str(tmp_path), **FAST)
    yield made
    made.close()


def train(
    enough: Callable[[], bool], *, at: Callable[[int], None] = lambda _: None, most_s: float = 60
) -> torch.nn.Module:
    """Train until there is enough; ``at(step)`` is called in every step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    session = otel_train.current()
    if session is not None:
        session.add(model)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, deadline = 0, time.monotonic() + most_s
    while not enough() and time.monotonic() < deadline:
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            at(step)
            time.sleep(0.001)
    return model


def records(session: Session) -> list[dict[str, Any]]:
    """What is on the disk so far."""
    folder = session.run_directory
    assert folder is not None
    return [json.loads(path.read_text()) for path in sorted((folder / "captures").glob("*.record.json"))]


def trace(session: Session, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Its events."""
    folder = session.run_directory
    assert folder is not None
    with gzip.open(folder / "captures" / record["file"]) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        return events


def test_a_capture_holds_whole_steps_with_their_stages(session: Session) -> None:
    """What the profiler saw is found under the stages that the metrics speak of."""
    assert otel_train.capture(steps=3, reason="a test") == ""
    train(lambda: bool(records(session)))

    (record,) = records(session)
    names = [event.get("name") for event in trace(session, record)]
    first, last = record["steps"]
    assert record["problem"] == ""
    assert last - first == 2
    assert [name for name in names if str(name).startswith("ProfilerStep#")]
    for stage in ("forward", "backward", "optimizer"):
        assert names.count(f"otel_train:{stage}") == 3
    assert names.count("otel_train:data:loader") >= 3  # the end of an epoch is an ask as well
    assert any("aten::" in str(name) for name in names)


def test_weights_are_the_same_with_a_capture(session: Session) -> None:
    """Looking must not change what is looked at."""
    count: list[int] = []
    otel_train.capture(steps=5)
    seen = train(lambda: bool(records(session)), at=count.append)
    session.close()
    steps = len(count)
    count.clear()
    bare = train(lambda: len(count) >= steps, at=count.append)

    assert all(torch.equal(a, b) for a, b in zip(seen.parameters(), bare.parameters(), strict=True))


def test_the_program_s_own_profiler_keeps_its_events(session: Session) -> None:
    """Ours is refused while it runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as mine:
        otel_train.capture(steps=2)
        train(lambda: bool(records(session)))

    assert "another profiler" in records(session)[0]["problem"]
    assert len(mine.events()) > 10


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same thread", "other thread"])
def test_a_profiler_that_starts_during_a_capture_gets_its_events(
    session: Session, *, elsewhere: bool
) -> None:
    """Ours gives way: two at once crash the process, or leave the user's empty."""
    mine = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    over = threading.Event()

    def start_and_stop() -> None:
        mine.start()
        over.wait(60)
        mine.stop()  # only where it was started

    helper = threading.Thread(target=start_and_stop)
    started: list[int] = []

    def at(step: int) -> None:
        busy = torch.autograd.profiler._is_profiler_enabled
        if busy and not started:
            started.append(step)
            helper.start() if elsewhere else mine.start()

    otel_train.capture(steps=10_000)
    train(lambda: bool(records(session)), at=at)
    over.set()
    if elsewhere:
        helper.join(20)
        assert not helper.is_alive()
    else:
        mine.stop()
        assert len(mine.events()) > 0

    assert records(session)[0]["problem"] == "the program started a profiler of its own"


def test_a_capture_longer_than_the_run_is_a_shorter_capture(session: Session) -> None:
    """Nothing that was recorded is lost, and the record says how much it is."""
    otel_train.capture(steps=10_000)
    train(lambda: torch.autograd.profiler._is_profiler_enabled)
    session.close()

    (record,) = records(session)
    assert record["problem"].startswith("captured ")
    assert record["problem"].endswith(" of 10000 steps")
    assert not torch.autograd.profiler._is_profiler_enabled
    assert trace(session, record)


def test_a_capture_for_which_no_step_is_left_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """The thread that receives answers does not wait for a thread that waits for one: that took ten seconds."""
    session = otel_train.instrument(run_dir=str(tmp_path), agent="process", **QUIET)

    def at(step: int) -> None:
        if step == 6:
            otel_train.capture(steps=5)

    train(iter([False, True]).__next__, at=at)
    began = time.monotonic()
    session.close()

    assert time.monotonic() - began < 8.0
    assert [record["problem"] for record in records(session)] == ["captured 0 of 5 steps"]


def test_sigusr2_asks_for_a_capture(session: Session) -> None:
    """The only thing one has on a node without a network."""
    os.kill(os.getpid(), signal.SIGUSR2)
    train(lambda: bool(records(session)))

    assert records(session)[0]["trigger"] == "signal"
    session.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_sigusr2_asks_for_one_after_a_session_that_another_thread_closed(tmp_path: Path) -> None:
    """Only the main thread may remove a handler, so that of the earlier session is still there."""
    earlier = otel_train.instrument(run_dir=str(tmp_path / "earlier"), **FAST)
    closing = threading.Thread(target=earlier.close)
    closing.start()
    closing.join()
    session = otel_train.instrument(run_dir=str(tmp_path / "later"), **FAST)
    os.kill(os.getpid(), signal.SIGUSR2)
    train(lambda: bool(records(session)), most_s=40)
    session.close()

    assert [record["trigger"] for record in records(session)] == ["signal"]
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_handler_of_the_program_s_own_stays(tmp_path: Path) -> None:
    """Schedulers requeue with SIGUSR2."""

    def mine(*_: object) -> None:
        """Whatever the program does."""

    signal.signal(signal.SIGUSR2, mine)
    try:
        with otel_train.instrument(run_dir=str(tmp_path), **FAST):
            assert signal.getsignal(signal.SIGUSR2) is mine
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_http_asks_for_a_capture(tmp_path: Path) -> None:
    """With the token from the run directory, and only with it."""
    settings = {**FAST, "prometheus": True, "prometheus_address": "127.0.0.1:0"}
    with otel_train.instrument(run_dir=str(tmp_path), **settings) as session:
        assert session.metrics_url is not None
        assert session.run_directory is not None
        token = (session.run_directory / "rank0" / "capture-token").read_text().strip()
        request = urllib.request.Request(
            session.metrics_url.replace("/metrics", "/capture"), data=b'{"steps": 2}', method="POST"
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        assert refused.value.code == 401
        refused.value.close()
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.load(answer)["armed"] is True
        train(lambda: bool(records(session)))

        assert records(session)[0]["steps_recorded"] == 2
    events = (session.run_directory / "rank0" / "events.jsonl").read_text().splitlines()
    assert "train.profiler.capture" in [json.loads(line)["name"] for line in events]


def test_slow_steps_ask_for_one_where_that_is_wanted(tmp_path: Path) -> None:
    """It explains slowness that lasts, while it lasts."""
    with otel_train.instrument(run_dir=str(tmp_path), profiler="auto", **FAST) as session:
        train(
            lambda: bool(records(session)), at=lambda step: time.sleep(0.02 * (step > 100 and step % 5 == 0))
        )

        (record,) = records(session)
    assert record["trigger"] == "slow_step"
    assert "were slow" in record["reason"]


class Lasting(IterableDataset[torch.Tensor]):
    """Rows until a file is there, or, without one, twenty of them."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def __iter__(self) -> Iterator[torch.Tensor]:
        deadline = time.monotonic() + 60
        row = 0
        while row < 20 or (self._file and not self._file.exists() and time.monotonic() < deadline):
            row += 1
            yield torch.ones(8)


def test_chosen_epochs_give_their_files_and_no_others(tmp_path: Path) -> None:
    """``epoch_1.json`` and ``epoch_3.json``, plain, as scripts of an earlier profiler read them."""
    plain = tmp_path / "plain"
    settings = {
        **FAST,
        "profiler_every": {"epoch": [1, 3]},
        "profiler_output_dir": plain,
        "profiler_options": "record_shapes",
    }
    begins, step = [], 0
    with otel_train.instrument(
        run_dir=str(tmp_path), profiler_schedule={"skip_first": 0}, **settings
    ) as session:
        model = torch.nn.Linear(8, 1)
        session.add(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for file in (plain / "epoch_1.json", None, plain / "epoch_3.json", None):
            begins.append(step)
            for batch in DataLoader(Lasting(file)):
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                time.sleep(0.002)

    assert {path.name for path in plain.glob("*.json")} == {"epoch_1.json", "epoch_3.json"}
    for number in (1, 3):
        events = json.loads((plain / f"epoch_{number}.json").read_text())["traceEvents"]
        names = [str(event.get("name")) for event in events]
        steps = [int(name.removeprefix("ProfilerStep#")) for name in names if "ProfilerStep#" in name]
        assert begins[number - 1] <= min(steps) <= max(steps) < begins[number]
        assert any("Input Dims" in event.get("args", {}) for event in events)


def test_what_a_machine_lacks_is_left_out_and_said(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """A setting from the cluster must not cost the capture on a laptop."""
    otel_train.capture(steps=1, activities=["mtia"])
    train(lambda: bool(records(session)))
    session.close()

    (record,) = records(session)
    assert record["problem"] == ""
    assert record["warnings"] == ["no mtia activity: torch does not support it on this machine"]
    assert any("aten::" in str(event.get("name")) for event in trace(session, record))
    assert "Capture (on_demand): no mtia activity: torch does not support it on this machine" in caplog.text


def test_captures_can_be_off(tmp_path: Path) -> None:
    """Then nothing listens and nothing is written."""
    with otel_train.instrument(run_dir=str(tmp_path), profiler="off", **FAST) as session:
        assert "off" in otel_train.capture(steps=1)
        assert session.run_directory is not None
        assert not list(session.run_directory.glob("*/capture-token"))


def test_bad_requests_of_the_program_are_refused_at_once(session: Session) -> None:
    """While the user is still looking."""
    with pytest.raises(otel_train.ConfigError, match="steps=0: expected a whole number from 1"):
        otel_train.capture(steps=0)
    with pytest.raises(otel_train.ConfigError, match="some of cpu,cuda,xpu,mtia"):
        otel_train.Config(profiler_activities="tpu")
    session.close()


@pytest.mark.slow
def test_fifty_captures_take_no_more_memory_than_five(tmp_path: Path) -> None:
    """A profiler that keeps what it has recorded ends a run of days."""
    import psutil

    with otel_train.instrument(run_dir=str(tmp_path), profiler_kept=2, **FAST):
        process, done, at_five = psutil.Process(), [0], [0]

        def enough() -> bool:
            asked = otel_train.capture(steps=1) == ""
            done[0] += asked
            if done[0] == 5 and not at_five[0]:
                at_five[0] = process.memory_info().rss
            return done[0] > FIFTY

        train(enough, most_s=300)
        grown = process.memory_info().rss - at_five[0]
    assert done[0] > FIFTY
    assert grown < 8 << 20


SCRIPT = """
import time, torch, otel_train
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
model = torch.nn.Linear(8, 1)
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
otel_train.instrument(model, {"train": loader}, run_dir=%r, run_id="live", console=False, tuning={"poll_interval_s": 0.05})
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
until = time.monotonic() + 60
while time.monotonic() < until:
    for batch, in loader:
        model(batch).sum().backward(); optimizer.step(); optimizer.zero_grad(); time.sleep(0.002)
"""


def test_the_command_captures_a_live_run_and_says_where_it_is(tmp_path: Path) -> None:
    """The usual reaction to a slow run in a dashboard."""
    program = subprocess.Popen(
        [sys.executable, "-c", SCRIPT % str(tmp_path)],
        env={**os.environ, "OTEL_TRAIN_PROMETHEUS_ADDRESS": "127.0.0.1:0"},
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "live/rank0/flight.bin").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        said = printed_by("-m", "otel_train", "profile", "live", "--run-dir", tmp_path, "--steps", "2")
    finally:
        program.terminate()
        program.wait(30)

    path = Path(said.split(": ")[2].rpartition(" (")[0])
    with gzip.open(path) as file:
        assert "traceEvents" in json.load(file)
