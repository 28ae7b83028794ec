"""The one thread that reads what was recorded."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from otel_train.agent.messages import OomKills, Report
from otel_train.agent.process import ProcessActivity
from otel_train.agent.remote import MOST_UNREAD_ARRAYS, MOST_UNREAD_VALUES, RemoteRecording
from otel_train.agent.ring_reader import SharedRings
from otel_train.agent.service import AHEAD_EDGES, LEAST_PAUSE_S, READ_EDGES, ExportLoop, PeriodicTask
from otel_train.aggregation.run_state import SLICE_EDGES
from otel_train.aggregation.spans import SamplingRules
from otel_train.datamodel import Anchor, Outcomes, Snapshot
from otel_train.exporters import ExportRoute
from otel_train.instrumentation.logged_values import Value, ValueQueue
from otel_train.recording.events import Flag, Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.recording.shared_memory import ENTRIES, PendingEntries
from otel_train.safety import Guard
from otel_train.testing import FakeClock, Kept
from tests.support.flight import PrivateMemory
from tests.support.runs import run_state
from tests.support.waiting import in_threads

TRAINING = Flag.GRAD | Flag.TRAINING


class Rig:
    """An export loop without a thread, on a clock that the test advances."""

    def __init__(self) -> None:
        self.clock = FakeClock(10**9)
        anchor = Anchor(10**18, self.clock())
        self.memory = PrivateMemory(1 << 16, anchor)
        self.recorder = Recorder(self.memory, clock=self.clock)
        self.run = run_state(anchor, rules=SamplingRules(3, 1 << 40, 2.0, 1.0, 10))
        self.snapshots = 0
        self.rings = SharedRings(self.memory.map)
        self.loop = ExportLoop(self.rings, self.run, snapshot=self.snapshot, clock=self.clock, every_s=0.5)

    def snapshot(self) -> Snapshot:
        self.snapshots += 1
        return Snapshot(0, self.clock(), ())

    def route(self, every_s: float = 0.0, exporter: Any = None) -> Any:
        made = Kept() if exporter is None else exporter
        self.loop.routes.append(ExportRoute(made, Guard(f"route {len(self.loop.routes)}"), every_s))
        return made

    def steps(self, number: int) -> None:
        edge, source = self.recorder.edge, self.recorder.source
        data, model = source(SourceKind.DATA, "code"), source(SourceKind.FORWARD, "model")
        back, update = source(SourceKind.BACKWARD, "backward"), source(SourceKind.OPTIMIZER, "SGD")
        for _ in range(number):
            for one, flags in ((data, 0), (model, TRAINING), (back, 0), (update, 0)):
                edge(code(Op.BEGIN, one, flags))
                self.clock.tick(us=10)
                edge(code(Op.END, one))

    def end_pass(self) -> None:
        data = self.recorder.source(SourceKind.DATA, "code")
        self.recorder.edge(code(Op.BEGIN, data))
        self.recorder.edge(code(Op.STOP, data))

    def counted(self) -> int:
        return self.run.totals.steps_by_phase().get("train", 0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.rings.limit(None)
    yield made
    made.memory.close()


def test_to_touch_the_memory_of_a_rank_changes_nothing_that_was_written() -> None:
    """The agent touches it while the training thread writes."""
    rig = Rig()
    word = code(Op.BEGIN, rig.recorder.source(SourceKind.STAGE, "work"))
    rig.recorder.edge(word)
    rig.rings.touch()

    assert rig.recorder.main.ring.read(10).codes.tolist() == [word]


def test_the_time_of_a_run_ends_when_its_rank_says_so() -> None:
    """A rank whose run was short waits for its agent to begin: that is no time of the run."""
    rig = Rig()
    assert rig.rings.run_clock() > rig.clock()

    rig.memory.ended_word[0] = rig.clock()

    assert rig.rings.run_clock() == rig.rings.ended_ns == rig.clock()


def test_a_turn_accounts_what_was_recorded(rig: Rig) -> None:
    """From ring to metrics; the last step is open until the next ask."""
    kept = rig.route()
    rig.steps(20)
    rig.loop.run_once()

    assert rig.counted() == 19
    assert rig.rings.steps() == (19, rig.clock() - 40_000)
    assert rig.loop.edges == 160
    assert [batch.snapshot is not None for batch in kept.batches] == [True]
    assert kept.spans


def test_events_of_a_source_without_a_name_are_lost_and_others_are_counted(rig: Rig) -> None:
    """The rank may write the table of names each time that the agent reads it."""
    rig.recorder.edge(code(Op.BEGIN, 4000))
    rig.recorder.edge(code(Op.END, 4000))
    rig.steps(20)
    rig.loop.run_once()

    assert rig.counted() == 19
    assert (rig.loop.lost, rig.loop.guard.faults) == (2, 0)


def test_events_that_a_loop_can_no_longer_read_are_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary would say that none are."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of the accounting")

    kept = rig.route()
    rig.steps(20)
    monkeypatch.setattr(rig.run, "feed", refuse)
    for _ in range(rig.loop.guard.limit):
        rig.steps(5)
        rig.clock.tick(s=5)
        rig.loop.run_once()
    assert rig.loop.guard.closed
    rig.steps(5)

    assert rig.loop.lost >= 40
    assert len(kept.batches) == rig.loop.guard.limit


def test_reports_that_no_loop_takes_are_dropped_beyond_a_bound_and_counted(rig: Rig) -> None:
    """The memory of the agent would grow for as long as a run lasts whose loop is switched off."""
    remote = RemoteRecording(rig.rings, lambda *_: None)
    values: list[Any] = [Value(0, "loss", 1.0)] * (MOST_UNREAD_VALUES // 8)
    report = _report(values, (0, 0))
    for _ in range(9):
        remote.take_in(report)
    assert len(remote.logged) == MOST_UNREAD_VALUES
    before = remote.dropped
    assert before == len(values)
    values.clear()
    for _ in range(MOST_UNREAD_ARRAYS):
        remote.take_in(report)

    assert len(remote.operations()) == MOST_UNREAD_ARRAYS
    assert remote.dropped == before + 9


def test_values_of_a_rank_that_was_killed_are_taken_in_once_and_those_replaced_are_counted(rig: Rig) -> None:
    """It can be killed after a report has been sent and before the memory says so, or with more values than fit there."""
    remote = RemoteRecording(rig.rings, lambda *_: None)
    queue = ValueQueue(rig.clock, PendingEntries(rig.memory.pending(0)))
    queue.log({"reported": 1.0})
    remote.take_in(_report(list(queue.drain()), (queue.drained, 0)))
    for _ in range(ENTRIES + 3):
        queue.log({"waiting": 1.0})
    remote.take_in_unreported()

    assert Counter(value.name for value in remote.logged) == {"reported": 1, "waiting": ENTRIES}
    assert remote.dropped == 3


def _report(values: list[Any], reported: tuple[int, int]) -> Report:
    return Report(
        changes=0, positions=(), device_steps=(1, 1), outcomes=Outcomes(1, 0, 0), scale=None, compiles=[],
        logged_values=values, operations=array("q", range(3)), reported=reported, builds=[], exits=[],
        reports=0, records=None, exchange=(False, 0), state=None,
    )  # fmt: skip


def test_a_reader_that_a_rank_has_lapped_reads_no_event_that_needs_a_report() -> None:
    """The events that it may read are gone; those that are there need what the rank has not reported yet."""
    rig = Rig()
    (thread,) = rig.rings.threads
    rig.steps(5)
    rig.rings.limit([(thread.slot, thread.ring.written)])
    capacity = thread.ring.capacity
    while rig.recorder.main.ring.written < 2 * capacity:
        rig.recorder.edge(0)
    piece = thread.ring.read(100)

    assert len(piece.times) == 0
    assert thread.ring.taken == piece.missed == thread.ring.written - capacity
    assert thread.ring.pending == 0


def test_time_between_passes_goes_no_further_than_what_may_be_read() -> None:
    """The steps after it are written already, and come with the next report of the rank."""
    rig = Rig()
    rings = rig.rings
    rig.steps(20)
    rig.end_pass()
    (thread,) = rings.threads
    rings.limit([(thread.slot, thread.ring.written)])
    rig.loop.read_rings()
    rig.clock.tick(s=1)
    rig.steps(10)
    rig.end_pass()
    rig.loop.read_rings()
    rings.limit(None)
    rig.loop.read_rings()

    assert rig.counted() == 30
    assert rig.run.totals.phase_s("train") == pytest.approx(30 * 40e-6)
    rig.memory.close()


def test_of_threads_that_are_read_in_one_turn_the_one_that_trained_first_leads(rig: Rig) -> None:
    """The main thread's ring is the first: it led although its training began later."""
    trained, read = threading.Event(), threading.Event()

    def train() -> None:
        rig.steps(12)
        trained.set()
        read.wait()

    threading.Thread(target=train, name="first").start()
    trained.wait()
    rig.steps(12)
    rig.loop.run_once()
    read.set()

    assert rig.run.leading is not None
    assert rig.run.leading.name == "first"


def begun_in_a_thread(do: Callable[[Rig], object]) -> Rig:
    """Returns what was made in a thread that did this and is over."""
    rigs: list[Rig] = []

    def begin() -> None:
        rigs.append(Rig())
        rigs[0].rings.limit(None)
        do(rigs[0])

    in_threads(begin)
    return rigs[0]


def test_a_thread_goes_on_from_the_one_that_began_the_session() -> None:
    """Without code a session begins in the first thread that trains, which may be a thread of its epoch."""
    rig = begun_in_a_thread(lambda rig: rig.steps(10))
    for _ in range(2):
        rig.loop.read_rings()
    rig.steps(10)
    rig.loop.read_rings()
    rig.run.close(rig.clock())

    assert rig.loop.edges == 160
    assert (rig.counted(), rig.run.training_threads) == (20, 1)
    assert rig.run.totals.activity_ns.sum() == rig.clock() - rig.run.started_ns
    rig.memory.close()


def test_a_thread_that_only_reads_does_not_lead_because_it_began_the_session() -> None:
    """Its waits for data were taken for those of training, where it was over before the first turn."""

    def fetch(rig: Rig) -> None:
        rig.end_pass()
        in_threads(lambda: rig.steps(12))
        rig.end_pass()

    rig = begun_in_a_thread(fetch)
    rig.loop.read_rings()

    assert rig.run.training_threads == 1
    rig.memory.close()


def test_more_than_a_slice_is_read_in_one_turn(rig: Rig) -> None:
    """A loop that falls behind for ever loses records."""
    rig.steps(SLICE_EDGES // 4)
    rig.loop.run_once()

    assert rig.loop.edges == 2 * SLICE_EDGES
    assert rig.loop.missed == 0


def test_a_loop_that_is_stopped_leaves_a_long_backlog_to_the_last_turn(rig: Rig) -> None:
    """The end waits for the loop only so long: then both would account the same edges at once."""
    steps, edges = 7 * SLICE_EDGES // 8, 7 * SLICE_EDGES
    rig.steps(steps)
    rig.loop.start()
    while not rig.loop.edges:
        time.sleep(0.0005)
    rig.loop.stop(5.0)
    left = edges - rig.loop.edges
    rig.loop.read_rings()

    assert left > 0
    assert (rig.loop.edges, rig.loop.missed) == (edges, 0)
    assert rig.counted() == steps - 1


@pytest.mark.parametrize(("edges", "read"), [(READ_EDGES, READ_EDGES), (READ_EDGES // 2, 0)])
def test_many_edges_are_accounted_when_they_are_reported(rig: Rig, edges: int, read: int) -> None:
    """Not at the next turn: the end of the program waits for what is left. For few the next turn is soon enough."""
    rig.loop.start()
    rig.steps(edges // 8)
    rig.loop.wake()
    until_s = time.monotonic() + 0.3  # the first turn comes after 0.5 s
    while time.monotonic() < until_s and not (read and rig.loop.edges == read):
        time.sleep(0.001)
    found = rig.loop.edges
    rig.loop.stop(5.0)

    assert found == read


@pytest.mark.parametrize(
    ("edges", "pause_s"),
    [(0, 0.5), (AHEAD_EDGES, 0.5), (AHEAD_EDGES * 5, 0.2), (AHEAD_EDGES * 50, LEAST_PAUSE_S)],
)
def test_rings_into_which_edges_come_fast_are_looked_at_more_often(
    monkeypatch: pytest.MonkeyPatch, edges: int, pause_s: float
) -> None:
    """Within one second so many edges; never more often than every 0.1 s, never less often than once per turn."""
    now_s = [100.0]
    monkeypatch.setattr("otel_train.agent.service.time.monotonic", lambda: now_s[0])
    written = SimpleNamespace(ring=SimpleNamespace(written=0))
    recorder: Any = SimpleNamespace(threads=[written])
    nothing: Any = None
    loops = [
        ExportLoop(recorder, nothing, snapshot=nothing, clock=FakeClock(0), every_s=every_s)
        for every_s in (0.5, 0.01)
    ]
    now_s[0] += 1.0
    written.ring.written = edges

    assert loops[0]._pause_s() == pytest.approx(pause_s)
    assert loops[1]._pause_s() == 0.01


def asking(rig: Rig, rings: SharedRings) -> tuple[RemoteRecording, list[int]]:
    """A rank that has not reported, and one entry for each time that it is asked to."""
    asked: list[int] = []
    remote = RemoteRecording(rings, lambda _: asked.append(1))
    rig.loop.advance = remote.advance
    return remote, asked


def test_edges_are_read_without_a_report_where_nothing_else_has_changed() -> None:
    """The rank's service thread sleeps meanwhile: each time it wakes, training waits for the interpreter."""
    rig = Rig()
    rings = rig.rings
    remote, asked = asking(rig, rings)
    rig.steps(20)
    rig.loop.read_rings()
    assert (rig.counted(), asked) == (0, [1])  # four sources are new

    rings.limit(rig.recorder.positions(), rig.recorder.changes)
    remote.asked_s = 0.0
    rig.steps(30)
    rig.loop.read_rings()
    assert (rig.counted(), asked) == (49, [1])
    rig.memory.close()


def test_edges_after_a_change_wait_for_the_report_about_it() -> None:
    """A compilation, a skipped update, a value: the step that it belongs to is accounted after it is known. Asked once."""
    rig = Rig()
    rings = rig.rings
    _, asked = asking(rig, rings)
    rig.steps(1)
    rings.limit(rig.recorder.positions(), rig.recorder.changes)
    rig.steps(9)
    rig.loop.read_rings()
    rig.recorder.changed()
    rig.steps(10)
    rig.loop.read_rings()
    rig.loop.read_rings()
    assert (rig.counted(), asked) == (9, [1])

    rings.limit(rig.recorder.positions(), rig.recorder.changes)
    rig.loop.read_rings()
    assert rig.counted() == 19
    rig.memory.close()


def test_marked_steps_are_counted_while_there_is_always_a_step_that_waits_for_the_next_report() -> None:
    """A loop without a model that logs a value in every step: some events of its thread are always unread."""
    rig = Rig()
    work, mark = rig.recorder.source(SourceKind.STAGE, "work"), rig.recorder.source(SourceKind.MARK, "step")
    for _ in range(3):
        for _ in range(10):
            rig.recorder.edge(code(Op.BEGIN, work))
            rig.clock.tick(us=10)
            rig.recorder.edge(code(Op.END, work))
            rig.recorder.edge(code(Op.MARK, mark))
        rig.recorder.changed()
        rig.rings.limit([(0, rig.recorder.main.ring.written - 3)], rig.recorder.changes)
        rig.recorder.changed()
        rig.loop.read_rings()

    assert rig.counted() == 29
    rig.memory.close()


def test_a_rank_that_hung_and_goes_on_is_read_by_its_reports_again() -> None:
    """While it hung nothing could be asked: what was there was read."""
    rig = Rig()
    rings = rig.rings
    rig.steps(10)
    rings.limit(None)
    rig.loop.read_rings()
    assert rig.counted() == 9

    rings.limit(rig.recorder.positions(), rig.recorder.changes)
    rig.recorder.changed()
    rig.steps(10)
    rings.advance()
    rig.loop.read_rings()
    assert rig.counted() == 9
    rig.memory.close()


def test_a_forked_child_adds_no_name_to_the_table_of_its_parent() -> None:
    """A worker of a loader that times a stage: its name stood where that of the parent's optimizer came to stand."""
    rig = Rig()
    rings, written = rig.rings, rig.recorder.changes
    child = os.fork()
    if not child:
        rig.recorder.source(SourceKind.STAGE, "decode")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    assert rig.recorder.changes == written
    assert rings.sources == []
    rig.memory.close()


def test_snapshots_come_when_they_are_due(rig: Rig) -> None:
    """Each exporter has its own interval; spans go at once."""
    often, seldom = rig.route(1.0), rig.route(10.0)
    for _ in range(21):
        rig.loop.run_once()
        rig.clock.tick(s=0.5)

    assert len(often.snapshots) == 11
    assert len(seldom.snapshots) == 2
    assert rig.snapshots == 11


def test_the_last_turn_sends_everything(rig: Rig) -> None:
    """Whatever was due or not."""
    kept = rig.route(3600.0)
    rig.loop.run_once()
    rig.loop.run_once(final=True)

    assert len(kept.snapshots) == 2
    assert kept.batches[-1].final


def test_without_metrics_spans_and_events_go_out_all_the_same(rig: Rig) -> None:
    """A reading of the operating system that fails must not cost the traces."""
    kept = rig.route()

    def fail() -> Snapshot:
        raise RuntimeError

    rig.loop._snapshot = fail
    rig.steps(20)
    rig.loop.run_once()

    assert kept.spans
    assert kept.snapshots == []


def test_a_broken_task_stops_no_other(rig: Rig) -> None:
    """Nor itself from being counted."""
    done: list[int] = []

    def fail() -> None:
        raise RuntimeError

    broken = Guard("broken")
    rig.loop.tasks += [
        PeriodicTask(fail, broken, 0.0),
        PeriodicTask(lambda: done.append(1), Guard("fine"), 0.0),
    ]
    for _ in range(5):
        rig.loop.run_once()

    assert len(done) == 5
    assert broken.faults == 3


def test_a_fault_of_tasks_that_share_a_guard_is_one_fault(rig: Rig) -> None:
    """One fault counted twice looks like two."""

    def fails() -> None:
        raise OSError

    shared = Guard("both")
    rig.loop.early_tasks.append(PeriodicTask(fails, shared, 0.0))
    rig.loop.tasks.append(PeriodicTask(lambda: None, shared, 0.0))
    rig.loop.run_once()

    assert rig.loop.faults()["both"] == 1


def test_what_is_done_first_is_done_before_anything_is_read(rig: Rig) -> None:
    """A NaN that was logged in a step must be known when that step is judged."""
    rig.steps(20)
    at_first: list[int] = []
    rig.loop.early_tasks.append(PeriodicTask(lambda: at_first.append(rig.counted()), Guard("first"), 0.0))
    rig.loop.run_once()

    assert at_first == [0]
    assert rig.counted() == 19


def test_lost_records_are_counted(rig: Rig) -> None:
    """A ring that was overrun is said, not guessed at: in flight files, too, steps have no numbers then."""
    rig.steps((1 << 16) // 8 + 100)
    rig.loop.run_once()

    assert rig.rings.steps() == (0, 0)
    assert rig.loop.missed >= 800
    assert rig.loop.edges + rig.loop.missed == 8 * ((1 << 16) // 8 + 100)


def test_oom_kills_are_counted_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    """Machines of a cluster have one or the other; earlier kills in the same group are not this process's."""
    rows = [row.split(":", 2) for row in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
    places = [tmp_path / "memory" / path.lstrip("/") for _, kinds, path in rows if kinds == "memory"]
    files = [place / "memory.oom_control" for place in places]
    files += [tmp_path / path.lstrip("/") / "memory.events" for _, kinds, path in rows if not kinds]
    assert files
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("low 0\noom_kill 3\n", encoding="ascii")

    kills = OomKills(os.getpid(), tmp_path)

    assert kills.count == 0
    for number, file in enumerate(files, 1):
        file.write_text("oom_kill 4\noom_group_kill 0\n", encoding="ascii")
        assert kills.count == number
    files[0].write_text("not a number\n\xff", encoding="latin-1")
    assert kills.count <= 0
    assert OomKills(-1, tmp_path).count == 0
    assert OomKills(os.getpid(), tmp_path / ("x" * 300)).count == 0  # a path that the system refuses


def test_an_agent_that_waits_for_a_disk_works_while_the_disk_answers(tmp_path: Path) -> None:
    """It imports its packages from a cold one; the disk that hangs is that of the run directory."""
    task = tmp_path / "7" / "task" / "7"
    task.mkdir(parents=True)
    (task / "stat").write_text("7 (python) D 1", encoding="utf-8")

    def is_working(ran_ns: int) -> bool:
        (task / "schedstat").write_text(f"{ran_ns} 0 9", encoding="utf-8")
        return work.is_working()

    (task / "schedstat").write_text("1000 0 9", encoding="utf-8")
    work = ProcessActivity(7, reading=True, processes=tmp_path)
    assert [is_working(ran_ns) for ran_ns in (2000, 2000, 3000)] == [True, False, True]
    work = ProcessActivity(7, processes=tmp_path)
    assert not is_working(4000)
