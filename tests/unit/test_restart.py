"""How long a run stood still: hours of the allocation that no attempt sees by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from otel_train.datamodel import Anchor
from otel_train.exporters.run_directory import down_s, total_down_s
from otel_train.recording.events import Op, SourceKind, code
from otel_train.recording.recorder import Recorder
from otel_train.testing import FakeClock
from tests.support.flight import PrivateMemory

NS_PER_S = 10**9
STARTED_NS = 1000 * NS_PER_S


def leave_flight(folder: Path, name: str, *, last_edge_s: float | None) -> None:
    """The flight file of an attempt that began at 1000 s, with one last edge so many seconds later."""
    clock = FakeClock()
    memory = PrivateMemory(1 << 12, Anchor(STARTED_NS, clock()), folder / name)
    recorder = Recorder(memory, clock=clock, in_backward=lambda: False)
    if last_edge_s is not None:
        source = recorder.source(SourceKind.STAGE, "work")
        clock.tick(s=last_edge_s)
        recorder.edge(code(Op.BEGIN, source))
    memory.poll(STARTED_NS)
    recorder.release_memory()
    memory.close()


def test_the_time_between_two_attempts_is_counted_from_the_last_edge(tmp_path: Path) -> None:
    """What came after the last edge was hanging, dying and restarting: not training."""
    leave_flight(tmp_path, "flight-0.bin", last_edge_s=60)

    assert down_s(tmp_path, 0, STARTED_NS + 100 * NS_PER_S) == pytest.approx(40)


def test_a_run_that_had_finished_was_not_down(tmp_path: Path) -> None:
    """Training goes on the next day, under the same id: that night was no outage."""
    leave_flight(tmp_path, "flight-0.bin", last_edge_s=60)
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps({"state": "finished"}))
    assert down_s(tmp_path, 0, STARTED_NS + 100 * NS_PER_S) is None

    summary.write_text(json.dumps({"state": "running"}))
    assert down_s(tmp_path, 0, STARTED_NS + 100 * NS_PER_S) == pytest.approx(40)


def test_without_an_attempt_before_or_its_file_nothing_is_known(tmp_path: Path) -> None:
    """Absent, never zero: 0 s would say that the restart was free."""
    assert down_s(tmp_path, -1, STARTED_NS) is None
    assert down_s(tmp_path, 0, STARTED_NS) is None
    (tmp_path / "flight-0.bin").write_bytes(b"not a flight file")
    assert down_s(tmp_path, 0, STARTED_NS) is None
    leave_flight(tmp_path, "flight-1.bin", last_edge_s=None)
    assert down_s(tmp_path, 1, STARTED_NS) is None


def test_a_clock_that_was_set_back_gives_no_negative_time(tmp_path: Path) -> None:
    """A counter never falls."""
    leave_flight(tmp_path, "flight-0.bin", last_edge_s=60)

    assert down_s(tmp_path, 0, STARTED_NS) == 0


def test_the_time_between_all_attempts_is_added_up(tmp_path: Path) -> None:
    """A counter that each attempt began with its own time seemed to grow by the difference alone."""
    assert total_down_s(tmp_path, 0, None) == 0
    assert total_down_s(tmp_path, 1, 480.0) == 480
    assert total_down_s(tmp_path, 2, 490.0) == 970
    assert total_down_s(tmp_path, 3, None) == 970
    assert total_down_s(tmp_path, 4, 500.0) == 1470


@pytest.mark.parametrize("down_s", [None, 480.0], ids=["continues", "counts again"])
def test_an_agent_that_takes_over_an_attempt_does_not_add_its_time_twice(
    tmp_path: Path, down_s: float | None
) -> None:
    """The agent of the attempt was killed."""
    total_down_s(tmp_path, 1, 20.0)
    total_down_s(tmp_path, 2, 480.0)

    assert total_down_s(tmp_path, 2, down_s) == 500


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"attempt": 1, "before_seconds": null, "seconds": "x"}'])
def test_a_sum_that_cannot_be_read_begins_anew(tmp_path: Path, text: str) -> None:
    """Training starts all the same."""
    (tmp_path / "restarts.json").write_text(text)

    assert total_down_s(tmp_path, 1, 5.0) == 5
