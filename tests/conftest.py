"""What holds for every test."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support.command_line import Cli, Ended

if TYPE_CHECKING:
    from tests.support.receiver import Received
    from tests.support.written import Writer

# Started in the background, or under nohup, Ctrl-C or SIGHUP is ignored: the programs under test must not inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# A busy machine makes a slow example, not a wrong one.
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")


FORK_HANGS_AFTER_S = 60


def pytest_configure() -> None:
    """A forked child that hangs shows where: the time limit of a test shows the threads of its parent alone."""
    report = os.dup(2)

    def watch() -> None:
        faulthandler.dump_traceback_later(FORK_HANGS_AFTER_S, file=report)

    os.register_at_fork(after_in_child=watch)


def free_the_lock_of_coverage() -> None:
    """Coverage locks its data where a thread meets a new file: a child forked just then would wait for it for ever."""
    collector = sys.modules.get("coverage.collector")
    for running in collector.Collector._collectors if collector is not None else ():
        if running.data_lock is not None:
            running.data_lock._at_fork_reinit()


# Before otel_train's handlers, whose lines are counted.
os.register_at_fork(after_in_child=free_the_lock_of_coverage)


@pytest.fixture(autouse=True)
def bare_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a test sets variables: settings, collectors and ranks of the environment do not reach it.

    Programs that ``make test-stack`` has built into a cache are found by the tests of the stack alone, so that every
    other test passes on a machine that has none.
    """
    for name in list(os.environ):
        ours = name.startswith(("OTEL_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC_", "SLURM_"))
        ours |= name in {"COLUMNS", "NO_COLOR", "FORCE_COLOR"}
        if ours and name != "OTEL_TRAIN_TEST_BIN":
            monkeypatch.delenv(name)
    if request.node.get_closest_marker("stack") is None:
        monkeypatch.setenv("OTEL_TRAIN_TEST_BIN", os.devnull)
    # Sessions of the tests' own process: a thread starts faster. Programs that tests start have the default.
    monkeypatch.setenv("OTEL_TRAIN_AGENT", os.environ.get("TEST_AGENT", "thread"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs ``otel-train`` with these words."""
    from otel_train.cli.main import main

    def run(*words: object) -> Ended:
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:  # of argparse
            code = int(ended.code or 0)
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def receiver() -> Iterator[Received]:
    """A healthy receiver of OTLP over HTTP."""
    from tests.support.receiver import http_receiver

    with http_receiver() as received:
        yield received


@pytest.fixture
def writer() -> Iterator[Writer]:
    """What public functions write."""
    from tests.support.written import Writer

    with Writer().active() as writes:
        yield writes


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is one that was removed."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB, where we may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)


@pytest.fixture(params=[False, True], ids=["python", "c"])
def both_writers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings are written, and hooks run, in Python, then in C: what holds for one holds for the other."""
    from otel_train.recording import ring_buffer

    if request.param and ring_buffer.EXTENSION is None:
        pytest.skip("the writer in C was not built: no compiler, or not Linux")
    if not request.param:
        monkeypatch.setattr(ring_buffer, "EXTENSION", None)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """A session that a failed test leaves behind must not watch the next test, nor a tracker that it has imported log of it."""
    yield
    from otel_train.api import current
    from otel_train.config.settings import TRACKER_MODULES

    session = current()
    if session is not None:
        session.close("failed")
    for name in TRACKER_MODULES["tensorboard"]:
        sys.modules.pop(name, None)
