"""Bounded files of JSON lines, and the spool made of them."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from otel_train.exporters import spool
from otel_train.exporters.spool import SpooledRequest, SpoolQueue
from otel_train.files import MOST_BYTES, BoundedLines, predecessor
from tests.support.json_lines import read_jsonl
from tests.support.zero_code import printed_by


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
    """A run without events leaves no empty file to wonder about."""
    file = BoundedLines(tmp_path / "deep" / "a.jsonl", max_bytes=1000, on_error=errors.append)
    assert list(tmp_path.iterdir()) == []
    assert file.append(line(1))
    file.close()
    assert lines_of(file.path) == [1]


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
def test_a_bounded_file_keeps_the_newest_lines(
    sizes: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Law: no line is missing between those that are kept, and the bound holds throughout."""
    path = tmp_path_factory.mktemp("law") / "a.jsonl"
    file = BoundedLines(path, max_bytes=1000, on_error=lambda _: None)
    for number, size in enumerate(sizes):
        file.append(line(number, size))
        parts = [part for part in (path, predecessor(path)) if part.exists()]
        assert sum(part.stat().st_size for part in parts) <= 1000
    file.close()
    there = lines_of(path)
    assert there == [*range(len(sizes) - len(there), len(sizes))]
    assert there


def test_a_line_larger_than_the_file_may_be_is_dropped(tmp_path: Path, errors: list[OSError]) -> None:
    """One monster must not wipe out everything else."""
    file = BoundedLines(tmp_path / "a.jsonl", max_bytes=100, on_error=errors.append)
    file.append(line(1))
    assert not file.append(line(2, 100))
    file.close()
    assert lines_of(file.path) == [1]


FULL_DISK = """
import json, resource, signal, sys
from pathlib import Path
from otel_train.files import BoundedLines

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
errors = []
file = BoundedLines(Path(sys.argv[1]), max_bytes=1 << 20, on_error=errors.append)
written = [file.append(json.dumps({"n": number, "pad": "x" * 400})) for number in range(4)]
written.append(file.append(json.dumps({"n": 9})))
file.close()
print(json.dumps([written, len(errors)]))
"""


def test_a_disk_that_fills_up_in_mid_line_leaves_whole_lines(tmp_path: Path) -> None:
    """The half that went to disk is taken back, the rest of the run goes on."""
    path = tmp_path / "a.jsonl"

    assert json.loads(printed_by("-c", FULL_DISK, path)) == [[True, True, False, False, True], 2]
    assert [json.loads(text)["n"] for text in path.read_text().splitlines()] == [0, 1, 9]


def test_a_file_that_was_removed_is_begun_anew(tmp_path: Path, errors: list[OSError]) -> None:
    """People tidy up below live runs; what is written into a file without a name is lost."""
    file = BoundedLines(tmp_path / "a.jsonl", max_bytes=1000, on_error=errors.append)
    file.append(line(1))
    file.path.rename(tmp_path / "taken")
    file.append(line(2))
    file.close()
    assert lines_of(file.path) == [2]
    assert lines_of(tmp_path / "taken") == [1]


def queue(folder: Path, **settings: Any) -> SpoolQueue:
    return SpoolQueue(folder, "metrics", **settings)


def request(number: int, padding: int = 0) -> bytes:
    """A line with one data point."""
    text = json.dumps({"resourceMetrics": [], "n": number, "timeUnixNano": "x" * padding})
    return text.replace('": "x', '":"x').encode()


def numbers(lines: Iterable[bytes]) -> list[int]:
    return [json.loads(each)["n"] for each in lines]


def head_of(waiting: SpoolQueue) -> SpooledRequest:
    head = waiting.head()
    assert head is not None
    return head


def drained(waiting: SpoolQueue) -> list[int]:
    """What the queue hands out, in order, each removed."""
    out = []
    with waiting.sending() as granted:
        assert granted
        while (head := waiting.head()) is not None:
            out.append(json.loads(head.line)["n"])
            waiting.remove(head)
    return out


def test_closing_gives_the_files_back_and_leaves_nothing_that_says_nothing(tmp_path: Path) -> None:
    """After close() no file of the spool is open, and an empty one is removed."""
    before = open_files()
    waiting = queue(tmp_path)
    waiting.append(request(1))
    assert drained(waiting) == [1]
    waiting.append(request(2))
    assert drained(waiting) == [2]
    waiting.close()

    assert open_files() == before
    assert list(tmp_path.iterdir()) == []


def test_the_spool_holds_one_request_a_line(tmp_path: Path) -> None:
    """Any collector's file receiver reads this format."""
    waiting = queue(tmp_path)
    waiting.append(request(1))
    waiting.append(request(2))
    waiting.close()
    [segment] = (tmp_path / "spool").glob("metrics-*.otlp.jsonl")

    assert segment.read_bytes() == request(1) + b"\n" + request(2) + b"\n"


def test_another_process_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    """The offset is on disk, so SIGKILL sends nothing twice that was removed."""
    killed = queue(tmp_path)
    for number in range(6):
        killed.append(request(number))
    with killed.sending():
        for _ in range(3):
            killed.remove(head_of(killed))

    assert numbers(queue(tmp_path).waiting()) == [3, 4, 5]
    assert drained(queue(tmp_path)) == [3, 4, 5]
    assert drained(queue(tmp_path)) == []


def test_a_line_that_a_kill_left_half_written_is_skipped_and_counted(tmp_path: Path) -> None:
    """What is behind it must get through."""
    before = queue(tmp_path)
    before.append(request(1))
    before.close()
    [segment] = (tmp_path / "spool").glob("metrics-*.otlp.jsonl")
    with segment.open("ab") as file:
        file.write(request(2)[:-5])
    after = queue(tmp_path)
    after.append(request(3))

    assert drained(after) == [1, 3]
    assert after.torn == 1


def test_a_segment_is_not_removed_under_its_writer(tmp_path: Path) -> None:
    """Two processes: one appends, the other sends all there is, again and again."""
    writer, sender = queue(tmp_path), queue(tmp_path)
    out: list[int] = []
    for number in range(50):
        writer.append(request(number))
        if number % 3 == 0:
            out += drained(sender)
    out += drained(sender)

    assert out == list(range(50))


def test_a_segment_removed_before_its_first_line_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new segment is empty for an instant, and an empty one is done."""
    locked = spool._locked

    def late(fd: int) -> bool:
        monkeypatch.setattr(spool, "_locked", locked)
        assert drained(queue(tmp_path)) == []
        return locked(fd)

    monkeypatch.setattr(spool, "_locked", late)
    queue(tmp_path).append(request(1))

    assert drained(queue(tmp_path)) == [1]


def test_what_waits_in_memory_at_the_end_goes_to_disk_where_that_is_possible_again(tmp_path: Path) -> None:
    """The disk has space again meanwhile."""
    (tmp_path / "spool").write_text("in the way")
    losses: list[int] = []
    waiting = queue(tmp_path, on_loss=lambda records, _: losses.append(records))
    waiting.append(request(1))
    (tmp_path / "spool").unlink()
    waiting.close()

    assert numbers(queue(tmp_path).waiting()) == [1]
    assert losses == []


def test_appending_while_another_thread_sends_loses_nothing(tmp_path: Path) -> None:
    """The export loop appends while the sender removes segments."""
    waiting, out = queue(tmp_path), []
    done = threading.Event()

    def send() -> None:
        while not done.is_set():
            out.extend(drained(waiting))
        out.extend(drained(waiting))

    thread = threading.Thread(target=send)
    thread.start()
    for number in range(2000):
        waiting.append(request(number))
    done.set()
    thread.join(30)

    assert out == list(range(2000))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(sizes=st.lists(st.integers(1, 700), min_size=1, max_size=60), taken=st.integers(0, 20))
def test_a_full_spool_drops_its_oldest_and_counts_them(
    sizes: list[int], taken: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Law: what was sent, what waits and what was counted is what was put, and the bound holds throughout."""
    folder = tmp_path_factory.mktemp("law")
    losses: list[int] = []
    waiting = queue(folder, max_bytes=4000, on_loss=lambda records, _: losses.append(records))
    sent = []
    for number, size in enumerate(sizes):
        waiting.append(request(number, size))
        files = (folder / "spool").glob("metrics-*")
        assert sum(path.stat().st_size for path in files) <= 4000
        if number < taken:
            with waiting.sending():
                head = head_of(waiting)
                sent.append(json.loads(head.line)["n"])
                waiting.remove(head)
    there = numbers(waiting.waiting())
    waiting.close()

    assert len(sent) + len(there) + sum(losses) == len(sizes)
    assert sent + there == sorted(sent + there)
    assert (sent + there)[-1] == len(sizes) - 1


def test_a_line_larger_than_the_spool_is_dropped_and_counted(tmp_path: Path) -> None:
    """One monster must not wipe out everything else."""
    losses: list[tuple[int, str]] = []
    waiting = queue(
        tmp_path, max_bytes=1000, on_loss=lambda records, reason: losses.append((records, reason))
    )
    waiting.append(request(1))
    waiting.append(request(2, 2000))

    assert numbers(waiting.waiting()) == [1]
    assert losses == [(1, "queue_full")]


def test_what_the_disk_does_not_take_waits_in_memory_bounded(
    tmp_path: Path, errors: list[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the folder should be, as good as a full or read-only disk."""
    (tmp_path / "spool").write_text("in the way")
    losses: list[int] = []
    monkeypatch.setattr("otel_train.exporters.spool.MEMORY_BYTES", 3 * len(request(1)))
    waiting = queue(tmp_path, on_error=errors.append, on_loss=lambda n, _: losses.append(n))
    for number in range(5):
        waiting.append(request(number))

    assert sum(losses) == 2
    assert errors
    (tmp_path / "spool").unlink()
    waiting.append(request(5))
    assert numbers(waiting.waiting()) == [2, 3, 4, 5]


FULL_SPOOL = """
import json, resource, signal, sys
from pathlib import Path
from otel_train.exporters.spool import SpooledRequest, SpoolQueue

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
errors = []
queue = SpoolQueue(Path(sys.argv[1]), "metrics", on_error=errors.append)
for number in range(6):
    queue.append(json.dumps({"n": number, "pad": "x" * 400}).encode())
sent = []
with queue.sending():
    while (head := queue.head()) is not None:
        sent.append(json.loads(head.line)["n"])
        queue.remove(head)
print(json.dumps([sent, bool(errors)]))
"""


def test_a_disk_that_fills_up_loses_nothing_while_there_is_memory(tmp_path: Path) -> None:
    """Half a line on disk, and the rest in memory, would be a line lost."""
    assert json.loads(printed_by("-c", FULL_SPOOL, tmp_path)) == [[0, 1, 2, 3, 4, 5], True]


def test_tries_to_write_on_a_full_disk_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each export left an empty segment: thousands a day, which every later one looked at."""
    errors: list[OSError] = []
    waiting = queue(tmp_path, on_error=errors.append)
    monkeypatch.setattr("otel_train.exporters.spool.append_whole", fails)
    for number in range(3):
        waiting.append(request(number))

    assert (len(errors), waiting.unsaved, list(tmp_path.glob("spool/*.jsonl"))) == (3, 3, [])
    monkeypatch.undo()
    waiting.append(request(3))
    assert (numbers(waiting.waiting()), waiting.unsaved) == ([0, 1, 2, 3], 0)


def fails(*_: object) -> None:
    """What a write does on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_rejected_lies_aside_with_its_reason(tmp_path: Path) -> None:
    """People find out what was wrong with it, and can send it again."""
    waiting = queue(tmp_path)
    waiting.append(request(1))
    waiting.append(request(2))
    with waiting.sending():
        waiting.reject(head_of(waiting), "refuses a request (400)")
    [kept] = read_jsonl(tmp_path / "spool" / "rejected" / "metrics.jsonl")

    assert kept["reason"] == "refuses a request (400)"
    assert str(kept["line"]).encode() == request(1)
    assert numbers(waiting.waiting()) == [2]


def test_what_does_not_fit_among_the_rejected_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record counts as `rejected` when its request is: it was in the sum of all drops twice."""
    monkeypatch.setattr("otel_train.exporters.spool._REJECTED_BYTES", 4 * len(request(1)) + 400)
    lost: list[tuple[int, str]] = []
    waiting = SpoolQueue(tmp_path, "metrics", on_loss=lambda records, reason: lost.append((records, reason)))
    for number in range(8):
        waiting.append(request(number))
    long = request(9)[:-1] + b" " * 2000 + b"}"
    waiting.append(long)
    with waiting.sending():
        for _ in range(9):
            waiting.reject(head_of(waiting), "refuses a request (400)")
    kept = len(read_jsonl(tmp_path / "spool" / "rejected" / "metrics.jsonl"))

    assert 0 < kept < 8
    assert lost == []
    assert numbers(waiting.waiting()) == []


@pytest.mark.parametrize(
    "state",
    [
        b"0000000001 -00000000100\n",
        b"99999999999999999999999\n",
        b"9999999999 000000000000\n",  # the next segment would have a number too long for a name
        b"99999999999 00000000005\n",
        b"0000000001 000000001000\n",
        b"0000000001 000000000005\n",
        b"0000000001\n",
        b"\xff" * 24,
        b"\0" * 24,
    ],
)
def test_a_damaged_offset_stops_nothing_and_loses_nothing(tmp_path: Path, state: bytes) -> None:
    """One beyond the end of its segment, or in the middle of a line, is of another file: nothing of this one is sent."""
    before = queue(tmp_path)
    before.append(request(1))
    before.close()
    (tmp_path / "spool" / "metrics.offset").write_bytes(state)
    after = queue(tmp_path)
    after.append(request(2))

    assert drained(after) == [1, 2]


def test_what_is_in_memory_alone_is_known_while_one_more_is_tried(tmp_path: Path) -> None:
    """The run summary is shown then: it said of all of them that they wait in the spool."""
    (tmp_path / "spool").touch()
    seen: list[int] = []
    waiting: SpoolQueue = queue(tmp_path, on_error=lambda _: seen.append(waiting.unsaved))
    for number in range(3):
        waiting.append(request(number))

    assert seen == [0, 1, 2]
    assert waiting.unsaved == 3


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_lies_in_place_of_the_offset_holds_up_nothing(tmp_path: Path, kind: str) -> None:
    """Nothing on disk was sent any more, by no later start of the run and by no replay."""
    before = queue(tmp_path)
    before.append(request(1))
    place = tmp_path / "spool" / "metrics.offset"
    place.unlink()
    if kind == "folder":
        place.mkdir()
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(place)
    before.append(request(2))

    assert drained(before) == [1, 2]
    before.close()


def test_a_file_with_the_last_possible_number_is_no_segment(tmp_path: Path) -> None:
    """The names of those behind it would be too long: they were written, and neither sent nor dropped."""
    folder = tmp_path / "spool"
    folder.mkdir()
    (folder / "metrics-9999999999.otlp.jsonl").touch()
    waiting = queue(tmp_path)
    waiting.append(request(1))

    assert drained(waiting) == [1]


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_is_no_segment_does_not_hold_up_the_others(tmp_path: Path, kind: str) -> None:
    """Nothing on disk was sent any more, until the spool was full."""
    folder = tmp_path / "spool"
    folder.mkdir()
    first = folder / "metrics-0000000001.otlp.jsonl"
    if kind == "folder":
        first.mkdir()
    elif kind == "pipe":
        os.mkfifo(first)
    else:
        first.symlink_to(tmp_path)
    waiting = queue(tmp_path)
    for number in range(3):
        waiting.append(request(number))

    assert drained(waiting) == [0, 1, 2]
    waiting.close()


def test_a_segment_that_cannot_be_read_stays_and_holds_up_no_other(tmp_path: Path) -> None:
    """A bad block, or a file of another user, kept everything behind it until the spool was full."""
    folder = tmp_path / "spool"
    folder.mkdir()
    first = folder / "metrics-0000000001.otlp.jsonl"
    first.write_bytes(request(9) + b"\n")
    os.truncate(first, MOST_BYTES + 1)  # of holes
    errors: list[OSError] = []
    waiting = queue(tmp_path, max_bytes=2 * MOST_BYTES, on_error=errors.append)
    waiting.append(request(0))
    waiting.append(request(1))

    assert numbers(waiting.waiting()) == [0, 1]
    assert drained(waiting) == [0, 1]
    assert errors[-1].filename == str(first)
    waiting.close()
    assert first.exists()


def test_a_full_spool_drops_a_segment_that_cannot_be_read(tmp_path: Path) -> None:
    """It cannot be counted; without that nothing was written any more."""
    folder = tmp_path / "spool"
    folder.mkdir()
    first = folder / "metrics-0000000001.otlp.jsonl"
    first.touch()
    os.truncate(first, MOST_BYTES + 1)
    waiting = queue(tmp_path, max_bytes=1 << 20)
    waiting.append(request(0))

    assert not first.exists()
    assert drained(waiting) == [0]


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write into the folder must not be able to end the process."""
    monkeypatch.setattr("otel_train.exporters.spool.MOST_LINE_BYTES", 4096)
    (tmp_path / "spool").mkdir()
    segment = tmp_path / "spool" / "metrics-0000000001.otlp.jsonl"
    segment.write_bytes(b"x" * 20_000 + b"\n" + request(2) + b"\n")
    waiting = queue(tmp_path)
    with waiting.sending():
        head = head_of(waiting)
        assert "more than 4096 bytes" in head.problem
        assert len(head.line) <= 4096
        waiting.reject(head, head.problem)

    assert drained(waiting) == [2]

    segment.write_bytes(b"x" * 20_000)  # torn off
    waiting.append(request(3))

    assert drained(waiting) == [3]
    assert waiting.torn == 1
