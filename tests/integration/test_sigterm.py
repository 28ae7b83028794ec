"""SIGTERM ends a program as it does without a session; what only the program can finish is finished first."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from otel_train.agent.process import ends_its_container
from otel_train.recording.ring_buffer import EXTENSION
from tests.support.programs import command_of, ended_summary, environ, line
from tests.support.warm import WarmProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Begin = Callable[..., subprocess.Popen[str]]

ROOT = Path(__file__).parents[2]
AT_ONCE_S = 0.7
"""A bare process of this size takes 0.1 s to end, and more on a busy machine. What waits for Python takes 1 s."""

PRELUDE = """
    import ctypes, os, signal, sys, threading, time
    import torch, otel_train
    torch.set_num_threads(1)
    RUNS = sys.argv[1]
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=4)

    def start(**settings):
        settings = {"console": False, "agent": "process", **settings}
        return otel_train.instrument(
            model, {"train": data}, run_dir=RUNS, prometheus=False, tuning={"poll_interval_s": 0.05}, **settings
        )

    def train():
        for batch in data:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    def say(*words):
        print(*words, flush=True)

    def until(true):
        for _ in range(2000):
            if true():
                return
            time.sleep(0.01)
        say("not in time")

    def handler():
        now = signal.getsignal(signal.SIGTERM)
        return {signal.SIG_DFL: "default", signal.SIG_IGN: "ignored"}.get(now, getattr(now, "__name__", now))

    def hang():
        lib, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        say("hangs")
        lib.pthread_mutex_lock(lock), lib.pthread_mutex_lock(lock)  # with the interpreter lock; no signal ends the call
"""


beside = pytest.mark.skipif(
    ends_its_container(), reason="here the agent may end with the program, which waits for it"
)
in_c = pytest.mark.skipif(
    EXTENSION is None, reason="without the extension in C the program ends once Python runs again"
)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Begins a program; ends what is left of it."""
    begun: list[subprocess.Popen[str]] = []

    def start(text: str, *words: str) -> subprocess.Popen[str]:
        command = [*command_of(tmp_path, PRELUDE, text), *words]
        begun.append(
            WarmProgram(command, env=environ(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def ended_by_sigterm(process: subprocess.Popen[str]) -> str:
    """Sends SIGTERM, which ends the program; its standard error."""
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, errors
    return errors


def terminated_in_s(process: subprocess.Popen[str]) -> float:
    """Sends SIGTERM; seconds until the process is gone."""
    began_s = time.monotonic()
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM
    return time.monotonic() - began_s


@in_c
@pytest.mark.parametrize("how", ["hang()", "say('sleeps'); time.sleep(60)"])
def test_a_rank_ends_at_once(begin: Begin, tmp_path: Path, how: str) -> None:
    """However its main thread hangs: the agent has what is to be delivered, and sees the end from outside."""
    process = begin(f"start(); train(); say(handler()); {how}")
    assert line(process) == "default"
    line(process)

    # A program that ends its container waits for its agent, which may end with it.
    assert terminated_in_s(process) < (30 if ends_its_container() else AT_ONCE_S)
    assert ended_summary(tmp_path, "terminated")["steps"] == {"train": 10}


@in_c
def test_a_rank_that_hangs_in_c_and_has_its_agent_in_a_thread_ends_after_a_second(begin: Begin) -> None:
    """Python would have to run to finish it."""
    process = begin("start(agent='thread'); say(handler()); hang()")
    assert line(process) == "_terminated"
    line(process)

    assert terminated_in_s(process) < 10


@pytest.mark.parametrize("agent", ["process", "thread"])
def test_a_session_gives_the_handler_back(begin: Begin, agent: str) -> None:
    """The next SIGTERM of the program is not otel_train's."""
    process = begin("start(agent=sys.argv[2]).close(); say(handler()); time.sleep(60)", agent)

    assert line(process) == "default"
    assert terminated_in_s(process) < 10


@in_c
@pytest.mark.parametrize("sessions", ["start()", "start().close()", "start(console_metrics='throughput')"])
def test_a_handler_that_a_library_set_during_an_earlier_session_is_called_once(
    begin: Begin, sessions: str
) -> None:
    """It calls otel_train's as its previous one, which calls it again as its own: the two would overflow the stack."""
    process = begin(f"""
        import faulthandler
        first = start()
        faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
        first.close()
        {sessions}
        say("ready")
        time.sleep(60)
        """)
    assert line(process) == "ready"

    assert ended_by_sigterm(process).count("most recent call first") == 1


@beside
def test_what_is_open_in_the_program_alone_is_closed_first(begin: Begin, tmp_path: Path) -> None:
    """A tracker lives there: rows that wait for it would be lost. The service thread opens it, and may set no handler itself."""
    process = begin("""
        session = start(console_metrics="throughput")
        until(lambda: handler() != "default")
        train()
        say(handler())
        time.sleep(60)
    """)
    assert line(process) == "_terminated"
    assert "[Throughput] Epoch 1:" in ended_by_sigterm(process)
    assert ended_summary(tmp_path, "terminated")["steps"] == {"train": 10}


@beside
@in_c
def test_a_tracker_is_closed_before_the_main_thread_has_set_the_handler(begin: Begin, tmp_path: Path) -> None:
    """It waits for a thread that trains, runs no Python meanwhile, and wakes when a signal comes."""
    process = begin("""
        session = start(console_metrics="throughput")

        def work():
            until(lambda: session._service.components.trackers is not None)
            train()
            say("trained")
            time.sleep(60)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """)
    line(process)
    time.sleep(0.5)
    assert "[Throughput] Epoch 1:" in ended_by_sigterm(process)
    assert ended_summary(tmp_path, "terminated")["steps"] == {"train": 10}


@beside
def test_providers_of_the_program_are_flushed_first(begin: Begin, tmp_path: Path) -> None:
    """What their readers have not collected is in the program alone."""
    process = begin("""
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        start(meter_provider=MeterProvider([InMemoryMetricReader()]))
        say(handler())
        time.sleep(60)
    """)
    assert line(process) == "_terminated"
    ended_by_sigterm(process)

    ended_summary(tmp_path, "terminated")


@beside
def test_a_capture_is_closed_first_and_no_longer_once_it_is_written(begin: Begin, tmp_path: Path) -> None:
    """The trace of a profiler lies in the program until then."""
    process = begin("""
        session = start(profiler="on_demand", profiler_schedule="active=2,warmup=1")
        train()
        otel_train.summary()
        say(handler())
        assert session.capture() == ""
        seen = []

        def captured():
            train()
            seen.append(handler())
            return (session.run_directory / "captures").exists() and handler() == "default"

        until(captured)
        say(sorted(set(seen)))
        time.sleep(60)
    """)

    assert [line(process), line(process)] == ["default", "['_terminated', 'default']"]
    terminated_in_s(process)
    ended_summary(tmp_path, "terminated")


@in_c
@pytest.mark.parametrize("agent", ["process", "thread"])
def test_a_forked_child_ends_at_once_and_leaves_the_session_alone(
    begin: Begin, tmp_path: Path, agent: str
) -> None:
    """It has the handler of its parent, and no session."""
    process = begin(
        """
        start(agent=sys.argv[2]); train()
        child = os.fork()
        if child == 0:
            say(handler())
            hang()
        time.sleep(2.0)
        began = time.monotonic()
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        say(os.waitstatus_to_exitcode(status), time.monotonic() - began < 0.7)
        train()
        """,
        agent,
    )
    said, errors = process.communicate(timeout=60)

    assert (process.returncode, said.split()) == (0, ["default", "hangs", "-15", "True"]), errors
    assert ended_summary(tmp_path, "finished")["steps"] == {"train": 20}


@pytest.mark.parametrize("agent", ["process", "thread"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_instrument_ends_the_program_and_its_run(
    begin: Begin, tmp_path: Path, agent: str, number: signal.Signals
) -> None:
    """Nothing is left that says the run goes on, also where the program takes its time to end."""
    bare = begin(
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), int(sys.argv[2]))
        """,
        str(int(number)),
    ).wait(60)  # torch imports tabulate at exit where it is installed; then the status of SIGINT is 1
    process = begin(
        """
        import atexit
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if sys.argv[2] == "process":
            atexit.register(time.sleep, 2.5)
        from otel_train.agent.client import AgentClient
        opening = AgentClient._await_opening

        def await_opening(self):
            opening(self)
            self._is_opened.wait()
            os.kill(os.getpid(), int(sys.argv[3]))
            time.sleep(5)

        AgentClient._await_opening = await_opening
        start(agent=sys.argv[2])
        say("goes on")
        """,
        agent,
        str(int(number)),
    )
    said, _ = process.communicate(timeout=60)

    assert (process.returncode, said) == (bare, "")
    ended_summary(tmp_path, "terminated" if number == signal.SIGTERM else "interrupted")


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_handler_of_the_program_is_called_and_ends_it_as_it_wants(
    begin: Begin, tmp_path: Path, where: str
) -> None:
    """It saves a checkpoint, and leaves with a status of its own."""
    process = begin(
        """
        def save(number, frame):
            say("saves", number)
            sys.exit(42)

        if sys.argv[2] == "before":
            signal.signal(signal.SIGTERM, save)
        start(); train()
        if sys.argv[2] == "after":
            signal.signal(signal.SIGTERM, save)
        say("up")
        time.sleep(60)
        """,
        where,
    )
    line(process)
    process.terminate()
    said, errors = process.communicate(timeout=60)

    assert (process.returncode, said) == (42, "saves 15\n"), errors
    assert ended_summary(tmp_path, "terminated" if where == "before" else "failed")["steps"] == {"train": 10}


@pytest.mark.parametrize("agent", ["process", "thread"])
def test_a_program_that_takes_its_handler_away_again_ends_as_one_that_never_had_any(
    begin: Begin, tmp_path: Path, agent: str
) -> None:
    """A library guards one call with a handler of its own, and sets the default action again: the run's end must be known."""
    process = begin(
        """
        session = start(agent=sys.argv[2]); train(); session.summary()
        signal.signal(signal.SIGTERM, lambda *_: None)
        session.summary()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.argv[2] == "thread":
            until(lambda: (train(), handler() == "_terminated")[1])
        else:
            until(lambda: (train(), ctypes.CDLL(None).sigaction(15, None, now) or now.raw[:8] != bytes(8))[1])
        say("up")
        time.sleep(60)
        """.replace("session =", "now = ctypes.create_string_buffer(256); session ="),
        agent,
    )
    assert line(process) == "up"
    process.terminate()
    said, errors = process.communicate(timeout=60)

    assert (process.returncode, said) == (-signal.SIGTERM, ""), errors
    ended_summary(tmp_path, "terminated")


@in_c
@pytest.mark.parametrize(("beginning", "said"), [
    # ``faulthandler`` prints where the program is, and ends it as if it were not there.
    pytest.param("import faulthandler; faulthandler.register(signal.SIGTERM, chain=True); start(); train()",
                 "most recent call first", id="a handler that a library has set in C goes on with its work"),
    # Only the main thread can set a handler of Python; none is needed.
    pytest.param("thread = threading.Thread(target=lambda: (start(), train())); thread.start(); thread.join()", "",
                 id="a session of another thread ends as one of the main thread"),
])  # fmt: skip
def test_a_program_whose_handler_is_not_ours_ends_as_terminated(
    begin: Begin, tmp_path: Path, beginning: str, said: str
) -> None:
    """The agent sees the end from outside."""
    process = begin(f"{beginning}; otel_train.summary(); say('up'); time.sleep(60)")
    line(process)
    assert said in ended_by_sigterm(process)
    assert ended_summary(tmp_path, "terminated")["steps"] == {"train": 10}
