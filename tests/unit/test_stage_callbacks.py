"""The program's own code around stages, and what it can read there."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

import otel_train
from otel_train.instrumentation.callbacks import MOST_SUSPENDED, LastBatch, StageCallbacks
from otel_train.recording.events import Ending, Flag, Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.testing import FakeClock
from tests.support.flight import PrivateMemory
from tests.support.waiting import in_threads

MS = 1_000_000


class Bench:
    """A recorder on a clock that stands still, and a log of what was called."""

    def __init__(self, edges: int = 1 << 10) -> None:
        self.clock = FakeClock(1_000)
        self.recorder = Recorder(PrivateMemory(edges), clock=self.clock)
        self.hooks = StageCallbacks(self.recorder)
        self.last = LastBatch(self.recorder)
        self.called: list[str] = []

    def edge(self, op: Op, kind: SourceKind, name: str = "x", *, flags: int = 0, payload: int = 0) -> None:
        self.recorder.edge(code(op, self.recorder.source(kind, name), flags, payload))

    def run(self, kind: SourceKind, *inside: SourceKind, name: str = "x", end: Op = Op.END) -> None:
        """One run of a stage, with others inside."""
        self.edge(Op.BEGIN, kind, name)
        for each in inside:
            self.run(each)
        self.edge(end, kind, name)

    def fetch(self, loader: str, ms: int = 1, op: Op = Op.END) -> None:
        """One ask for a batch."""
        self.edge(Op.BEGIN, SourceKind.DATA, loader)
        self.clock.tick(ms=ms)
        self.edge(op, SourceKind.DATA, loader, payload=Ending.EPOCH_END if op is Op.STOP else 0)

    def say(self, what: str) -> Callable[[], None]:
        return lambda: self.called.append(what)

    def watch(self, *stages: str) -> None:
        for stage in stages:
            self.hooks.add(stage, self.say(f"before {stage}"), self.say(f"after {stage}"))

    def written(self) -> int:
        return self.recorder.main.ring.written


def test_code_runs_before_and_after_a_stage() -> None:
    """And the stage's own time begins after the one and ends before the other."""
    bench, times = Bench(), []

    def slow() -> None:
        bench.clock.tick(ms=7)
        times.append(bench.written())

    bench.hooks.add("forward", slow, slow)
    bench.edge(Op.BEGIN, SourceKind.FORWARD)
    bench.clock.tick(ms=2)
    bench.edge(Op.END, SourceKind.FORWARD)

    piece = bench.recorder.main.ring.read(10)
    assert (piece.times[1] - piece.times[0]) == 2 * MS
    assert times == [0, 2]


def test_what_no_metric_counts_apart_is_no_run_of_its_own() -> None:
    """A model inside a model, recomputation in backward, an optimizer inside its scaler."""
    bench = Bench()
    bench.watch("forward", "backward", "optimizer")
    bench.run(SourceKind.FORWARD, SourceKind.FORWARD)
    bench.run(SourceKind.BACKWARD, SourceKind.FORWARD, SourceKind.BACKWARD)
    bench.run(SourceKind.SCALER, SourceKind.OPTIMIZER)

    assert bench.called == [
        "before forward", "after forward", "before backward", "after backward",
        "before optimizer", "after optimizer",
    ]  # fmt: skip


def test_a_stage_that_raises_has_its_after() -> None:
    """Also an optimizer's step, of which no hook of torch's says that it is over; the next ask does."""
    bench = Bench()
    bench.watch("optimizer", "data", "mine")
    bench.run(SourceKind.STAGE, name="mine", end=Op.FAIL)
    bench.edge(Op.BEGIN, SourceKind.OPTIMIZER)
    bench.fetch("train")
    bench.run(SourceKind.OPTIMIZER)

    assert bench.called == [
        "before mine", "after mine", "before optimizer", "after optimizer",
        "before data", "after data", "before optimizer", "after optimizer",
    ]  # fmt: skip


def test_a_closure_that_fetches_is_inside_its_optimizer() -> None:
    """Unless it has just failed: then so has the optimizer."""
    bench = Bench()
    bench.watch("optimizer")
    bench.edge(Op.BEGIN, SourceKind.OPTIMIZER, flags=Flag.CLOSURE)
    bench.fetch("train")
    bench.run(SourceKind.FORWARD)
    bench.fetch("train")
    bench.edge(Op.END, SourceKind.OPTIMIZER)
    assert bench.called == ["before optimizer", "after optimizer"]

    bench.edge(Op.BEGIN, SourceKind.OPTIMIZER, flags=Flag.CLOSURE)
    bench.run(SourceKind.FORWARD, end=Op.FAIL)
    bench.fetch("train")
    bench.run(SourceKind.OPTIMIZER)
    assert bench.called == 3 * ["before optimizer", "after optimizer"]


def test_making_an_iterator_is_no_fetch() -> None:
    """It gives no batch."""
    bench = Bench()
    bench.watch("data")
    bench.edge(Op.BEGIN, SourceKind.DATA, flags=Flag.START)
    bench.edge(Op.END, SourceKind.DATA, flags=Flag.START)

    assert bench.called == []


def test_what_is_called_may_use_stages_itself() -> None:
    """A forward inside code around forward must not call that code again."""
    bench = Bench()
    bench.hooks.add("forward", lambda: bench.run(SourceKind.FORWARD), bench.say("after"))
    bench.run(SourceKind.FORWARD)

    assert bench.called == ["after"]
    assert bench.written() == 4


def test_a_handle_takes_back_its_own_and_nothing_else() -> None:
    """With the last one gone nothing stands in the way of the edges."""
    bench = Bench()
    bench.watch("data")
    with bench.hooks.add("data", bench.say("mine"), None) as handle:
        bench.fetch("train")
    handle.remove()
    bench.fetch("train")

    assert bench.called == ["before data", "mine", "after data", "before data", "after data"]


def test_without_any_nothing_stands_in_the_way() -> None:
    """The ring's own function is called by the probes, before and after."""
    bench = Bench()
    ring = bench.recorder.main.ring
    bench.hooks.add("data", bench.say("x"), None).remove()

    assert ring._interceptors == [None, None]
    bench.fetch("train")
    assert bench.called == []
    assert bench.written() == 2


def test_a_handle_may_be_removed_from_inside_and_from_another_thread() -> None:
    """Once is often enough; and a user interface has a thread of its own."""
    bench = Bench()

    def one_time() -> None:
        bench.called.append("once")
        once.remove()

    once = bench.hooks.add("data", one_time, None)
    bench.fetch("train")
    bench.fetch("train")
    other = bench.hooks.add("data", bench.say("other"), None)
    in_threads(other.remove)
    bench.fetch("train")

    assert bench.called == ["once"]
    assert bench.recorder.main.ring._interceptors == [None, None]
    assert bench.written() == 6


def test_one_that_fails_is_said_once_and_off_after_three(caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on, and so do the others."""
    bench = Bench()

    def fails() -> None:
        bench.called.append("failed")
        raise OSError("no display")

    bench.hooks.add("data", fails, None)
    bench.hooks.add("data", bench.say("well"), None)
    with caplog.at_level(logging.WARNING, "otel_train"):
        for _ in range(5):
            bench.fetch("train")

    assert (bench.called.count("failed"), bench.called.count("well")) == (3, 5)
    assert bench.hooks.faults == 3
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_a_call_that_is_suspended_is_one_call() -> None:
    """A generator is resumed for every item, and another one of its stage may run in between."""
    bench = Bench()
    bench.watch("read")
    for op, token in [
        (Op.RESUME, 1), (Op.SUSPEND, 1), (Op.RESUME, 2), (Op.SUSPEND, 2), (Op.RESUME, 1), (Op.SUSPEND, 1),
        (Op.RESUME, 1), (Op.END, 1), (Op.RESUME, 2), (Op.FAIL, 2),
    ]:  # fmt: skip
        bench.edge(op, SourceKind.STAGE, "read", payload=token)

    assert bench.called == ["before read", "before read", "after read", "after read"]


def test_a_call_inside_one_that_is_suspended_ends_with_it() -> None:
    """A block around a ``yield`` is left open by it."""
    bench = Bench()
    bench.watch("inner")
    bench.edge(Op.RESUME, SourceKind.STAGE, "outer", payload=1)
    bench.edge(Op.BEGIN, SourceKind.STAGE, "inner")
    bench.edge(Op.SUSPEND, SourceKind.STAGE, "outer", payload=1)

    assert bench.called == ["before inner", "after inner"]


def test_a_call_that_was_suspended_before_is_not_taken_for_a_new_one() -> None:
    """A generator may register the callbacks of its own stage."""
    bench = Bench()
    bench.edge(Op.RESUME, SourceKind.STAGE, "read", payload=1)
    bench.watch("read")
    for op in (Op.SUSPEND, Op.RESUME, Op.END):
        bench.edge(op, SourceKind.STAGE, "read", payload=1)

    assert bench.called == []


def test_few_suspended_calls_are_kept() -> None:
    """A generator that another thread ends is not seen to end."""
    bench = Bench()
    bench.watch("read")
    for token in range(1, MOST_SUSPENDED + 3):
        bench.edge(Op.RESUME, SourceKind.STAGE, "read", payload=token)
        bench.edge(Op.SUSPEND, SourceKind.STAGE, "read", payload=token)

    (thread,) = bench.hooks._threads
    assert len(thread._suspended) == MOST_SUSPENDED


def test_the_faults_of_removed_callbacks_still_count() -> None:
    """A program may register callbacks for one step at a time."""
    bench = Bench()

    def fails() -> None:
        raise OSError

    for _ in range(5):
        with bench.hooks.add("data", fails, None):
            bench.fetch("train")

    assert bench.hooks.faults == 5


def test_ctrl_c_in_it_is_the_users() -> None:
    """A stop that does not stop is worse than a missing metric."""
    bench = Bench()

    def stop() -> None:
        raise KeyboardInterrupt

    bench.hooks.add("data", stop, None)
    with pytest.raises(KeyboardInterrupt):
        bench.fetch("train")


def test_after_the_session_and_in_a_forked_child_nothing_is_called() -> None:
    """A worker would run the program's code once more for every stage in the dataset."""
    bench = Bench()
    bench.watch("data")
    bench.recorder.silence()
    bench.fetch("train")

    assert bench.called == []
    assert bench.written() == 0


def test_a_capture_and_code_of_the_programs_own_may_stand_there_together() -> None:
    """The one comes and goes, the other stays."""
    bench = Bench()
    ring, seen = bench.recorder.main.ring, []

    def see(word: int, write: Callable[[int], None]) -> None:
        seen.append(Op(word & 15).name)
        write(word)
        if len(seen) == 2:
            ring.intercept(None)

    bench.watch("data")
    ring.intercept(see)
    for _ in range(2):
        bench.fetch("train")

    assert seen == ["BEGIN", "END"]
    assert bench.called == ["before data", "after data"] * 2
    assert bench.written() == 4


def test_nothing_to_call_is_refused() -> None:
    """Said where it is written, not when the stage comes."""
    with pytest.raises(otel_train.ConfigError, match="expected a callable"):
        Bench().hooks.add("forward", None, None)
    with pytest.raises(otel_train.ConfigError, match="expected a callable"):
        Bench().hooks.add("forward", "print", None)  # type: ignore[arg-type]  # on purpose


# --- the last batch -------------------------------------------------------------------------------


def test_the_last_batch_says_where_it_came_from() -> None:
    """To log the loss under its loader's name, say."""
    bench = Bench()
    assert (bench.last.loader, bench.last.fetch_ms) == (None, None)

    bench.fetch("code", 3)
    bench.run(SourceKind.FORWARD)
    assert (bench.last.loader, bench.last.fetch_ms) == ("code", 3.0)
    bench.fetch("prose", 5)
    bench.fetch("code", 9, Op.STOP)

    assert (bench.last.loader, bench.last.fetch_ms) == ("prose", 5.0)


def test_a_loader_that_reads_another_is_the_one_that_gave_the_batch() -> None:
    """The outer one's wait holds the inner one's."""
    bench = Bench()
    bench.edge(Op.BEGIN, SourceKind.DATA, "outer")
    bench.fetch("inner", 2)
    assert bench.last.loader == "inner"
    bench.clock.tick(ms=1)
    bench.edge(Op.END, SourceKind.DATA, "outer")

    assert (bench.last.loader, bench.last.fetch_ms) == ("outer", 3.0)


def test_it_is_found_however_much_was_written_since() -> None:
    """Also where the edges between two looks are many, or more than the ring holds."""
    bench = Bench()
    bench.fetch("code", 4)
    for _ in range(300):
        bench.run(SourceKind.FORWARD)
    assert (bench.last.loader, bench.last.fetch_ms) == ("code", 4.0)
    for _ in range(2000):
        bench.run(SourceKind.FORWARD)

    assert (bench.last.loader, bench.last.fetch_ms) == ("code", 4.0)


def test_a_batch_whose_ask_was_overwritten_has_no_time() -> None:
    """Not measured is absent, never zero."""
    bench = Bench(edges=1 << 4)
    bench.edge(Op.BEGIN, SourceKind.DATA, "code")
    for _ in range(20):
        bench.run(SourceKind.FORWARD)
    bench.edge(Op.END, SourceKind.DATA, "code")

    assert (bench.last.loader, bench.last.fetch_ms) == ("code", None)


def test_another_thread_has_its_own_last_batch() -> None:
    """What a reader in the background fetches is not what the loop got."""
    bench = Bench()
    said: list[tuple[str | None, float | None]] = []
    bench.fetch("code")

    def read() -> None:
        said.append((bench.last.loader, bench.last.fetch_ms))
        bench.fetch("background", 6)
        said.append((bench.last.loader, bench.last.fetch_ms))

    in_threads(read)

    assert said == [(None, None), ("background", 6.0)]
    assert bench.last.loader == "code"
