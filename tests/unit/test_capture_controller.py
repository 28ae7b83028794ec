"""Who gets a capture, what is written of it, and what makes one by itself."""

from __future__ import annotations

import gzip
import json
import logging
import sys
import threading
import time
from _thread import get_ident
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from otel_train.agent.remote import RequestFolder
from otel_train.config.settings import ProfilerEvery, Tuning
from otel_train.datamodel import Capture
from otel_train.profiler import flops as flops_module
from otel_train.profiler.controller import CaptureController
from otel_train.profiler.endpoint import CaptureEndpoint, Capturing, EpochCaptures, NoEpochCaptures
from otel_train.profiler.flops import MOST_TRIES, FlopCount
from otel_train.profiler.requests import (
    KEY_FILE,
    SLOW_STEPS,
    UNDER_WAY,
    CaptureRequest,
    Schedule,
    SlowSteps,
    leave_request,
)
from otel_train.profiler.step_schedule import ProfiledThread
from otel_train.profiler.storage import CaptureStore
from otel_train.recording.events import Instrumented, LoopState, Op, SourceKind, StepRule, code
from otel_train.recording.ring_buffer import Ring
from otel_train.testing import FakeClock
from tests.support.profiler import FakeProfiler, FakeTraining
from tests.support.waiting import until

SOURCES = [Instrumented(SourceKind.DATA, "train"), Instrumented(SourceKind.OPTIMIZER, "SGD")]
REQUEST = CaptureRequest("on_demand", 2, warmup=0)
STEP_NS = 10_000_000
FOUND = """
import sys
from pathlib import Path
from otel_train.profiler.storage import note_analysis
lists = {"top_cpu_ops": [], "top_cuda_ops": [], "memory_peaks": [], "breakdown": {"stages": []}}
document = {"findings": [{"summary": "All of it is waiting."}], **lists}
note_analysis(Path(sys.argv[-1]), document)
"""
"""Instead of an analysis: what it found goes into the record of the trace named last."""


class Run:
    """A loop of 10 ms steps, its controller, and everything that is reported of captures."""

    def __init__(self, folder: Path, **place: Any) -> None:
        self.folder = folder
        self.clock = FakeClock(1)
        self.profiler = FakeProfiler()
        words = memoryview(bytearray(1 << 16)).cast("q")
        self.ring = Ring(words, clock=self.clock, owner=get_ident(), on_other_thread=print)
        self.ends: list[int] = []
        self.captures: list[Capture] = []
        self.epoch = 1
        self.step_ns = STEP_NS
        training: Any = FakeTraining(self.loop, self.thread, self.number, lambda _: self.epoch)
        defaults = {"max_bytes": 1 << 20, "kept": 8, "analyze": ()}
        self.controller = CaptureController(
            self.profiler, clock=self.clock, tuning=Tuning(profiler_max_s=60, profiler_cooldown_s=60),
            training=training, done=self.captures.append,
            place=CaptureStore(folder / "captures", 0, **{**defaults, **place}),
        )  # fmt: skip
        (folder / "rank0").mkdir()
        self.requests = RequestFolder(folder / "rank0", "secret")
        self.endpoint = CaptureEndpoint(self.controller, REQUEST, 0, self.requests, training=training)
        self.steps(20)

    def loop(self) -> LoopState:
        rule = StepRule(SourceKind.OPTIMIZER, asks=True)
        return LoopState(rule, 0, len(self.ends), self.step_ns, self.epoch, self.clock.now_ns)

    def thread(self) -> ProfiledThread:
        return ProfiledThread(get_ident(), SOURCES, self.ring.intercept)

    def number(self, at_ns: int) -> int:
        return sum(1 for end in self.ends if end <= at_ns)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.ring.edge(code(Op.BEGIN, 0))
            if self.ring.written > 1:
                self.ends.append(self.clock.now_ns)
            self.clock.tick(ms=5)
            self.ring.edge(code(Op.BEGIN, 1))
            self.ring.edge(code(Op.END, 1))
            self.clock.tick(ms=5)

    def schedule(self, every: ProfilerEvery, **bounds: int) -> None:
        planned = Schedule(every, REQUEST._replace(trigger="schedule"), self.clock, **bounds)
        self.endpoint.triggers.append(planned)

    def finish(self) -> Capture:
        """Let the loop go on until one more capture has been reported."""
        known, deadline = len(self.captures), time.monotonic() + 20
        while len(self.captures) == known and time.monotonic() < deadline:
            self.endpoint.poll()
            self.steps(1)
            time.sleep(0.001)
        return self.captures[known]

    def captured(self, request: CaptureRequest = REQUEST) -> Capture:
        """The capture that is asked for now."""
        assert self.controller.ask(request) == ""
        return self.finish()

    def records(self) -> list[dict[str, Any]]:
        return [
            json.loads(path.read_text()) for path in sorted((self.folder / "captures").glob("*.record.json"))
        ]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with nothing captured yet."""
    return Run(tmp_path)


def test_a_capture_leaves_a_trace_and_a_record(run: Run) -> None:
    """The record says what it is, months later."""
    capture = run.captured(REQUEST._replace(reason="why not"))

    assert capture.error == capture.problem == ""
    with gzip.open(capture.file) as file:
        assert "traceEvents" in json.load(file)
    (record,) = run.records()
    assert (record["trigger"], record["reason"], record["steps_recorded"]) == ("on_demand", "why not", 2)
    assert record["steps"] == list(capture.steps)
    assert record["file"] == f"epoch_1-step_{record['steps'][0]}-rank0.json.gz"


def test_one_at_a_time_and_the_next_one_waits(run: Run) -> None:
    """Two profilers at once crash the process."""
    run.controller.ask(REQUEST)
    run.endpoint.poll()
    assert run.controller.ask(REQUEST) == ""
    run.finish()
    run.finish()

    assert run.profiler.log.count("start") == run.profiler.log.count("stop") == 2


def test_captures_that_were_not_requested_keep_a_pause(run: Run) -> None:
    """A run whose steps are slow for an hour needs one capture, not sixty."""
    slow = REQUEST._replace(trigger="slow_step")
    run.captured(slow)

    assert "too recent" in run.controller.ask(slow)
    assert run.controller.ask(REQUEST) == ""


@pytest.mark.parametrize(("broken", "error", "has_file"), [("", "short", True), ("stop", "profiler", False)])
def test_a_capture_without_all_its_steps_is_short_if_it_has_a_trace(
    run: Run, broken: str, error: str, *, has_file: bool
) -> None:
    """Only without one is there a fault of the profiler to look for."""
    run.profiler.broken = {broken}
    run.controller.ask(REQUEST._replace(steps=50))
    run.endpoint.poll()
    run.steps(5)
    run.controller.scheduler.abort("stopped after 0.05 s")
    capture = run.finish()

    assert (capture.error, capture.problem, bool(capture.file)) == (error, "stopped after 0.05 s", has_file)


def test_a_whole_capture_whose_profiler_does_not_stop_has_an_error(run: Run) -> None:
    """All steps were recorded, but there is no trace."""
    run.profiler.broken = {"stop"}

    assert (run.captured().error, run.captures[0].problem) == ("profiler", "RuntimeError: stop is broken")


def test_of_two_threads_that_ask_at_once_one_gets_the_last_place(run: Run) -> None:
    """Otherwise the queue would grow beyond its bound, and then without one."""
    both_decide = threading.Barrier(2)

    class Undecided(CaptureRequest):
        @property
        def automatic(self) -> bool:
            with suppress(threading.BrokenBarrierError):
                both_decide.wait(0.2)
            return False

    run.controller.ask(REQUEST)
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(run.controller.ask, [Undecided(*REQUEST)] * 2))

    assert sorted(answers) == ["", UNDER_WAY]


def test_a_refused_signal_is_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """There is no other answer to ``kill -USR2``."""
    run.profiler.without = "no torch"
    run.endpoint.ask_by_signal()

    assert [record.getMessage() for record in caplog.records] == ["No capture (SIGUSR2): no torch"]


def test_no_other_rank_is_asked_if_this_one_refuses(run: Run) -> None:
    """The answer says that nothing was armed."""
    (run.folder / "rank3").mkdir()
    for _ in range(2):
        run.controller.ask(REQUEST)

    assert post(run, {"ranks": [0, 3]}) == (409, {"error": UNDER_WAY})
    assert not list((run.folder / "rank3").iterdir())


def test_a_trace_that_is_too_large_is_not_kept(tmp_path: Path) -> None:
    """The disk belongs to checkpoints."""
    run = Run(tmp_path, max_bytes=10)
    capture = run.captured()

    assert capture.error == "size"
    assert not capture.file
    assert not list((tmp_path / "captures").glob("*.gz"))


def test_the_next_capture_is_as_long_as_the_first_has_shown_to_fit(tmp_path: Path) -> None:
    """The end of a capture costs training time with every byte."""
    run = Run(tmp_path, max_bytes=300)
    size = run.captured(REQUEST._replace(steps=1)).bytes
    run.captured(REQUEST._replace(steps=1000))

    second = max(run.records(), key=lambda record: record["steps_recorded"])
    assert second["steps_recorded"] == 300 // size
    assert "of 1000 steps" in second["reason"]


OPENED: list[str] = []
"""Paths that this process opens, while it is asked for."""


def test_this_process_opens_no_file_of_a_capture(run: Run) -> None:
    """A disk that hangs stops another process, which no thread of the program waits for."""
    folder, listening = str(run.folder / "captures"), [True]
    sys.addaudithook(
        lambda event, given: OPENED.append(str(given[0])) if event == "open" and listening else None
    )
    capture = run.captured()
    listening.clear()

    assert capture.file.startswith(folder)
    assert OPENED
    assert [path for path in OPENED if path.startswith(folder)] == []


def test_where_no_process_can_be_started_a_thread_writes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit of processes is no reason to lose the capture."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    capture = run.captured()

    assert capture.error == capture.problem == ""
    with gzip.open(capture.file) as file:
        assert "traceEvents" in json.load(file)


def test_a_writing_process_that_is_killed_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is lost with it; the event and the log still say that there was a capture."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    capture = run.captured()

    assert (capture.error, capture.file) == ("disk", "")
    assert capture.problem.startswith("not written: the process that writes it ended with 1")


def test_old_captures_are_removed_and_pinned_ones_stay(tmp_path: Path) -> None:
    """The one that shows the bug must not be the one that goes."""
    run = Run(tmp_path, kept=2)
    pinned = run.captured(REQUEST._replace(pinned=True)).file
    for _ in range(3):
        last = run.captured().file

    left = {str(path) for path in (tmp_path / "captures").glob("*.json.gz")}
    assert left == {pinned, last}
    assert len(run.records()) == 2


def test_metadata_of_captures_without_a_trace_is_removed_as_well(tmp_path: Path) -> None:
    """A schedule that asks too late every two seconds would leave 40,000 files a day."""
    run = Run(tmp_path, kept=2)
    kept = run.captured().file
    run.profiler.broken = {"save"}
    for _ in range(4):
        run.captured()

    assert [bool(record["file"]) for record in run.records()].count(False) == 2
    assert [str(path) for path in (tmp_path / "captures").glob("*.json.gz")] == [kept]


@pytest.mark.parametrize("earlier", ["", "yesterday"])
def test_a_trace_that_is_too_large_leaves_no_uncompressed_copy(
    run: Run, epochs: EpochCaptures, tmp_path: Path, earlier: str
) -> None:
    """It is ten times larger than the trace that was refused. A file of an earlier run stays."""
    run.controller._place = run.controller._place._replace(max_bytes=10)
    plain = tmp_path / "out" / "epoch_1.json"
    plain.parent.mkdir()
    if earlier:
        plain.write_text(earlier)
    epochs.begin(1, {"steps": 1, "warmup": 0}, output_dir=str(plain.parent))
    run.steps(3)
    epochs.finish(20)

    assert run.captures[0].error == "size"
    assert [path.read_text() for path in plain.parent.iterdir() if path.name != ".gitignore"] == [
        earlier for _ in range(bool(earlier))
    ]


def test_tensorboard_finds_a_copy(tmp_path: Path) -> None:
    """Its plugin looks for a suffix of its own."""
    run = Run(tmp_path, tensorboard=str(tmp_path / "tb"))
    run.captured()

    assert [path.name.endswith(".pt.trace.json.gz") for path in (tmp_path / "tb").glob("*.json*")] == [True]
    assert (tmp_path / "tb" / ".gitignore").read_text() == "*\n"


def test_plain_traces_go_where_the_user_wants_them(tmp_path: Path) -> None:
    """Scripts read ``epoch_N.json``; a second one of an epoch must not overwrite the first."""
    run = Run(tmp_path, output=str(tmp_path / "out"))
    firsts = [run.captured().steps[0] for _ in range(2)]

    names = sorted(path.name for path in (tmp_path / "out").glob("*.json"))
    assert (tmp_path / "out" / ".gitignore").read_text() == "*\n"
    assert names == [f"epoch_1-step_{firsts[1]}.json", "epoch_1.json"]
    events = json.loads((tmp_path / "out" / "epoch_1.json").read_text())["traceEvents"]
    assert f"ProfilerStep#{firsts[0]}" in [event["name"] for event in events]


def test_what_is_found_after_the_end_is_in_the_record(tmp_path: Path) -> None:
    """The last capture of a run is the one of its end: the loop does not wait for it, and it must not be lost."""
    run = Run(tmp_path, analyze=("sh", "-c", f'sleep 0.3; exec {sys.executable} -c "$0" x "$1"', FOUND))
    run.controller.ask(REQUEST)
    run.endpoint.poll()
    run.steps(5)
    run.controller.scheduler.abort("")
    run.controller.end(20)

    assert run.captures[0].finding == ""
    assert run.captures[0].file
    assert until(lambda: run.records()[0]["finding"]) == {"summary": "All of it is waiting."}


def test_an_analysis_that_fails_costs_nothing_but_its_finding(tmp_path: Path) -> None:
    """The trace is what counts."""
    run = Run(tmp_path, analyze=("false",))
    assert run.captured().file
    assert run.records()[0]["finding"] == {}


# -- what asks -------------------------------------------------------------------------------------


def test_a_schedule_by_steps_meets_its_multiples(run: Run) -> None:
    """Every rank captures the same steps."""
    run.schedule(ProfilerEvery(steps=50))

    assert run.finish().steps == (50, 51)
    assert run.finish().steps == (100, 101)


def test_a_schedule_by_epochs_takes_the_first_steps_of_each(run: Run) -> None:
    """What is slow in an epoch is often its beginning."""
    run.schedule(ProfilerEvery(epochs=2))
    run.finish()
    run.epoch = 2
    run.endpoint.poll()
    assert not run.controller.scheduler.begun_ns or len(run.captures) == 1
    run.epoch = 3
    run.finish()

    assert [record["epoch"] for record in run.records()] == [1, 3]


def test_a_chosen_epoch_that_was_over_too_soon_is_said(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the user waits for a file that is never written."""
    run.schedule(ProfilerEvery(epoch=(1,)), skip_first=1000)
    run.endpoint.poll()
    run.epoch = 2
    run.endpoint.poll()
    run.endpoint.poll()

    (record,) = caplog.records
    assert record.getMessage().startswith(
        "No capture of epoch 1: it was over before step 1000 (skip_first of profiler_schedule)"
    )


def test_a_chosen_epoch_is_asked_for_until_it_is_accepted(run: Run) -> None:
    """Requests of others may fill the queue when it begins."""
    run.schedule(ProfilerEvery(epoch=(2,)))
    assert [run.controller.ask(REQUEST) for _ in range(2)] == ["", ""]
    run.epoch = 2
    run.endpoint.poll()

    assert [run.finish().trigger for _ in range(3)] == ["on_demand", "on_demand", "schedule"]


def test_a_chosen_epoch_that_nothing_can_record_is_said_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """A program of JAX, say."""
    run.schedule(ProfilerEvery(epoch=(2,)))
    run.profiler.without = "no torch"
    for run.epoch in (1, 2, 2, 3):
        run.endpoint.poll()

    assert [record.getMessage() for record in caplog.records] == ["No capture (epoch 2): no torch"]


def test_a_schedule_by_minutes_and_its_end(run: Run) -> None:
    """As many as wanted, no more."""
    run.schedule(ProfilerEvery(minutes=0.01), most=1)
    run.finish()
    run.clock.tick(s=60)
    for _ in range(5):
        run.endpoint.poll()
        run.steps(2)

    assert len(run.captures) == 1


def slow_steps(seen: list[tuple[int, int]]) -> list[CaptureRequest]:
    """What is asked for in a loop that is looked at in these steps, after so many slow ones."""
    wanted: list[CaptureRequest] = []
    trigger = SlowSteps(REQUEST)

    def ask(request: CaptureRequest) -> str:
        wanted.append(request)
        return ""

    for step, slow in seen:
        trigger.request_if_due(LoopState(step=step, median_ns=STEP_NS, slow=slow), ask)
    return wanted


@pytest.mark.parametrize(
    ("seen", "reasons"),
    [
        # One slow step may be anything.
        ([(100, 0), (110, 1), (120, SLOW_STEPS - 1)], []),
        (
            [(100, 0), (120, SLOW_STEPS - 1), (130, SLOW_STEPS), (131, SLOW_STEPS)],
            ["3 of the last 30 steps were slow"],
        ),
        # Three in an hour are weather.
        ([(number * 1000, number) for number in range(20)], []),
        # Two seconds are a thousand steps, and a fifth of them slow.
        ([(0, 0), (1000, 200)], ["200 of the last 1000 steps were slow"]),
    ],
    ids=["few", "enough, once", "far apart", "of a fast loop"],
)
def test_slow_steps_ask_once_there_are_enough_of_them(
    seen: list[tuple[int, int]], reasons: list[str]
) -> None:
    """However far apart two looks are."""
    assert [wanted.reason for wanted in slow_steps(seen)] == reasons


def test_polls_in_which_no_step_ends_are_not_kept() -> None:
    """An evaluation, or a run that waits, may last for days."""
    trigger = SlowSteps(REQUEST)
    for _ in range(1000):
        trigger.request_if_due(LoopState(step=100, median_ns=STEP_NS), lambda _: "")

    assert len(trigger._seen) == 1


def test_a_request_in_a_file_is_taken_once(run: Run) -> None:
    """``otel-train profile`` leaves one."""
    leave_request(run.folder / "rank0", {"steps": 3, "reason": "by file"})
    run.finish()

    assert run.records()[0]["steps_recorded"] == 3
    assert run.records()[0]["reason"] == "by file"
    assert not (run.folder / "rank0" / "capture-request.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"steps": -1}', "\xff", '{"steps": 1e999}', "[" * 10_000])
def test_a_broken_request_is_thrown_away_and_said(
    run: Run, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It must not be read again on every turn, nor switch anything off."""
    (run.folder / "rank0" / "capture-request.json").write_text(text, "utf-8")
    run.endpoint.poll()
    run.endpoint.poll()

    assert len(caplog.records) == 1
    assert run.controller.ask(REQUEST) == ""


@pytest.mark.parametrize("cause", ["folder", "link"])
def test_a_folder_that_cannot_be_looked_into_has_no_request(run: Run, cause: str) -> None:
    """A file server that is away is no fault of a capture request, which was never made."""
    folder = run.folder / "rank0"
    folder.rmdir()
    if cause == "link":
        folder.symlink_to(run.folder / "captures")
    else:
        folder.write_text("")

    assert run.requests.waiting() is None


def test_a_token_that_cannot_be_removed_at_the_end_is_no_fault(run: Run) -> None:
    """It is worth nothing without the process. A disk that accepts no writes has been said already."""
    folder = run.folder / "rank0"
    folder.rmdir()
    folder.write_text("")
    run.requests.withdraw()


def post(run: Run, document: object) -> tuple[int, dict[str, Any]]:
    return run.endpoint.post(json.dumps(document).encode())


@pytest.mark.parametrize("token", ["", "Secret", "secret ", "geheim"])
def test_http_without_the_token_is_refused_with_the_place_where_it_is(run: Run, token: str) -> None:
    """Any page in a browser on this machine can post here."""
    assert str(run.folder / "rank0" / KEY_FILE) in run.requests.refusal(token)
    assert run.requests.refusal("secret") == ""


def test_a_program_without_torch_is_not_captured(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Importing torch in the middle of a JAX program's loop would cost seconds, or fail."""
    assert run.controller.ask(REQUEST) == ""  # before that is known
    run.profiler.without = "no torch"
    refused = run.controller.ask(REQUEST)
    with caplog.at_level(logging.WARNING):
        run.endpoint.poll()
    run.steps(5)

    assert refused == "no torch"
    assert "Capture (on_demand): no torch" in caplog.text
    assert not run.profiler.log


@pytest.mark.parametrize(
    "document",
    [
        [], 3, {"steps": 0}, {"steps": True}, {"steps": "5"}, {"activities": ["tpu"]}, {"activities": []},
        {"ranks": ["0"]}, {"ranks": -1}, {"frames": 3}, {"with_stack": 1}, {"at_step": -2}, {"warmup": 10**9},
        # A notification of an Alertmanager: who holds the token could name any alert.
        {"alerts": [{"status": "firing", "labels": {"alertname": "TrainInputBound"}}]},
    ],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused_with_a_reason(run: Run, document: object) -> None:
    """Value, rule, remedy."""
    status, answer = post(run, document)

    assert status == 400
    assert "expected" in answer["error"] or "Known" in answer["error"]
    assert next(iter(document if isinstance(document, dict) else ()), "") in answer["error"]


def test_other_ranks_are_asked_for_the_same_steps(run: Run) -> None:
    """Which rank waits for which is only seen in traces of one and the same step."""
    (run.folder / "rank3").mkdir()
    status, answer = post(run, {"steps": 1, "ranks": [0, 3]})
    request = json.loads((run.folder / "rank3" / "capture-request.json").read_text())

    assert status == 202
    assert request["at_step"] == answer["at_step"] > len(run.ends)
    assert run.finish().steps[0] == answer["at_step"]


def test_a_request_in_a_file_can_name_other_ranks(run: Run) -> None:
    """``otel-train profile --ranks`` leaves it with one of them, which names a step for all."""
    (run.folder / "rank3").mkdir()
    leave_request(run.folder / "rank0", {"steps": 1, "ranks": [0, 3]})
    first = run.finish().steps[0]

    assert json.loads((run.folder / "rank3" / "capture-request.json").read_text())["at_step"] == first


def test_several_ranks_are_asked_once_the_pace_is_known(run: Run) -> None:
    """Without it the next step of all ranks is unknown."""
    (run.folder / "rank3").mkdir()
    run.step_ns = 0
    assert post(run, {"steps": 1, "ranks": [0, 3]})[0] == 409
    leave_request(run.folder / "rank0", {"steps": 1, "ranks": [0, 3]})
    run.endpoint.poll()
    assert not (run.folder / "rank3" / "capture-request.json").exists()
    run.step_ns = STEP_NS
    run.endpoint.poll()
    assert (run.folder / "rank3" / "capture-request.json").exists()


def test_a_rank_that_is_not_there_is_said(run: Run) -> None:
    """Not silently one trace fewer."""
    status, answer = post(run, {"ranks": [7]})

    assert status == 409
    assert "rank 7" in answer["error"]


@pytest.mark.parametrize("broken", ["no folder", "not writable"])
def test_a_request_that_one_rank_cannot_get_is_left_for_none(run: Run, broken: str) -> None:
    """Those that had it recorded a capture, although the answer was that there is none."""
    (run.folder / "rank3").mkdir()
    if broken == "not writable":
        (run.folder / "rank7" / "capture-request.json" / "a folder").mkdir(parents=True)
    status, answer = post(run, {"steps": 1, "ranks": [0, 3, 7]})

    assert status == 409
    assert "rank7" in answer["error"].replace("rank 7", "rank7")
    assert not (run.folder / "rank3" / "capture-request.json").exists()
    assert not run.controller.wanted


def test_the_metadata_of_all_ranks_have_the_id_of_the_request(run: Run) -> None:
    """Two commands at a time, each with the same reason, took the other's capture for their own."""
    (run.folder / "rank3").mkdir()
    leave_request(run.folder / "rank0", {"steps": 1, "ranks": [0, 3], "request_id": "a1"})
    run.finish()

    assert run.records()[0]["request_id"] == "a1"
    assert json.loads((run.folder / "rank3" / "capture-request.json").read_text())["request_id"] == "a1"


def test_each_cause_has_a_cooldown_of_its_own(run: Run) -> None:
    """Another alert, or a requested capture, is no reason to leave this one without a trace."""
    run.captured()
    assert run.endpoint.ask_by_alert("TrainInputBound") == ""
    assert "one at a time" in run.endpoint.ask_by_alert("TrainInputBound")
    run.finish()
    assert "last capture by TrainInputBound is too recent" in run.endpoint.ask_by_alert("TrainInputBound")
    assert run.endpoint.ask_by_alert("TrainStraggler") == ""
    run.finish()
    run.clock.tick(ms=60_000)
    assert run.endpoint.ask_by_alert("TrainInputBound") == ""


def test_the_token_file_is_for_its_owner_alone(run: Run) -> None:
    """Only users who may read our files may request captures."""
    run.requests.publish()
    path = run.folder / "rank0" / KEY_FILE
    assert path.read_text() == "secret\n"
    assert path.stat().st_mode & 0o777 == 0o600
    run.requests.withdraw()
    assert not path.exists()


@contextmanager
def accounted() -> Iterator[None]:
    """Here events are accounted at once."""
    yield


@pytest.fixture
def epochs(run: Run) -> EpochCaptures:
    return EpochCaptures(run.endpoint, accounted)


def test_an_epoch_that_is_over_before_the_agent_polls_is_captured(
    run: Run, epochs: EpochCaptures, tmp_path: Path
) -> None:
    """A small epoch lasts no longer than a poll of the agent."""
    plain = tmp_path / "traces"
    for number in (1, 2):
        assert epochs.begin(number, {"steps": 2}, output_dir=str(plain)) == ""
        run.steps(5)
        epochs.end()
    epochs.finish(20)

    assert sorted(path.name for path in plain.glob("*.json")) == ["epoch_1.json", "epoch_2.json"]
    assert [(r["epoch"], r["steps_recorded"], r["problem"]) for r in run.records()] == [
        (1, 2, ""),
        (2, 2, ""),
    ]
    assert [capture.trigger for capture in run.captures] == ["schedule", "schedule"]


def test_a_second_run_into_the_same_folder_writes_its_epochs_anew(
    run: Run, epochs: EpochCaptures, tmp_path: Path
) -> None:
    """A program that reads ``epoch_1.json`` after training reads that of this training."""
    old = tmp_path / "traces" / "epoch_1.json"
    old.parent.mkdir()
    old.write_text("yesterday")
    epochs.begin(1, {"steps": 1}, output_dir=str(old.parent))
    run.steps(3)
    epochs.finish(20)

    assert [path.name for path in old.parent.glob("*.json")] == ["epoch_1.json"]
    assert old.read_text() != "yesterday"


def test_of_two_who_want_the_same_epoch_the_second_is_refused_at_once(
    run: Run, epochs: EpochCaptures
) -> None:
    """One profiler at a time; training does not wait for the first to be over."""
    began_s = time.monotonic()
    first, second = epochs.begin(1, {"steps": 50}), epochs.begin(1, {"steps": 50})

    assert (first, second) == ("", "a capture is under way: one at a time")
    assert time.monotonic() - began_s < 15


def test_an_epoch_ends_a_flop_count_that_waits_for_its_first_step(
    run: Run, epochs: EpochCaptures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that would make the step waited half a minute for the count. The step is counted later."""
    pytest.importorskip("torch")  # nothing is counted before the program has imported it
    monkeypatch.setattr(flops_module, "_dynamo_has_run", lambda: False)  # in another test of this process
    training: Any = FakeTraining(run.loop, run.thread, run.number, lambda _: 1)
    flops = FlopCount(training, event=lambda *_: None, max_s=60, shared=False)
    Capturing.give_way_to(cast("Capturing", run.endpoint), flops)
    armed = []
    for epoch in range(1, MOST_TRIES + 2):
        flops.poll(free=True)
        armed.append((flops.busy, epochs.begin(epoch, {"steps": 1, "warmup": 0}), flops.busy))
        run.steps(3)
    epochs.finish(20)
    flops.poll(free=True)

    assert armed == [(True, "", False)] * (MOST_TRIES + 1)
    assert [record["steps_recorded"] for record in run.records()] == [1] * (MOST_TRIES + 1)
    assert (flops.busy, flops.refusal) == (True, "")


def test_two_captures_that_wait_at_the_end_are_both_written(run: Run, epochs: EpochCaptures) -> None:
    """The first may still be written when the session closes."""
    for number in (1, 2):
        epochs.begin(number, {"steps": 1})
        run.steps(3)
    run.controller.end(20)

    assert [record["epoch"] for record in run.records()] == [1, 2]


def test_a_request_for_which_no_step_came_is_said_at_the_end(run: Run) -> None:
    """It was accepted: an evaluation, or a loop that was over, must not swallow it. A schedule is no request."""
    run.controller.ask(REQUEST)
    run.controller.ask(REQUEST._replace(trigger="schedule", at_step=1000))
    run.controller.end(20)

    (record,) = run.records()
    assert (record["trigger"], record["problem"]) == ("on_demand", "captured 0 of 2 steps")
    assert [(capture.file, capture.error) for capture in run.captures] == [("", "short")]


def test_a_step_that_the_end_cut_off_is_no_step_of_the_trace(run: Run) -> None:
    """Its range is shorter than a step: in a mean or a comparison it would be one of the steps."""
    run.controller.ask(REQUEST._replace(steps=50))
    run.steps(1)
    run.endpoint.poll()
    run.steps(6)
    run.controller.scheduler.abort("")
    run.controller.end(20)

    (record,) = run.records()
    with gzip.open(run.captures[0].file) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    first, last = record["steps"]
    steps = [name for name in names if name.startswith("ProfilerStep#")]
    assert steps == [f"ProfilerStep#{number}" for number in range(first, last + 1)]
    assert f"incomplete ProfilerStep#{last + 1}" in names


def test_where_nothing_can_be_captured_the_reason_is_said() -> None:
    """``profiler="off"``, or a disk that takes nothing."""
    none = NoEpochCaptures("otel_train is disabled")
    none.end()
    none.finish(1)

    assert none.begin(1, {}) == "otel_train is disabled"


def test_a_full_disk_is_said_and_training_goes_on(run: Run) -> None:
    """Nothing raises, the record says what happened."""
    run.profiler.broken = {"save"}
    capture = run.captured()

    assert capture.error == "disk"
    assert "save is broken" in run.records()[0]["problem"]
