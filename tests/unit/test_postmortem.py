"""What is left of a process that was killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_train.catalog import STEP_NUMBER
from otel_train.cli.postmortem import headline
from otel_train.datamodel import SUMMARY_SCHEMA, Anchor
from otel_train.errors import RunDirectoryError
from otel_train.recording.events import Op, SourceKind, code
from otel_train.recording.flight_recorder import read_flight
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import RINGS_OFFSET
from otel_train.resource import namespace_of, process_mark
from otel_train.rundata.flight import FlightHistory, ThreadHistory, read_postmortem, thread_history
from otel_train.testing import FakeClock
from tests.support.edges import Tape
from tests.support.flight import PrivateMemory
from tests.support.runs import Run

VICTIM = """
import sys, time
from pathlib import Path
from otel_train.datamodel import Anchor, system_clock
from otel_train.recording.events import Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from tests.support.flight import PrivateMemory

memory = PrivateMemory(4096, Anchor.now(), Path(sys.argv[1]) / "flight.bin")
recorder = Recorder(memory, clock=system_clock)
recorder.set_identity({"run_id": "r1", "rank": 3, "attempt": 2, "started_unix_ns": time.time_ns()})
data = recorder.source(SourceKind.DATA, "code")
forward = recorder.source(SourceKind.FORWARD, "net")
backward = recorder.source(SourceKind.BACKWARD, "backward")
sgd = recorder.source(SourceKind.OPTIMIZER, "SGD")
for _ in range(50):
    for source, flags in ((data, 0), (forward, 3), (backward, 0), (sgd, 0)):
        recorder.edge(code(Op.BEGIN, source, flags))
        recorder.edge(code(Op.END, source))
recorder.edge(code(Op.BEGIN, data)); recorder.edge(code(Op.END, data))
recorder.edge(code(Op.BEGIN, forward, 3))
print("ready", flush=True)
time.sleep(60)
"""


class Flight:
    """A flight file under construction, started at the Unix time 1000 s."""

    def __init__(self, folder: Path, *, edges: int = 64) -> None:
        self.clock = FakeClock(1000)
        self.memory = PrivateMemory(edges, Anchor(1000 * 10**9, 1000), folder / "flight.bin")
        self.recorder = Recorder(self.memory, clock=self.clock)
        self.source = self.recorder.source

    def edges(self, *edges: tuple[Op, int]) -> None:
        for op, source in edges:
            self.recorder.edge(code(op, source))

    def ask(self) -> None:
        """A batch is asked for, and does not come."""
        self.edges((Op.BEGIN, self.source(SourceKind.DATA, "code")))

    def step(self, *sources: int) -> None:
        """Stages of 5 ns each."""
        for source in sources:
            self.edges((Op.BEGIN, source))
            self.clock.tick(5)
            self.edges((Op.END, source))


@pytest.fixture
def flight(tmp_path: Path) -> Iterator[Flight]:
    made = Flight(tmp_path)
    yield made
    made.memory.close()


def leave_summary(folder: Path, **values: object) -> None:
    (folder / "summary.json").write_text(json.dumps({"schema": SUMMARY_SCHEMA, **values}))


def test_a_killed_process_leaves_its_last_steps_and_its_open_stage(tmp_path: Path) -> None:
    """SIGKILL runs no handler: only what lies in the map is left."""
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert victim.stdout is not None
    with victim.stdout:
        assert victim.stdout.readline() == "ready\n"
        living = read_postmortem(tmp_path)
        victim.send_signal(signal.SIGKILL)
        victim.wait()

    dead = read_postmortem(tmp_path)

    assert (living["alive"], dead["alive"]) == (True, False)
    assert (dead["run_id"], dead["rank"], dead["attempt"], dead["pid"]) == ("r1", 3, 2, victim.pid)
    assert dead["steps_in_file"] == 50
    assert dead["edges_in_file"] == 50 * 8 + 3
    assert dead["last_step"]["index"] == 50
    assert [(s["stage"], s["loader"], s["model"]) for s in dead["open"]] == [("forward", "code", "net")]
    assert [step["index"] for step in dead["recent_steps"]] == list(range(30, 50))
    assert set(dead["recent_steps"][-1]["stages"]) == {"data", "forward", "backward", "optimizer", "other"}
    for step in dead["recent_steps"]:
        assert sum(step["stages"].values()) == pytest.approx(step["duration_s"])
    json.dumps(dead)


@pytest.mark.parametrize(
    ("left", "alive"),
    [
        ({"process": process_mark(os.getpid()), "pid_namespace": namespace_of("pid")}, True),
        ({"process": f"a-boot/{os.getpid()}/1", "pid_namespace": namespace_of("pid")}, False),
        ({"process": f"a-boot/{os.getpid()}/1", "pid_namespace": "pid:[1]"}, None),
        ({"process": "", "pid_namespace": ""}, True),
        ({}, True),
    ],
    ids=["this one", "a later one", "in another container", "no /proc", "an earlier version"],
)
def test_a_process_that_only_has_the_number_of_a_rank_is_not_the_rank(
    left: dict[str, str], alive: bool | None, tmp_path: Path, flight: Flight
) -> None:
    """A training process is number 1 of its container: number 1 of the machine always lives."""
    flight.recorder.set_identity({"run_id": "r1", "rank": 0, **left})
    flight.ask()

    assert read_postmortem(tmp_path)["alive"] is alive


def test_an_open_stage_lasts_until_the_last_sign_of_life(tmp_path: Path, flight: Flight) -> None:
    """The training thread hung; the agent did not."""
    flight.ask()
    flight.memory.poll(1030 * 10**9)

    (stage,) = read_postmortem(tmp_path)["open"]

    assert stage == {
        "stage": "data", "loader": "code", "model": None, "thread": "MainThread", "for_seconds": 30.0
    }  # fmt: skip


def test_the_suspects_of_the_reports_are_read_from_a_summary_of_any_version(
    tmp_path: Path, flight: Flight
) -> None:
    """One with a key more, and one of which keys are missing, were a TypeError."""
    flight.ask()
    known = {
        "rank": 3, "host": "b", "step": 7, "stage": "other", "loader": "", "quiet_s": 18.0, "silent": True
    }  # fmt: skip
    leave_summary(tmp_path, ranks={"suspects": [known | {"new": 1}, {"rank": 4}]})

    assert read_postmortem(tmp_path)["reported_suspects"] == [known]


def test_steps_that_were_overwritten_are_numbered_back_from_the_summary(
    tmp_path: Path, flight: Flight
) -> None:
    """A ring forgets; the summary has counted."""
    loader, sgd = flight.source(SourceKind.DATA, "code"), flight.source(SourceKind.OPTIMIZER, "SGD")
    for _ in range(100):
        flight.step(loader, sgd)
    flight.memory.poll(1001 * 10**9)
    by_itself = read_postmortem(tmp_path)
    leave_summary(tmp_path, steps={"train": 100}, state="killed")

    report = read_postmortem(tmp_path)

    assert by_itself["recent_steps"][-1]["index"] == by_itself["steps_in_file"] - 1
    assert "step 0 is the first" in by_itself["warnings"][0]
    assert report["recent_steps"][-1]["index"] == 99
    assert report["state"] == "killed"


def test_steps_that_were_overwritten_have_the_numbers_that_the_agent_counted(
    tmp_path: Path, flight: Flight
) -> None:
    """A node lost power: each summary was up to 30 s old, so that of two ranks in one step one looked thousands behind."""
    loader, sgd = flight.source(SourceKind.DATA, "code"), flight.source(SourceKind.OPTIMIZER, "SGD")
    for number in range(103):
        if number == 100:  # the agent looked when the request for this batch had ended the step before
            ended_ns = flight.clock()
        flight.step(loader, sgd)
    flight.memory.poll(1001 * 10**9, (100, ended_ns))
    leave_summary(tmp_path, steps={"train": 40}, state="running")

    report = read_postmortem(tmp_path)

    assert report["recent_steps"][-1]["index"] == report["step"] == 102
    assert report["warnings"] == []


def long_run(flight: Flight, *, steps: int, known: bool) -> None:
    """A block around the training, evaluation after every tenth step, an exception once, and a hang in a forward."""
    block, data = flight.source(SourceKind.STAGE, "everything"), flight.source(SourceKind.DATA, "train")
    val, net = flight.source(SourceKind.DATA, "val"), flight.source(SourceKind.FORWARD, "net")
    backward, sgd = flight.source(SourceKind.BACKWARD, "backward"), flight.source(SourceKind.OPTIMIZER, "SGD")
    flight.edges((Op.BEGIN, block))
    ended = (0, 0)
    for number in range(steps):
        ended = (number, flight.clock())
        flight.step(data, net, backward, sgd)
        if number == 3:
            flight.edges((Op.BEGIN, block), (Op.BEGIN, net), (Op.FAIL, net), (Op.FAIL, block))
        if number % 10 == 9:
            flight.step(val, val)
        flight.clock.tick(1)
    flight.step(data)
    flight.edges((Op.BEGIN, net))
    flight.memory.poll(1001 * 10**9, ended if known else (0, 0))


@pytest.mark.parametrize("known", [True, False], ids=["counted by the agent", "of a former version"])
@pytest.mark.parametrize("edges", [256, 8192], ids=["overwritten", "whole"])
def test_a_long_file_is_accounted_from_its_end_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edges: int, *, known: bool
) -> None:
    """A full one took seconds of each of a thousand ranks; of its events the last steps and the open stages are shown."""
    flight, accounted = Flight(tmp_path, edges=edges), []
    long_run(flight, steps=300, known=known)
    leave_summary(tmp_path, steps={"train": 300}, state="running")
    of_all = read_postmortem(tmp_path)

    def seen(*args: Any) -> ThreadHistory:
        history = thread_history(*args)
        accounted.append(history.accounted)
        return history

    monkeypatch.setattr("otel_train.rundata.flight.thread_history", seen)
    monkeypatch.setattr("otel_train.rundata.flight._TAIL_EDGES", 200)
    of_the_end = read_postmortem(tmp_path)
    flight.memory.close()

    counted = of_all["steps_in_file"] if edges > 256 else None
    assert of_the_end == of_all | {"steps_in_file": counted}
    assert [stage["stage"] for stage in of_all["open"]] == ["everything", "forward"][edges <= 256 :]
    assert accounted == ([200] if known or edges == 256 else [200, 1600, of_all["edges_in_file"]])


@pytest.mark.usefixtures("flight")
def test_a_process_that_died_before_its_first_edge_is_reported(tmp_path: Path) -> None:
    """Out of memory while the model was built."""
    report = read_postmortem(tmp_path)

    assert (report["open"], report["last_step"], report["edges_in_file"]) == ([], None, 0)
    assert report["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((content, r"flight\.bin") for content in (b"", b"OTELTRN1", b"OTELTRN1" + bytes(400_000), b"PK" * 200_000, None)),
        (b"OTELTRN9" + bytes(400_000), "begins with b'OTELTRN9', expected b'OTELTRN1'; use the otel-train that wrote it"),
    ],
    ids=["empty", "cut", "zeros", "foreign", "none", "of another version"],
)  # fmt: skip
def test_what_is_no_flight_file_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    """The message must say which file, what is wrong, and what reads it."""
    if content is not None:
        (tmp_path / "flight.bin").write_bytes(content)

    with pytest.raises(RunDirectoryError, match=said):
        read_postmortem(tmp_path)


def test_a_file_that_was_cut_short_gives_what_it_holds(tmp_path: Path, flight: Flight) -> None:
    """A copy that did not finish."""
    flight.ask()
    flight.memory.poll(1001 * 10**9)
    whole = (tmp_path / "flight.bin").read_bytes()
    (tmp_path / "flight.bin").write_bytes(whole[: 300 * 1024])

    report = read_postmortem(tmp_path)

    assert [stage["loader"] for stage in report["open"]] == ["code"]


def test_a_file_without_the_events_of_the_training_thread_is_refused_as_cut_off(
    tmp_path: Path, flight: Flight
) -> None:
    """It was read as one of a process that had written nothing, and its rank as one between two stages."""
    flight.ask()
    flight.memory.poll(1001 * 10**9)
    whole = (tmp_path / "flight.bin").read_bytes()
    (tmp_path / "flight.bin").write_bytes(whole[: RINGS_OFFSET + 16])

    with pytest.raises(RunDirectoryError, match=r"flight\.bin: it is cut off"):
        read_postmortem(tmp_path)


def test_a_loop_that_hung_after_its_update_was_still_in_that_step(tmp_path: Path, flight: Flight) -> None:
    """No ask had closed it: counted as closed, its rank would look further than those that waited for it."""
    data, sgd = flight.source(SourceKind.DATA, "code"), flight.source(SourceKind.OPTIMIZER, "SGD")
    steps = {}
    for number in range(5):
        flight.step(data, sgd)
        steps[number] = read_postmortem(tmp_path)["step"]
    flight.ask()

    assert steps == {number: number for number in range(5)}
    assert read_postmortem(tmp_path)["step"] == 5


def own(tape: Tape) -> Tape:
    return tape.spend(1).run(SourceKind.STAGE, "log", 3).spend(1)


LOOPS: dict[str, Callable[[Tape], object]] = {
    "usual": lambda tape: own(own(own(tape.ask()).forward()).backward()).update().run(SourceKind.STAGE, "log", 3),
    "without a loader": lambda tape: own(own(tape).forward().backward().update()),
    "marked": lambda tape: own(own(tape.ask()).forward().backward().update()).mark(),
    "without an optimizer": lambda tape: own(own(tape.ask()).forward().backward()),
    "two batches a step": lambda tape: own(tape.micro()).micro().update(),
    "saves": lambda tape: own(tape.step()).run(SourceKind.CHECKPOINT, "checkpoint", 9),
    "evaluates": lambda tape: own(tape.step()).start("val").validate(),
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_the_step_at_the_end_has_one_number(loop: str, tmp_path: Path) -> None:
    """The first line said 41 of the step that the event, the overview and the trace call 40."""
    whole = Tape(started_ns=1000).repeat(12, LOOPS[loop])
    flight = Flight(tmp_path, edges=1 << 10)
    for each in whole.sources:
        flight.source(each.kind, each.name, each.phase)
    differ = []
    for place, (at_ns, word) in enumerate(zip(whole.times, whole.codes, strict=True), 1):
        flight.clock.tick(at_ns - flight.clock())
        flight.recorder.edge(word)
        if 20 < place <= len(whole.codes) - 20:
            continue
        read = Tape(started_ns=1000)
        read.sources, read.times, read.codes = whole.sources, whole.times[:place], whole.codes[:place]
        run = Run().feed(read).close(at_ns + 9)
        run.account.killed("SIGKILL")
        ((killed, *_), report) = run.account.spans.drain()[1], read_postmortem(tmp_path)
        numbers = [report["step"], killed.attributes[STEP_NUMBER.name]]
        if said := re.search(r" (?:of|in) step (\d+)", headline(report)):
            numbers.append(int(said[1]))
        assert said or not report["open"]
        if len(set(numbers)) > 1:
            differ.append((place, numbers))
    flight.memory.close()

    assert differ == []


@pytest.mark.parametrize(
    ("hung_s", "goes_on"), [(30, False), (30, True), (0, False)], ids=["hung", "went on", "raised"]
)
def test_a_rank_that_an_exception_ended_was_in_the_stage_that_raised(
    tmp_path: Path, flight: Flight, hung_s: int, goes_on: bool
) -> None:
    """Ctrl-C while it hung, or out of memory. The exception ends the stage, and the program saves what it has."""
    kinds = (SourceKind.DATA, SourceKind.BACKWARD, SourceKind.CHECKPOINT)
    loader, backward, saving = (flight.source(kind, "code") for kind in kinds)
    flight.edges((Op.BEGIN, loader), (Op.END, loader), (Op.BEGIN, backward))
    flight.clock.tick(hung_s * 10**9)
    flight.edges((Op.FAIL, backward), (Op.BEGIN, saving), (Op.END, saving), (Op.PASS_END, loader))
    if goes_on:
        flight.ask()
    flight.memory.poll(1034 * 10**9)  # the process waits for other code at its exit
    leave_summary(tmp_path, state="interrupted", started_unix_s=1000.0, wall_seconds=hung_s)

    report = read_postmortem(tmp_path)

    assert [stage["stage"] for stage in report["open"]] == ["data" if goes_on else "backward"]
    assert report["quiet_seconds"] == (0.0 if goes_on else hung_s)
    assert report["warnings"] == []


def test_batches_that_no_step_used_at_the_end_are_of_no_step(tmp_path: Path, flight: Flight) -> None:
    """A loop that fetches two batches ahead ends with two in hand: their time has a step that never closes."""
    data, sgd = flight.source(SourceKind.DATA, "code"), flight.source(SourceKind.OPTIMIZER, "SGD")
    for stage in (data, sgd, data, data):
        flight.step(stage)
    timeline = FlightHistory(read_flight(tmp_path / "flight.bin")).timeline

    assert timeline is not None
    assert timeline.selves_ns.sum(axis=1).tolist() == [10]


def test_a_pause_in_a_stage_that_ended_is_none_of_the_end(tmp_path: Path, flight: Flight) -> None:
    """A checkpoint that took three seconds was over when Ctrl-C came."""
    saving = flight.source(SourceKind.CHECKPOINT, "checkpoint")
    flight.edges((Op.BEGIN, saving))
    flight.clock.tick(3 * 10**9)
    flight.edges((Op.END, saving))
    flight.memory.poll(1004 * 10**9)
    leave_summary(tmp_path, state="interrupted")

    assert read_postmortem(tmp_path)["open"] == []


@pytest.mark.parametrize("wall_s", [1e308, -1e308])
def test_an_end_that_cannot_be_is_left_out(wall_s: float, tmp_path: Path, flight: Flight) -> None:
    """Any user may have written the summary."""
    flight.ask()
    flight.memory.poll(1030 * 10**9)
    leave_summary(tmp_path, state="failed", started_unix_s=wall_s, wall_seconds=wall_s)

    report = read_postmortem(tmp_path)

    assert (report["ended_unix_s"], report["quiet_seconds"]) == (None, 30.0)
