"""Files below a run directory, which may hold anything."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from otel_train import files
from otel_train.cli.main import main
from otel_train.errors import RunDirectoryError
from otel_train.files import (
    divided,
    lines_of,
    make_folder,
    open_binary,
    open_given,
    open_to_write,
    parse_json,
    problem_of,
    rank_folders,
    read_bytes,
    read_json,
    read_named,
    read_word,
    replace_text,
)
from tests.support.command_line import Cli
from tests.support.left_run import leave_run, say_summary
from tests.support.made_trace import training

STRANGER = 12_345


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a rank."""
    (tmp_path / "run" / "rank0").mkdir(parents=True)
    return tmp_path / "run"


def link(path: Path) -> None:
    elsewhere = path.parent.parent.parent / "secret"
    elsewhere.write_text('{"secret": 1}')
    path.symlink_to(elsewhere)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has 107 characters at most
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path.name)
    finally:
        os.chdir(here)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def holes(path: Path) -> None:
    """Leaves as much as is opened, behind a line."""
    path.write_bytes(b"{}\n")
    os.truncate(path, files.MOST_BYTES)


def deep(path: Path) -> None:
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")


def strangers(path: Path) -> None:
    path.write_text("{}")
    if os.geteuid():
        pytest.skip("giving a file away needs root")
    os.chown(path, STRANGER, STRANGER)


def given_away(run: Path) -> Path:
    """The summary of a run that has another owner."""
    summary = run / "rank0" / "summary.json"
    summary.write_text("{}")
    for path in (run, run / "rank0", summary):
        os.chown(path, STRANGER, STRANGER)
    return summary


HOSTILE: list[tuple[Callable[[Path], object], str]] = [
    (link, "a link: only regular files are opened"),
    (device, "a link: only regular files are opened"),
    (os.mkfifo, "a pipe or a device: only regular files are opened"),
    (unix_socket, "a socket: only regular files are opened"),
    (lambda path: path.mkdir(), "a folder: only regular files are opened"),
    (huge, "has more than 16,777,216 bytes, more than otel_train writes"),
    (deep, "nested deeper than 64 levels"),
    (
        strangers,
        "owned by user 12345, which is neither ours (0) nor root. Run as that user, or name another folder",
    ),
]


@pytest.mark.parametrize(("make", "said"), HOSTILE)
def test_what_is_not_our_regular_file_is_not_read_and_its_kind_is_said(
    make: Callable[[Path], object], said: str, run: Path
) -> None:
    """A link leads out of the folder, a pipe blocks for ever, a device never ends."""
    path = run / "rank0" / "summary.json"
    make(path)

    with pytest.raises(RunDirectoryError) as caught:
        read_json(path)

    assert said in str(caught.value)
    if "nested" not in said and "more than" not in said:
        assert problem_of(path) in str(caught.value)


def test_a_folder_below_a_run_directory_that_is_a_link_is_not_entered(run: Path, tmp_path: Path) -> None:
    """The file behind it is regular; it is another program's."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "summary.json").write_text("{}")
    (run / "rank1").symlink_to(outside)

    with pytest.raises(RunDirectoryError, match="a link"):
        read_json(run / "rank1" / "summary.json")
    with pytest.raises(OSError, match="a link"):
        os.close(open_to_write(run / "rank1" / "events.jsonl", append=True))
    with pytest.raises(OSError, match="a link"):
        replace_text(run / "rank1" / "summary.json", "replaced")
    assert (outside / "summary.json").read_text() == "{}"
    assert list(rank_folders(run)) == [0]
    assert list(outside.iterdir()) == [outside / "summary.json"]


@needs_root
def test_a_folder_of_another_user_is_not_entered(run: Path) -> None:
    """Its owner may exchange what is in it at any time."""
    (run / "rank0" / "summary.json").write_text("{}")
    os.chown(run / "rank0", STRANGER, STRANGER)

    with pytest.raises(RunDirectoryError, match="owned by user 12345"):
        read_json(run / "rank0" / "summary.json")


@needs_root
def test_root_reads_a_run_directory_of_a_user(run: Path) -> None:
    """Whoever looks after a cluster looks at the runs of others; root could become their owner anyway."""
    assert read_json(given_away(run)) == {}


@needs_root
@pytest.mark.parametrize(
    ("kind", "read"), [("ext4", False), ("nfs4", True), ("fuse.sshfs", True), ("cifs", True)]
)
def test_on_a_network_file_system_the_owner_of_the_run_directory_is_trusted(
    run: Path, monkeypatch: pytest.MonkeyPatch, kind: str, read: bool
) -> None:
    """A file server may show every file as one user's: what this process has written would be a stranger's."""
    summary = given_away(run)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("otel_train.files.file_system", lambda _: kind)

    assert (problem_of(summary) == "") is read
    os.chown(summary, STRANGER + 1, STRANGER)
    assert f"owned by user {STRANGER + read}" in problem_of(summary)


def test_links_up_to_the_run_directory_are_followed(run: Path, tmp_path: Path) -> None:
    """A user names it, and may keep runs on another disk."""
    (tmp_path / "latest").symlink_to(run)
    (run / "rank0" / "summary.json").write_text("{}")

    assert read_json(tmp_path / "latest" / "rank0" / "summary.json") == {}


@pytest.mark.parametrize(
    ("path", "root", "below"),
    [
        ("/d/runs/r/rank0/summary.json", "/d/runs/r", "rank0/summary.json"),
        ("/d/runs/r/run.json", "/d/runs/r", "run.json"),
        ("/d/r/training-2/rank10/spool/rejected/x", "/d/r", "training-2/rank10/spool/rejected/x"),
        ("rank0/flight.bin", ".", "rank0/flight.bin"),
        ("/rank0/x", "/", "rank0/x"),
        ("/d/rankings/x", "/d/rankings", "x"),
    ],
)
def test_a_path_is_divided_where_folders_of_our_own_layout_begin(path: str, root: str, below: str) -> None:
    """Above it lies what a user has named, below it what any user may have put there."""
    assert divided(Path(path)) == (Path(root), Path(below).parts)


@pytest.mark.parametrize("path", [".", "/"])
def test_a_path_without_a_name_is_refused_as_a_folder(path: str) -> None:
    """Callers report an OSError with its path."""
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        divided(Path(path))


def test_a_path_that_climbs_out_is_refused(run: Path) -> None:
    """``..`` leaves the folder it is looked for in."""
    with pytest.raises(OSError, match="no path below"):
        open_binary(run / "rank0" / ".." / "x", root=run)


def test_a_file_that_a_user_names_may_be_a_link_but_no_pipe(tmp_path: Path) -> None:
    """A trace on another disk is fine; waiting for ever is not."""
    (tmp_path / "trace.json").write_text("[]")
    (tmp_path / "link.json").symlink_to(tmp_path / "trace.json")
    os.mkfifo(tmp_path / "pipe.json")

    assert read_named(tmp_path / "link.json", 10) == b"[]"
    with open_given(tmp_path / "link.json") as file:
        assert file.read() == b"[]"
    with pytest.raises(OSError, match="no regular file"):
        read_named(tmp_path / "pipe.json", 10)
    with pytest.raises(OSError, match="more than 1 bytes"):
        read_named(tmp_path / "trace.json", 1)


def test_a_file_that_grows_while_it_is_read_ends_at_its_bound(tmp_path: Path) -> None:
    """A writer may be faster than a reader."""
    path = tmp_path / "x"
    path.write_bytes(b"x" * 10)

    assert read_bytes(path, 10) == b"x" * 10
    with pytest.raises(OSError, match="more than 9 bytes"):
        read_bytes(path, 9)


def test_a_line_without_an_end_takes_no_more_memory_than_is_allowed(tmp_path: Path) -> None:
    """A disk that was full leaves gigabytes of zeros without a newline."""
    (tmp_path / "x").write_bytes(b"ab\n" + b"z" * 1000 + b"\ncd\n" + b"z" * 8)

    with (tmp_path / "x").open("rb") as file:
        assert list(lines_of(file, 8)) == [b"ab\n", b"z" * 8, b"cd\n", b"z" * 8]


def test_a_hole_of_a_terabyte_is_no_line_and_hides_none_behind_it(tmp_path: Path) -> None:
    """Reading its zeros would take a quarter of an hour."""
    path = tmp_path / "x"
    path.write_bytes(b"ab\n")
    os.truncate(path, 1 << 40)
    with path.open("ab") as file:
        file.write(b"z\ncd\n")
    os.truncate(path, 1 << 41)

    with path.open("rb") as file:
        assert list(lines_of(file, 8)) == [b"ab\n", bytes(8), b"cd\n", bytes(8)]


def test_a_word_of_a_file_that_is_missing_is_empty(tmp_path: Path) -> None:
    """A run that was just begun has none yet."""
    assert read_word(tmp_path / "attempt") == ""


@pytest.mark.parametrize("umask", [0, 0o177])
def test_what_we_make_is_its_owners_alone(tmp_path: Path, umask: int) -> None:
    """Whatever the umask of a job is: with 0177 a run directory was made that its owner could not enter."""
    before = os.umask(umask)
    try:
        make_folder(tmp_path / "a" / "b")
        os.close(open_to_write(tmp_path / "a" / "lines", append=True))
    finally:
        os.umask(before)

    modes = [stat.S_IMODE((tmp_path / "a" / name).stat().st_mode) for name in (".", "b", "lines")]
    assert modes == [0o700, 0o700, 0o600]


# --- JSON -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": NaN, "b": Infinity, "c": -Infinity}', {"a": None, "b": None, "c": None}),
        ("[1e999, -1e999, 1.5]", [None, None, 1.5]),
        (f"[{'9' * 30}, {2**63}]", [None, 2**63]),
        (f"[{'9' * 5000}]", [None]),
        ("[" * 63 + "1" + "]" * 63, json.loads("[" * 63 + "1" + "]" * 63)),
    ],
)
def test_what_is_no_number_that_can_be_computed_with_is_absent(text: str, value: Any) -> None:
    """One wrong number must not hide the rest of a document, and must not reach a sum."""
    assert parse_json(text) == value


@pytest.mark.parametrize(
    "text", ["", "{", "[1,]", "\x00", b"\xff\xfe\xff", "[" * 66 + "]" * 66, "[" * 200_000]
)
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    """Callers catch one kind of error."""
    with pytest.raises(ValueError):  # noqa: PT011  # what it says depends on the text
        parse_json(text)


NUMBERS = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.text() | NUMBERS


@given(st.recursive(SCALARS, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=20))
def test_what_we_write_is_what_we_read(value: Any) -> None:
    """Bounds take nothing from documents that otel_train writes."""
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["[]", "1", "null", '"x"'])
def test_a_document_that_is_no_object_is_refused(run: Path, text: str) -> None:
    """Readers look up keys."""
    (run / "run.json").write_text(text)

    with pytest.raises(RunDirectoryError, match=r"run.json is not a JSON object"):
        read_json(run / "run.json")


# --- commands ---------------------------------------------------------------------------------------

COMMANDS = ("summary", "postmortem", "report", "validate", "export", "compare", "analyze")
NAMES = (
    "run.json", "rank0/summary.json", "rank0/flight.bin", "rank0/attempt", "rank0/metrics.otlp.jsonl", "rank0/events.jsonl",
    "rank0/spans.otlp.jsonl.1", "rank0/spool/metrics-0000000001.otlp.jsonl",
    "captures/x-rank0.json.gz", "captures/x-rank0.record.json",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [link, device, os.mkfifo, unix_socket, huge, holes, deep, strangers])
def test_no_command_hangs_fails_or_follows_whatever_lies_in_a_run_directory(
    make: Callable[[Path], object], name: str, tmp_path: Path, cli: Cli
) -> None:
    """Each ends with its exit code and a sentence, and within seconds."""
    run = leave_run(tmp_path / "runs", [3])
    say_summary(run)
    (run / "captures").mkdir()
    training(steps=2).write(run / "captures" / "x-rank0.json.gz")
    (run / "rank0/spool").mkdir()
    (run / name).unlink(missing_ok=True)
    make(run / name)
    begun = time.monotonic()

    for command in COMMANDS:
        code, out, err = cli(command, *[run] * (2 if command == "compare" else 1))
        assert code in {0, 1, 2}, command
        assert "Traceback" not in err
        assert "secret" not in out

    code, out, err = cli("replay", run, "--all", "--dry-run")
    assert code in {0, 1, 2}
    assert "Traceback" not in err
    assert time.monotonic() - begun < 20
    assert threading.active_count() < 50
    assert files.problem_of(run / name) or make in {huge, holes, deep}


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4),
        st.sampled_from(["otel_train.summary/2", "finished", "running", "train", "\x1b[2J", "\ud800", "../../x"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["name", "file", "train", "stage", "loader", "value", "stages"]), inner, max_size=4),
    ),
    max_leaves=6,
)  # fmt: skip
KEYS = (
    "state", "steps", "stages", "activities", "findings", "captures", "telemetry", "loaders", "ranks", "rates", "throughput",
    "instrumentation_gaps", "settings_from", "settings_ignored", "run_id", "wall_seconds", "world_size", "step_durations", "attempt",
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(values=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_no_command_ends_in_a_traceback_whatever_a_summary_says(
    values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An older version wrote it, or a user edited it."""
    run = tmp_path_factory.getbasetemp() / "any" / "r1"
    if not run.exists():
        leave_run(run.parent, [3])
    say_summary(run, **values)

    for command in ("summary", "postmortem", "report", "validate", "export", "compare"):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            assert main([command, *[str(run)] * (2 if command == "compare" else 1)]) in {0, 1, 2}
        assert "Traceback" not in said.getvalue()
        assert "\x1b[2J" not in said.getvalue()
