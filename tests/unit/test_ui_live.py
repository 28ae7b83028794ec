"""Following runs while they are written: steps, life signs, metrics; and the command that serves the page."""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_train.datamodel import Anchor
from otel_train.errors import ConfigError
from otel_train.recording.events import Op, SourceKind, code
from otel_train.recording.flight_recorder import Heartbeat, heartbeat_of
from otel_train.recording.recorder import Recorder
from otel_train.resource import namespace_of, process_mark
from otel_train.rundata.flight import read_postmortem
from otel_train.rundata.live_view import RankReader, RankView, RunList
from otel_train.rundata.liveness import QUIET_S, liveness
from otel_train.rundata.metrics_history import MOST_MOMENTS, MetricsHistory
from otel_train.testing import FakeClock
from otel_train.ui.pages import overview
from otel_train.ui.server import PageServer, browser_url, has_screen, listen
from tests.support.command_line import Cli
from tests.support.flight import PrivateMemory
from tests.support.left_run import MS, leave_run, say_summary
from tests.support.programs import line
from tests.support.slow_clients import answered, served_s, trickling
from tests.unit.test_report import metrics_line

START_S = 10**9
HERE = os.uname().nodename
NO_PROCESS = 2**22 + 1  # more than a pid can be on Linux


class Training:
    """A process that trains, as its flight file shows it: 10 ms steps, of which forward takes 4."""

    def __init__(self, runs: Path, *, edges: int = 1 << 12, identity: dict[str, str] | None = None) -> None:
        self.run = runs / "r1"
        (self.run / "rank0").mkdir(parents=True)
        (self.run / "run.json").write_text(json.dumps({"run_id": "r1", "host": HERE}))
        self.clock = FakeClock(1000)
        self._memory = PrivateMemory(
            edges, Anchor(START_S * 10**9, self.clock()), self.run / "rank0/flight.bin"
        )
        self._recorder = Recorder(self._memory, clock=self.clock)
        self._recorder.set_identity({"run_id": "r1", "rank": 0, "attempt": 0, **(identity or {})})
        kinds = {"data": SourceKind.DATA, "forward": SourceKind.FORWARD, "optimizer": SourceKind.OPTIMIZER}
        self.sources = {name: self._recorder.source(kind, name) for name, kind in kinds.items()}

    @property
    def now_s(self) -> float:
        return START_S + (self.clock() - 1000) / 1e9

    def begin(self, stage: str) -> None:
        self._recorder.edge(code(Op.BEGIN, self.sources[stage], 3 if stage == "forward" else 0))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for stage, ms in (("data", 1), ("forward", 4), ("optimizer", 5)):
                self.begin(stage)
                self.clock.tick(ms * MS)
                self._recorder.edge(code(Op.END, self.sources[stage]))

    def heartbeat(self) -> None:
        self._memory.poll(int(self.now_s * 1e9))

    def close(self) -> None:
        self._recorder.release_memory()
        self._memory.close()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    made.close()


def viewer(training: Training) -> RankReader:
    return RankReader(now=lambda: training.now_s)


def look(viewer: RankReader, training: Training) -> RankView:
    return viewer.view(training.run, None)


def test_steps_are_seen_as_soon_as_they_are_made(training: Training) -> None:
    """The flight file is mapped: nothing has to be written, flushed or asked for. The step is 10 ms, 10 % of it data."""
    seeing = viewer(training)
    training.train(5)
    training.heartbeat()
    assert look(seeing, training).steps == 5

    training.train(3)
    view = look(seeing, training)

    assert (view.steps, view.progress.exact) == (8, True)
    assert view.progress.now_step_s == pytest.approx(0.010)
    assert view.progress.now_data_share == pytest.approx(0.1)
    assert view.progress.spans_s[-1] == pytest.approx((0.07, 0.08))
    assert list(view.progress.stages_s) == ["data", "forward", "optimizer"]


def test_the_stage_that_is_open_is_shown(training: Training) -> None:
    """A run that hangs shows where."""
    training.train(2)
    training.begin("data")
    training.clock.tick(300 * MS)
    training.heartbeat()

    [inside] = look(viewer(training), training).progress.open

    assert (inside["stage"], inside["loader"], inside["for_seconds"]) == ("data", "data", pytest.approx(0.3))


@pytest.mark.parametrize("later", [7, 1500])
def test_steps_beyond_the_file_are_counted_from_the_summary(training: Training, later: int) -> None:
    """The ring holds the last 500 or so. A fast run makes more in the half minute between two summaries: they are estimated."""
    training.train(2000)
    training.heartbeat()
    wall_s = training.now_s - START_S
    written: dict[str, Any] = {"started_unix_s": float(START_S), "wall_seconds": wall_s}
    say_summary(training.run, state="running", steps={"train": 2000}, **written)

    training.train(later)
    training.heartbeat()
    view = look(viewer(training), training)

    assert (view.steps, view.progress.exact) == (2000 + later, False)
    assert len(view.progress.step_s) == 200


def test_what_was_written_at_the_end_holds(training: Training) -> None:
    """A flight file may have lost steps; the summary of a run that ended has them all."""
    training.train(5)
    training.heartbeat()
    written = {"steps": {"train": 9000}, "started_unix_s": float(START_S), "wall_seconds": 1.0}
    say_summary(training.run, **written)

    assert look(viewer(training), training).steps == 9000


def heartbeat(quiet_s: float, pid: int = NO_PROCESS, **place: str | int) -> Heartbeat:
    return Heartbeat(pid, START_S + 100 - quiet_s, place and {"host": HERE, **place})


def state_of(summary: dict[str, Any], last: Heartbeat | None) -> str:
    return liveness(summary, {}, last, written_s=None, now_s=START_S + 100.0).word


@pytest.mark.parametrize(
    ("summary", "last", "word"),
    [
        ({"state": "finished"}, heartbeat(50), "finished"),
        ({"state": "killed"}, None, "killed"),
        ({"state": "running"}, heartbeat(0.5), "running"),
        ({}, heartbeat(QUIET_S - 1), "running"),
        ({"state": "running", "host": HERE}, heartbeat(QUIET_S + 1), "gone"),
        ({"state": "running", "host": HERE}, heartbeat(QUIET_S + 1, os.getpid()), "silent"),
        ({"state": "running", "host": "elsewhere"}, heartbeat(QUIET_S + 1), "silent"),
        # The number of a process means nothing in another container.
        ({"state": "running", "host": HERE}, heartbeat(QUIET_S + 1, pid_namespace="pid:[1]"), "silent"),
        ({"state": "finished", "started_unix_s": START_S + 1.0, "wall_seconds": 9.0}, heartbeat(2), "running"),
        ({"state": "finished", "started_unix_s": 1.0, "wall_seconds": 9.0, "until_unix_s": START_S + 99.0}, heartbeat(2), "finished"),
        ({"state": "running", "host": HERE}, heartbeat(-3600), "gone"),
        ({"state": "running", "host": HERE}, heartbeat(-3600, os.getpid()), "running"),
        ({"state": "running", "host": "elsewhere"}, heartbeat(-3600), "running"),
        # The last heartbeat may be late, and in containers the next attempt may have the same pid.
        ({"state": "finished", "attempt": 1, "until_unix_s": START_S + 1.0}, heartbeat(2, attempt=1), "finished"),
        ({"state": "finished", "attempt": 0, "until_unix_s": START_S + 97.0}, heartbeat(2, attempt=1), "running"),
        ({"state": "finished", "pid": NO_PROCESS}, heartbeat(2), "finished"),
        ({"state": "finished", "pid": NO_PROCESS}, heartbeat(2, os.getpid()), "running"),
        ({"state": ["finished"]}, None, "unknown"),
        ({}, None, "unknown"),
    ],
)  # fmt: skip
def test_a_run_is_what_its_last_sign_says(summary: dict[str, Any], last: Heartbeat | None, word: str) -> None:
    """Gone is not the same as finished, nor silent as gone; a restart is a run that goes on."""
    assert state_of(summary, last) == word


OF_A_LATER_PROCESS = f"a-boot/{os.getpid()}/1"


@pytest.mark.parametrize(
    ("identity", "alive"),
    [
        ({"host": HERE, "process": process_mark(os.getpid()), "pid_namespace": namespace_of("pid")}, True),
        ({"host": HERE, "process": OF_A_LATER_PROCESS, "pid_namespace": namespace_of("pid")}, False),
        ({"host": HERE, "process": OF_A_LATER_PROCESS, "pid_namespace": "pid:[1]"}, None),
        ({"host": "elsewhere"}, None),
        ({"host": HERE}, True),
        ({}, True),
    ],
    ids=["this one", "a later one", "in another container", "on another host", "no /proc", "an earlier version"],
)  # fmt: skip
def test_all_readers_agree_on_whether_the_process_of_a_rank_lives(
    identity: dict[str, str], alive: bool | None, tmp_path: Path, cli: Cli
) -> None:
    """The page said silent, for ever, of a rank whose number another process had, and the post-mortem that it died."""
    training = Training(tmp_path, identity=identity)
    training.train(1)
    training.heartbeat()
    training.clock.tick(int(QUIET_S + 1) * 1000 * MS)
    say_summary(training.run, state="running", host=identity.get("host", HERE), started_unix_s=float(START_S))

    shown = cli("summary", training.run).out
    [row] = RunList(tmp_path).rows()

    words = {look(viewer(training), training).state.word, row.state.word}
    assert words == {"gone" if alive is False else "silent"}
    assert read_postmortem(training.run / "rank0")["alive"] is alive
    assert ("its process is gone" in shown) == (alive is False)
    training.close()


@pytest.mark.parametrize(
    ("quiet_s", "said", "hangs"), [(2, "for 2.00 s", False), (19, "no step has ended for 19.0 s", True)]
)
def test_the_page_says_for_how_long_no_step_has_ended(
    quiet_s: int, said: str, hangs: bool, training: Training
) -> None:
    """It showed 100 steps per second, and that the loop was between two stages, of a loop that hung in a lock."""
    training.train(5)
    training.clock.tick(quiet_s * 1000 * MS)
    training.heartbeat()

    page = overview(look(viewer(training), training))

    assert "between stages" in page
    assert ("no step has ended" in page) == hangs
    assert said in page


@pytest.mark.parametrize(("quiet_s", "alive"), [(1.0, True), (QUIET_S + 1, None)])
def test_the_post_mortem_goes_by_the_heartbeat_of_another_container(
    quiet_s: float, alive: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said unknown of a rank that the list of runs showed as running."""
    training = Training(tmp_path, identity={"host": HERE, "pid_namespace": "pid:[1]"})
    training.train(1)
    training.heartbeat()
    monkeypatch.setattr("time.time", lambda: training.now_s + quiet_s)
    [row] = RunList(tmp_path).rows()

    report = read_postmortem(training.run / "rank0")

    assert report["alive"] is alive
    assert row.state.word == ("running" if alive else "silent")
    training.close()


def test_a_zombie_process_is_gone() -> None:
    """A launcher that hangs leaves zombie ranks, whose pids are still taken."""
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as dead:
        assert dead.stdout is not None
        dead.stdout.read()  # ends with the process, which is a zombie until it is waited for
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)

        assert state_of({"state": "running", "host": HERE}, heartbeat(QUIET_S + 1, dead.pid)) == "gone"


def test_the_end_of_a_rank_whose_summary_cannot_be_read_is_not_known(training: Training) -> None:
    """A cut off ``summary.json`` of a run that had finished read ``gone``, and critical."""
    training.train(5)
    training.heartbeat()
    (training.run / "rank0" / "summary.json").write_text('{"state": "fini')
    view = RankReader(now=lambda: training.now_s + 100).view(training.run, 0)

    assert view.state.word == "unknown"
    assert view.notices[0].severity == "warning"
    assert "summary.json" in view.notices[0].summary


def test_without_a_flight_file_the_age_of_the_summary_tells(tmp_path: Path) -> None:
    """On network file systems there is none: a summary comes every 30 s."""
    about = {"state": "running", "host": HERE, "pid": NO_PROCESS}
    for age_s, word in ((40.0, "running"), (100.0, "gone")):
        assert liveness(about, {}, None, written_s=START_S - age_s, now_s=float(START_S)).word == word
    slow = {"settings": {"tuning": {"summary_interval_s": 60}}}
    assert liveness(about, slow, None, written_s=START_S - 100.0, now_s=float(START_S)).word == "running"


@pytest.mark.parametrize(
    ("about", "word"),
    [
        ({"rank": 0, "pid": NO_PROCESS, "host": HERE}, "gone"),
        ({"rank": 0, "pid": os.getpid(), "host": HERE}, "unknown"),
        ({"rank": 0, "pid": NO_PROCESS, "host": "elsewhere"}, "unknown"),
        ({"rank": 1, "pid": NO_PROCESS, "host": HERE}, "unknown"),
    ],
    ids=["ended", "goes on", "on another host", "of another rank"],
)
def test_a_rank_whose_agent_could_not_begin_is_gone_once_its_process_is(
    about: dict[str, Any], word: str, tmp_path: Path
) -> None:
    """An agent that ``pids.max`` ends leaves ``run.json`` and no more: the run was unknown for ever."""
    run = tmp_path / "r1"
    (run / "rank0").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(about))
    [row] = RunList(tmp_path).rows()

    view = RankReader().view(run, 0)

    assert (row.state.word, view.state.word) == (word, word)


def test_a_flight_file_that_is_no_longer_written_is_worked_out_once(tmp_path: Path) -> None:
    """Pages of runs that ended stay open, and ask on."""
    run = leave_run(tmp_path, [5])
    say_summary(run)
    seeing = RankReader()

    assert seeing.view(run, 0).progress is seeing.view(run, 0).progress


def test_a_rank_that_failed_is_shown_once_its_summary_arrives(tmp_path: Path) -> None:
    """On a network file system it may come late: the run was `finished` until the server was started anew."""
    run = leave_run(tmp_path, [5])
    say_summary(run)
    runs = RunList(tmp_path)
    [before] = runs.rows()
    other = json.loads((run / "rank0/summary.json").read_text())
    (run / "rank1").mkdir()
    (run / "rank1/summary.json").write_text(
        json.dumps({**other, "rank": 1, "state": "failed", "end_cause": "x"})
    )

    [after] = runs.rows()

    assert (before.state.word, after.state.word, after.cause) == ("finished", "failed", "x")


def test_metadata_of_captures_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page asks every second, and a run of many ranks has hundreds of these files."""
    run = leave_run(tmp_path, [5])
    (run / "captures").mkdir()
    taken = {"file": "a-rank0.json.gz", "trigger": "on_demand", "steps": [1, 2], "finding": {}}
    path = run / "captures/a-rank0.record.json"
    path.write_text(json.dumps(taken))
    seeing = RankReader()
    first = seeing.view(run, 0).records
    monkeypatch.setattr("otel_train.rundata.run.wrong_values", None)

    assert list(seeing.view(run, 0).records) == list(first) == [taken]


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.otlp.jsonl").open("a") as file:
        file.write(text)


def write_lines(folder: Path, seconds: range) -> None:
    append(folder, "".join(json.dumps(metrics_line(second)) + "\n" for second in seconds))


def test_lines_of_metrics_are_followed(tmp_path: Path) -> None:
    """100 steps in each second, as they come; half a line is no line yet."""
    history = MetricsHistory(tmp_path)
    assert history.read() == ({}, [])
    write_lines(tmp_path, range(1, 4))
    assert history.read()[0]["times"] == [1.0, 2.0]
    torn = json.dumps(metrics_line(4)) + "\n"
    append(tmp_path, torn[:100])
    assert history.read()[0]["times"] == [1.0, 2.0]
    append(tmp_path, torn[100:])

    series, [first, _] = history.read()
    assert series["times"] == [1.0, 2.0, 3.0]
    assert series["steps_per_s"] == [100.0] * 3
    assert first["name"] == "train · code · forward"


def test_time_per_step_after_a_restart_is_of_the_steps_since(tmp_path: Path) -> None:
    """Counters begin at zero again."""
    write_lines(tmp_path, range(1, 4))
    append(tmp_path, json.dumps(metrics_line(5, trained=1)) + "\n")

    series, _ = MetricsHistory(tmp_path).read()
    assert series["stages"]["forward"] == pytest.approx([0.008] * 3)


def started(line: dict[str, Any], start_s: int) -> dict[str, Any]:
    """Write the start of the run into a line, as the agent does."""
    for metric in line["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]:
        for point in metric.get("sum", {}).get("dataPoints", ()):
            point["startTimeUnixNano"] = str(start_s * 10**9)
    return line


def test_time_counts_from_the_start_of_the_run(tmp_path: Path) -> None:
    """The first line comes after an interval, and the axis began there: a run of 48 s ended at 33 s."""
    for second in (16, 31, 46):
        append(tmp_path, json.dumps(started(metrics_line(second), 1001)) + "\n")

    series, _ = MetricsHistory(tmp_path).read()
    assert series["times"] == [15.0, 30.0, 45.0]
    assert series["memory"]["process memory usage"][0] == pytest.approx(5.16e8)


def test_the_line_at_the_end_of_a_run_makes_no_spike(tmp_path: Path) -> None:
    """100 steps in each second, and each line lacks the last 2 s of them; the last comes after 3 s and lacks none."""
    for second, trained in ((0, 0), (15, 13), (30, 28), (45, 43), (48, 48)):
        append(tmp_path, json.dumps(metrics_line(second, trained)) + "\n")

    series, _ = MetricsHistory(tmp_path).read()
    assert series["times"] == [15.0, 30.0, 45.0, 48.0]
    assert series["steps_per_s"] == pytest.approx([1300 / 15, 100.0, 2000 / 18, 2000 / 18])
    assert len(series["memory"]["process memory usage"]) == 4


def test_a_file_that_was_put_aside_keeps_its_place_in_the_course(tmp_path: Path) -> None:
    """Bounded files rotate; a chart must not begin anew."""
    write_lines(tmp_path, range(1, 4))
    (tmp_path / "metrics.otlp.jsonl").rename(tmp_path / "metrics.otlp.jsonl.1")
    write_lines(tmp_path, range(4, 6))
    history = MetricsHistory(tmp_path)
    assert history.read()[0]["times"] == [1.0, 2.0, 3.0, 4.0]

    (tmp_path / "metrics.otlp.jsonl").rename(tmp_path / "metrics.otlp.jsonl.1")
    write_lines(tmp_path, range(6, 7))

    assert history.read()[0]["times"] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_charts_of_a_file_that_is_too_large_are_of_its_end_and_that_is_said(training: Training) -> None:
    """A disk that was full left a hole of gigabytes; a line with an end is behind it."""
    rank = training.run / "rank0"
    write_lines(rank, range(1, 4))
    os.truncate(rank / "metrics.otlp.jsonl", 8 << 30)
    append(rank, "\n")
    write_lines(rank, range(5, 8))

    view = RankReader().view(training.run, 0)

    assert view.series["times"] == [1.0, 2.0]
    [said] = [notice.summary for notice in view.notices if "charts" in notice.summary]
    assert said.startswith("metrics.otlp.jsonl has 8,589,9")
    assert said.endswith(" bytes: the charts show what is in its last 256 MiB.")


def test_a_long_course_is_thinned(tmp_path: Path) -> None:
    """A week of lines every 15 s is 40,000: more than a screen can show, and the last must be among them."""
    history = MetricsHistory(tmp_path)
    for start in range(1, 3 * MOST_MOMENTS, 100):
        write_lines(tmp_path, range(start, start + 100))
        series, _ = history.read()

    assert MOST_MOMENTS // 2 < len(series["times"]) <= 2 * MOST_MOMENTS
    assert series["times"][-1] == 3 * MOST_MOMENTS - 1
    again, _ = MetricsHistory(tmp_path).read()
    assert len(again["times"]) <= 2 * MOST_MOMENTS
    assert again["times"][-1] == pytest.approx(3 * MOST_MOMENTS - 1, abs=2)


def test_a_port_that_is_taken_gives_way_to_the_next() -> None:
    """Two people, one machine; the address that is printed holds."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        if port > 65000:
            pytest.skip("the system gave a port at the very end")
        with listen("127.0.0.1", port) as second:
            assert second.getsockname()[1] > port
            assert browser_url(second) == f"http://127.0.0.1:{second.getsockname()[1]}/"


def test_only_this_machine_can_ask_by_default() -> None:
    """Run names, hosts and paths are private to this machine."""
    with listen("127.0.0.1", 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match="no-such-host"):
        listen("no-such-host.invalid", 8420)


def test_an_address_is_one_to_type() -> None:
    """0.0.0.0 is none, and colons need brackets."""
    with listen("0.0.0.0", 0) as sock:
        assert browser_url(sock).startswith("http://127.0.0.1:")
    if socket.has_ipv6:
        with listen("::1", 0) as sock:
            assert browser_url(sock).startswith("http://[::1]:")


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, False),
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "w"}, True),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "x"}, False),
    ],
)
def test_a_browser_is_opened_where_it_can_be_seen(environ: dict[str, str], seen: bool) -> None:
    """Not on the other end of an SSH connection."""
    assert has_screen(environ) is seen


@pytest.mark.parametrize("module", ["starlette", "uvicorn"])
def test_without_the_extra_the_command_says_how_to_get_it(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """One line to paste, before anything listens."""
    for imported in ("otel_train.cli.ui", "otel_train.ui.server"):
        monkeypatch.delitem(sys.modules, imported, raising=False)
    monkeypatch.setitem(sys.modules, module, None)

    said = f"otel-train: {module} is not installed. Run: pip install 'otel-train[web]'\n"
    assert cli("ui", tmp_path, "--no-open").refused == said


@pytest.mark.parametrize(
    "case",
    [
        "a-file: is not a folder",
        "20260131-x7: there is no such folder; expected a folder of run directories, a run directory, or the id of a run below",
        f"--host={'a' * 64}: label too long",
        f"--host=192.0.2.1: {os.strerror(errno.EADDRNOTAVAIL)}. Give a name or an address of this machine",
    ],
)
def test_what_cannot_be_served_is_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """A slip of the finger."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    word, said = case.split(": ")

    assert said in cli("ui", word, "--port=0").refused


SERVE = "import sys; sys.modules['torch'] = None; from otel_train.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("word", ["runs", "runs/r1", "r1"])
def test_the_page_is_served_without_torch_until_ctrl_c(word: str, tmp_path: Path) -> None:
    """It runs on laptops that have no torch, and a browser that holds a connection open does not hold up the end."""
    say_summary(leave_run(tmp_path / "runs", [5]))
    command = [sys.executable, "-c", SERVE, "ui", word, "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as served:
        try:
            address = line(served).split()[-1]
            connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=60)
            connection.request("GET", "/run/r1?tab=timing")
            answer = connection.getresponse()
            text = answer.read().decode()
            served.send_signal(signal.SIGINT)
            code = served.wait(60)
            connection.close()
        finally:
            served.kill()

    assert (answer.status, code) == (200, 130)
    assert "backward" in text


def test_the_heartbeat_of_a_file_that_otel_train_did_not_write_is_none(tmp_path: Path) -> None:
    """The list looks at the first bytes of whatever is called flight.bin."""
    path = tmp_path / "flight.bin"
    assert heartbeat_of(path) is None
    for data in (b"", b"OTELTRN1", b"x" * 200):
        path.write_bytes(data)
        assert heartbeat_of(path) is None


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Of the page, as the command serves it."""
    with listen("127.0.0.1", 0) as sock:
        server = PageServer(tmp_path)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        yield int(sock.getsockname()[1])
        server.should_exit = True
        thread.join(10)


def status_of(port: int, *, host: str = "localhost") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/", headers={"Host": host})
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_page_comes_while_forty_clients_trickle(port: int) -> None:
    """More than it serves at once, and none of them is ever silent."""
    took_s = []
    with trickling(port, 40), trickling(port, 40):
        time.sleep(0.3)
        for _ in range(10):
            begun_s = time.monotonic()
            assert status_of(port) == 200
            took_s.append(time.monotonic() - begun_s)
            time.sleep(0.05)

    assert max(took_s) < 2


def test_a_request_for_the_page_has_two_seconds_and_eight_kilobytes_in_all(port: int) -> None:
    """Its server knows neither limit."""
    assert 1.5 < served_s(port, b"G") < 5
    assert answered(port, b"GET /?" + b"x" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""


def test_a_browser_keeps_its_connection_from_page_to_page(port: int) -> None:
    """The bounds are of one request, not of a connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        for _ in range(30):
            connection.request("GET", "/", headers={"Cookie": "x" * 1000})
            response = connection.getresponse()
            assert response.status == 200
            response.read()
        time.sleep(2.5)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def test_the_served_page_answers_to_its_own_names_alone(port: int) -> None:
    """As it is started by the command."""
    hosts = ("localhost:1", "127.0.0.1", "evil.example")
    assert [status_of(port, host=host) for host in hosts] == [200, 200, 421]
