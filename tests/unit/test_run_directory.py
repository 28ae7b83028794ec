"""The run directory: a contract with whoever reads it after the run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from otel_train.datamodel import Event, ExportBatch
from otel_train.errors import RunDirectoryError
from otel_train.exporters.otlp_json import OtlpLines
from otel_train.exporters.run_directory import (
    RunDirectory,
    earlier_trainings,
    find_run,
    folder_name,
)
from otel_train.files import dump_json, rank_folders
from tests.support.json_lines import read_jsonl
from tests.support.snapshots import RESOURCE, snapshot, spans

ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=300)


def test_a_batch_leaves_events_metrics_and_spans(tmp_path: Path) -> None:
    """Everything that happened can be read without any server."""
    directory = RunDirectory.open(tmp_path / "runs", "job", rank=2)
    directory.describe(OtlpLines(RESOURCE))
    event = Event(name="oom", time_unix_ns=5, attributes={"train.bytes": 3, "train.bad": float("nan")})
    directory.export(ExportBatch(snapshot=snapshot(), spans=spans(), events=(event,)))
    directory.close(1)
    rank = tmp_path / "runs" / "job" / "rank2"
    assert read_jsonl(rank / "events.jsonl") == [
        {
            "time_unix_ns": 5,
            "name": "oom",
            "attempt": 0,
            "rank": 2,
            "attributes": {"train.bytes": 3, "train.bad": None},
        }
    ]
    assert [list(line) for line in read_jsonl(rank / "metrics.otlp.jsonl")] == [["resourceMetrics"]]
    assert [list(line) for line in read_jsonl(rank / "spans.otlp.jsonl")] == [["resourceSpans"]]


def finished(root: Path, rank: int = 0, *, restarts: int = 0) -> RunDirectory:
    """A training that has come to its end."""
    directory = RunDirectory.open(root, "job", rank=rank, restarts=restarts)
    directory.write_summary(dump_json({"state": "finished", "training": directory.training}))
    directory.close()
    return directory


def test_a_training_after_one_that_finished_is_another_one(tmp_path: Path) -> None:
    """Folds of one job: what the first has written is there when the last has ended."""
    opened = []
    for _ in range(3):
        directory = finished(tmp_path)
        opened.append((directory.training, directory.attempt, directory.previous_attempt))
        (directory.rank_path / "spool").mkdir(exist_ok=True)
        (directory.rank_path / "spool" / f"of-{directory.training}").touch()
        (tmp_path / "job" / "captures").mkdir(exist_ok=True)
        (tmp_path / "job" / "captures" / "epoch_1-step_2-rank0.json.gz").touch()

    job = tmp_path / "job"
    assert opened == [(1, 0, -1), (2, 0, -1), (3, 0, -1)]
    assert earlier_trainings(job) == [job / "training-1", job / "training-2"]
    for number, home in enumerate((job / "training-1", job / "training-2", job), 1):
        assert json.loads((home / "rank0" / "summary.json").read_text())["training"] == number
        assert json.loads((home / "run.json").read_text())["training"] == number
        assert [path.name for path in (home / "captures").iterdir()] == ["epoch_1-step_2-rank0.json.gz"]
        assert find_run(home, tmp_path) == home
    # What could not be sent waits for whoever can send it.
    assert sorted(path.name for path in (job / "rank0" / "spool").iterdir()) == ["of-1", "of-2", "of-3"]


@pytest.mark.parametrize("removed", [["training-1"], ["training-2"], ["training-1", "training-2"]])
def test_a_training_has_its_own_number_though_earlier_ones_were_removed(
    removed: list[str], tmp_path: Path
) -> None:
    """The user frees space on the disk. A number that another training has had would give both the same trace ids."""
    for _ in range(3):
        finished(tmp_path)
    for name in removed:
        shutil.rmtree(tmp_path / "job" / name)
    following = finished(tmp_path)

    assert following.writable
    assert following.training == 4
    summary = json.loads((tmp_path / "job" / "training-3" / "rank0" / "summary.json").read_text())
    assert summary["training"] == 3


def test_a_training_goes_past_a_folder_that_was_moved_and_linked(tmp_path: Path) -> None:
    """An archive on another disk stays as it is."""
    finished(tmp_path)
    (tmp_path / "archive" / "rank0").mkdir(parents=True)
    (tmp_path / "archive" / "rank0" / "precious").touch()
    (tmp_path / "job" / "training-1").symlink_to(tmp_path / "archive")
    following = finished(tmp_path)

    assert (following.writable, following.training) == (True, 3)
    assert [path.name for path in (tmp_path / "archive" / "rank0").iterdir()] == ["precious"]


@pytest.mark.parametrize("training", ["2", -1, 10**9, None, 1.5])
def test_a_wrong_number_in_a_summary_is_not_taken(training: object, tmp_path: Path) -> None:
    """The file may have been edited."""
    finished(tmp_path)
    (tmp_path / "job" / "rank0" / "summary.json").write_text(
        json.dumps({"state": "finished", "training": training})
    )

    assert RunDirectory.open(tmp_path, "job", rank=0).training == 2
    assert earlier_trainings(tmp_path / "job") == [tmp_path / "job" / "training-1"]


def test_a_restart_that_the_launcher_counts_is_one_although_this_rank_had_finished(tmp_path: Path) -> None:
    """A launcher starts all ranks again when one of them has died."""
    finished(tmp_path)
    again = RunDirectory.open(tmp_path, "job", rank=0, restarts=1)
    again.write_summary(dump_json({"state": "finished"}))
    again.close()
    another = RunDirectory.open(tmp_path, "job", rank=0, restarts=1)

    assert (again.training, again.attempt) == (1, 1)
    assert (another.training, another.attempt) == (2, 1)


def test_a_rank_moves_its_own_files_alone(tmp_path: Path) -> None:
    """Another rank may still be writing in the training that is over for this one."""
    finished(tmp_path, rank=0)
    slow = RunDirectory.open(tmp_path, "job", rank=1)
    finished(tmp_path, rank=0)

    slow.write_summary(dump_json({"state": "finished"}))
    assert (tmp_path / "job" / "rank1" / "summary.json").exists()
    slow.close()
    assert RunDirectory.open(tmp_path, "job", rank=1).training == 2
    assert (tmp_path / "job" / "training-1" / "rank1" / "summary.json").exists()


@pytest.mark.parametrize("text", ["", "x", "boot/1/2", "a/b/c closed", "//// ////", "\x00" * 500])
def test_a_folder_whose_owner_is_gone_or_not_known_is_taken(text: str, tmp_path: Path) -> None:
    """Only a lock that is held counts, whatever a dead process or a torn page has left in its file."""
    other = in_another_process(tmp_path, hold=False)
    assert other == "job 1 0"
    (tmp_path / "job" / "rank0.lock").write_text(text)

    again = RunDirectory.open(tmp_path, "job", rank=0)

    assert (again.run_id, again.training, again.attempt) == ("job", 1, 1)


HOLDER = """
import os, sys, time
from pathlib import Path
from otel_train.exporters.run_directory import RunDirectory

directory = RunDirectory.open(Path(sys.argv[1]), "job", rank=0, owner=int(sys.argv[3]))
print(directory.run_id, directory.training, directory.attempt, flush=True)
if sys.argv[2] == "worker" and os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
if sys.argv[2] != "end":
    time.sleep(60)
"""


@contextmanager
def holder(root: Path, what: str, owner: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the folder of rank 0."""
    words = [sys.executable, "-c", HOLDER, str(root), what, str(owner)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def in_another_process(root: Path, *, hold: bool, owner: int = 0) -> str:
    with holder(root, "hold" if hold else "end", owner) as process:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if not hold:
            process.wait()
        return said


def test_an_agent_that_follows_a_killed_one_counts_no_other_start(tmp_path: Path) -> None:
    """The process that it writes for is the same. The flight file of the start before stays where it is."""
    before, flight = tmp_path / "job/rank0/flight-0.bin", tmp_path / "job/rank0/flight.bin"
    in_another_process(tmp_path, hold=False)
    flight.write_text("first")

    assert in_another_process(tmp_path, hold=False, owner=os.getpid()) == "job 1 1"
    flight.write_text("second")
    following = RunDirectory.open(tmp_path, "job", rank=0)

    assert (following.training, following.attempt, following.previous_attempt) == (1, 1, 0)
    assert (before.read_text(), flight.read_text()) == ("first", "second")
    following.close()
    assert RunDirectory.open(tmp_path, "job", rank=0).attempt == 2


def test_the_folder_of_a_living_process_is_its_own_for_life(tmp_path: Path) -> None:
    """Two trainings side by side would write into one file; the lock is there before the first of them writes."""
    with holder(tmp_path, "hold") as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["job", "1", "0"]

        beside = RunDirectory.open(tmp_path, "job", rank=0)
        other_rank = RunDirectory.open(tmp_path, "job", rank=1)
        assert not RunDirectory.again(tmp_path / "job", 0, attempt=0).writable

    assert (beside.run_id, other_rank.run_id) == ("job-2", "job")
    assert RunDirectory.again(tmp_path / "job", 0, attempt=0).writable
    assert RunDirectory.open(tmp_path, "job", rank=0).run_id == "job"


def test_many_processes_that_start_at_once_share_no_folder(tmp_path: Path) -> None:
    """A launcher starts them within a millisecond."""
    with ExitStack() as stack:
        others = [stack.enter_context(holder(tmp_path, "hold")) for _ in range(6)]
        names = sorted(other.stdout.readline().split()[0] for other in others if other.stdout is not None)

    assert names == ["job", *(f"job-{number}" for number in range(2, 7))]


def test_a_worker_that_outlives_its_process_holds_no_folder(tmp_path: Path) -> None:
    """DataLoader workers of a run that was killed live on for seconds; its restart is an attempt of the same run."""
    with holder(tmp_path, "worker") as process:
        assert process.stdout is not None
        process.stdout.readline()
        worker = int(process.stdout.readline())
        try:
            process.kill()
            process.wait()
            again = RunDirectory.open(tmp_path, "job", rank=0)
        finally:
            os.kill(worker, signal.SIGKILL)

    assert (again.run_id, again.attempt) == ("job", 1)


def test_a_process_may_open_its_folder_twice_and_keeps_it_until_both_are_closed(tmp_path: Path) -> None:
    """Closing one descriptor of a file takes all locks of the process on it away."""
    first, second = (RunDirectory.open(tmp_path, "job", rank=0) for _ in range(2))
    first.close()

    assert in_another_process(tmp_path, hold=False) == "job-2 1 0"

    second.close()

    assert in_another_process(tmp_path, hold=False) == "job 1 2"


def test_nothing_is_written_through_a_link_or_into_a_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every user may write, a run id can be guessed and its folder be there before the run."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "rank0").symlink_to(tmp_path / "outside")

    assert not RunDirectory.open(tmp_path, "job", rank=0).writable
    assert list((tmp_path / "outside").iterdir()) == []

    if os.geteuid():
        pytest.skip("giving a folder away needs root")
    (tmp_path / "other").mkdir()
    os.chown(tmp_path / "other", 54_321, 54_321)
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    monkeypatch.setattr("otel_train.files.file_system", lambda _: "ext4")
    assert not RunDirectory.open(tmp_path, "other", rank=0).writable
    assert not (tmp_path / "other" / "rank0" / "attempt").exists()
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    os.chown(tmp_path / "link", 54_321, 54_321, follow_symlinks=False)
    assert not RunDirectory.open(tmp_path, "link", rank=0).writable
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_lock_file_that_is_a_link_is_not_opened(tmp_path: Path) -> None:
    """It would be emptied."""
    (tmp_path / "job").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "job" / "rank0.lock").symlink_to(tmp_path / "precious")

    directory = RunDirectory.open(tmp_path, "job", rank=0)

    assert not directory.writable
    assert (tmp_path / "precious").read_text() == "precious"


def test_flight_files_of_many_trainings_are_bounded(tmp_path: Path) -> None:
    """They are by far the largest files, and a sweep has hundreds of trainings."""
    for _ in range(5):
        finished(tmp_path).flight_path.write_bytes(b"x")

    kept = sorted(str(path.parent.parent.relative_to(tmp_path)) for path in tmp_path.rglob("flight.bin"))
    assert kept == ["job", "job/training-3", "job/training-4"]


@pytest.mark.parametrize(("attempt", "expected"), [(None, 3), (5, 5), (0, 0)])
def test_the_attempt_is_known_where_the_folder_cannot_be_written(attempt: int | None, expected: int) -> None:
    """Trace ids are made of it: two attempts on a disk that cannot be written would have the same ones."""
    nowhere = Path("/proc/nowhere")

    assert RunDirectory.open(nowhere, "job", rank=0, attempt=attempt, restarts=3).attempt == expected


def test_runs_ignore_themselves_in_git_when_we_made_their_parent(tmp_path: Path) -> None:
    """No gigabyte of telemetry is committed by accident, and no folder of the user is touched."""
    RunDirectory.open(tmp_path / "runs", "job", rank=0)
    assert (tmp_path / "runs" / ".gitignore").read_text() == "*\n"
    (tmp_path / "mine").mkdir()
    RunDirectory.open(tmp_path / "mine", "job", rank=0)
    assert not (tmp_path / "mine" / ".gitignore").exists()


def test_opening_again_is_the_next_attempt(tmp_path: Path) -> None:
    """A restarted job continues its run, and traces of the two must not collide."""
    assert [RunDirectory.open(tmp_path, "job", rank=0).attempt for _ in range(3)] == [0, 1, 2]
    assert RunDirectory.open(tmp_path, "job", rank=1).attempt == 0
    assert RunDirectory.open(tmp_path, "job", rank=0, attempt=7).attempt == 7
    assert RunDirectory.open(tmp_path, "job", rank=0).attempt == 8


def test_the_newest_three_flight_files_are_kept(tmp_path: Path) -> None:
    """The crash of the attempt before is what people come to look at."""
    for attempt in range(6):
        directory = RunDirectory.open(tmp_path, "job", rank=0)
        directory.flight_path.write_text(f"of attempt {attempt}")
        os.utime(directory.flight_path, ns=(attempt + 1, attempt + 1))
    RunDirectory.open(tmp_path, "job", rank=0)
    left = {path.name: path.read_text() for path in (tmp_path / "job" / "rank0").glob("flight*")}
    assert left == {f"flight-{attempt}.bin": f"of attempt {attempt}" for attempt in (3, 4, 5)}


def test_rank_0_has_the_last_word_on_run_json(tmp_path: Path) -> None:
    """Whoever is first stands in, so that the folder is never without it."""
    RunDirectory.open(tmp_path, "job", rank=5, run={"by": 5})
    RunDirectory.open(tmp_path, "job", rank=6, run={"by": 6})
    run_json = tmp_path / "job" / "run.json"
    assert json.loads(run_json.read_text()) == {"run_id": "job", "training": 1, "by": 5}
    RunDirectory.open(tmp_path, "job", rank=0, run={"by": 0})
    RunDirectory.open(tmp_path, "job", rank=6, run={"by": 6})
    assert json.loads(run_json.read_text()) == {"run_id": "job", "training": 1, "by": 0}


def test_a_summary_is_replaced_as_a_whole_and_is_always_json(tmp_path: Path) -> None:
    """Readers poll it while it is written; NaN is no JSON."""
    directory = RunDirectory.open(tmp_path, "job", rank=0)
    directory.write_summary(dump_json({"steps": {"train": 3}, "loss": float("nan"), "list": [float("inf")]}))
    path = directory.rank_path / "summary.json"
    assert json.loads(path.read_text()) == {"steps": {"train": 3}, "loss": None, "list": [None]}
    assert not [found for found in directory.rank_path.iterdir() if found.name.startswith(".")]


def test_what_a_killed_process_had_not_renamed_yet_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """Such files stayed for good: those of a process that was killed again and again filled the folder."""
    run = RunDirectory.open(tmp_path, "r", rank=0)
    run.close()
    places = run.rank_path, run.path, run.path / "captures"
    places[-1].mkdir()
    for number, name in enumerate((".summary.json.7.8", ".summary.json.9.8", "text.1.2", ".text")):
        for place in places:
            (place / name).write_text("{")
            if number != 1:  # that one is being written
                os.utime(place / name, (1, 1))
    RunDirectory.open(tmp_path, "r", rank=0).close()

    for place in places:
        left = {path.name for path in place.iterdir() if "summary" in path.name or "text" in path.name}
        assert left == {".summary.json.9.8", "text.1.2", ".text"}


def test_files_are_bounded_together(tmp_path: Path) -> None:
    """A month of training must not fill the disk."""
    directory = RunDirectory.open(tmp_path, "job", rank=0, max_bytes=60_000)
    directory.describe(OtlpLines(RESOURCE))
    for step in range(100):
        directory.export(
            ExportBatch(snapshot=snapshot(step), spans=spans(), events=(Event(name="e", time_unix_ns=1),))
        )
    directory.close(1)
    sizes = [path.stat().st_size for path in directory.rank_path.glob("*.jsonl*")]
    assert sum(sizes) <= 60_000
    assert len(read_jsonl(directory.rank_path / "metrics.otlp.jsonl")) < 100


def test_a_folder_that_vanishes_in_mid_run_is_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Scratch disks are cleaned while jobs run."""
    directory = RunDirectory.open(tmp_path / "runs", "job", rank=0)
    (tmp_path / "runs").rename(tmp_path / "gone")
    (tmp_path / "runs").write_text("")
    directory.describe(OtlpLines(RESOURCE))
    directory.export(ExportBatch(snapshot=snapshot()))
    directory.write_summary(dump_json({}))
    assert directory.faults == 2
    assert len(caplog.messages) == 1


def test_a_run_whose_folder_was_removed_in_mid_run_can_be_found_and_started_again(tmp_path: Path) -> None:
    """Scratch disks are cleaned while jobs run. What goes on being written belongs to a run and an attempt."""
    RunDirectory.open(tmp_path, "job", rank=0, attempt=1).close(1)
    directory = RunDirectory.open(tmp_path, "job", rank=0, attempt=2, run={"host": "h1"})
    directory.describe(OtlpLines(RESOURCE))
    before = json.loads((directory.path / "run.json").read_text())
    shutil.rmtree(directory.path)
    directory.export(ExportBatch(snapshot=snapshot()))
    directory.write_summary(dump_json({}))
    assert "closed" not in (directory.path / "rank0.lock").read_text()  # no other process takes the rank
    directory.close(1)

    assert "closed" in (directory.path / "rank0.lock").read_text()
    assert find_run(None, tmp_path) == directory.path
    assert json.loads((directory.path / "run.json").read_text()) == before
    assert RunDirectory.open(tmp_path, "job", rank=0).attempt == 3


@given(first=ANY_TEXT, second=ANY_TEXT)
@example("a/b", "a-b")
@example("a/b", "a b")
@example("", "run")
@example("..", ".")
@example("x" * 200, "x" * 201)
def test_ids_become_folders_inside_the_root_and_never_the_same_one(first: str, second: str) -> None:
    """A run id comes from the environment: it must not climb out of the folder."""
    name = folder_name(first)
    assert name
    assert "/" not in name
    assert name not in {".", ".."}
    assert len(name) < 128
    assert name.isascii()
    assert not name.startswith(".")
    assert not set(name) & set("/\\\0 \n")
    if first != second:
        assert name != folder_name(second)


def test_a_run_is_found_by_folder_by_rank_by_id_and_as_the_newest(tmp_path: Path) -> None:
    """People paste whatever they have at hand."""
    for number, run_id in enumerate(("old", "a/b")):
        directory = RunDirectory.open(tmp_path, run_id, rank=0)
        for path in (directory.path, directory.rank_path):
            os.utime(path, (number + 1, number + 1))
    newest = tmp_path / folder_name("a/b")
    assert find_run(None, tmp_path) == newest
    assert find_run("a/b", tmp_path) == newest
    assert find_run("old", tmp_path) == tmp_path / "old"
    assert find_run(newest, tmp_path / "elsewhere") == newest
    assert find_run(str(newest / "rank0"), tmp_path) == newest
    assert rank_folders(newest) == {0: newest / "rank0"}


def test_a_run_that_is_removed_while_the_newest_is_looked_for_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old runs are removed while others are read."""
    for run_id in ("stays", "goes"):
        RunDirectory.open(tmp_path, run_id, rank=0)

    def listed(run: Path) -> dict[int, Path]:
        found = rank_folders(run)
        if run.name == "goes":
            shutil.rmtree(run)
        return found

    monkeypatch.setattr("otel_train.exporters.run_directory.rank_folders", listed)
    assert find_run(None, tmp_path) == tmp_path / "stays"


@pytest.mark.parametrize("run", [None, "no-such-run", "/nowhere"])
def test_a_run_that_is_not_there_is_refused_with_a_remedy(run: str | None, tmp_path: Path) -> None:
    """The commonest mistake is standing in the wrong folder."""
    with pytest.raises(RunDirectoryError, match="OTEL_TRAIN_RUN_DIR"):
        find_run(run, tmp_path)
