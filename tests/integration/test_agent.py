"""An agent beside the program: what it sees when the program, the agent itself or the disk fails."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from otel_train.agent.node import _FIRST_S
from otel_train.agent.process import _PROGRAM, ends_its_container
from otel_train.agent.rank_end import how_it_ended
from tests.support import waiting
from tests.support.fake_cuda import compiled
from tests.support.json_lines import last_points, read_jsonl
from tests.support.programs import command_of, ended_summary, environ, line
from tests.support.receiver import http_receiver
from tests.support.warm import WarmProgram
from tests.support.zero_code import launched

ROOT = Path(__file__).parents[2]
Begin = Callable[..., subprocess.Popen[str]]
until = partial(waiting.until, seconds=60.0)  # agents start and end here
PRELUDE = """
    import ctypes, os, signal, sys, threading, time
    import torch, otel_train
    from torch.utils.data import DataLoader, TensorDataset
    torch.set_num_threads(1)
    torch.manual_seed(0)
    RUNS = sys.argv[1]
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=4)

    def start(**settings):
        return otel_train.instrument(
            model, {"train": data}, run_dir=RUNS, agent="process", tuning={"poll_interval_s": 0.05}, prometheus_address="127.0.0.1:0", **settings
        )

    def agent_of_here():
        import psutil

        return next(
            each for each in psutil.process_iter(["cmdline", "cwd"])
            if each.info["cwd"] == os.getcwd() and "otel_train.agent.node" in (each.info["cmdline"] or [""])[-1]
        )

    def train(pause_s=0.0):
        for (batch,) in data:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            time.sleep(pause_s)

    def say(*words):
        print(*words, flush=True)
"""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Begins a program in a session of its own, in ``tmp_path``; ends what is left of it."""
    begun: list[subprocess.Popen[str]] = []

    def start(text: str, **more: str) -> subprocess.Popen[str]:
        begun.append(
            WarmProgram(
                command_of(tmp_path, PRELUDE, text), env=environ(**more), cwd=tmp_path, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )
        )  # fmt: skip
        return begun[-1]

    yield start
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.communicate()
    killed_agents(tmp_path)


def agents(folder: Path) -> list[psutil.Process]:
    """Agents of programs that run in this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            program, *words = process.cmdline() or [""]
            # /bin/sh starts it.
            mine = program != "/bin/sh" and any("otel_train.agent.node" in word for word in words)
            if mine and Path(process.cwd()) == folder:
                found.append(process)
    return found


def killed_agents(folder: Path) -> set[int]:
    """Kills all agents there are; their numbers."""
    found = agents(folder)
    for agent in found:
        agent.kill()
    return {agent.pid for agent in found}


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Attributes of the events of this name, of the only rank."""
    [file] = (folder / "runs").glob("*/rank0/events.jsonl")
    return [event["attributes"] for event in read_jsonl(file) if event["name"] == name]


def summary(tmp_path: Path, state: str) -> dict[str, Any]:
    """The summary of the only run, once it has ended in ``state`` and no agent is left."""
    found = ended_summary(tmp_path, state)
    until(lambda: not agents(tmp_path), "the agent has left")
    return found


def test_a_program_that_ends_by_itself_leaves_its_metrics_and_no_agent(begin: Begin, tmp_path: Path) -> None:
    """The run summary comes before the prompt, although another process has the metrics."""
    process = begin("start(); train(); train()")
    said, errors = process.communicate(timeout=60)

    assert (process.returncode, said) == (0, ""), errors
    assert "200 train steps" in errors
    assert summary(tmp_path, "finished")["steps"] == {"train": 200}


def test_the_wait_for_an_agent_that_starts_is_no_time_of_the_run(begin: Begin, tmp_path: Path) -> None:
    """A short program waits at its end until the agent has counted it; nothing of it ran meanwhile."""
    process = begin("began = time.monotonic(); session = start(); train(); say(time.monotonic() - began)")
    took_s = float(line(process))

    assert process.wait(60) == 0
    assert summary(tmp_path, "finished")["wall_seconds"] < took_s + 0.2


@pytest.mark.parametrize("end", ["session.close(); time.sleep(2)", "sys.exit(5)"])
def test_a_program_that_closes_all_its_descriptors_is_counted_to_its_end(
    begin: Begin, tmp_path: Path, end: str
) -> None:
    """The connection is among them, and the program goes on."""
    process = begin(f"""
        session = start()
        train()
        session.run_directory
        os.closerange(3, os.sysconf("SC_OPEN_MAX") + 100)
        train(0.03)
        {end}
        """)
    _, said = process.communicate(timeout=60)

    found = summary(tmp_path, "failed" if "exit" in end else "finished")
    assert found["steps"] == {"train": 200}
    assert process.returncode == (5 if "exit" in end else 0)
    assert "Traceback" not in said, said
    assert said.count("closed the connection") <= 1, said


LATE = """
import sys, time
if "otel_train.agent.node" in "".join(sys.orig_argv):
    from otel_train.agent import rank_connection
    how_it_ended = rank_connection.how_it_ended
    rank_connection.how_it_ended = lambda *rank: (time.sleep(3), how_it_ended(*rank))[1]
"""


def test_a_killed_rank_ends_as_its_process_does_however_late_its_agent_is(
    begin: Begin, tmp_path: Path
) -> None:
    """The agent finishes the ranks of a node one after the other: the post-mortem names the one that ended first."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(LATE)
    process = begin(
        """
        session = start()
        session.run_directory
        for (batch,) in data:
            model(batch)
            say("in a step")
            time.sleep(60)
        """,
        PYTHONPATH=f"{tmp_path / 'late'}:{ROOT}",
    )
    line(process)
    process.kill()
    killed_s = time.time()

    found = summary(tmp_path, "killed")
    assert found["started_unix_s"] + found["wall_seconds"] - killed_s < 2.0


def test_sigkill_loses_no_step_and_nothing_that_was_logged(begin: Begin, tmp_path: Path) -> None:
    """The agent reads the memory to its end. The last loss before an end is what explains it, and is written at once."""
    process = begin("""
        session = start()
        train()
        session.log({"loss": 2.0, "tokens": 100})
        time.sleep(2)
        otel_train.log({"loss": 0.5, "tokens": 20}, accuracy=0.75)
        otel_train.log(loss=float("nan"))
        session.event("mine", {"why": "it ends"}, step=7)
        otel_train.end(otel_train.begin("load"))
        train()
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    process.communicate(timeout=60)

    found = summary(tmp_path, "killed")

    assert process.returncode == -signal.SIGKILL
    assert (found["steps"], found["telemetry"]["records_lost"]) == ({"train": 200}, 0)
    assert [len(events(tmp_path, name)) for name in ("mine", "train.nonfinite", "train.run.killed")] == [
        1,
        1,
        1,
    ]
    [folder] = (tmp_path / "runs").glob("*/rank0")
    exported = last_points(folder)
    assert [point["value"] for point in exported["train.tokens"]] == [120]
    [accuracy] = exported["train.metric.value"]
    assert (*accuracy["labels"].values(), accuracy["value"]) == ("accuracy", "train", 0.75)
    assert [row["count"] for row in found["stages"] if row["stage"] == "load"] == [1]


def test_a_crash_in_c_is_an_end_like_any_other(begin: Begin, tmp_path: Path) -> None:
    """otel_train's handlers do not run in a process that has a segmentation fault."""
    process = begin("start(); train(); ctypes.string_at(0)")
    process.communicate(timeout=60)

    assert process.returncode == -signal.SIGSEGV
    found = summary(tmp_path, "killed")
    assert (found["steps"], found["end_cause"]) == ({"train": 100}, "SIGSEGV")


@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_signals_to_the_whole_group_end_the_program_and_not_its_agent(
    begin: Begin, tmp_path: Path, number: int, state: str
) -> None:
    """Ctrl-C in a terminal, a launcher that ends its ranks: all is exported. SIGTERM leaves no time to print the run summary."""
    process = begin("start(); train(); say('trained'); time.sleep(60)")
    line(process)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=30)

    assert summary(tmp_path, state)["steps"] == {"train": 100}
    assert ("100 train steps" in errors) == (number == signal.SIGINT)


def test_a_handler_of_the_program_is_left_alone_however_long_it_waits(begin: Begin, tmp_path: Path) -> None:
    """It checkpoints, or counts; otel_train neither sends its signal again nor ends the program."""
    process = begin("""
        def mine(number, frame):
            say("mine")
        start(); train()
        signal.signal(signal.SIGTERM, mine)
        say("waits")
        until = time.monotonic() + 3
        while time.monotonic() < until:
            ctypes.PyDLL(None).usleep(500_000)
    """)
    line(process)
    process.terminate()
    said, _ = process.communicate(timeout=60)

    assert said.split() == ["mine"]
    assert process.returncode == 0
    assert summary(tmp_path, "finished")["steps"] == {"train": 100}


def test_an_agent_that_dies_is_followed_by_another_that_counts_everything(
    begin: Begin, tmp_path: Path
) -> None:
    """The memory is the program's: what is still in it is counted again from the beginning."""
    process = begin(
        "session = start(); train(); say(session.run_directory); sys.stdin.readline() if 0 else time.sleep(3);"
        "train(); say(session.summary()['steps'])"
    )
    line(process)
    [agent] = agents(tmp_path)
    agent.kill()

    assert line(process) == "{'train': 200}"
    _, errors = process.communicate(timeout=60)
    assert "another one is started" in errors
    assert summary(tmp_path, "finished")["steps"] == {"train": 200}


@pytest.mark.parametrize("faults", [1, 3])
def test_a_fault_of_the_service_thread_leaves_the_rank_to_the_agent_it_has(
    begin: Begin, tmp_path: Path, faults: int
) -> None:
    """The agent lives and reads the shared memory: with a second one beside it, two would count the rank."""
    process = begin(f"""
        session = start()
        train()
        session.summary()
        components, faults = session._service.components, list(range({faults}))
        poll = components.poll

        def failing():
            if faults:
                faults.pop()
                otel_train.log(loss=1.0)
                raise MemoryError
            return poll()

        components.poll = failing
        while faults:
            otel_train.log(loss=1.0)
            time.sleep(0.05)
        time.sleep(1)
        say("failed")
        sys.stdin.readline()
        train()
        """)
    assert line(process) == "failed"
    assert len(agents(tmp_path)) == 1
    _, errors = process.communicate("\n", timeout=60)

    assert errors.count("agent failed; ") == 1
    assert "another one" not in errors
    assert summary(tmp_path, "finished")["steps"] == {"train": 200}


@pytest.mark.parametrize(("steady_s", "stops"), [(0.05, False), (600.0, True)])
def test_agents_that_die_at_once_are_given_up_and_those_that_lived_are_not(
    begin: Begin, tmp_path: Path, steady_s: float, stops: bool
) -> None:
    """A run of a month may meet a node that is short of memory every few days."""
    process = begin(f"""
        import otel_train.agent.process
        otel_train.agent.process.STEADY_S = {steady_s}
        session = start()
        train()
        say(session.run_directory)
        sys.stdin.readline()
        """)
    line(process)
    killed: set[int] = set()
    for _ in range(4):
        until(lambda: {agent.pid for agent in agents(tmp_path)} - killed, "another agent")
        time.sleep(0.5)  # it has lived
        killed.update(killed_agents(tmp_path))
    _, errors = process.communicate("\n", timeout=60)

    assert ("nothing more is exported" in errors) == stops
    if not stops:
        assert summary(tmp_path, "finished")["steps"] == {"train": 100}


@pytest.mark.parametrize("state", ["killed", "finished"])
def test_an_agent_that_is_killed_before_it_has_begun_is_followed_by_another(
    begin: Begin, tmp_path: Path, state: str
) -> None:
    """The one that follows outlives the program as well, and counts no other start of it."""
    process = begin(f"""
        start()
        say("up")
        sys.stdin.readline()
        train()
        time.sleep(3)
        if {state == "killed"}:
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    line(process)
    killed_agents(tmp_path)
    process.communicate("\n", timeout=60)

    found = summary(tmp_path, state)
    assert (found["steps"], found["attempt"]) == ({"train": 100}, 0)


def test_an_agent_that_nothing_can_follow_is_said_in_one_line(begin: Begin, tmp_path: Path) -> None:
    """A container's limit of processes counts threads as well."""
    process = begin("""
        import subprocess

        def refuse(*_, **__):
            raise RuntimeError("can't start new thread")

        def no_fork(*_, **__):
            raise BlockingIOError(11, "Resource temporarily unavailable")

        session = start()
        session.run_directory
        starts = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
        setattr(threading, starts, refuse)
        subprocess.Popen = no_fork
        say("up")
        sys.stdin.readline()
        train()
        """)
    line(process)
    killed_agents(tmp_path)
    _, errors = process.communicate("\n", timeout=60)

    assert process.returncode == 0, errors
    assert errors.count("no other one can be started (can't start new thread); nothing more is") == 1
    assert "Traceback" not in errors


def test_sigterm_to_the_agent_alone_is_not_how_its_rank_ends(begin: Begin, tmp_path: Path) -> None:
    """The kernel knows better."""
    process = begin("session = start(); train(); say(session.run_directory); time.sleep(60)")
    line(process)
    [agent] = agents(tmp_path)
    agent.terminate()
    process.kill()
    process.communicate(timeout=60)

    assert summary(tmp_path, "killed")["steps"] == {"train": 100}


@pytest.mark.parametrize(("end", "state"), [("", "finished"), ("sys.exit(3)", "failed")])
def test_an_agent_that_is_killed_while_the_program_ends_is_followed_by_another(
    begin: Begin, tmp_path: Path, end: str, state: str
) -> None:
    """It is stopped first, in the middle of the end, so that the answer is not on its way already."""
    process = begin(f"""
        session = start()
        train()
        session.run_directory
        agent = agent_of_here()
        session.log({{"loss": 0.5}})
        agent.suspend()
        threading.Timer(0.06, agent.kill).start()
        session.close("{state}")
        {end}
        """)
    _, errors = process.communicate(timeout=60)

    assert "another one is started" in errors
    assert summary(tmp_path, state)["steps"] == {"train": 100}


def test_an_agent_that_nothing_can_follow_is_said_while_the_program_ends(
    begin: Begin, tmp_path: Path
) -> None:
    """As during training: at its limit of processes a program ended without a word, and its run without a summary."""
    process = begin("""
        from otel_train.agent import node, process

        def refuse(*_, **__):
            raise OSError(11, "Resource temporarily unavailable")

        def no_thread(*_, **__):
            raise RuntimeError("can't start new thread")

        session = start()
        train()
        session.run_directory
        agent = agent_of_here()
        process.connect_agent, node.opened = refuse, no_thread
        session.log({"loss": 0.5})
        agent.suspend()
        threading.Timer(0.06, agent.kill).start()
        session.close()
        """)
    _, errors = process.communicate(timeout=60)

    assert errors.count("agent: RuntimeError: can't start new thread; nothing more is exported") == 1


@pytest.mark.parametrize("adopts", [False, True])
def test_a_program_that_waits_for_any_child_never_meets_the_agent(
    begin: Begin, tmp_path: Path, adopts: bool
) -> None:
    """``os.wait()`` of a program with a child of its own, and a handler of SIGCHLD that counts; also of one that adopts orphans."""
    process = begin(
        """
        signal.alarm(60)
        ctypes.CDLL(None).prctl(36, int(os.environ["ADOPTS"]), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        heard = []
        signal.signal(signal.SIGCHLD, lambda number, frame: heard.append(number))
        session = start()
        session.run_directory
        train()
        child = os.fork()
        if child == 0:
            os._exit(3)
        pid, status = os.wait()
        say(pid == child, os.waitstatus_to_exitcode(status), len(heard))
        try:
            os.wait()
        except ChildProcessError:
            say("no more")
        """,
        ADOPTS=str(int(adopts)),
    )

    assert line(process) == "True 3 1"
    assert line(process) == "no more"
    process.communicate(timeout=60)
    assert summary(tmp_path, "finished")["steps"] == {"train": 100}


def test_a_run_that_shares_its_processor_says_so(begin: Begin, tmp_path: Path) -> None:
    """Every stage takes twice as long, and no stage is the cause: of a program beside it, or of a container's limit."""
    process = begin(
        """
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        start()
        import subprocess
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        until_s = time.monotonic() + 2
        while time.monotonic() < until_s:
            for (batch,) in data:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
        busy.kill()
        """
    )
    process.communicate(timeout=60)
    [written] = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/rank0/summary.json")]

    found = {finding["name"]: finding for finding in written["findings"]}["cpu_contention"]
    assert found["evidence"]["cpu_wait_ratio"] > 0.2
    assert found["seconds"] == written["cpu_wait_seconds"] < written["wall_seconds"]


def test_a_run_that_hangs_says_so_while_it_does_and_all_of_the_silence_is_stalled(
    begin: Begin, tmp_path: Path
) -> None:
    """It read ``running`` and ``unattributed`` in every list, and nothing was printed."""
    process = begin(
        """
        start(stall_after_s=1.0)
        for number, (batch,) in enumerate(data):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if number == 20:
                say("hangs")
                sys.stdin.readline()
        """
    )
    assert line(process) == "hangs"
    hung_s = time.monotonic()

    def stalled() -> dict[str, Any] | None:
        written = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/rank0/summary.json")]
        return next((each for each in written if each["stall"]), None)

    hung = until(stalled, "a stall is written")
    shown = launched(
        [sys.executable, "-m", "otel_train", "summary", hung["run_id"]], environ(), tmp_path
    ).stdout
    silent_s = time.monotonic() - hung_s
    _, errors = process.communicate("\n", timeout=60)

    assert (hung["stall"]["stage"], hung["stall"]["after"], hung["stall"]["step"]) == (
        "other",
        "optimizer",
        20,
    )
    assert hung["findings"][0]["name"] == "stalled"
    assert sum(hung["activities"].values()) == pytest.approx(hung["wall_seconds"])
    assert "● stalled" in shown
    assert "in step 20, after stage optimizer" in shown
    assert errors.count("No progress for ") == 1
    assert f"in step 20, after stage optimizer. otel-train postmortem {hung['run_dir']} has" in errors
    ended = summary(tmp_path, "finished")
    assert ended["stall"] is None
    assert ended["activities"]["stalled"] == pytest.approx(silent_s, abs=0.5)


def test_the_summary_of_a_run_that_has_just_begun_is_written_within_seconds(
    begin: Begin, tmp_path: Path
) -> None:
    """It had the state of the first half second for 30 seconds: "other 100 %", and too early to say."""
    process = begin(
        """
        start()
        say("trains")
        while True:
            train(0.002)
        """
    )
    assert line(process) == "trains"

    def trained() -> bool:
        written = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/rank0/summary.json")]
        return any(each["steps"].get("train", 0) > 200 for each in written)

    until(trained, "200 steps are in the summary", seconds=15)
    process.kill()


def test_metrics_are_served_while_the_interpreter_is_held(begin: Begin, tmp_path: Path) -> None:
    """A call that hangs in C with the lock held: nothing of the program runs, and everything is still exported."""
    from urllib.request import urlopen

    process = begin(
        """
        session = start(stall_after_s=1.0, export_interval_s=0.2)
        say(session.metrics_url)
        train(0.002)
        time.sleep(1.0)
        say("held")
        ctypes.PyDLL(None).sleep(8)
        say("released")
        """
    )
    url = line(process)
    line(process)
    held_until = time.monotonic() + 6.0
    pages = []
    while time.monotonic() < held_until:
        with urlopen(url, timeout=2) as page:
            pages.append(page.read().decode())
        time.sleep(0.5)

    assert len(pages) > 8
    # Steps of the last turn before the call were not reported by then; a hang is no reason to keep them back.
    steps = [row for row in pages[-1].splitlines() if row.startswith("train_steps_total{")]
    assert sum(float(row.split()[-1]) for row in steps) == 100
    assert line(process) == "released"
    process.communicate(timeout=60)


def test_device_time_is_exported_while_the_interpreter_is_held(begin: Begin, tmp_path: Path) -> None:
    """A rank that hangs in a call to its driver: what the device does by then is on the page while it hangs."""
    from urllib.request import urlopen

    process = begin(f"""
        from otel_train.instrumentation import manager
        from tests.support.fake_cuda import FakeCuda
        device = FakeCuda({str(compiled(tmp_path))!r})
        manager.find_driver = lambda environ: device
        model.register_forward_hook(lambda *of: device.work(1_000_000))
        session = start(stall_after_s=1.0, export_interval_s=0.2)
        steps = session._recording.devices.steps
        type(steps).choose = lambda *of: None  # every step is timed, whatever that costs here
        steps.one_in = 1
        say(session.metrics_url)
        train()
        time.sleep(1.0)
        say("held")
        device.holding.hold(60, 1_000_000_000)
        say("released")
        """)
    url = line(process)
    line(process)

    def counted() -> float:
        with urlopen(url, timeout=2) as page:
            rows = page.read().decode().splitlines()
        counts = [row for row in rows if row.startswith("train_stage_device_duration_seconds_count{")]
        return sum(float(row.split()[-1]) for row in counts if 'train_stage="forward"' in row)

    before = counted()
    arrived = until(lambda: counted() >= 100 and counted(), "device time of the held rank", seconds=50)
    assert process.stdout is not None
    said = select.select([process.stdout], [], [], 0)[0]

    assert (before, arrived) == (0, 100)
    assert said == []
    process.kill()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that hangs while it is frozen."""
    tools = ("mkfs.ext4", "mount", "umount", "fsfreeze")
    if os.geteuid() or not all(map(shutil.which, tools)):
        pytest.skip("making a disk that hangs needs root, mkfs.ext4, mount and fsfreeze")
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, **quiet)
    if subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=False, **quiet).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["fsfreeze", "-u", str(folder)], check=False, **quiet)
    until(
        lambda: subprocess.run(["umount", str(folder)], check=False, **quiet).returncode == 0,
        "it is unmounted",
    )


def test_a_disk_that_hangs_stops_neither_training_nor_its_end(
    begin: Begin, tmp_path: Path, disk: Path
) -> None:
    """The run directory is on it. Metrics are counted, served and shown all the same: writing is another thread's."""
    process = begin(f"""
        RUNS = {str(disk / "runs")!r}
        session = start(export_interval_s=0.2)
        say(session.metrics_url)
        while not os.path.exists({str(tmp_path / "frozen")!r}):
            time.sleep(0.01)
        longest = 0.0
        for _ in range(20):
            began = time.perf_counter()
            train(0.0005)
            longest = max(longest, time.perf_counter() - began)
        say(longest < 1.5)
        sys.stdin.readline()
        began = time.perf_counter()
        session.close()
        say(round(time.perf_counter() - began, 3))
        """)
    url = line(process)
    subprocess.run(["fsfreeze", "-f", str(disk)], check=True)
    (tmp_path / "frozen").touch()
    try:
        assert line(process) == "True"
        until(lambda: page(url)["0"] >= 2000, "all steps are on the page")
        assert process.stdin is not None
        print(file=process.stdin, flush=True)
        assert float(line(process)) < 1.0  # 0.1 s for the disk; the rest is this machine's
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert "train steps" in process.stderr.read()
    finally:
        subprocess.run(["fsfreeze", "-u", str(disk)], check=True)
    until(lambda: not agents(tmp_path), "the agent has left")


REFUSED = """
    import socket

    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    socket.{function} = refuse
    start()
    train()
"""


@pytest.mark.parametrize(
    "program",
    [
        "sys.executable = ''; start(); train()",
        # What is frozen would train once more.
        "sys.frozen = True; sys.executable = os.path.abspath('frozen'); start(); train()",
        # A sandbox that filters sendmsg: the process that has been started leaves at once, nothing will connect to it.
        REFUSED.format(function="send_fds"),
        # It may be gone before the program has said a word to it.
        "sys.executable = os.path.abspath('ends'); start(); train()",
    ],
)
def test_without_a_process_a_thread_does_the_work(begin: Begin, tmp_path: Path, program: str) -> None:
    """A machine that cannot start one: said once, and every metric is there."""
    for name, text in ("frozen", "touch trained-again"), ("ends", "exit 1"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    process = begin(program)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 0, errors
    assert errors.count("a thread of this process does its work") == 1
    assert summary(tmp_path, "finished")["steps"] == {"train": 100}
    assert not (tmp_path / "trained-again").exists()


def test_an_agent_whose_rank_is_gone_before_it_listens_leaves_at_once(tmp_path: Path) -> None:
    """A program that fails at once. No other rank can connect where there is no listener."""
    program = """
import socket, time
from otel_train.agent.node import NodeAgent
agent = NodeAgent(None)
ours, theirs = socket.socketpair()
ours.close()
agent.take(theirs)
while agent.channels:
    time.sleep(0.01)
began_s = time.monotonic()
agent.run()
print(time.monotonic() - began_s)
"""
    done = launched([sys.executable, "-c", program], environ(), tmp_path)

    assert float(done.stdout) < _FIRST_S / 2, done.stderr


def test_where_neither_a_process_nor_a_thread_can_be_reached_one_line_says_so(begin: Begin) -> None:
    """A sandbox that filters socketpair. That a thread did the work was logged before it was tried."""
    process = begin(REFUSED.format(function="socketpair"))
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 0, errors
    assert errors.count("could not start") == errors.count("\n") == 1
    assert "no agent can run beside this process" in errors


@pytest.mark.parametrize("safe", ["", "1"])
def test_the_agent_finds_the_packages_of_its_program(tmp_path: Path, safe: str) -> None:
    """With PYTHONSAFEPATH there is no working directory at the head of the path: what is there is the user's own."""
    program = _PROGRAM.partition("; from ")[0] + "; print(*sys.path, sep=chr(10))"
    variables = {**os.environ, "PYTHONSAFEPATH": safe, "PYTHONPATH": str(tmp_path)}
    done = launched([sys.executable, "-c", program.format(root=str(ROOT))], variables)

    found = done.stdout.split("\n")[:-1]
    assert (found[0], found[-1]) == (str(tmp_path), str(ROOT)), done.stderr
    assert "" not in found


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("pass", "finished"),
        ("os._exit(3)", "failed"),
        ("raise ValueError('x')", "failed"),
        ("os.execv('/bin/sleep', ['sleep', '5'])", "finished"),
    ],
)
def test_no_agent_outlives_its_rank(begin: Begin, tmp_path: Path, end: str, state: str) -> None:
    """However the rank ends, and however soon."""
    process = begin(f"session = start(); train(); {end}" if ";" not in end else end)
    process.communicate(timeout=60)

    until(lambda: not agents(tmp_path), "the agent has left", seconds=10.0)
    found = until(lambda: list((tmp_path / "runs").glob("*/rank0/summary.json")), "a summary")
    until(lambda: json.loads(found[0].read_text())["steps"] == {"train": 100}, "all steps are in it")
    assert json.loads(found[0].read_text())["state"] == state


def test_texts_and_numbers_of_the_programs_own_classes_reach_the_agent(begin: Begin, tmp_path: Path) -> None:
    """The agent cannot import the classes of the program; an enumeration names loaders, stages and values in many."""
    process = begin("""
        import enum, pathlib
        class Name(str, enum.Enum):
            TRAIN = "train"; AUGMENT = "augment"; LOSS = "loss"; REASON = "slow"; RUN = "own"; MODEL = "net"
        class Level(enum.IntEnum):
            HIGH = 3
        class Rate(float): pass
        class Folder(type(pathlib.Path())): pass

        session = otel_train.instrument(
            {Name.MODEL: model}, {Name.TRAIN: data}, run_dir=Folder(RUNS), run_id=Name.RUN, agent="process",
            prometheus_address="127.0.0.1:0", tuning={"poll_interval_s": Rate(0.05)}, run_name=Name.REASON,
        )
        for (batch,) in data:
            with otel_train.stage(Name.AUGMENT):
                optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            session.log({Name.LOSS: Rate(0.5)})
            session.event(Name.REASON, {Name.LOSS: Level.HIGH, "name": Name.LOSS, "rate": Rate(0.25)})
        session.log({Name.LOSS: Level.HIGH})
    """)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, "another one" in err) == (0, False), err

    found = summary(tmp_path, "finished")
    assert (found["steps"]["train"], found["telemetry"]["faults"]) == (100, {})
    rows = {(row["stage"], row["loader"], row["model"]) for row in found["stages"]}
    assert rows >= {("augment", "train", ""), ("data", "train", ""), ("forward", "train", "net")}
    assert found["run_id"] == "own"
    [events] = tmp_path.rglob("events.jsonl")
    last = [json.loads(row) for row in events.read_text(encoding="utf-8").splitlines()][-1]
    assert last["attributes"].items() >= {"loss": 3, "name": "loss", "rate": 0.25}.items()
    assert not any("Name." in path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.json*"))


def test_weights_are_those_of_the_bare_loop(begin: Begin, tmp_path: Path) -> None:
    """With an agent, and with one that is killed in the middle."""
    text = "train(0.001); {}train(0.001); say([round(float(x), 12) for x in model.weight.flatten()])"
    bare = begin(text.format(""))
    instrumented = begin("session = start(); session.run_directory; " + text.format("time.sleep(1); "))
    until(lambda: agents(tmp_path), "an agent runs")
    time.sleep(0.5)
    killed_agents(tmp_path)

    assert line(instrumented) == line(bare)


def held_agent(tmp_path: Path) -> psutil.Process:
    """The agent of the only program, which is stopped: it takes nothing, and is not gone."""
    [agent] = agents(tmp_path)
    agent.suspend()
    (tmp_path / "held").touch()
    return agent


HELD = """
    from otel_train.agent import messages
    messages._SEND_TIMEOUT_S = 1.0
    session = start()
    session.run_directory
    say("opened")
    while not os.path.exists("held"):
        time.sleep(0.01)
    names = [f"name {number:04} {'x' * 150}" for number in range(4000)]
"""


def test_what_is_logged_while_the_agent_is_stopped_is_counted_once_it_goes_on(
    begin: Begin, tmp_path: Path
) -> None:
    """Its socket is full, so that a message is taken in part: the next one begins behind its end all the same."""
    process = begin(
        HELD
        + """
    for _ in range(2):
        session.log({"tokens": 1, **dict.fromkeys(names, 1.0)})
        threading.Thread(target=session.summary, daemon=True).start()
        time.sleep(2.5)
    say("logged")
    sys.stdin.readline()
    session.log({"tokens": 1})
    say(session.summary()["state"])
    """
    )
    line(process)
    agent = held_agent(tmp_path)
    try:
        assert line(process) == "logged"
    finally:
        agent.resume()
    assert process.stdin is not None
    print(file=process.stdin, flush=True)
    assert line(process) == "running"
    _, errors = process.communicate(timeout=60)

    assert "agent: it has ended" not in errors
    summary(tmp_path, "finished")
    [folder] = (tmp_path / "runs").glob("*/rank0")
    assert [point["value"] for point in last_points(folder)["train.tokens"]] == [3]


def test_sigterm_ends_a_program_that_waits_for_its_agent(begin: Begin, tmp_path: Path) -> None:
    """The handler ends the session on the thread that is in the middle of a message to an agent which takes nothing."""
    process = begin(
        HELD
        + """
    session.log(dict.fromkeys(names, 1.0))
    say("asks")
    session.summary()
    """
    )
    line(process)
    agent = held_agent(tmp_path)
    try:
        assert line(process) == "asks"
        time.sleep(1.0)
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    finally:
        agent.resume()
    summary(tmp_path, "terminated")


@pytest.mark.parametrize("warns", [False, True])
def test_a_standard_error_that_takes_nothing_does_not_delay_the_end(
    begin: Begin, tmp_path: Path, *, warns: bool
) -> None:
    """What reads the pipe has stopped, and the program prints nothing: only the run summary and warnings would wait for it."""
    wrong = {"OTEL_TRAIN_OTLP": "maybe", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"} if warns else {}
    process = begin(
        """
        pipe, full = os.pipe()
        os.set_blocking(full, False)
        try:
            while True:
                os.write(full, bytes(4096))
        except BlockingIOError:
            pass
        os.set_blocking(full, True)
        os.dup2(full, 2)
        session = start(exit_timeout_s=20); train(); otel_train.summary()
        began = time.monotonic()
        session.close()
        say(time.monotonic() - began)
        """,
        **wrong,
    )

    assert float(line(process)) < 2.0
    assert process.wait(20) == 0
    assert summary(tmp_path, "finished")["steps"] == {"train": 100}


@pytest.mark.skipif(
    ends_its_container(), reason="here the program waits for its agent, which may end with it"
)
@pytest.mark.parametrize(
    ("when", "asks"),
    [("opened", False), ("filled", False), ("starts", False), ("opened", True), ("filled", True)],
)
def test_an_agent_that_is_stopped_delays_no_end(begin: Begin, tmp_path: Path, when: str, asks: bool) -> None:
    """It goes on without the program: what there is to say is in its socket, or in the memory.

    A program that goes on gets its summary once the agent has it, and then nothing of the session is left.
    """
    process = begin(
        """
        from otel_train.agent import process
        when, before = os.environ["WHEN"], len(os.listdir("/proc/self/fd"))
        connect = process.connect_agent

        def stopped(*given):
            connection = connect(*given)
            os.kill(connection.pid, signal.SIGSTOP)
            return connection

        if when == "starts":
            process.connect_agent = stopped
        session = start(exit_timeout_s=20)
        train()
        if when != "starts":
            session.summary()
            os.kill(session._service.connection.pid, signal.SIGSTOP)
        if when == "filled":
            names = [f"name {number:04} {'x' * 150}" for number in range(4000)]
            session.log(dict.fromkeys(names, 1.0))
            thread = threading.Thread(target=session.summary, daemon=True)  # reports, as far as that is taken
            thread.start()
            time.sleep(2)
        train()
        began = time.monotonic()
        session.close()
        say(time.monotonic() - began, session._service.connection.pid)
        if "ASKS" in os.environ:
            say(session.summary()["steps"]["train"], session.summary()["state"])
            say(len(os.listdir("/proc/self/fd")) - before, threading.active_count())
        """,
        WHEN=when,
        **({"ASKS": "1"} if asks else {}),
    )
    took_s, agent = line(process).split()
    try:
        assert float(took_s) < 0.25  # 0.1 s, and a margin for a busy machine
        assert asks or process.wait(20) == 0
    finally:
        psutil.Process(int(agent)).resume()
    if asks:
        assert line(process) == "200 finished"
        assert line(process) == "0 1"
    assert summary(tmp_path, "finished")["steps"] == {"train": 200}


@pytest.mark.skipif(
    ends_its_container(), reason="here the program waits for its agent, which may end with it"
)
@pytest.mark.parametrize(
    ("agent_goes_on_after_s", "printed"), [(0.5, ["1", "2"]), (4.0, [])], ids=["in time", "too late"]
)
def test_the_end_waits_for_what_the_agent_has_for_the_program_itself(
    begin: Begin, tmp_path: Path, agent_goes_on_after_s: float, printed: list[str]
) -> None:
    """Blocks on the console, rows of trackers and provided exporters exist in the program alone: the agent cannot go on with them.

    The wait is bounded by ``exit_timeout_s``, and what may be missing then is said.
    """
    process = begin(f"""
        import subprocess
        session = start(console_metrics=["throughput"])
        session.summary()
        agent = session._service.connection.pid
        os.kill(agent, signal.SIGSTOP)
        train(); train()
        subprocess.Popen(["sh", "-c", "sleep {agent_goes_on_after_s}; kill -CONT " + str(agent)])
        began = time.monotonic()
        session.close()
        say(time.monotonic() - began)
        """)
    took_s = float(line(process))
    _, errors = process.communicate(timeout=30)

    assert re.findall(r"^\[Throughput\] Epoch (\d+):$", errors, re.MULTILINE) == printed, errors
    assert ("has not answered in 1.5 s at the end" in errors) == (not printed)
    assert took_s < 3.0  # exit_timeout_s, and a margin for a busy machine
    assert summary(tmp_path, "finished")["steps"] == {"train": 200}


def test_a_second_ctrl_c_ends_the_wait_for_the_agent(begin: Begin, tmp_path: Path) -> None:
    """It prints nothing, as without us, and the run was interrupted all the same."""
    process = begin(
        """
        from otel_train.agent import process
        process.ends_its_container = lambda: True  # else nothing waits for an agent that is stopped
        import atexit, torch._dynamo.utils  # torch may import tabulate at its exit, and then a bare program exits with 1
        atexit.unregister(torch._dynamo.utils.dump_compile_times)
        start(exit_timeout_s=30); train(); otel_train.summary(); say('trained'); time.sleep(60)
        """
    )
    line(process)
    agent = held_agent(tmp_path)
    try:
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    finally:
        agent.resume()

    assert process.returncode == -signal.SIGINT, errors
    assert errors.count("KeyboardInterrupt") == 1, errors
    assert "Exception ignored" not in errors
    assert summary(tmp_path, "interrupted")["steps"] == {"train": 100}


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 15),
    reason="an older kernel forgets how a process ended once its parent has waited for it",
)
@pytest.mark.parametrize(
    ("end", "state", "causes"),
    [
        ("os._exit(3)", "failed", ["exit code 3"]),
        ("os._exit(0)", "finished", []),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed", ["SIGKILL"]),
        ("os.abort()", "killed", ["SIGABRT"]),
    ],
)
def test_the_end_of_a_rank_is_known_after_its_parent_has_waited_for_it(
    begin: Begin, tmp_path: Path, end: str, *, state: str, causes: list[str]
) -> None:
    """A shell waits for it at once: before the agent has looked."""
    process = begin(f"start(); train(); otel_train.summary(); say('trained'); sys.stdin.readline(); {end}")
    line(process)
    agent = held_agent(tmp_path)
    try:
        process.communicate("\n", timeout=60)
    finally:
        agent.resume()

    assert summary(tmp_path, state)["steps"] == {"train": 100}
    assert [each["train.run.end.cause"] for each in events(tmp_path, "train.run.killed")] == causes


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of processes with 256 MB of memory."""
    rows = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    kinds, path = next((row.split(":", 2)[1:] for row in rows if ":memory:" in row), ("", ""))
    above = Path(f"/sys/fs/cgroup/memory{path}") if kinds else Path("/sys/fs/cgroup")
    group = above / f"otel-train-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if kinds else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(256 << 20))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group of memory can be made here: {error}")
    yield group
    waiting.until(lambda: not (group / "cgroup.procs").read_text().strip(), "its processes are gone")
    group.rmdir()


@pytest.mark.parametrize("late", [False, True], ids=["", "before its agent has looked"])
def test_a_rank_that_the_kernel_kills_for_want_of_memory_ends_by_an_oom_kill(
    begin: Begin, tmp_path: Path, small_group: Path, late: bool
) -> None:
    """Else it looks as if a user had killed it: the log of the kernel is not for users to read.

    A model that does not fit may be made right after ``instrument()``, while the agent starts.
    """
    process = begin(f"""
        from otel_train.agent import process
        connect = process.connect_agent

        def stopped(*given):
            connection = connect(*given)
            os.kill(connection.pid, signal.SIGSTOP)
            say(connection.pid)
            return connection

        if {late}:
            process.connect_agent = stopped
        say("up"); sys.stdin.readline(); start(); train()
        if not {late}:
            otel_train.summary()
        bytearray(1 << 30)
        """)
    line(process)
    (small_group / "cgroup.procs").write_text(str(process.pid))
    said, _ = process.communicate("\n", timeout=60)
    for agent in said.split():
        psutil.Process(int(agent)).resume()

    assert process.returncode == -signal.SIGKILL
    assert summary(tmp_path, "killed")["steps"] == {"train": 100}
    assert [each["train.run.end.cause"] for each in events(tmp_path, "train.run.killed")] == ["OOM kill"]


# -- several ranks on one node ---------------------------------------------------------------------


def place(rank: int, world_size: int, **more: str) -> dict[str, str]:
    """What a launcher says to a rank of a node."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size), "OTEL_TRAIN_RUN_ID": "job", **more,
    }  # fmt: skip


def page(url: str) -> dict[str, float]:
    """Training steps by rank, as the page has them."""
    from urllib.request import Request, urlopen

    from prometheus_client.openmetrics.parser import text_string_to_metric_families as families

    asked = Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urlopen(asked, timeout=5) as answer:
        text = answer.read().decode()
    found = {family.name: family for family in families(text)}  # type: ignore[no-untyped-call]  # theirs
    steps = found["train_steps"].samples if "train_steps" in found else []
    return {sample.labels["train_rank"]: sample.value for sample in steps}


WAITING = """
    session = start(export_interval_s=0.2)
    train()
    say(session.metrics_url)
    sys.stdin.readline()
    train()
"""


def test_ranks_of_a_node_have_one_agent_one_page_and_one_connection(begin: Begin, tmp_path: Path) -> None:
    """Eight of each would cost a node half a gigabyte, and a Collector eight connections."""
    with http_receiver() as receiver:
        send = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        begun = [begin(WAITING, **place(rank, 3, **send)) for rank in range(3)]
        urls = {line(process) for process in begun}

        assert len(urls) == 1
        assert len(agents(tmp_path)) == 1
        [url] = urls
        expected = dict.fromkeys("012", 100.0)
        until(lambda: page(url) == expected, "all ranks are on the page")
        until(lambda: len(ranks_of(receiver)) == 3, "all ranks have sent")
        # While several requests are under way each has one; one is kept.
        until(lambda: receiver.open_connections <= 1, "surplus connections are closed")

        begun[0].communicate("\n", timeout=60)
        until(lambda: page(url) == dict.fromkeys("12", 100.0), "the rank that has ended has left the page")
        for process in begun[1:]:
            process.communicate("\n", timeout=60)
            assert process.returncode == 0
    until(lambda: not agents(tmp_path), "the agent has left")
    found = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/rank*/summary.json")]
    assert [each["steps"] for each in found] == [{"train": 200}] * 3
    assert {each["state"] for each in found} == {"finished"}


def test_ranks_with_a_thousand_open_files_share_an_agent(begin: Begin, tmp_path: Path) -> None:
    """Shards of a data set, say: its number of the listening socket, which the agent keeps, is beyond what select(2) takes."""
    many = """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = [os.dup(0) for _ in range(1100)]
    """
    begun = [begin(many + WAITING, **place(rank, 2)) for rank in range(2)]
    urls = {line(process) for process in begun}

    assert (len(urls), len(agents(tmp_path))) == (1, 1)
    begun[1].kill()
    path = tmp_path / "runs" / "job" / "rank1" / "summary.json"
    until(lambda: path.exists() and json.loads(path.read_text())["state"] == "killed", "it is counted")
    _, errors = begun[0].communicate("\n", timeout=60)
    assert (begun[0].returncode, "agent" in errors.partition("━━")[0]) == (0, False), errors


def test_an_agent_of_many_ranks_sees_how_each_ends() -> None:
    """Each costs it some ten descriptors, and an agent inherits how many its program may open."""
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        low = os.pidfd_open(process.pid)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
        try:
            high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1500)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        process.kill()

        assert how_it_ended(process.pid, high) == ("killed", "SIGKILL")
        os.close(low)
        os.close(high)


def test_a_rank_that_the_agent_has_no_descriptor_for_gets_another_agent(begin: Begin, tmp_path: Path) -> None:
    """A node of hundreds of ranks. The ranks that are served go on, and the agent does not spin on one that it cannot accept."""
    begun = [begin(WAITING, **place(0, 2))]
    urls = {line(begun[0])}
    begun.append(begin("    say('up'); sys.stdin.readline()" + WAITING, **place(1, 2)))
    assert line(begun[1]) == "up"
    [agent] = agents(tmp_path)
    used = {int(path.name) for path in Path(f"/proc/{agent.pid}/fd").iterdir()}
    soft, hard = agent.rlimit(resource.RLIMIT_NOFILE)
    agent.rlimit(resource.RLIMIT_NOFILE, (min(set(range(len(used) + 1)) - used), hard))
    assert begun[1].stdin is not None
    begun[1].stdin.write("\n")
    begun[1].stdin.flush()
    until(lambda: len(agents(tmp_path)) == 2, "another agent")
    agent.rlimit(resource.RLIMIT_NOFILE, (soft, hard))
    urls.add(line(begun[1]))

    assert len(urls) == 2
    for process in begun:
        _, errors = process.communicate("\n", timeout=60)
        # It may say that its agent can open no file for a second; the path has the name of this test.
        said = errors.partition("━━")[0].replace(str(tmp_path), "")
        assert (process.returncode, "agent" in said) == (0, False), errors
    until(lambda: not agents(tmp_path), "the agents have left")
    found = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/rank*/summary.json")]
    assert [each["steps"] for each in found] == [{"train": 200}] * 2


def test_an_agent_goes_on_for_its_ranks_where_no_thread_is_left_for_another(tmp_path: Path) -> None:
    """pids.max, or ulimit -u. The rank reads the end of the connection, and has the work done elsewhere."""
    program = """
import resource, socket
from otel_train.agent.node import NodeAgent
agent = NodeAgent(None)
ours, theirs = socket.socketpair()
taken_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + (1 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
agent.take(theirs)
print(len(agent.channels), ours.recv(1))
"""
    done = launched([sys.executable, "-c", program], environ(), tmp_path)

    assert (done.returncode, done.stdout) == (0, "0 b''\n"), done.stderr


WHOLE = """
        session = start()
        session.run_directory
        train()
        session.close()
        say("over")
        """


def counted_to_the_end(process: subprocess.Popen[str], tmp_path: Path) -> str:
    """What a program with ``WHOLE`` writes to stderr, once every step of it is in its summary."""
    assert line(process) == "over"
    _, errors = process.communicate(timeout=60)
    assert summary(tmp_path, "finished")["steps"] == {"train": 100}, errors
    return errors


def test_a_thread_does_the_work_where_no_agent_of_another_rank_ever_begins(
    begin: Begin, tmp_path: Path
) -> None:
    """One that can start no more threads, say, closes every new connection. Nothing else would export the rank."""
    process = begin(
        """
        import socket
        from otel_train.agent import process as agent
        known, listener = agent._address, socket.socket(socket.AF_UNIX)
        def full():
            while True:
                listener.accept()[0].close()
        def taken(info, environ):
            address = known(info, environ)
            if not listener.getsockname():
                listener.bind(address)
                listener.listen()
                threading.Thread(target=full, daemon=True).start()
            return address
        agent._address = taken
        """
        + WHOLE,
        **place(0, 2),
    )

    assert counted_to_the_end(process, tmp_path).count("a thread of this process does its work") == 1


def test_why_no_agent_can_begin_is_said(begin: Begin, tmp_path: Path) -> None:
    """A module of the program that stands in the way of one of Python's, in a folder of PYTHONPATH."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "gzip.py").write_text("raise ImportError('not this one')\n", encoding="utf-8")
    process = begin(
        """
        import gzip
        os.environ["PYTHONPATH"] = os.getcwd() + "/modules"
        """
        + WHOLE
    )

    because = "ended before it began (ImportError: not this one); a thread of this process does its work"
    assert because in counted_to_the_end(process, tmp_path)


def test_ranks_of_two_versions_have_an_agent_each(begin: Begin, tmp_path: Path) -> None:
    """The package was upgraded while a run goes on: an agent of the old version may not read what a new rank sends."""
    begun = [begin(WAITING, **place(0, 2))]
    line(begun[0])
    begun.append(
        begin('    from otel_train.agent import process; process.VERSION = "99"' + WAITING, **place(1, 2))
    )
    line(begun[1])

    assert len(agents(tmp_path)) == 2
    for process in begun:
        process.communicate("\n", timeout=60)
        assert process.returncode == 0


@pytest.mark.parametrize("ports", [("29501", "29502"), ("29501", "29501")])
def test_two_jobs_with_one_run_id_at_once_are_two_runs(
    begin: Begin, tmp_path: Path, ports: tuple[str, str]
) -> None:
    """A script of Slurm starts two; torchrun without a name gives both the run id of the script."""
    first = [begin(WAITING, **place(rank, 2, MASTER_PORT=ports[0])) for rank in range(2)]
    urls = {line(process) for process in first}
    second = [begin(WAITING, **place(rank, 2, MASTER_PORT=ports[1])) for rank in range(2)]
    urls |= {line(process) for process in second}
    for process in (*first, *second):
        process.communicate("\n", timeout=60)
    until(lambda: not agents(tmp_path), "the agents have left")

    assert len(urls) == len(set(ports))
    found = {str(path.parent.relative_to(tmp_path)): path for path in tmp_path.glob("runs/*/*/summary.json")}
    assert sorted(found) == ["runs/job-2/rank0", "runs/job-2/rank1", "runs/job/rank0", "runs/job/rank1"]
    for path in found.values():
        ended = json.loads(path.read_text())
        assert (ended["steps"], ended["state"], ended["attempt"]) == ({"train": 200}, "finished", 0)


def test_the_agent_of_a_node_that_dies_is_followed_by_one_for_all_its_ranks(
    begin: Begin, tmp_path: Path
) -> None:
    """All ranks notice at once, and only one of them may start another."""
    begun = [begin(WAITING, **place(rank, 2)) for rank in range(2)]
    for process in begun:
        line(process)
    [agent] = agents(tmp_path)
    agent.kill()
    [other] = until(lambda: [each for each in agents(tmp_path) if each.pid != agent.pid], "another agent")
    for process in begun:
        _, errors = process.communicate("\n", timeout=60)
        assert process.returncode == 0
        assert errors.count("another one is started") == 1, errors
    until(lambda: not other.is_running(), "it has left")
    found = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/rank*/summary.json")]
    assert [each["steps"] for each in found] == [{"train": 200}] * 2


def test_a_rank_that_is_killed_is_counted_while_the_others_go_on(begin: Begin, tmp_path: Path) -> None:
    """The agent is not theirs alone."""
    begun = [begin(WAITING, **place(rank, 2)) for rank in range(2)]
    url, _ = [line(process) for process in begun]
    begun[1].kill()
    path = tmp_path / "runs" / "job" / "rank1" / "summary.json"
    until(lambda: path.exists() and json.loads(path.read_text())["state"] == "killed", "it is counted")
    assert json.loads(path.read_text())["steps"] == {"train": 100}
    until(lambda: page(url) == {"0": 100.0}, "the other one is still served")
    begun[0].communicate("\n", timeout=60)
    assert begun[0].returncode == 0
    until(lambda: not agents(tmp_path), "the agent has left")


def test_a_rank_that_meets_an_agent_which_is_leaving_finds_another(begin: Begin, tmp_path: Path) -> None:
    """The last rank of before has ended between the connection and the first message."""
    process = begin(
        """
        import socket
        from otel_train.agent import process as agent
        known, listener = agent._address, socket.socket(socket.AF_UNIX)
        def leave():
            connection, _ = listener.accept()
            listener.close()
            connection.close()
        def left(info, environ):
            address = known(info, environ)
            if listener.fileno() >= 0:
                listener.bind(address)
                listener.listen()
                threading.Thread(target=leave).start()
            return address
        agent._address = left
        session = start()
        train()
        session.close()
        say("over")
        """,
        **place(0, 2),
    )
    assert line(process) == "over"

    assert process.wait(timeout=60) == 0
    assert summary(tmp_path, "finished")["steps"]["train"] == 100


def test_another_users_socket_is_not_trusted_with_our_memory(begin: Begin, tmp_path: Path) -> None:
    """Names of the abstract namespace have no owner: another user may have taken ours."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    process = begin(
        """
        from otel_train.agent import process as agent
        known = agent._address
        def taken(info, environ):
            address = known(info, environ)
            if not os.path.exists("squatted"):
                ready, write = os.pipe()
                if os.fork() == 0:
                    os.setuid(65534)
                    listener = __import__("socket").socket(1)
                    listener.bind(address)
                    listener.listen()
                    os.write(write, b"x")
                    connection, _ = listener.accept()
                    os._exit(len(connection.recv(1)))
                os.read(ready, 1)
                open("squatted", "w").close()
            return address
        agent._address = taken
        session = start()
        train()
        session.close()
        say(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
        **place(0, 2),
    )
    said, errors = process.communicate(timeout=60)
    assert said.split() == ["0"], errors  # it was sent nothing
    assert summary(tmp_path, "finished")["steps"] == {"train": 100}


def test_an_address_that_a_silent_process_has_taken_is_said(begin: Begin) -> None:
    """Names of the abstract namespace have no owner: nothing is exported, and only the log can tell why."""
    process = begin(
        """
        import logging, queue
        from otel_train.agent import client, process as agent
        client.SILENT_S = 0.2
        listener = __import__("socket").socket(1)
        known = agent._address
        def taken(info, environ):
            address = known(info, environ)
            if listener.fileno() >= 0:
                listener.bind(address)
                listener.listen()
            return address
        agent._address = taken
        said = queue.Queue()
        logging.getLogger("otel_train").addFilter(lambda record: said.put(record.getMessage()) or True)
        session = start()
        say(os.getpid(), said.get(timeout=30))
        listener.close()  # the rank goes on by itself
        session.close()
        """,
        **place(0, 2),
    )
    pid, _, said = line(process).partition(" ")

    assert f"agent: process {pid}, which opened its address, has not begun in" in said
    assert process.wait(timeout=60) == 0


def test_an_agent_that_began_while_the_interpreter_was_held_is_not_said_to_be_silent(begin: Begin) -> None:
    """The first call of a library may hold it for a minute; the agent's message waits to be read then."""
    process = begin(
        """
        import ctypes, logging, struct, time
        from otel_train.agent import client
        said = []
        logging.getLogger("otel_train").addFilter(lambda record: said.append(record.getMessage()) or True)
        session = start()
        time.sleep(0.2)  # the service thread waits for the agent
        waiting = struct.pack("ihh", session._service.connection.channel.fileno(), 1, 0)
        libc = ctypes.PyDLL(None)  # its functions keep the lock
        client.SILENT_S = 5.0
        libc.poll(waiting, 1, 10_000)
        libc.sleep(6)  # the agent has sent what it sends at its start
        train()
        session.close()
        say(session.summary()["steps"]["train"], sum("has not begun" in each for each in said))
        """
    )

    assert line(process) == "100 0"
    assert process.wait(timeout=60) == 0


def test_a_client_that_says_nothing_does_not_keep_the_agent(begin: Begin, tmp_path: Path) -> None:
    """Any process of the user can connect: to be silent, to begin a message, or to send what is none."""
    process = begin(
        """
    from otel_train.agent import process as agent
    known = agent._address
    def address(info, environ):
        found = known(info, environ)
        say(found.hex())
        return found
    agent._address = address
    """
        + WAITING,
        **place(0, 2),
    )
    address = bytes.fromhex(line(process))
    url = line(process)
    clients = []
    for said in (b"", struct.pack("<Q", 1 << 20), struct.pack("<Q", 4) + b"none", b"x" * 100):
        clients.append(socket.socket(socket.AF_UNIX))
        clients[-1].connect(address)
        clients[-1].sendall(said)
    until(lambda: page(url) == {"0": 100.0}, "the rank is on the page")
    process.communicate("\n", timeout=60)

    assert process.returncode == 0
    assert summary(tmp_path, "finished")["steps"] == {"train": 200}  # and the agent has left
    for peer in clients:
        peer.close()


def ranks_of(receiver: Any) -> set[str]:
    """Ranks that have sent metrics."""
    return {
        attribute.value.string_value or str(attribute.value.int_value)
        for request in list(receiver.metrics)
        for group in request.resource_metrics
        for attribute in group.resource.attributes
        if attribute.key == "train.rank"
    }
