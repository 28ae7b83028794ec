"""What a session does where processes and threads begin, end and multiply."""

from __future__ import annotations

import json
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from otel_train.catalog import RUN_STATES
from tests.support.json_lines import last_points
from tests.support.programs import command_of, ended_summary, environ
from tests.support.waiting import until
from tests.support.warm import WarmProgram, ended
from tests.support.zero_code import launched

Run = Callable[..., subprocess.CompletedProcess[str]]

PRELUDE = """
    import os, sys, threading, time
    import torch, otel_train
    from torch.utils.data import DataLoader, Dataset, TensorDataset
    torch.set_num_threads(1)
    RUNS = sys.argv[1]
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)

    def start(model=None, loaders=None, **settings):
        return otel_train.instrument(
            model, loaders, run_dir=RUNS, prometheus=False, console=False, tuning={"poll_interval_s": 0.02}, **settings
        )

    def train(data=data):
        for (batch,) in data:
            model(batch).sum().backward()
            optimizer.step()
"""


GREENLETS = """
    import _thread, threading
    number_of = _thread.get_ident
    _thread.get_ident = lambda: number_of() + 1
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program to its end: in an interpreter that is new, where it does not begin like most."""

    def to_its_end(text: str, *arguments: str, prelude: str = PRELUDE) -> subprocess.CompletedProcess[str]:
        command = [*command_of(tmp_path, prelude, text), *arguments]
        return (ended if prelude == PRELUDE else launched)(command, environ(), tmp_path)

    return to_its_end


@pytest.fixture(params=["process", "thread"])
def each_agent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of the program is a process, then a thread."""
    monkeypatch.setenv("OTEL_TRAIN_AGENT", request.param)


def runs(tmp_path: Path) -> list[Path]:
    """Run directories there are."""
    return [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]


def exported_states(tmp_path: Path) -> dict[str, int]:
    """``train.run.status`` by state, as exported last by the only run."""
    (folder,) = runs(tmp_path)
    points = last_points(folder / "rank0")["train.run.status"]
    return {point["labels"]["train.run.state"]: int(point["value"]) for point in points}


def test_a_program_of_these_tests_begins_and_ends_as_a_new_interpreter(tmp_path: Path) -> None:
    """It is a fork of one that has imported torch."""
    text = """
        import atexit, os, signal, sys, threading
        atexit.register(print, "over")
        print(sys.argv, sys.orig_argv, sys.path[:2], __name__, __file__, __spec__, os.getcwd(), os.environ["SAID"])
        print(sorted(os.listdir("/proc/self/fd")), os.getppid(), os.getsid(0), threading.active_count())
        print([(number, signal.getsignal(number)) for number in sorted(signal.valid_signals())])
        raise ValueError
    """
    command, variables = command_of(tmp_path, text), environ(SAID="x")
    new = launched(command, variables, tmp_path)
    warm = ended(command, variables, tmp_path)

    assert (warm.stdout, warm.returncode) == (new.stdout, new.returncode)
    assert warm.stderr.splitlines()[-1] == new.stderr.splitlines()[-1] == "ValueError"


def test_threads_that_instrument_at_once_share_one_session(run: Run, tmp_path: Path) -> None:
    """A service that trains in several threads: three sessions would each patch torch, and undo each other."""
    done = run("""
        sessions, together = [], threading.Barrier(8)

        def go():
            together.wait()
            sessions.append(start(model))

        threads = [threading.Thread(target=go) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        train()
        sessions[0].close()
        print(len(set(map(id, sessions))), sessions[0].summary()["steps"]["train"])
        """)

    assert (done.returncode, done.stdout.split()) == (0, ["1", "10"]), done.stderr
    assert len(runs(tmp_path)) == 1


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_imports_the_script_has_no_session(run: Run, method: str, tmp_path: Path) -> None:
    """``multiprocessing`` runs the module again in every such child, and with it ``instrument()``."""
    done = run(f"""
        rows = TensorDataset(torch.randn(40, 4))
        data = DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context={method!r})
        session = start(model, {{"train": data}})
        if __name__ == "__main__":
            train(data)
            session.close()
            print(session.summary()["steps"]["train"])
        """)

    assert (done.returncode, done.stdout.split()) == (0, ["10"]), done.stderr
    assert len(runs(tmp_path)) == 1


def test_a_child_that_trains_by_itself_has_a_session(run: Run, tmp_path: Path) -> None:
    """``torch.multiprocessing.spawn``: what the child calls is no import of the script."""
    done = run("""
        def work(number):
            session = start(model)
            train()
            session.close()

        if __name__ == "__main__":
            torch.multiprocessing.spawn(work, nprocs=2)
        """)

    assert done.returncode == 0, done.stderr
    summaries = [json.loads((one / "rank0/summary.json").read_text()) for one in runs(tmp_path)]
    assert [summary["steps"]["train"] for summary in summaries] == [10, 10]


@pytest.mark.parametrize(
    ("module", "agent"), [("torch._utils", "process"), ("torch.nn", "thread"), ("torch.optim", "process")]
)
def test_instrument_in_the_middle_of_the_import_of_torch_waits_for_the_next_call(
    run: Run, module: str, agent: str
) -> None:
    """Something that torch imports may call it: torch is in ``sys.modules`` then, and lacks most of its names."""
    done = run(
        """
        import importlib.util, sys
        import otel_train

        def start():
            return otel_train.instrument(run_dir=sys.argv[1], prometheus=False, console=False, agent=sys.argv[3])

        class Finder:
            def find_spec(self, name, path, target=None):
                if name == sys.argv[2]:
                    sys.meta_path.remove(self)
                    spec = importlib.util.find_spec(name)
                    execute = spec.loader.exec_module

                    def exec_module(module):
                        sessions.append(start())
                        with otel_train.stage("load"):
                            execute(module)

                    spec.loader.exec_module = exec_module
                    return spec

        sessions = []
        sys.meta_path.insert(0, Finder())
        import torch

        def train():
            for batch in torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=4):
                model(batch).sum().backward()
                optimizer.step()

        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train()
        sessions.append(start())
        train()
        sessions[0].close()
        print(sessions[0] is sessions[1], sessions[0].summary()["steps"]["train"])
        """,
        module,
        agent,
        prelude="",
    )

    assert (done.returncode, done.stdout) == (0, "True 10\n"), done.stderr
    assert "could not start" not in done.stderr


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_program_that_has_no_sys_exit_closes_its_session(run: Run, when: str) -> None:
    """A sandbox removes it; ours stands in its place, and nothing may be missing when it is put back."""
    done = run(f"""
        if {when!r} == "before":
            del sys.exit
        session = start(model)
        if {when!r} == "after":
            del sys.exit
        session.close()
        print(session.summary()["state"], hasattr(sys, "exit"))
        """)

    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["finished", "False"], "")


@pytest.mark.usefixtures("each_agent")
def test_what_a_signal_handler_raises_in_instrument_reaches_the_program(run: Run) -> None:
    """A watchdog that ends what takes too long. The next call starts from the beginning."""
    done = run("""
        import signal

        class Finder:
            def find_spec(self, name, path, target=None):
                if name == "otel_train.agent.reports":
                    sys.meta_path.remove(self)
                    signal.raise_signal(signal.SIGALRM)

        def late(number, frame):
            raise TimeoutError("too late")

        signal.signal(signal.SIGALRM, late)
        sys.meta_path.insert(0, Finder())
        try:
            start(model)
        except TimeoutError as error:
            print(error)
        session = start(model)
        train()
        session.close()
        print(session.summary()["steps"]["train"])
        """)

    assert (done.returncode, done.stdout) == (0, "too late\n10\n"), done.stderr


@pytest.mark.usefixtures("each_agent")
def test_ctrl_c_while_a_session_closes_ends_its_waits_and_leaves_nothing_of_it(
    run: Run, tmp_path: Path
) -> None:
    """In a notebook the process goes on: hooks would stay, and the run would not end before it."""
    done = run("""
        import signal
        session = start(model)
        train()
        session._service._await_agent = lambda _: signal.raise_signal(signal.SIGINT)
        try:
            session.close()
        except KeyboardInterrupt:
            print("interrupted", signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL)
        session = start(model)
        train()
        session.close()
        print(session.summary()["steps"]["train"])
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                thread.join(10)
        """)

    assert (done.returncode, done.stdout) == (0, "interrupted True\n10\n"), done.stderr
    summaries = [json.loads((path / "rank0" / "summary.json").read_text()) for path in runs(tmp_path)]
    assert [(each["state"], each["steps"]) for each in summaries] == [("finished", {"train": 10})] * 2


@pytest.mark.usefixtures("each_agent")
def test_a_program_whose_threads_have_numbers_of_another_library_is_counted(run: Run) -> None:
    """Gevent and eventlet replace what tells threads apart: their greenlets are threads of their own."""
    done = run(
        """
        session = start(model)
        train()
        session.close()
        print(session.summary()["steps"]["train"])
        """,
        prelude=GREENLETS + PRELUDE,
    )

    assert (done.returncode, done.stdout) == (0, "10\n"), done.stderr


def test_torch_that_is_imported_after_instrument_is_said(run: Run) -> None:
    """Else a run without a single step ends without a word."""
    text = """
        import sys
        import otel_train
        session = otel_train.instrument(run_dir=sys.argv[1], prometheus=False, console=False)
        import torch
        for batch in torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4):
            batch.requires_grad_().sum().backward()
        if len(sys.argv) > 2:
            otel_train.instrument()
            torch.ones(1, requires_grad=True).sum().backward()
    """
    for more, times in ([], 1), (["again"], 0):
        done = run(text, *more, prelude="")

        assert done.returncode == 0, done.stderr
        assert done.stderr.count("torch was imported after instrument() was called") == times, done.stderr


def test_a_module_that_only_has_the_name_of_torch_stops_no_program(run: Run) -> None:
    """A stub of tests or of a documentation build: what fails is said, and everything is as without the call."""
    text = """
        import signal, sys, threading, types
        import otel_train
        sys.modules["torch"] = types.ModuleType("torch")
        before = sys.exit, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR2)
        session = otel_train.instrument(run_dir=sys.argv[1], prometheus=False, console=False, agent=sys.argv[2])
        after = sys.exit, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR2)
        print(session.run_directory, before == after, threading.active_count())
        session.close()
    """
    for agent in ("process", "thread"):
        done = run(text, agent, prelude="")

        assert (done.returncode, done.stdout) == (0, "None True 1\n"), done.stderr
        assert "could not start: " in done.stderr


def test_an_agent_in_a_thread_that_cannot_be_imported_is_said(run: Run) -> None:
    """A broken package of an exporter: training goes on bare, and no thread prints a traceback."""
    done = run("""
        sys.modules["otel_train.exporters.manager"] = None
        session = start(model, agent="thread")
        train()
        session.close()
        print(threading.active_count())
        """)

    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "could not start: ModuleNotFoundError: import of otel_train.exporters.manager" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_agent_that_an_error_ends_leaves_no_thread_beside_the_next_one(run: Run) -> None:
    """Two export loops would count each step twice, and ``/metrics`` of the first would stand still."""
    done = run("""
        from otel_train.agent.rank_connection import RankConnection

        take, failures = RankConnection._take, [RuntimeError("a fault of the agent")]

        def fail_once(self, message):
            if self.service.run.step_number > 0 and failures:
                raise failures.pop()
            take(self, message)

        def of_agent():
            return sorted(each.name for each in threading.enumerate() if each.name.startswith("otel-train-export"))

        RankConnection._take = fail_once
        session = start(model, agent="thread")
        until_s = time.monotonic() + 20
        while failures and time.monotonic() < until_s:
            train()
            session.summary()
        time.sleep(2)
        print(len(failures), of_agent())
        session.close()
        print([each.name for each in threading.enumerate()])
        """)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 ['otel-train-export']", "['MainThread']"]
    assert "an error ended the work for rank 0" in done.stderr


def test_a_forked_child_that_begins_a_session_of_its_own_is_measured_as_its_parent(run: Run) -> None:
    """A pool of sweeps, a daemon that trains: what the child has inherited of its parent's session must not stand in its way."""
    done = run("""
        import warnings

        def go():
            session = start(model, {"train": data})
            train(data)
            session.close()
            summary = session.summary()
            waits = sum(row["count"] for row in summary["stages"] if row["stage"] == "data")
            print(summary["steps"]["train"], waits, session.instrumentation_gaps(), flush=True)

        warnings.filterwarnings("ignore", message=".*use of fork")  # of Python 3.12 and later, where there are threads
        parent = start(model, {"train": data})
        train(data)
        child = os.fork()
        if not child:
            go()
            sys.exit(0)
        os.waitpid(child, 0)
        go()
        """)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["10 10 []", "20 20 []"]


def test_a_forked_child_that_trains_unrecorded_says_so_once(run: Run) -> None:
    """A program that becomes a daemon after ``instrument()`` had no metrics, and its session said that it records."""
    done = run("""
        import warnings

        warnings.filterwarnings("ignore", message=".*use of fork")  # of Python 3.12 and later, where there are threads
        session = start(model, {"train": data})
        child = os.fork()
        if not child:
            train(data)
            train(data)
            print(str(session).endswith(f"recording in process {os.getppid()} only>"), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        """)

    assert (done.returncode, done.stdout) == (0, "True\n")
    assert done.stderr.count("nothing of it is recorded. Call instrument() after the fork") == 1


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_multiprocessing_leaves_its_run_to_an_agent_in_a_thread(
    run: Run, method: str, tmp_path: Path
) -> None:
    """It ends without ``atexit``, and a thread ends with it: nothing of the run would be left."""
    done = run(f"""
        def work(end):
            start(model, agent="thread")
            train()
            if end == "raises":
                raise ValueError(end)
            sys.exit(int(end))

        if __name__ == "__main__":
            for end in ("0", "3", "raises"):
                child = torch.multiprocessing.get_context({method!r}).Process(target=work, args=(end,))
                child.start()
                child.join()
                print(child.exitcode)
        """)

    assert (done.returncode, done.stdout.split()) == (0, ["0", "3", "1"]), done.stderr
    summaries = [json.loads((one / "rank0/summary.json").read_text()) for one in sorted(runs(tmp_path))]
    assert sorted(summary["state"] for summary in summaries) == ["failed", "failed", "finished"]
    assert [summary["steps"]["train"] for summary in summaries] == [10, 10, 10]


@pytest.mark.usefixtures("each_agent")
@pytest.mark.parametrize("stream", ["closed", "that_only_writes", "None"])
def test_a_standard_error_that_is_no_stream_stops_nothing(run: Run, stream: str) -> None:
    """A daemon closes it, a notebook or a tee replaces it; what is logged to a closed one makes ``logging`` raise."""
    done = run(f"""
        class Tee:
            def write(self, text): pass
            def flush(self): pass

        if {stream!r} == "closed":
            sys.stderr.close()
        else:
            sys.stderr = Tee() if {stream!r} == "that_only_writes" else None
        os.environ["OTEL_TRAIN_NO_SUCH"] = "1"  # is warned of
        session = start(model)
        train()
        otel_train.begin("load"); otel_train.end(otel_train.begin("load")); otel_train.log(loss=object())
        session.close()
        print(session.summary()["steps"]["train"])
        """)

    assert (done.returncode, done.stdout.split()) == (0, ["10"]), done.stderr


@pytest.mark.usefixtures("each_agent")
def test_a_working_directory_that_is_gone_is_replaced_by_no_other(run: Run) -> None:
    """A relative ``run_dir`` means nothing there. An agent that began in another folder would write below that one."""
    done = run("""
        folder = os.path.join(RUNS, "gone")
        os.makedirs(folder)
        os.chdir(folder)
        os.rmdir(folder)
        RUNS = "runs"
        session = start(model)
        train()
        session.close()
        print(session.run_directory, session.summary()["steps"]["train"])
        """)

    assert (done.returncode, done.stdout.split()) == (0, ["None", "10"]), done.stderr
    assert "No such file or directory. What cannot be written is dropped" in done.stderr


@pytest.mark.parametrize("left", [0, 1, 3])
def test_where_no_thread_can_be_started_training_goes_on_bare(run: Run, left: int) -> None:
    """A container's limit of processes counts threads."""
    done = run(f"""
        import signal, _thread
        starts = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
        left, begin = [{left}], getattr(threading, starts)

        def refuse(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
            return begin(*args, **kwargs)

        setattr(threading, starts, refuse)
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
        session = otel_train.instrument(model, {{"train": data}}, run_dir=RUNS, prometheus_address="127.0.0.1:0", console=False)
        train(data)
        session.close()
        setattr(threading, starts, begin)
        bare = type(iter(data)).__next__.__module__.startswith("torch")
        print(threading.active_count(), bare, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
        """)

    assert (done.returncode, done.stdout.split()) == (0, ["1", "True", "True"]), done.stderr
    lines = [line for line in done.stderr.splitlines() if "can't start new thread" in line]
    assert len(lines) == len({line.partition(":")[0] for line in lines}) <= 4, (
        done.stderr
    )  # each component once


@pytest.mark.parametrize("left", [1, 3, 6])
def test_where_no_file_can_be_opened_training_goes_on(run: Run, left: int) -> None:
    """``ulimit -n``, and a loader with many workers and tensors in shared memory."""
    done = run(f"""
        import resource
        train(data)
        otel_train.instrument  # is there; what it needs is not loaded
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
        most = 3 + {left}
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        session = otel_train.instrument(model, {{"train": data}}, run_dir=RUNS, prometheus_address="127.0.0.1:0", console=False)
        train(data)
        session.close()
        print("trained", type(iter(data)).__next__.__module__.startswith("torch"))
        """)

    assert (done.returncode, done.stdout.split()) == (0, ["trained", "True"]), done.stderr


@pytest.mark.parametrize("limit", ["DATA", "AS"])
def test_where_no_memory_is_left_training_goes_on_and_the_log_says_which_limit_to_raise(
    run: Run, limit: str
) -> None:
    """A batch system limits it; the text of a ``MemoryError`` is empty, and that of the system a number."""
    done = run(f"""
        import resource
        kind, before = resource.RLIMIT_{limit}, resource.getrlimit(resource.RLIMIT_{limit})
        resource.setrlimit(kind, (1 << 20, before[1]))
        session = start(model, {{"train": data}})
        resource.setrlimit(kind, before)
        train()
        print("trained")
        """)

    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "could not start: " in line]
    assert "could not start: ." not in said
    assert "ulimit -v" in said


@pytest.mark.usefixtures("each_agent")
@pytest.mark.parametrize("number", [302, 204, 90], ids=["prlimit", "sched_getaffinity", "chmod"])
def test_where_a_sandbox_or_a_file_system_refuses_a_call_everything_is_recorded(
    run: Run, number: int
) -> None:
    """A filter of system calls refuses limits and processors to the program and to its agent; a mounted bucket, modes."""
    if platform.machine() != "x86_64":
        pytest.skip("numbers of system calls")
    done = run(f"""
        import ctypes, struct
        rules = (0x20, 0, 0, 0), (0x15, 0, 1, {number}), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)
        text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
        program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(text))
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        assert not prctl(38, 1, 0, 0, 0)
        assert not prctl(22, 2, program)
        session = start(model, {{"train": data}})
        train()
        session.close()
        print(session.summary()["steps"]["train"], session.run_directory is not None)
        """)

    assert (done.returncode, done.stdout) == (0, "10 True\n"), done.stderr
    assert "rrno" not in done.stderr
    assert "not permitted" not in done.stderr


@pytest.mark.usefixtures("each_agent")
def test_instrument_in_a_finder_of_the_import_system_waits_for_no_import(run: Run) -> None:
    """A hook may begin a session when it is asked for a module; until it answers, no other thread can import anything."""
    done = run("""
        data = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)

        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == "that_is_nowhere":
                    began = time.monotonic()
                    self.session = start(model, {"train": data})
                    print(time.monotonic() - began < 5)

        finder = Finder()
        sys.meta_path.insert(0, finder)
        try:
            import that_is_nowhere
        except ImportError:
            sys.meta_path.remove(finder)
        train(data)
        print(finder.session.summary()["steps"]["train"])
        """)

    assert (done.returncode, done.stdout.split()) == (0, ["True", "10"]), done.stderr


@pytest.mark.parametrize("hard", [1024, 30])
def test_a_loader_with_workers_has_all_descriptors_that_it_has_without_us(run: Run, hard: int) -> None:
    """Torch waits for ever, or dies, where it lacks one; with 30 the bare program works."""
    done = run(f"""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (30, {hard}))
        data = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4, num_workers=2)
        session = start(model, {{"train": data}}, agent="process")
        train(data)
        print("trained", session.summary().get("steps", {{}}).get("train"), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        """)

    steps = "10" if hard > 30 else "None"
    assert (done.returncode, done.stdout.split()) == (0, ["trained", steps, "30"]), done.stderr
    assert ("ulimit -n" in done.stderr) == (hard == 30), done.stderr


def test_what_a_program_opens_after_it_has_closed_all_descriptors_is_its_own(run: Run) -> None:
    """A number that was ours may be its log's, or its connection's to another rank: nothing may be written there, or closed."""
    done = run("""
        import socket
        data = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)
        session = start(model, {"train": data}, agent="process")
        session.run_directory
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        pairs = [socket.socketpair() for _ in range(40)]
        train(DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4))
        session.close()
        for one, other in pairs:
            other.settimeout(0.0)
            try:
                print("read", other.recv(100))
            except BlockingIOError:
                pass
            one.send(b"x")
        print("trained")
        """)

    assert (done.returncode, done.stdout.split()) == (0, ["trained"]), done.stderr


def test_what_was_instrumented_can_be_used_after_the_close(run: Run) -> None:
    """The session ends where its block ends; threads of the program may not have noticed."""
    done = run("""
        faults, over = [], threading.Event()
        threading.excepthook = lambda args: faults.append(repr(args.exc_value))

        def work(session, data):
            running = iter(session.loaders["queue"])
            while not over.is_set():
                for batch in session.loaders["queue"]:
                    with otel_train.stage("augment"):
                        model(batch).sum().backward()
                    otel_train.end(otel_train.begin("upload"))
                train(data)
                next(running, None)

        for _ in range(5):
            over.clear()
            data = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)
            session = start(model, {"train": data, "queue": [torch.randn(2, 4)] * 20})
            threads = [threading.Thread(target=work, args=(session, data)) for _ in range(3)]
            for thread in threads: thread.start()
            time.sleep(0.05)
            session.close()
            time.sleep(0.05)
            over.set()
            for thread in threads: thread.join()
        print(faults)
        """)

    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_worker_that_dies_meanwhile_leaves_no_half_of_a_session(run: Run) -> None:
    """Torch raises from its handler of SIGCHLD, wherever the main thread is: in the middle of ``instrument()`` as well."""
    done = run("""
        import signal
        from otel_train.instrumentation import registry
        from otel_train.instrumentation import dataloader
        patch, replace = registry.DataLoaderPatch, dataloader.replace

        def dies(*_):
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

        def replacing(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGCHLD)
            return replace(*args, **kwargs)

        signal.signal(signal.SIGCHLD, dies)
        dataloader.replace = replacing
        try:
            start(model, {"train": data})
        except RuntimeError as error:
            print("torch's" if "worker" in str(error) else error)
        dataloader.replace = replace
        train(data)
        session = otel_train.current()
        session.close()
        print(session.summary()["steps"]["train"], type(iter(data)).__next__.__module__.startswith("torch"))
        print(torch.utils.data.dataloader._BaseDataLoaderIter.__init__.__module__)
        """)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch's", "10", "True", "torch.utils.data.dataloader"], done.stderr


def test_a_fork_in_the_middle_of_our_work_does_not_hang(run: Run) -> None:
    """A lock that another thread holds at that moment is held in the child for ever: the child has no thread that releases it."""
    done = run("""
        session = start(model)
        held, go = threading.Event(), threading.Event()

        def hold():
            recording = session._recording
            with recording.probes._lock, recording.recorder._lock:
                held.set()
                go.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            for row in DataLoader(TensorDataset(torch.randn(4, 4))):  # as a dataset that reads a loader of its own
                with otel_train.stage("decode"):
                    torch.nn.Linear(4, 2)(row[0])
            os._exit(0)
        until = time.monotonic() + 20
        ended = (0, 0)
        while not ended[0] and time.monotonic() < until:
            ended = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, 9)
        go.set()
        thread.join()
        session.close()
        print(ended[0] == child, ended[1])
        """)

    assert (done.returncode, done.stdout.split()) == (0, ["True", "0"]), done.stderr


def test_a_second_sigterm_takes_nothing_away(tmp_path: Path) -> None:
    """Batch systems send it to the group and again to the process; the first one's work is not done yet."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = command_of(
            tmp_path,
            PRELUDE,
            """
            session = start(model)
            train(data)
            print("trained", flush=True)
            while True:
                train(data)
            """,
        )
        process = WarmProgram(
            command, env=environ(OTEL_EXPORTER_OTLP_ENDPOINT=address), stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(50):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.005)
        process.wait(timeout=60)
        process.stdout.close()

    assert process.returncode == -signal.SIGTERM
    ended_summary(tmp_path, "terminated")


@pytest.mark.usefixtures("each_agent")
def test_a_signal_that_the_program_blocks_waits_for_it(run: Run, tmp_path: Path) -> None:
    """It is for a place between two steps; a thread that does not block it would take it at once, and end the program."""
    done = run("""
        import signal
        session = start(model)
        session.run_directory
        numbers = {signal.SIGTERM, signal.SIGUSR1}
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number in numbers:
            os.kill(os.getpid(), number)
        time.sleep(0.5)
        train(data)
        print([signal.sigwait(numbers).name for _ in numbers])
        """)

    assert (done.returncode, done.stdout.strip()) == (0, "['SIGUSR1', 'SIGTERM']"), done.stderr
    ended_summary(tmp_path, "finished")


@pytest.mark.parametrize(
    ("ending", "state", "cause"),
    [
        ("sys.exit(3)", "failed", "exit code 3"),
        ("sys.exit()", "finished", None),
        ("raise ValueError('no\\nsuch ' + 300 * 'a')", "failed", f"ValueError: no such {179 * 'a'}…"),
        (
            "in_a_worker(ValueError('no'))",
            "failed",
            "ValueError: Caught ValueError in a worker. ValueError: no",
        ),
        ("with session: raise KeyError('a')", "failed", "KeyError: 'a'"),
        ("raise Unprintable", "failed", "Unprintable"),
        ("raise KeyboardInterrupt", "interrupted", None),
        ("caught()", "finished", None),
        (
            "leave = threading.Thread(target=sys.exit, args=(3,)); leave.start(); leave.join()",
            "finished",
            None,
        ),
        ("os.kill(os.getpid(), 15)", "terminated", None),
    ],
)
def test_a_run_has_the_end_that_its_program_has(
    run: Run, ending: str, *, state: str, cause: str | None, tmp_path: Path
) -> None:
    """Who reads ``finished`` does not start it again; the exit code is that of the bare program."""
    text = f"""
        from torch._utils import ExceptionWrapper

        def in_a_worker(error):
            try:
                raise error
            except ValueError:
                ExceptionWrapper(where="in a worker").reraise()

        def caught():
            try:
                sys.exit(3)
            except SystemExit:
                train(data)

        class Unprintable(Exception):
            def __str__(self):
                raise ValueError

        session = start(model, disabled=len(sys.argv) > 2)
        train(data)
        {ending}
        """
    instrumented, bare = run(text), run(text, "bare")

    assert instrumented.returncode == bare.returncode, instrumented.stderr
    assert ended_summary(tmp_path, state)["end_cause"] == cause
    assert {name for name, value in exported_states(tmp_path).items() if value} == {state}


@pytest.mark.parametrize(
    ("block", "state"),
    [
        ("for _ in data: sys.exit(3)", "failed"),
        ("for _ in DataLoader(data.dataset, num_workers=1): sys.exit(3)", "failed"),
        (
            "with otel_train.epoch(), otel_train.stage('check'), otel_train.checkpoint(): sys.exit(3)",
            "failed",
        ),
        ("for _ in data: leave()", "finished"),
    ],
)
@pytest.mark.usefixtures("each_agent")
def test_an_exit_out_of_a_loop_is_the_end_of_the_run(
    run: Run, block: str, state: str, tmp_path: Path
) -> None:
    """What it leaves, a pass and stages, ends after the exit; the program has caught it where something begins after it."""
    text = f"""
        def leave():
            try:
                sys.exit(3)
            except SystemExit:
                pass

        start(model)
        train(data)
        {block}
        """
    done = run(text)

    assert done.returncode == (3 if state == "failed" else 0), done.stderr
    ended_summary(tmp_path, state)


def test_states_of_an_earlier_end_are_off_in_the_next_attempt(run: Run, tmp_path: Path) -> None:
    """Its series are the same: what no one takes back stays true for minutes. Few runs end by Ctrl-C, and all have states."""
    common = 'session = start(model, run_id="r")\ntrain(data)\n'
    run(common + "raise KeyboardInterrupt")
    ended_summary(tmp_path, "interrupted")
    first = exported_states(tmp_path)
    run(common)
    ended_summary(tmp_path, "finished")
    second = exported_states(tmp_path)

    assert {name for name, value in first.items() if value} == {"interrupted"}
    assert set(RUN_STATES) - set(first) == {"terminated"}
    assert {name for name, value in second.items() if value} == {"finished"}
    assert set(second) == set(RUN_STATES)


CONSOLE = """
        import code
        prompt = code.InteractiveConsole(globals())
"""


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        (["1 / 0", "start(model)", "train()"], "finished"),
        (["start(model)", "raise KeyboardInterrupt", "train()"], "finished"),
        (["start(model)", "train()", "sys.exit(3)"], "failed"),
    ],
)
def test_an_error_that_a_prompt_shows_is_no_end_of_the_run(
    run: Run, lines: list[str], state: str, tmp_path: Path
) -> None:
    """Python and IPython leave it in ``sys.last_value``, as the interpreter leaves the one that ends a program."""
    done = run(CONSOLE + "".join(f"        prompt.push({line!r})\n" for line in lines))

    assert done.returncode == (3 if state == "failed" else 0), done.stderr
    ended_summary(tmp_path, state)


def test_an_error_at_pythons_own_prompt_is_no_end_of_the_run(tmp_path: Path) -> None:
    """It shows errors as the end of a script does; ``sys.ps1`` tells them apart."""
    command = command_of(tmp_path, PRELUDE, "start(model)")
    done = subprocess.run(
        [command[0], "-i", *command[1:]], input="1 / 0\ntrain()\n", env=environ(), capture_output=True, text=True,
        timeout=100, check=False, cwd=tmp_path,
    )  # fmt: skip

    assert "ZeroDivisionError" in done.stderr
    assert ended_summary(tmp_path, "finished")["steps"] == {"train": 10}


def test_a_notebook_whose_last_cell_fails_has_failed(run: Run, tmp_path: Path) -> None:
    """What runs a notebook as a job stops at the first cell that fails, and ends the kernel as a user would."""
    run(f"""{CONSOLE}
        sys.modules["IPython"] = shell = type(os)("IPython")
        shell.get_ipython = lambda: shell
        shell.last_execution_succeeded = False
        start(model)
        train()
        prompt.push("1 / 0")
        """)

    ended_summary(tmp_path, "failed")


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        ("raise SystemExit(3)", "failed"),
        ("import atexit; atexit.register(time.sleep, 0.3); raise SystemExit(3)", "failed"),
        ("raise SystemExit", "finished"),
        ("session.close(); raise SystemExit(3)", "finished"),
    ],
)
def test_an_exit_code_that_no_one_has_said_is_the_kernels(
    run: Run, ending: str, state: str, tmp_path: Path
) -> None:
    """``raise SystemExit(main())`` leaves nothing that ``atexit`` could see; the agent learns of it when the program is gone."""
    run(f"""
        session = start(model, agent="process")
        train()
        {ending}
        """)
    (folder,) = runs(tmp_path)

    until(lambda: (folder / "rank0.lock").read_text().strip().endswith("closed"))
    assert ended_summary(tmp_path, state)["end_cause"] == ("exit code 3" if state == "failed" else None)


def test_a_crash_after_the_end_of_the_session_is_the_end_of_the_run(run: Run, tmp_path: Path) -> None:
    """As of a library whose threads still run when the interpreter is taken down: the launcher sees that signal, too."""
    run("""
        import signal

        class Library:
            def __del__(self, crash=os.kill, here=os.getpid(), number=signal.SIGSEGV):
                crash(here, number)

        library = Library()
        start(model, agent="process")
        train()
        """)
    (folder,) = runs(tmp_path)

    until(lambda: (folder / "rank0.lock").read_text().strip().endswith("closed"))
    assert ended_summary(tmp_path, "killed")["end_cause"] == "SIGSEGV"
