"""Bounded files of JSON lines, and the spool made of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from otel_train.export.jsonl import BoundedLines, predecessor, read_jsonl
from otel_train.export.spool import Spool
from tests.support.figures import RESOURCE, snapshot, spans

if TYPE_CHECKING:
    from pathlib import Path


def open_files() -> set[int]:
    """File descriptors in use."""
    return {fd for fd in range(256) if is_open(fd)}


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def errors() -> list[OSError]:
    return []


def lines_of(path: Path) -> list[int]:
    return [int(str(value["n"])) for value in read_jsonl(path)]


def line(number: int, padding: int = 0) -> str:
    return json.dumps({"n": number, "padding": "x" * padding})


def test_nothing_is_created_before_the_first_line(tmp_path: Path, errors: list[OSError]) -> None:
    """A run whose collector was always there leaves no spool to wonder about."""
    file = BoundedLines(tmp_path / "deep" / "a.jsonl", max_bytes=1000, on_error=errors.append)
    assert list(tmp_path.iterdir()) == []
    assert file.append(line(1))
    file.close()
    assert lines_of(file.path) == [1]


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    """A killed process leaves half a line; the rest must stay readable."""
    path = tmp_path / "a.jsonl"
    path.write_text(line(1) + "\n" + line(2) + "\n" + '{"n": 3')
    assert lines_of(path) == [1, 2]


def test_the_next_attempt_does_not_glue_its_line_to_a_torn_one(tmp_path: Path, errors: list[OSError]) -> None:
    """Otherwise two lines are lost instead of one."""
    path = tmp_path / "a.jsonl"
    path.write_text(line(1) + "\n" + '{"n": 2, "long": "' + "y" * 200_000)
    file = BoundedLines(path, max_bytes=1 << 20, on_error=errors.append)
    file.append(line(3))
    file.close()
    assert lines_of(path) == [1, 3]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=60))
def test_a_bounded_file_keeps_the_newest_lines_and_counts_the_others(
    sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Law: what is on disk plus what was counted is what was written, and the bound holds throughout."""
    path = tmp_path_factory.mktemp("law") / "a.jsonl"
    file = BoundedLines(path, max_bytes=1000, on_error=lambda _: None)
    for number, size in enumerate(sizes):
        file.append(line(number, size))
        parts = [part for part in (path, predecessor(path)) if part.exists()]
        assert sum(part.stat().st_size for part in parts) <= 1000
    file.close()
    there = lines_of(path)
    assert len(there) + file.dropped_lines == len(sizes)
    assert there == sorted(there)
    assert there[-1] == len(sizes) - 1


def test_a_line_larger_than_the_file_may_be_is_dropped_and_counted(
    tmp_path: Path, errors: list[OSError]
) -> None:
    """One monster must not wipe out everything else."""
    file = BoundedLines(tmp_path / "a.jsonl", max_bytes=100, on_error=errors.append)
    file.append(line(1))
    assert not file.append(line(2, 100))
    file.close()
    assert (lines_of(file.path), file.dropped_lines) == ([1], 1)


FULL_DISK = """
import json, resource, signal, sys
from pathlib import Path
from otel_train.export.jsonl import BoundedLines

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
errors = []
file = BoundedLines(Path(sys.argv[1]), max_bytes=1 << 20, on_error=errors.append)
written = [file.append(json.dumps({"n": number, "pad": "x" * 400})) for number in range(4)]
written.append(file.append(json.dumps({"n": 9})))
file.close()
print(json.dumps([written, file.failed_lines, len(errors)]))
"""


def test_a_disk_that_fills_up_in_mid_line_leaves_whole_lines(tmp_path: Path) -> None:
    """The half that went to disk is taken back, the rest of the run goes on."""
    path = tmp_path / "a.jsonl"
    told = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], check=True, capture_output=True, text=True
    )

    assert json.loads(told.stdout) == [[True, True, False, False, True], 2, 2]
    assert [json.loads(text)["n"] for text in path.read_text().splitlines()] == [0, 1, 9]


def test_a_file_taken_away_is_begun_anew(tmp_path: Path, errors: list[OSError]) -> None:
    """A replay moves the spool of a live run aside; nothing may be written after it."""
    file = BoundedLines(tmp_path / "a.jsonl", max_bytes=1000, on_error=errors.append)
    file.append(line(1))
    file.path.rename(tmp_path / "taken")
    file.append(line(2))
    file.close()
    assert lines_of(file.path) == [2]
    assert lines_of(tmp_path / "taken") == [1]


def test_closing_gives_the_file_back(tmp_path: Path, errors: list[OSError]) -> None:
    """After close() no file of ours is open."""
    before = open_files()
    spool = Spool(tmp_path, RESOURCE, version="1", on_error=errors.append)
    spool.put(snapshot())
    spool.put(spans())
    spool.close()
    assert open_files() == before


def test_the_spool_holds_one_request_a_line(tmp_path: Path, errors: list[OSError]) -> None:
    """Any collector's file receiver reads this format."""
    spool = Spool(tmp_path, RESOURCE, version="1", on_error=errors.append)
    assert spool.put(snapshot())
    assert spool.put(snapshot(8))
    assert spool.put(spans())
    spool.close()
    metrics = list(read_jsonl(tmp_path / "spool" / "metrics.otlp.jsonl"))
    traces = list(read_jsonl(tmp_path / "spool" / "spans.otlp.jsonl"))
    assert [list(request) for request in metrics] == [["resourceMetrics"]] * 2
    assert [list(request) for request in traces] == [["resourceSpans"]]


def test_a_full_spool_drops_its_oldest_lines_and_counts_them(tmp_path: Path, errors: list[OSError]) -> None:
    """A collector away for a week must not fill the disk that checkpoints need."""
    spool = Spool(tmp_path, RESOURCE, version="1", on_error=errors.append, max_bytes=40_000)
    for step in range(40):
        assert spool.put(snapshot(step))
    spool.close()
    folder = tmp_path / "spool"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 40_000
    assert spool.dropped_lines > 0
    assert spool.dropped_lines + len(list(read_jsonl(folder / "metrics.otlp.jsonl"))) == 40
