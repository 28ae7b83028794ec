"""What a script calls when there is no session, and when everything is switched off."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from otel_train.accounting.types import EVAL, TRAIN, StepSource
from otel_train.agent.coverage import (
    STEPLESS_S,
    UPDATES_WITHOUT_FORWARD,
    CoverageReporter,
    instrumentation_gaps,
)
from otel_train.agent.messages import RankState
from otel_train.aggregation.counters import JaxCompiles
from otel_train.api import DisabledSession
from otel_train.config import Config
from otel_train.datamodel import NS_PER_S
from otel_train.exit_hook import ExitHook
from otel_train.recording.events import WAIT, Instrumented, SourceKind
from otel_train.testing import FakeClock
from tests.support.waiting import until

# --- switched off ---------------------------------------------------------------------------------


def test_a_disabled_session_hands_back_what_it_was_given() -> None:
    """The loop goes over the user's own object."""
    rows = [1, 2]
    off = DisabledSession(Config(disabled=True), {"train": rows})
    off.add(loaders={"val": rows})
    with off as same:
        assert same is off

    assert off.loaders["train"] is rows
    assert set(off.loaders) == {"train", "val"}
    assert off.watch(rows, name="x") is rows
    assert (off.summary(), off.instrumentation_gaps()) == ({}, [])
    assert (off.last_loader_name, off.last_batch_fetch_ms) == (None, None)
    assert (off.config.disabled, off.closed, off.info.rank, off.info.world_size) == (True, True, 0, 1)
    assert DisabledSession(None, rows).config.disabled  # where ``instrument`` could not start
    off.end(off.begin("work"))
    off.report()
    off.on("forward", before=off.close).remove()
    off.cache("images", size=lambda: 1).remove()
    off.log({"loss": 1})
    off.event("x", {})
    off.reset_window()
    off.close()


# --- how it ends ----------------------------------------------------------------------------------


@pytest.fixture
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, "finished"),
        (SystemExit(), "finished"),
        (SystemExit(0), "finished"),
        (SystemExit(3), "failed"),
        (SystemExit("message"), "failed"),
        (ValueError(), "failed"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_the_state_of_a_run_is_read_off_its_end(error: BaseException | None, state: str) -> None:
    """``sys.exit(0)`` is no failure, Ctrl-C is no crash."""
    assert ExitHook(lambda _: None, MagicMock()).of(error) == state


@pytest.mark.parametrize(("error", "state"), [(None, "finished"), (ValueError("NaN"), "failed")])
def test_an_exception_that_was_being_handled_at_the_start_is_no_failure_of_the_run(
    error: Exception | None, state: str
) -> None:
    """``except OutOfMemoryError: train(batch_size=8)``: the second attempt closes its session inside the ``except``."""
    first = RuntimeError("out of memory")

    def second_attempt() -> None:
        hook = ExitHook(lambda _: None, MagicMock())
        try:
            if error is not None:
                raise error
        finally:
            hook.set_state("")
            assert (hook.state, hook.cause) == (state, f"ValueError: {error}" if error else "")

    with suppress(ValueError):
        try:
            raise first
        except RuntimeError:
            second_attempt()


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (1, "failed")])
@pytest.mark.parametrize("module", ["popen_fork", "forkserver"])
def test_a_forked_child_ends_as_multiprocessing_ends_it(
    module: str, code: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 runs ``atexit`` there, when the exception has been printed, in the function that has the exit code."""
    monkeypatch.delattr(sys, "last_value", raising=False)
    names: dict[str, Any] = {"__name__": f"multiprocessing.{module}"}
    exec("def launch(code, run_exit_functions):\n    run_exit_functions()", names)
    closed: list[str] = []
    names["launch"](code, ExitHook(closed.append, MagicMock())._at_exit)

    assert closed == [state]


def test_a_handler_of_the_users_own_still_gets_its_signal(sigterm: None) -> None:
    """Schedulers send SIGTERM, and scripts save a checkpoint then: that must go on."""
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    closed: list[str] = []
    hook = ExitHook(closed.append, MagicMock())
    hook.install()
    signal.raise_signal(signal.SIGTERM)

    assert got == [signal.SIGTERM]
    assert closed == []  # training goes on until the user's handler ends it
    assert hook.state == "terminated"
    hook.remove()


def test_a_signal_during_the_start_in_another_thread_raises_nothing_and_closes_the_session_afterwards(
    sigterm: None,
) -> None:
    """Python calls its handlers on the main thread, where the program did not call ``instrument()``."""
    got: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: got.append("handled"))
    hook = ExitHook(lambda _: None, MagicMock())
    hook.install()
    hook.close_first(True)
    begun, goes_on = threading.Event(), threading.Event()

    def start() -> None:
        with hook.starting():
            begun.set()
            goes_on.wait(10)

    thread = threading.Thread(target=start)
    thread.start()
    begun.wait(10)
    signal.raise_signal(signal.SIGTERM)
    assert got == []
    goes_on.set()
    thread.join()
    until(lambda: got)
    assert got == ["handled"]
    hook.remove()


def test_an_ignored_signal_stays_ignored(sigterm: None) -> None:
    """Who ignores SIGTERM does not want to be closed by it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    closed: list[str] = []
    hook = ExitHook(closed.append, MagicMock())
    hook.install()
    signal.raise_signal(signal.SIGTERM)
    hook.remove()

    assert closed == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


# --- what could not be seen -----------------------------------------------------------------------


class Counts(list[int]):
    def count(self, n: int) -> int:  # as the real one: by number of the row
        return self[n]


NOT_COMPILED = JaxCompiles()


def test_a_kind_of_device_whose_time_is_not_taken_is_named_once() -> None:
    """Its rows are absent, and a reader must not take that for a device that did nothing."""
    [thing] = instrumentation_gaps(an_account(updates=0, stages=()), RankState(untimed={"mps": "no events"}))

    assert (thing["what"], thing["name"], thing["cause"]) == ("device", "mps", "")
    assert thing["reason"].startswith("no events. Host time")


def an_account(
    *, updates: int = UPDATES_WITHOUT_FORWARD, sources: Sequence[Instrumented] = (), loader_threads: Sequence[str] = (),
    stages: tuple[str, ...] = ("backward",), source: StepSource = StepSource.UPDATE, jax: JaxCompiles = NOT_COMPILED,
    phase: str = "train", steps: int = 2,
) -> Any:  # fmt: skip
    counts = Counts(1 for _ in stages)
    keys = [SimpleNamespace(stage=s, model="", phase=phase) for s in stages]
    loaders = SimpleNamespace(names=[each.name for each in sources])
    names = SimpleNamespace(
        keys=keys, sources=sources, models=SimpleNamespace(published=str), loaders=loaders
    )
    batches = {(n, TRAIN): 1 for n, each in enumerate(sources) if each.kind is SourceKind.DATA}
    totals: Any = SimpleNamespace(
        names=names, stages=counts, updates=updates, batches=batches, steps_by_phase=lambda: {phase: steps}
    )
    compiles = SimpleNamespace(jax=jax)
    return SimpleNamespace(
        totals=totals, loader_threads=loader_threads, step_source=source, compiles=compiles, started_ns=0
    )


def reporter(
    run: Any, models: Sequence[str] = (), **more: Any
) -> tuple[CoverageReporter, list[tuple[str, str]]]:
    """One that logs what is missing of these models, and what it has logged."""
    lines: list[tuple[str, str]] = []
    state = lambda: RankState(models=tuple(models))  # noqa: E731  # a fake of one line
    return CoverageReporter(run, state, log=lambda *line: lines.append(line[1:3]), **more), lines


DATA = [Instrumented(SourceKind.DATA, "code")]


@pytest.mark.parametrize(("seen", "models", "missing"), [
    # The hook sits on an object that the loop does not use: silence would read as "forward costs nothing".
    pytest.param({"sources": DATA}, ("Net",), [("model", "Net")], id="a model that is never called is said"),
    pytest.param({"updates": 0, "stages": ()}, ("Net",), [], id="before there is training nothing is missing"),
    # No model, no loader: their time is in ``other``, and the summary says so.
    pytest.param({"loader_threads": ["prefetch"]}, (), [("stage", "forward"), ("loop", "prefetch"), ("stage", "data")],
                 id="what was not given is said"),
    # A step that is compiled as a whole shows no backward: that must not read as a backward of no cost.
    pytest.param({"sources": DATA, "stages": ("forward",)}, (), [("stage", "backward")],
                 id="updates without a backward are said"),
    # An optimizer that is not torch's steps unseen: steps are counted by something else.
    pytest.param({"updates": 0, "sources": DATA, "stages": ("forward", "backward"), "source": StepSource.BACKWARD}, (),
                 [("stage", "optimizer")], id="backwards without an update are said"),
    pytest.param({"updates": 0, "sources": DATA, "stages": ("forward", "backward"), "source": StepSource.BACKWARD, "steps": 1},
                 (), [], id="before a second step a backward without an update says nothing"),
    # A compiled step has its forward and its backward inside, as its user knows.
    pytest.param({"sources": [*DATA, Instrumented(SourceKind.WHOLE, "make_step")], "stages": ("make_step",)}, (), [],
                 id="what a whole step hides is not missing"),
    # Nothing counts steps then: no rate, no finding.
    pytest.param({"updates": 0, "sources": DATA, "stages": ("loss", WAIT), "source": StepSource.UNDECIDED}, (),
                 [("stage", "make_step")], id="functions of JAX without an update are said"),
    # An attack on a model needs gradients of its input, and neither updates nor a loader of training.
    pytest.param({"updates": 0, "source": StepSource.BACKWARD, "phase": "test"}, (), [],
                 id="backwards of an evaluation are no training of which something is missing"),
])  # fmt: skip
def test_what_could_not_be_seen_is_said(
    seen: dict[str, Any], models: tuple[str, ...], missing: list[tuple[str, str]]
) -> None:
    """Else its absence would read as a cost of nothing."""
    gaps = instrumentation_gaps(an_account(**seen), RankState(models=models))

    assert [(gap["what"], gap["name"]) for gap in gaps] == missing


def test_a_model_that_is_evaluated_and_of_which_a_copy_trains_is_said() -> None:
    """Clients train copies of a global model, and the server evaluates that: forwards of training are in no row."""
    run = an_account(sources=DATA, stages=("forward", "backward"))
    run.totals.names.keys[0].phase = "test"

    [thing] = instrumentation_gaps(run, RankState())

    assert (thing["what"], thing["name"], thing["cause"]) == ("stage", "forward", "never_seen")
    assert thing["reason"].startswith("forwards were seen outside training only")


def test_a_loader_that_gives_no_batch_of_training_is_said() -> None:
    """The loop iterates another object, or its pass began earlier: no wait for data would read as none."""
    run = an_account(sources=DATA, stages=("forward", "backward"))
    run.totals.batches = {(0, EVAL): 5}

    [thing] = instrumentation_gaps(run, RankState())

    assert (thing["what"], thing["name"], thing["cause"]) == ("stage", "data", "unhooked")
    assert thing["reason"].startswith("no batch of training came from an instrumented loader")


def test_a_thing_is_logged_once() -> None:
    """A line that comes back every two seconds is noise; none at all is silence."""
    run, models = an_account(updates=0, sources=DATA), ["Net"]
    missing, lines = reporter(run, models)
    missing.log_gaps()
    assert lines == []  # it may yet come
    run.totals.updates = UPDATES_WITHOUT_FORWARD
    missing.log_gaps()
    models.append("Teacher")
    missing.log_gaps(final=True)

    assert lines == [("model", "Net"), ("model", "Teacher")]


def test_a_model_that_may_be_called_later_is_logged_at_the_end() -> None:
    """An average of the weights is evaluated after the first epoch; the second of two trainings begins after the first."""
    run = an_account(sources=DATA, stages=("forward", "backward"))
    run.totals.names.keys[0].model = "Net"
    missing, lines = reporter(run, ("Net", "Average"))
    missing.log_gaps()
    assert lines == []
    missing.log_gaps(final=True)

    assert lines == [("model", "Average")]


COMPILED = JaxCompiles(functions=12, total_ns=3_400_000_000, longest="train_step", since_ns=NS_PER_S)
NO_STEP: dict[str, Any] = {"updates": 0, "stages": (), "source": StepSource.UNDECIDED}


@pytest.mark.parametrize("source", [StepSource.UNDECIDED, StepSource.BATCH])
def test_a_program_of_jax_without_a_step_has_a_gap_that_names_what_to_add(source: StepSource) -> None:
    """Its run summary has nothing but zeros: the reader must learn which two lines are missing."""
    run = an_account(**{**NO_STEP, "source": source}, sources=[], jax=COMPILED)

    [thing] = instrumentation_gaps(run, RankState(), now_ns=61 * NS_PER_S)

    assert (thing["what"], thing["name"]) == ("stage", "make_step")
    for part in (
        "12 functions in 3.4 s", "`train_step`", "60.0 s", "step = otel_train.jax.make_step(step)",
        "otel_train.watch(loader)", "docs/howto/jax.md",
    ):  # fmt: skip
        assert part in thing["reason"], part


def test_a_loader_that_was_seen_is_not_asked_for() -> None:
    """What to add is exactly what is missing."""
    run = an_account(**NO_STEP, sources=DATA, jax=COMPILED)

    [thing] = instrumentation_gaps(run, RankState())

    assert "make_step(step)" in thing["reason"]
    assert "watch" not in thing["reason"]


@pytest.mark.parametrize(
    "seen",
    [
        {"sources": [Instrumented(SourceKind.WHOLE, "make_step")]},
        {"sources": [Instrumented(SourceKind.OPTIMIZER, "optimizer")]},
        {"sources": DATA, "source": StepSource.MANUAL},
        {"sources": DATA, "updates": 3},
        {"sources": DATA, "stages": ("forward",)},
        {"sources": DATA, "jax": JaxCompiles()},
    ],
)
def test_a_program_whose_step_is_known_gets_no_advice_on_jax(seen: dict[str, Any]) -> None:
    """A step that has begun, or a program of torch that computes a little with JAX, lacks nothing."""
    gaps = instrumentation_gaps(an_account(**{**NO_STEP, "jax": COMPILED, **seen}), RankState())

    assert ("stage", "make_step") not in [(thing["what"], thing["name"]) for thing in gaps]


def test_jax_that_compiled_before_the_session_is_noticed() -> None:
    """A warm-up call before `instrument`: nothing is compiled later, and without torch nothing else can train."""
    run = an_account(**NO_STEP, sources=DATA)

    assert instrumentation_gaps(run, RankState(modules=frozenset({"jax"})))[0]["name"] == "make_step"
    assert instrumentation_gaps(run, RankState(modules=frozenset({"jax", "torch"}))) == []


def test_a_long_run_of_jax_gets_advice_on_its_missing_step_before_it_ends() -> None:
    """Hours of training without a metric are not worth waiting for; in the first minute a step may yet come."""
    clock = FakeClock(0)
    missing, lines = reporter(an_account(**NO_STEP, sources=DATA, jax=COMPILED), clock=clock)
    missing.log_gaps()
    assert lines == []
    clock.tick(ms=1000 * (STEPLESS_S + 1))
    for final in (False, True):
        missing.log_gaps(final=final)

    assert lines == [("stage", "make_step")]
