"""``otel-train``: what it prints, and how it ends."""

from __future__ import annotations

import argparse
import ctypes
import errno
import io
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from otel_train.cli import arguments, demo, postmortem, profile, summary
from otel_train.cli.main import COMMANDS, main
from otel_train.console.text import TextLayout, display_width
from otel_train.errors import RunDirectoryError
from otel_train.exporters.otlp_response import why
from otel_train.exporters.spool import SpoolQueue
from otel_train.files import replace_json
from otel_train.rundata.live_view import RankReader, RunList
from otel_train.ui.captures import artifacts
from tests.support.command_line import Cli
from tests.support.left_run import leave_run
from tests.support.made_trace import training
from tests.support.programs import line
from tests.support.waiting import until

GOLDEN = Path(__file__).parents[1] / "golden"
PLAIN = TextLayout(80, color=False, unicode=True)
WITHOUT_RIGHTS = 65_534


def rank_summary(rank: int, **values: Any) -> dict[str, Any]:
    """What a rank leaves behind, as far as these tests look."""
    return {
        "schema": "otel_train.summary/2",
        "run_id": "r1",
        "run_name": "nightly",
        "rank": rank,
        "state": "finished",
        "wall_seconds": 10.0,
        "steps": {"train": 50},
        "activities": {"productive": 10.0 - rank, "data_wait": float(rank)},
        "findings": [{"name": "input_bound", "loader": "code", "summary": "c"}] if rank else [],
        "telemetry": {"records_lost": 0},
    } | values


@pytest.fixture
def run_of_two(tmp_path: Path) -> Path:
    """A run directory with two ranks in it."""
    run = tmp_path / "runs" / "r1"
    for rank in (0, 1):
        (run / f"rank{rank}").mkdir(parents=True)
        (run / f"rank{rank}" / "summary.json").write_text(json.dumps(rank_summary(rank)))
    (run / "run.json").write_text("{}")
    return run


def complete_run(runs: Path) -> None:
    """A run directory with what a rank leaves behind, and a capture."""
    run = leave_run(runs, [3])
    (run / "rank0" / "summary.json").write_text(json.dumps(rank_summary(0)))
    (run / "captures").mkdir()
    training(steps=1).write(run / "captures" / "epoch_1-rank0.json")
    (run / "captures" / "epoch_1-rank0.record.json").write_text("{}")


def program(*command: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, in a process of its own."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
    return subprocess.run(list(map(str, command)), text=True, timeout=60, check=False, **streams)


def command(*words: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run ``otel-train`` as a user does, in a process of its own."""
    return program(sys.executable, "-m", "otel_train", *words, **settings)


def test_help_names_every_command_and_imports_none() -> None:
    """Help must not wait three seconds for the import of torch."""
    code = (
        "import sys; from otel_train.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'opentelemetry', 'psutil', 'prometheus_client'} & set(sys.modules)))"
    )

    shown = program(sys.executable, "-c", code).stdout

    assert shown.splitlines()[-1] == "[]"
    assert all(f"    {name}" in shown for name in COMMANDS)
    assert "otel_train.instrument(" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, cli: Cli) -> None:
    """A command whose help is a list of flags has to be learned elsewhere."""
    shown = cli(name, "--help").printed

    assert f"otel-train {name}" in shown
    assert len(shown.splitlines()) > 5


def test_without_a_command_the_help_is_shown_and_the_exit_code_says_so(cli: Cli) -> None:
    """In a script, a forgotten word must not look like success."""
    assert "commands" in cli().refused


def test_the_version_is_that_of_the_package(cli: Cli) -> None:
    """The first question of every bug report."""
    shown = cli("--version").printed

    assert re.match(r"otel-train (\d+\.\d+|\(run from its sources)", shown)


@pytest.mark.parametrize(("state", "live"), [("running", True), ("finished", False)])
def test_the_summary_of_a_live_run_says_how_old_it_is_and_where_metrics_are(
    state: str, live: bool, run_of_two: Path, cli: Cli
) -> None:
    """It is written every 30 s, and stays ``running`` where the container is gone. No page answers after the end."""
    url = "http://127.0.0.1:9464/metrics"
    found = rank_summary(0, state=state, started_unix_s=time.time() - 10.0 - 3600.0, metrics_url=url)
    (run_of_two / "rank0" / "summary.json").write_text(json.dumps(found))
    out = cli("summary", run_of_two).out

    assert ("Written 60.0 min ago." in out) == live
    assert f"metrics    {'' if live else 'was at '}{url}\n" in out


def test_the_summary_of_an_attempt_that_has_been_followed_by_another_says_so(
    run_of_two: Path, cli: Cli
) -> None:
    """For half a minute a run that was started again read as the failed one before."""
    for rank in (0, 1):
        found = rank_summary(rank, state="failed", attempt=0)
        (run_of_two / f"rank{rank}" / "summary.json").write_text(json.dumps(found))
        (run_of_two / f"rank{rank}" / "attempt").write_text("0\n")
    assert cli("summary", run_of_two).err == ""

    (run_of_two / "rank1" / "attempt").write_text("1\n")
    said = f"{run_of_two}: rank 1: a new attempt has written no summary yet"
    assert said in cli("summary", run_of_two).err


def test_the_summary_says_which_requests_the_collector_has_not_accepted(run_of_two: Path, cli: Cli) -> None:
    """Nothing had arrived of a run, and its summary said "none lost". It is right after a replay, too."""
    queues = [SpoolQueue(run_of_two / f"rank{rank}", "metrics") for rank in (0, 1)]
    for queue in queues:
        queue.append(b"{}")
        queue.append(b"{}")
    command = f"otel-train replay {run_of_two}"

    said = f"otlp       4 requests wait in the spool\n             {command}\n"
    assert said in cli("summary", run_of_two).out

    for queue in queues:
        with queue.sending():
            queue.reject(queue.head(), "answers 400")  # type: ignore[arg-type]  # there is one
    out = cli("summary", run_of_two).out
    assert "2 requests wait in the spool, 2 requests were rejected\n" in out
    assert f"{command} --rejected\n" in out

    for rank in (0, 1):
        shutil.rmtree(run_of_two / f"rank{rank}" / "spool")
    assert "otlp" not in cli("summary", run_of_two).out


def left_an_hour_ago(path: Path, host: str) -> None:
    """Write what a rank leaves whose process and agent were killed together."""
    now_s, rank = time.time(), int(path.parent.name.removeprefix("rank"))
    found = rank_summary(rank, state="running", host=host, pid=(1 << 22) + 1, started_unix_s=now_s - 3610.0)
    path.write_text(json.dumps(found))
    os.utime(path, (now_s - 3600.0, now_s - 3600.0))


@pytest.mark.parametrize(("host", "word"), [(os.uname().nodename, "gone"), ("another", "silent")])
def test_the_summary_shows_each_rank_as_the_list_of_runs_does(
    host: str, word: str, run_of_two: Path, cli: Cli
) -> None:
    """A node was lost with its agent: the state of its rank is what was written last, and the others had ended."""
    left_an_hour_ago(run_of_two / "rank1" / "summary.json", host)

    assert re.search(rf"^ +1 +{word} ", cli("summary", run_of_two).out, re.MULTILINE)
    shown = cli("summary", run_of_two, "--rank", "1").out
    assert f"● {word} " in shown
    assert ("min ago, and its process is gone." in shown) == (word == "gone")


def test_the_summary_is_as_patient_as_the_list_of_runs(run_of_two: Path, cli: Cli) -> None:
    """Without a flight recorder a sign of life is a new summary, here one in two hours; it took that for gone."""
    (run_of_two / "run.json").write_text('{"settings": {"tuning": "summary_interval_s=7200"}}')
    left_an_hour_ago(run_of_two / "rank0" / "summary.json", os.uname().nodename)
    [row] = RunList(run_of_two.parent).rows()

    out = cli("summary", run_of_two, "--rank", "0").out

    assert row.state.word == "running"
    assert "● running " in out
    assert "Written 60.0 min ago." in out


@pytest.mark.parametrize("recorded", [True, False])
def test_a_post_mortem_is_named_where_there_is_one(recorded: bool, run_of_two: Path, cli: Cli) -> None:
    """Without a flight recorder ``otel-train postmortem`` refuses the run, and everything pointed there."""
    for rank in (0, 1):
        left_an_hour_ago(run_of_two / f"rank{rank}" / "summary.json", os.uname().nodename)
    (run_of_two / "rank1" / "summary.json").write_text(json.dumps(rank_summary(1, state="failed")))
    if recorded:
        (run_of_two / "rank1" / "flight.bin").write_bytes(b"")

    view = RankReader().view(run_of_two, 0)

    advice = {notice.title: notice.advice for notice in view.notices}
    for said in (
        cli("summary", run_of_two).out,
        artifacts(view, None),
        advice["gone"],
        advice["other ranks failed"],
    ):
        assert ("otel-train postmortem" in said) is recorded


def test_an_expected_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """A traceback says 'we broke'; a wrong path is not that."""
    ended = command("summary", "no\nsuch", "--run-dir", str(tmp_path))

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("otel-train: ")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["analyze", "report", "validate"])
def test_a_run_that_goes_while_it_is_read_is_no_unexpected_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Old runs are removed, and moved, while others are read: here before each look at a file."""
    runs, looks = tmp_path / "runs", 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, *args: Any, **options: Any) -> Any:
            nonlocal looks
            looks -= "dir_fd" in options or str(path).startswith(str(runs))
            if looks == 0:
                (runs / "r1").replace(tmp_path / f"gone-{moment}")
            return call(path, *args, **options)

        return look

    for call in ("open", "listdir", "scandir", "stat", "lstat"):
        monkeypatch.setattr(os, call, counted(getattr(os, call)))
    for moment in range(1, 100):
        complete_run(runs)
        looks = moment
        assert main([name, "--run-dir", str(runs)]) in {0, 1, 2}
        assert "unexpected" not in capsys.readouterr().err
        if looks > 0:
            break
        looks = -1
        shutil.rmtree(runs)
    assert 0 < looks < moment


@pytest.mark.parametrize(("number", "which"), [(4, "training 4"), ("4", "the newest training")])
def test_the_training_that_is_shown_has_its_own_number(
    number: object, which: str, run_of_two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier ones may have been removed, so that their number says nothing."""
    (run_of_two / "training-2" / "rank0").mkdir(parents=True)
    replace_json(run_of_two / "run.json", {"training": number})

    arguments.print_earlier_trainings(run_of_two)

    assert f"{run_of_two} shows {which} of its run. To see the one before" in capsys.readouterr().err


def test_a_misspelt_command_is_refused_with_the_one_that_is_near(cli: Cli) -> None:
    """The list of all of them has fifteen."""
    assert "'sumary': there is no such command. Did you mean 'summary'?" in cli("sumary", "runs/a").refused
    assert "invalid choice: 'qqq'" in cli("qqq").refused


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["validate", "r1", "--rank", "0"], "otel-train validate"),
        (["stack", "up", "--x"], "otel-train stack up"),
    ],
)
def test_an_unknown_option_is_refused_with_the_usage_of_its_command(
    words: list[str], usage: str, cli: Cli
) -> None:
    """Which options there are is what the reader wants to know next."""
    said = cli(*words).refused

    assert said.startswith(f"usage: {usage} [-h]")
    assert f"{usage}: error: unrecognized arguments: --" in said


@pytest.mark.parametrize("words", [["summary", "--\x1b[31mred"], ["validate", "r1", "\x1b[2Jx\u202ey"]])
def test_an_unknown_argument_is_repeated_without_its_control_characters(words: list[str], cli: Cli) -> None:
    """A shell script may pass on what it was given."""
    said = cli(*words).refused

    assert "\\x1b[" in said
    assert "\x1b" not in said
    assert "\u202e" not in said


class Interrupt:
    def __set_name__(self, owner: type, name: str) -> None:
        raise KeyboardInterrupt


def interrupted(args: object) -> int:
    raise KeyboardInterrupt


def interrupted_as_a_class_is_made(args: object) -> int:
    type("Named", (), {"value": Interrupt()})
    return 0


@pytest.mark.parametrize("run", [interrupted, interrupted_as_a_class_is_made])
def test_ctrl_c_ends_a_command_quietly(
    run: Callable[[object], int], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Python before 3.12 makes a RuntimeError of what ``__set_name__`` raises, as in an import."""
    monkeypatch.setattr(summary, "run", run)

    assert cli("summary", "r1") == (128 + signal.SIGINT, "", "")


INTERRUPTED_IMPORT = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "otel_train.config.validation": {0}
sys.meta_path.insert(0, Interrupt())
from otel_train.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("how", ["raise KeyboardInterrupt", "raise RuntimeError from KeyboardInterrupt()"])
def test_ctrl_c_while_a_command_is_imported_ends_it_quietly(how: str) -> None:
    """That is a tenth of a second, and more on a busy machine. Python 3.11 wraps it where a class is made."""
    done = program(sys.executable, "-c", INTERRUPTED_IMPORT.format(how))

    assert (done.returncode, done.stderr) == (130, "")


WAITING = """
import sys, time
from otel_train.cli import summary
from otel_train.__main__ import main
summary.run = lambda args: print("waits", flush=True) or time.sleep(600)
sys.argv = ["otel-train", "summary", "r1"]
sys.exit(main())
"""


@contextmanager
def ended_by_one_ctrl_c(*words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A Python that has begun; after the block Ctrl-C ends it, and it says that a disk may not answer."""
    process = subprocess.Popen(
        [sys.executable, "-c", *words], env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        yield process
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert errors == "otel-train: interrupted in a system call that does not return: a disk may not answer\n"


def test_ctrl_c_ends_a_command_whose_disk_does_not_answer() -> None:
    """A read from a hanging FUSE or NFS mount goes on when a signal arrives. So does the main thread that a tracer holds."""
    ptrace, seize, interrupt = ctypes.CDLL(None).ptrace, 0x4206, 0x4207  # linux/ptrace.h
    # Another thread would take the signal of one that is held.
    with ended_by_one_ctrl_c(WAITING, OPENBLAS_NUM_THREADS="1") as process:
        assert line(process) == "waits"
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING, "it waits")
        assert ptrace(seize, process.pid, None, None) == ptrace(interrupt, process.pid, None, None) == 0
        assert os.WIFSTOPPED(os.waitpid(process.pid, 0)[1])


HUNG_PAGE = """
import sys, threading
from otel_train.__main__ import main
from otel_train.rundata.live_view import RunList
RunList.rows = lambda self: print("waits", flush=True) or threading.Event().wait()
sys.argv = ["otel-train", "ui", sys.argv[1], "--no-open", "--port", "0"]
sys.exit(main())
"""


def test_one_ctrl_c_ends_the_pages_of_runs_whose_disk_does_not_answer(run_of_two: Path) -> None:
    """A request that is being answered is in a thread which the interpreter waits for at its end."""
    with ExitStack() as browsers, ended_by_one_ctrl_c(HUNG_PAGE, str(run_of_two.parent)) as process:
        address = line(process).split()[-1]
        port = int(address.rstrip("/").rpartition(":")[2])
        browser = browsers.enter_context(socket.create_connection(("127.0.0.1", port)))
        browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert line(process) == "waits"


@pytest.mark.parametrize("words", [["summary", "r1"], ["analyze"], ["validate"], ["compare", "r1", "r2"]])
def test_where_no_run_is_found_it_is_said_that_the_file_with_the_setting_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, words: list[str]
) -> None:
    """The file names the folder of the runs: without it they are looked for in another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_TRAIN_CONFIG", "/gone/otel.yaml")
    first, second = cli(*words), cli(*words, "--run-dir", "/elsewhere")

    assert first.code == second.code == 2
    assert first.err.count("\n") == second.err.count("\n") == 1
    assert "OTEL_TRAIN_CONFIG='/gone/otel.yaml': cannot be read: No such file or directory." in first.err
    assert "OTEL_TRAIN_CONFIG=" not in second.err


def test_a_reader_that_has_gone_is_no_error(run_of_two: Path) -> None:
    """``otel-train summary | head -1`` must not end in a traceback."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout:
        ended = command("summary", run_of_two, stdout=stdout)

    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


WITHOUT_THREADS = """
import sys, threading
from otel_train.__main__ import main
def start(thread): raise RuntimeError("can't start new thread")
threading.Thread.start = start
sys.exit(main())
"""


def test_a_command_runs_where_no_thread_can_be_started(run_of_two: Path) -> None:
    """A user's limit of processes counts threads."""
    ended = program(sys.executable, "-c", WITHOUT_THREADS, "summary", run_of_two)

    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")  # noqa: PTH110 - a device
@pytest.mark.parametrize("words", ["summary {} --json", "summary {}", "metrics", "--help", "summary --help"])
def test_a_full_disk_under_the_output_is_named_and_no_file_that_was_read(
    run_of_two: Path, words: str
) -> None:
    """Whoever reads that a file of the run may be damaged looks in the wrong place; a half output with 0 is worse."""
    with open("/dev/full", "w") as stdout:  # noqa: PTH123 - a device
        ended = command(*words.format(run_of_two).split(), stdout=stdout)

    said = "otel-train: standard output cannot be written: [Errno 28] No space left on device\n"
    assert (ended.returncode, ended.stderr) == (2, said)


@pytest.mark.parametrize(("closed", "code"), [(1, 0), (2, 2)])
def test_a_closed_stream_is_no_error_and_no_message_goes_to_the_other(
    run_of_two: Path, closed: int, code: int
) -> None:
    """Cron and daemons close them; output for a script must not have a complaint in it."""
    words = f'exec "$0" -m otel_train summary --json "$1" {closed}>&-'
    ended = program("/bin/sh", "-c", words, sys.executable, run_of_two if closed == 1 else "no-such-run")

    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


def test_a_summary_of_several_ranks_begins_with_a_row_for_each(run_of_two: Path, cli: Cli) -> None:
    """The odd rank out is what one looks for first."""
    out = cli("summary", run_of_two).printed

    lines = out.splitlines()
    assert "2 ranks" in lines[0]
    assert lines[2].split()[:3] == ["0", "finished", "10.0"]
    assert lines[3].endswith("input_bound (code)")
    assert "10.0 %" in lines[3]
    assert any("rank 0 of" in line for line in lines)


def test_a_rank_without_a_loader_waits_for_none(run_of_two: Path, cli: Cli) -> None:
    """0.0 % would be a measurement; there is nothing to wait for."""
    assert "0.0 %" not in cli("summary", run_of_two).out.splitlines()[2]

    path = run_of_two / "rank0" / "summary.json"
    path.write_text(json.dumps(rank_summary(0, batches={"code": 50})))
    assert "0.0 %" in cli("summary", run_of_two).out.splitlines()[2]


@pytest.mark.parametrize("words", [["r1", "--rank", "1"], ["r1/rank1"]])
def test_one_rank_can_be_asked_for(
    run_of_two: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """By number, or by the folder that tab completion offers."""
    monkeypatch.chdir(run_of_two.parent)
    shown = cli("summary", *words, "--run-dir", ".").printed

    assert "ranks" not in shown
    assert "rank 1 of" in shown


def test_json_is_one_object_per_rank(run_of_two: Path, cli: Cli) -> None:
    """Scripts read lines; what they get is what the rank wrote."""
    shown = cli("summary", "r1", "--json", "--run-dir", run_of_two.parent).printed

    assert [json.loads(line) for line in shown.splitlines()] == [rank_summary(0), rank_summary(1)]


def test_a_summary_of_version_1_is_shown_under_the_keys_of_version_2(run_of_two: Path, cli: Cli) -> None:
    """Runs outlive the version that wrote them; a script that knows today's keys reads them all."""
    former = {
        **rank_summary(1), "schema": "otel_train.summary/1", "telemetry": {"pump_cpu_seconds": 1.0},
        "verdicts": [{"name": "input_bound", "loader": "code", "claim": "c"}], "unobserved": [{"what": "model"}],
    }  # fmt: skip
    del former["findings"]
    (run_of_two / "rank1" / "summary.json").write_text(json.dumps(former))

    shown = cli("summary", "r1", "--json", "--rank", "1", "--run-dir", run_of_two.parent).printed

    assert json.loads(shown) == {
        **rank_summary(1), "telemetry": {"agent_cpu_seconds": 1.0}, "instrumentation_gaps": [{"what": "model"}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a JSON object"),
        ("{}", "schema is None"),
        ('{"schema": "otel_train.summary/9"}', "expected 'otel_train.summary/2'"),
        ("\x00\xff", "cannot be read"),
    ],
)
def test_a_summary_that_is_none_is_refused(run_of_two: Path, text: str, message: str, cli: Cli) -> None:
    """Half a run summary from half a file would be believed."""
    (run_of_two / "rank0" / "summary.json").write_text(text)

    assert message in cli("summary", run_of_two, "--rank", "0").refused


@pytest.mark.parametrize(("name", "file"), [("summary", "summary.json"), ("postmortem", "flight.bin")])
def test_a_rank_whose_file_is_damaged_does_not_hide_the_others(
    name: str, file: str, tmp_path: Path, cli: Cli
) -> None:
    """One file that a full disk left empty kept back what a thousand others said."""
    run = leave_run(tmp_path, [3])
    (run / "rank0" / "summary.json").write_text(json.dumps(rank_summary(0)))
    shutil.copytree(run / "rank0", run / "rank1")
    (run / "rank1" / file).write_bytes(b"")
    code, out, err = cli(name, run)

    assert code == 1
    assert "rank 0" in out
    assert str(run / "rank1") in err
    assert cli(name, run, "--rank", "1").code == 2


@pytest.mark.parametrize(("name", "file"), [("summary", "summary.json"), ("postmortem", "flight.bin")])
def test_ranks_without_the_file_are_named(name: str, file: str, tmp_path: Path, cli: Cli) -> None:
    """The page of one rank of three looked like that of a run of one."""
    run = leave_run(tmp_path, [3])
    (run / "rank0" / "summary.json").write_text(json.dumps(rank_summary(0)))
    for rank in (1, 2):
        (run / f"rank{rank}").mkdir()
    code, _, err = cli(name, run)

    assert code == 0
    assert f"ranks 1, 2 left no {file}" in err


@pytest.mark.parametrize("words", [["--rank", "7"], []])
def test_a_rank_that_left_nothing_is_named(run_of_two: Path, words: list[str], cli: Cli) -> None:
    """The answer says which ranks there are, or that training has not begun."""
    if not words:
        for rank in (0, 1):
            (run_of_two / f"rank{rank}" / "summary.json").unlink()

    assert ("Ranks that have one: 0, 1" if words else "Has training begun?") in cli(
        "summary", run_of_two, *words
    ).refused


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("summary.json", ["summary", "report"]),
        ("flight.bin", ["postmortem"]),
        ("metrics.otlp.jsonl", ["compare"]),
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_named_instead_of_asking_whether_training_has_begun(
    name: str, commands: list[str], run_of_two: Path, cli: Cli
) -> None:
    """It has begun: the question sent the reader to the wrong place."""
    for rank in (0, 1):
        path = run_of_two / f"rank{rank}" / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    for command in commands:
        said = cli(command, *[run_of_two] * (2 if command == "compare" else 1)).refused
        assert f"rank0/{name}: cannot be read: a pipe or a device" in said
        assert "begun" not in said


@pytest.mark.parametrize("command", ["summary", "postmortem", "compare"])
def test_no_line_is_wider_than_a_narrow_terminal(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Tables were laid out for 80 columns at least, and the terminal broke each of their lines."""
    run = leave_run(tmp_path, [9], loader="a loader with a long name")
    shutil.copytree(run / "rank0", run / "rank1")
    for rank in (0, 1):
        (run / f"rank{rank}" / "summary.json").write_text(json.dumps(rank_summary(rank)))
    trace = tmp_path / "trace.json"
    training(steps=8).write(trace)
    monkeypatch.setenv("COLUMNS", "60")

    lines = cli(command, *((trace, trace) if command == "compare" else (run,))).out.splitlines()

    assert len(lines) > 4
    assert [line for line in lines if display_width(line) > 60] == []


@pytest.mark.parametrize("command", ["summary", "export", "compare"])
def test_of_many_ranks_a_message_names_groups(run_of_two: Path, command: str, cli: Cli) -> None:
    """It had four thousand numbers, and lost the last of them where it was cut."""
    for rank in (*range(2, 900), 1000):
        (run_of_two / f"rank{rank}").mkdir()
        (run_of_two / f"rank{rank}/summary.json").touch()
    runs = [run_of_two] * (2 if command == "compare" else 1)

    assert cli(command, *runs, "--rank", "950").refused.endswith(": 0-899, 1000\n")


def process_of(folder: Path) -> int:
    """Reads a rank, as a postmortem does; gives the process that did."""
    if folder.name == "rank3":
        raise RunDirectoryError("rank3 is damaged")
    return os.getpid()


def test_flight_files_of_many_ranks_are_read_by_other_processes_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full one takes more than a second: of a thousand ranks the first word came after twenty minutes."""
    for rank in range(12):
        (tmp_path / f"rank{rank}").mkdir()
        (tmp_path / f"rank{rank}" / "flight.bin").touch()
    args = argparse.Namespace(run=str(tmp_path), rank=None, run_dir="")

    found, code = arguments.read_ranks(args, "flight.bin", process_of, is_slow=True)

    assert [folder.name for folder in found] == [f"rank{rank}" for rank in range(12) if rank != 3]
    assert os.getpid() not in found.values()
    assert (code, capsys.readouterr().err) == (1, "otel-train: rank3 is damaged\n")


def test_a_postmortem_of_many_ranks_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    """As by ``timeout 60 otel-train postmortem``."""
    run = leave_run(tmp_path, [9])
    for rank in range(1, 9):
        shutil.copytree(run / "rank0", run / f"rank{rank}")
    program = (
        "import sys, time; from otel_train.rundata import flight\ndef slow(_): time.sleep(60)\n"
        "flight.read_postmortem = slow\n"
        "from otel_train.cli.main import main; main(['postmortem', sys.argv[1]])"
    )
    process = psutil.Popen([sys.executable, "-c", program, str(run)])
    until(process.children)
    workers = process.children()
    process.terminate()
    process.wait(10)

    assert not psutil.wait_procs(workers, timeout=10)[1]


def test_a_postmortem_of_a_large_run_has_the_pages_of_four_ranks(tmp_path: Path, cli: Cli) -> None:
    """It had thirty thousand lines for a thousand ranks, and the sentence on the suspect above them."""
    run = leave_run(tmp_path, [9])
    for rank in range(1, 20):
        shutil.copytree(run / "rank0", run / f"rank{rank}")
    said = cli("postmortem", run).out

    assert said.count("the last steps") == 4
    assert said.endswith(
        "\nPages of 4 of 20 ranks are above; 'otel-train postmortem RUN --rank N' prints that of another one.\n"
    )
    assert len(cli("postmortem", run, "--json").out.splitlines()) == 20


def test_a_run_without_a_flight_recorder_has_no_postmortem_and_the_command_says_why(
    run_of_two: Path, cli: Cli
) -> None:
    """It asked only whether training had begun, of a run that had ended."""
    assert "switched off (flight_recorder=False)?" in cli("postmortem", run_of_two).refused


def report(**facts: Any) -> dict[str, Any]:
    """A process that was killed in a backward."""
    backward = {
        "stage": "backward",
        "loader": "code",
        "model": "net",
        "thread": "MainThread",
        "for_seconds": 0.8,
    }
    stages = {"data": 0.05, "forward": 0.02, "backward": 0.03, "optimizer": 0.001, "other": 0.0002}
    return {
        "run_id": "20260131-x7", "rank": 0, "attempt": 1, "pid": 4242, "alive": False, "state": "running",
        "started_unix_s": 1769860000.0, "last_edge_unix_s": 1769860120.5, "step": 1234,
        "last_step": {"index": 1234, "started_unix_s": 1769860119.0, "duration_s": 1.5},
        "open": [{**backward, "stage": "update"}, backward], "steps_in_file": 10233,
        "recent_steps": [
            {"index": index, "duration_s": 0.1 + 0.01 * (index % 5), "stages": stages} for index in range(1214, 1234)
        ],
        "edges_in_file": 81920,
        "threads": [
            {"name": "MainThread", "edges": 81910, "last_edge_unix_s": 1769860120.5, "open": [backward]},
            {"name": "uploader\x1b[2J", "edges": 10, "last_edge_unix_s": 1769860100.0, "open": []},
        ],
        "warnings": ["The ring was overrun once: 12 edges are missing before step 1."],
    } | facts  # fmt: skip


def test_a_postmortem_looks_as_it_was_approved() -> None:
    """Read on a bad day; rewrite with GOLDEN=write, then look at it."""
    path = GOLDEN / "run_summary_postmortem_80.txt"

    text = postmortem.render(PLAIN, report())

    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert all(display_width(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({}, "rank 0 died in stage backward of step 1234, loader code, 800 ms after it began"),
        ({"open": [], "last_step": None}, "rank 0 died with no stage open"),
        ({"open": [], "step": 1235}, "rank 0 died after step 1234, with no stage open"),
        ({"open": []}, "rank 0 died in step 1234, with no stage open"),
        (
            {"alive": True, "open": [], "after": "backward", "quiet_seconds": 19.3},
            "rank 0 is running, in step 1234, after backward, with no stage open for 19.3 s",
        ),
        (
            {"alive": True, "open": [{"stage": "data", "loader": "", "for_seconds": None}]},
            "rank 0 is running, in stage data of step 1234",
        ),
        (
            {"alive": None, "open": [{"stage": "data", "loader": "a", "for_seconds": 90.0}]},
            "rank 0 was last seen in stage data of step 1234, loader a, 90.0 s after it began",
        ),
        ({"state": "finished", "open": []}, "rank 0 finished after step 1234, with no stage open"),
        ({"state": "terminated", "open": []}, "rank 0 was terminated in step 1234, with no stage open"),
        (
            {"state": "killed", "end_cause": "SIGSEGV", "open": [], "after": "unknown", "quiet_seconds": 0.2},
            "rank 0 was killed (SIGSEGV) in step 1234, with no stage open for 200 ms",
        ),
    ],
)
def test_one_sentence_says_what_it_was_doing(facts: dict[str, Any], sentence: str) -> None:
    """It is what one pastes into the incident channel, so it must state no more than is known."""
    assert postmortem.headline(report(**facts)) == sentence


@pytest.mark.parametrize(
    ("facts", "badge"),
    [
        ({}, "● gone"),
        ({"alive": True}, "● running"),
        ({"alive": None}, "● silent"),
        ({"alive": True, "state": "finished"}, "● finished"),
        ({"alive": False, "state": "killed"}, "● killed"),
    ],
)
def test_the_title_of_a_postmortem_says_no_more_than_its_sentence(facts: dict[str, Any], badge: str) -> None:
    """A rank of another host may well be alive, and a program may live on after its session."""
    assert badge in postmortem.render(TextLayout(80, False, True), report(**facts)).splitlines()[0]


def test_a_flight_file_that_knows_nothing_still_makes_a_page() -> None:
    """A process may die before its first edge."""
    assert "no stage open" in postmortem.render(PLAIN, dict.fromkeys(report()))


def test_the_demo_says_what_to_try_next() -> None:
    """The end of the demo is the beginning of use."""
    found = {"metrics_url": "http://127.0.0.1:9464/metrics", "run_dir": "runs/a b"}

    quiet = demo.closing_text(found, {})
    sending = demo.closing_text(
        found, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector:4318/v1/metrics"}
    )

    assert "http://127.0.0.1:9464/metrics" in quiet
    assert "otel-train summary 'runs/a b'" in quiet
    assert "set OTEL_EXPORTER_OTLP_ENDPOINT" in quiet
    assert "Exported to       http://collector:4318/v1/metrics" in sending
    assert "set OTEL_EXPORTER_OTLP_ENDPOINT" not in sending


def test_the_demo_names_its_command_as_this_shell_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``make demo`` runs ``.venv/bin/otel-train``, and .venv is not on the PATH of a new user."""
    script = tmp_path / ".venv/bin/otel-train"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(script.parent))
    monkeypatch.setenv("PATH", str(tmp_path))

    beside = demo.command_line()
    monkeypatch.setenv("PATH", str(script.parent))

    assert (beside, demo.command_line()) == (".venv/bin/otel-train", "otel-train")
    assert ".venv/bin/otel-train summary runs/a" in demo.closing_text(
        {"run_dir": "runs/a"}, {}, command=beside
    )


@pytest.mark.parametrize(
    ("finding", "workers", "line"),
    [
        ({"name": "input_bound", "loader": "code", "advice": "(num_workers=0): num_workers=2"}, 0, "demo --workers 2\n"),
        ({"name": "input_bound", "loader": "code", "advice": "num_workers=9"}, 0, "Follow the advice otel-train demo --workers 9"),
        ({"name": "input_bound", "loader": "code", "advice": "num_workers=6 (it has 4)"}, 4, "otel-train demo --workers 6"),
        ({"name": "input_bound", "loader": "code", "advice": "look at the storage"}, 4, ""),
        ({"name": "input_bound", "loader": "code", "advice": "ask one iterator for many batches"}, 0, ""),
        ({"name": "input_bound", "loader": "prose", "advice": "num_workers=2"}, 0, ""),
        ({"name": "compute_bound", "advice": "Little to gain at the input."}, 0, ""),
        ({"name": "compute_bound", "advice": ""}, 4, "Without workers   otel-train demo\n"),
        ({"name": "too_early", "advice": "Let it run."}, 0, "Let it run longer otel-train demo --minutes 1"),
        ({}, 0, ""),
    ],
)  # fmt: skip
def test_what_the_demo_proposes_follows_from_its_finding(
    finding: dict[str, Any], workers: int, line: str
) -> None:
    """It said "follow the advice: --workers 4" below a finding with nothing to do, or that asks for 2."""
    said = demo.closing_text({"findings": [finding] if finding else []}, {}, workers=workers)

    assert line in said
    assert ("otel-train demo" in said) == bool(line)


@pytest.mark.parametrize(
    "option",
    [
        "demo --minutes=0", "demo --seed=-1", "demo --steps=-1", "demo --workers=100000", "doctor --wait=-1",
        "replay --wait=-1", "replay --older-than=-1", "profile --steps=0", "profile --steps=10001",
        "profile --warmup=-1", "profile --timeout=0", "analyze --top=0", "summary --rank=-1",
        "compare A B --rank=-1", "ui --port=-1", "ui --port=70000",
    ],
)  # fmt: skip
@pytest.mark.parametrize("odd", ["", "nan", "inf", "1e999", "soon", "9" * 5000, "\x1b[2J"])
def test_an_option_that_is_no_number_in_its_bounds_is_refused_with_the_rule(
    option: str, odd: str, cli: Cli
) -> None:
    """A number that is none makes a command wait for ever, or print nothing and call that success."""
    *words, given = option.split()
    name, _, number = given.partition("=")
    err = cli(*words, f"{name}={odd or number}").refused

    said = err.splitlines()[-1]
    assert f"argument {name}: '" in said
    assert ": expected " in said
    assert len(said) < 250
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("words", "rank"), [("{}", 0), ("{}/rank1", 1), ("{}/rank1 --ranks=0,1", 0), ("{} --rank=1", 1)]
)
def test_a_capture_of_a_run_that_has_ended_is_refused_at_once(
    run_of_two: Path, words: str, rank: int, cli: Cli
) -> None:
    """Nothing would answer, and the command would wait for five minutes."""
    for each in (0, 1):
        (run_of_two / f"rank{each}" / "flight.bin").write_bytes(b"")
    err = cli("profile", *words.format(run_of_two).split()).refused

    assert f"rank {rank} has ended (finished)" in err
    assert not (run_of_two / "rank1" / "capture-request.json").exists()


@pytest.mark.parametrize("word", ["--ranks=a,b", "--rank=3"])
def test_ranks_of_a_program_that_is_started_for_a_capture_are_refused(
    word: str, tmp_path: Path, cli: Cli
) -> None:
    """They were ignored, and the demo was profiled."""
    given = word.replace("=", " ")

    assert f"{given}: names ranks of a live run" in cli("profile", f"--output-dir={tmp_path}", word).refused


def test_a_rank_beside_ranks_is_refused(run_of_two: Path, cli: Cli) -> None:
    """It was ignored: the ranks were captured without it."""
    assert "expected one of them" in cli("profile", run_of_two, "--rank=1", "--ranks=0").refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--older-than=1", "--older-than: has no effect without --blocks"),
        ("--wait=1", "--wait: has no effect without --verify"),
        ("--prometheus=http://p:9090 --blocks=b", "--prometheus: has no effect with --blocks"),
        ("--endpoint=http://c:4318 --verify", "--endpoint: has no effect with --verify"),
        ("--all --verify", "--all: has no effect with --verify"),
        ("--rejected --blocks=b", "--rejected: has no effect with --blocks"),
    ],
)
def test_an_option_of_replay_that_would_be_ignored_is_refused(
    words: str, said: str, run_of_two: Path, cli: Cli
) -> None:
    """Whoever gives it expects an effect."""
    assert said in cli("replay", run_of_two, *words.split()).refused


@pytest.mark.parametrize(
    ("words", "starts"), [("", False), ("--output-dir=d", True), ("--output-dir=d r1", False)]
)
def test_a_profile_of_the_demo_counts_as_a_program_that_is_started(
    words: str, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It handles Ctrl-C itself, and forks: no thread may run beside it."""
    begun: list[str] = []

    def begin(_: object, name: str) -> threading.Thread:
        begun.append(name)
        return threading.Thread()

    monkeypatch.setattr(sys, "argv", ["otel-train", "profile", *words.split()])
    monkeypatch.setattr(profile, "run", lambda _: 0)
    monkeypatch.setattr("otel_train.cli.main.daemon_thread", begin)

    assert main() == 0
    assert bool(begun) != starts


def test_a_request_for_a_capture_that_no_one_took_is_taken_back(run_of_two: Path, cli: Cli) -> None:
    """Left in the folder, the next start of the run would capture what is not waited for."""
    rank = run_of_two / "rank0"
    (rank / "flight.bin").write_bytes(b"")
    (rank / "summary.json").write_text(json.dumps(rank_summary(0, state="running")))
    code, out, _ = cli("profile", run_of_two, "--timeout=0.1")

    assert code == 2
    assert "no capture after 0.1 s" in out
    assert not (rank / "capture-request.json").exists()


def test_a_capture_is_not_waited_for_after_the_end_of_the_run(
    run_of_two: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command said for five minutes that it waits, and then that there was no capture after 300 s."""
    rank = run_of_two / "rank0"
    (rank / "flight.bin").write_bytes(b"")
    (rank / "summary.json").write_text(json.dumps(rank_summary(0, state="running")))
    monkeypatch.setattr(profile, "FINDING_S", 0.0)

    def end() -> None:
        while not (rank / "capture-request.json").exists():
            time.sleep(0.01)
        replace_json(rank / "summary.json", rank_summary(0, state="finished"))

    ending = threading.Thread(target=end)
    ending.start()
    code, out, _ = cli("profile", run_of_two, "--timeout=86400")
    ending.join()

    assert code == 2
    assert "rank 0: no capture: it has ended (finished)" in out


def test_a_request_that_the_rank_has_not_read_is_not_replaced(run_of_two: Path, cli: Cli) -> None:
    """The command that left it would wait in vain."""
    rank = run_of_two / "rank0"
    (rank / "flight.bin").write_bytes(b"")
    (rank / "summary.json").write_text(json.dumps(rank_summary(0, state="running")))
    earlier = {"steps": 9, "request_id": "of another command"}
    replace_json(rank / "capture-request.json", earlier)
    code, out, _ = cli("profile", run_of_two, "--timeout=0.1")

    assert code == 2
    assert "no capture after 0.1 s" in out
    assert json.loads((rank / "capture-request.json").read_text()) == earlier


def test_the_capture_of_another_request_is_no_answer(run_of_two: Path, cli: Cli) -> None:
    """It was printed as the requested one, and the request, which waited for it, was taken back."""
    rank = run_of_two / "rank0"
    (rank / "flight.bin").write_bytes(b"")
    (rank / "summary.json").write_text(json.dumps(rank_summary(0, state="running")))
    (run_of_two / "captures").mkdir(exist_ok=True)
    taken = {"bytes": 1, "rank": 0, "problem": "", "warnings": [], "finding": {"summary": "c"}}
    still_asked = []

    def take_both() -> None:
        until((rank / "capture-request.json").exists)
        request = json.loads((rank / "capture-request.json").read_text())
        others = {"trigger": "schedule", "request_id": ""}, {**request, "request_id": "of another command"}
        for first, asked in enumerate((*others, request)):
            name = f"epoch_1-step_{first}-rank0"
            record = {
                **taken,
                "file": f"{name}.json.gz",
                "trigger": "on_demand",
                **asked,
                "steps": [first, 5],
            }
            replace_json(run_of_two / f"captures/{name}.record.json", record)
            time.sleep(2 * profile._POLL_S)
            still_asked.append((rank / "capture-request.json").exists())

    taking = threading.Thread(target=take_both)
    taking.start()
    out = cli("profile", run_of_two, "--timeout=20").printed
    taking.join()

    assert still_asked == [True, True, False]
    assert out.startswith("rank 0: steps 2-5: ")


@pytest.fixture
def as_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., Any]]:
    """Calls a function as a user without rights, who owns the folder of runs."""
    user = os.geteuid()

    def call(function: Callable[..., Any], *words: object) -> Any:
        monkeypatch.chdir(tmp_path / "runs")  # pytest's folders above it are closed to other users
        for each in (tmp_path / "runs", *(tmp_path / "runs").rglob("*")) if not user else ():
            os.chown(each, WITHOUT_RIGHTS, -1)
        try:
            os.seteuid(user or WITHOUT_RIGHTS)
            return function(*words)
        finally:
            os.seteuid(user)

    return call


def test_rows_of_ranks_are_named_by_their_folders(tmp_path: Path, cli: Cli) -> None:
    """With a folder that was copied there were two rows of rank 0, and none of rank 1."""
    complete_run(tmp_path)
    shutil.copytree(tmp_path / "r1" / "rank0", tmp_path / "r1" / "rank1")

    assert re.search(r"^ *1 +finished", cli("summary", tmp_path / "r1").printed, re.MULTILINE)
    reports = cli("postmortem", tmp_path / "r1", "--json").printed.splitlines()
    assert [json.loads(each)["rank"] for each in reports] == [0, 1]


@pytest.mark.parametrize("words", ["summary", "report", "postmortem"])
def test_a_rank_that_may_not_be_read_is_named_with_the_reason(
    words: str, run_of_two: Path, cli: Cli, as_another_user: Any
) -> None:
    """The question whether training has begun sent the reader to the wrong place."""
    cli(words, run_of_two)  # imports the command
    shutil.rmtree(run_of_two / "rank1")
    (run_of_two / "rank0").chmod(0)
    said = as_another_user(cli, words, "./r1").refused
    (run_of_two / "rank0").chmod(0o700)

    assert said == "otel-train: r1/rank0: cannot be read: Permission denied\n"


def test_a_rank_that_may_not_be_read_does_not_hide_the_others(
    run_of_two: Path, cli: Cli, as_another_user: Any
) -> None:
    """Nor is it said that it left nothing."""
    cli("summary", run_of_two)  # imports the command
    (run_of_two / "rank0").chmod(0)
    every = as_another_user(cli, "summary", "./r1")
    one = as_another_user(cli, "summary", "./r1", "--rank=0").refused
    (run_of_two / "rank0").chmod(0o700)

    assert every.code == 1
    assert every.err == one == "otel-train: r1/rank0: cannot be read: Permission denied\n"
    assert "rank 1" in every.out


def test_a_rank_that_is_a_link_is_named_with_the_reason(run_of_two: Path, cli: Cli) -> None:
    """Links are not followed below a run directory."""
    shutil.rmtree(run_of_two / "rank1")
    (run_of_two / "rank0").rename(run_of_two / "moved")
    (run_of_two / "rank0").symlink_to("moved")

    assert "rank0: cannot be read: a link" in cli("summary", run_of_two).refused


@pytest.mark.parametrize("mode", [0, 0o400])
def test_a_folder_that_may_not_be_read_is_not_called_no_run(
    mode: int, run_of_two: Path, cli: Cli, as_another_user: Any
) -> None:
    """Permission is what is missing."""
    cli("validate", run_of_two)  # imports the command
    run_of_two.chmod(mode)
    said = as_another_user(cli, "validate", "./r1").refused
    run_of_two.chmod(0o700)

    assert said == "otel-train: r1: cannot be read: Permission denied\n"


def test_a_report_that_cannot_be_written_is_named(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said that the run cannot be shown."""
    complete_run(tmp_path / "runs")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("otel_train.cli.validate.replace_named", full)
    run = tmp_path / "runs" / "r1"
    said = cli("validate", run, "--report").refused
    assert said == f"otel-train: {run / 'report.html'}: cannot be written: No space left on device\n"


READERS = (
    "summary",
    "report",
    "postmortem",
    "export",
    "validate",
    "analyze",
    "compare {0}",
    "ui --no-open --port=0",
)


@pytest.mark.parametrize("words", READERS)
def test_a_run_that_this_user_may_not_read_is_refused_with_the_reason(
    words: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an unexpected error, with advice about damaged files, or no run directory at all."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    locked = tmp_path / "locked"
    complete_run(locked)
    run = locked / "r1"
    name, *options = words.format(run).split()
    cli(name, "--help")  # imports the command
    import_module("otel_train.ui.server")
    monkeypatch.chdir("/")
    locked.chmod(0)
    user = os.geteuid()
    try:
        os.seteuid(user or WITHOUT_RIGHTS)
        said = cli(name, run, *options).refused
    finally:
        os.seteuid(user)
        locked.chmod(0o700)

    assert said == f"otel-train: {run}: cannot be read: Permission denied\n"


@pytest.mark.parametrize(
    "words", ["compare {0} {0}", "analyze {0}", "validate {0}", "ui {0} --no-open --port=0"]
)
def test_a_run_id_may_be_longer_than_a_file_name(words: str, cli: Cli) -> None:
    """Its folder has a shorter name, and the path of the id is no path of a file."""
    said = cli(*words.format("x" * 300).split()).refused

    assert "unexpected" not in said
    assert "id of a run" in said


def test_pages_are_written_for_the_stream_they_go_to(run_of_two: Path) -> None:
    """Into a file go no escape codes, and in the C locale nothing but ASCII."""
    ended = command("summary", run_of_two, env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"})

    assert ended.returncode == 0
    assert ended.stdout.isascii()
    assert "\x1b" not in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 120
    assert ended.stdout.startswith("== otel_train ==")


@pytest.mark.parametrize("words", ["export", "validate --report", "replay --dry-run"])
def test_a_path_may_have_characters_that_the_output_does_not_take(words: str, tmp_path: Path) -> None:
    """It was an unexpected error, after the work was done."""
    runs = tmp_path / "läufe"
    complete_run(runs)
    ended = command(*words.split(), "--run-dir", runs, env={**os.environ, "PYTHONIOENCODING": "ascii"})

    assert ended.returncode in {0, 1}
    assert "l\\xe4ufe/r1" in ended.stdout
    assert "unexpected" not in ended.stderr


def test_an_unexpected_error_is_one_line_with_its_place(
    run_of_two: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """A traceback tells a user nothing, and a script needs the exit code."""
    monkeypatch.setattr(summary, "read_summary", lambda _: {"steps": 5})
    line = cli("summary", run_of_two).refused

    assert line.count("\n") == 1
    place = r"^otel-train: unexpected AttributeError in \w+\.py, line \d+: 'int' object .*\. A file that this command"
    assert re.search(place, line)

    monkeypatch.setenv("OTEL_TRAIN_DEBUG", "1")
    with pytest.raises(AttributeError):
        cli("summary", run_of_two)


def test_an_error_for_want_of_memory_blames_no_file(
    run_of_two: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """`ulimit -v` of a login node: nothing is damaged."""

    def read(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(summary, "read_summary", read)
    line = cli("summary", run_of_two).refused

    assert re.search(
        r"unexpected MemoryError in \w+\.py, line \d+\. No memory is left: raise the limit", line
    )
    assert "damaged" not in line


@pytest.mark.usefixtures("gone")
def test_a_working_directory_that_is_gone_is_said(cli: Cli) -> None:
    """A scratch folder that was cleaned while a shell was in it: no file is damaged."""
    assert "The working directory is gone: change to a folder that exists" in cli("ui").refused


@pytest.mark.usefixtures("gone")
def test_a_program_is_run_also_where_the_working_directory_is_gone(tmp_path: Path) -> None:
    """Python runs it there, too."""
    script = tmp_path / "script.py"
    script.write_text("print('ran')\nraise SystemExit(3)\n")
    ended = command("run", script)

    assert (ended.returncode, ended.stdout) == (3, "ran\n"), ended.stderr


def test_no_name_of_a_folder_and_no_reason_of_a_server_moves_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A name may hold an escape sequence that renames the terminal, hides lines or types into a shell."""
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\x9b"
    (tmp_path / evil / "rank0").mkdir(parents=True)
    (tmp_path / evil / "run.json").write_text("{}")

    for command in ("summary", "postmortem", "export", "report", "validate", "analyze"):
        assert main([command, str(tmp_path / evil)]) in {1, 2}
    assert main(["summary", evil]) == 2
    assert main(["replay", str(tmp_path / evil), "--dry-run"]) == 0
    assert main(["replay", str(tmp_path / evil), "--blocks", str(tmp_path)]) == 0
    logging.getLogger("otel_train").warning("the collector says %s", evil)

    out, err = capsys.readouterr()
    for text in (out, err, caplog.text, why(f"503 {evil}")):
        assert not set("\x1b\x07\x9b\u202e") & set(text)
    assert "\\x1b]0;owned" in err
    assert "\\x1b[2J" in caplog.text
    assert "\\x1b[2J" in why(f"503 {evil}")


@pytest.mark.parametrize("name", ["summary", "postmortem", "export", "report", "validate", "analyze"])
def test_json_is_ascii_whatever_a_name_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal takes U+009B for the beginning of an escape sequence; standard output of a job may take ASCII alone."""
    odd = "\x9b2Jäöü"
    complete_run(tmp_path / odd)
    path = tmp_path / odd / "r1" / "rank0" / "summary.json"
    path.write_text(json.dumps(rank_summary(0, run_name=odd)))
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", printed)

    assert main([name, "--json", "--run-dir", str(tmp_path / odd)]) in {0, 1}

    printed.seek(0)
    assert all(isinstance(json.loads(line), dict) for line in printed.readlines())


@pytest.mark.parametrize(
    ("former", "present"), [("check", "validate"), ("artifacts", "export"), ("catalog", "metrics")]
)
def test_a_former_name_of_a_command_is_accepted_with_a_line_that_says_the_present_one(
    former: str, present: str, cli: Cli
) -> None:
    """Scripts that call it go on working for one release."""
    code, out, err = cli(former, "--help")

    assert code == 0
    assert out.startswith(f"usage: otel-train {present} ")
    assert f"'{former}' is now '{present}'" in err


def test_the_former_option_of_replay_is_accepted(tmp_path: Path, cli: Cli) -> None:
    """As above."""
    assert "--root is now --run-dir" in cli("replay", "--root", tmp_path, "none").refused
