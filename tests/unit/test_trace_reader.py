"""What the reader makes of traces: whole, cut off, foreign and hostile ones."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from otel_train import TraceError
from otel_train.trace_analysis import events, reader
from otel_train.trace_analysis.events import EventKind, read
from otel_train.trace_analysis.reader import PIECE_BYTES
from otel_train.trace_analysis.summary import summarize
from tests.support.made_trace import MadeTrace, training, write_long

EVENT: dict[str, Any] = {
    "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5.0, "dur": 2.0,
}  # fmt: skip


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_becomes_columns(tmp_path: Path, name: str) -> None:
    """Plain or zipped, the same columns."""
    made = MadeTrace(rank=3, world_size=8)
    made.op("aten::mm", 10.5, 4.25)
    made.kernel("gemm", 20.0, 5.0, launched=12.0, stream=7)

    trace = read(made.write(tmp_path / name))

    assert (trace.rank, trace.world_size) == (3, 8)
    assert [trace.names[code] for code in trace.spans.name] == ["aten::mm", "cudaLaunchKernel", "gemm"]
    assert trace.spans.start_ns.tolist() == [0, 1500, 9500]
    assert trace.spans.dur_ns.tolist() == [4250, 2000, 5000]
    assert trace.spans.stream.tolist() == [-1, -1, 7]
    assert trace.spans.correlation.tolist() == [-1, 1, 1]
    assert trace.kind.tolist() == [EventKind.OP, EventKind.RUNTIME, EventKind.KERNEL]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("listed", [True, False])
def test_any_layout_of_json_is_read(tmp_path: Path, indent: int | None, listed: bool) -> None:
    """Other tools rewrite traces: compact, indented, as a bare list, keys in another order."""
    events = [{**EVENT, "ts": float(at), "args": {"x": [{"a": "},{"}, {"b": "]}"}]}} for at in range(20_000)]
    document: object = (
        events if listed else {"traceEvents": events, "later": {"traceEvents": []}, "text": "]}"}
    )
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document, indent=indent))

    trace = read(path)

    assert path.stat().st_size > PIECE_BYTES
    assert trace.spans.start_ns.tolist() == [at * 1000 for at in range(20_000)]


def test_the_key_of_the_events_may_also_stand_in_a_text(tmp_path: Path) -> None:
    """A trace's name is chosen by the user."""
    path = write(
        tmp_path / "t.json",
        {"traceName": '"traceEvents": [', "a": {"traceEvents": [1]}, "traceEvents": [EVENT]},
    )

    assert len(read(path).kind) == 1


@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_a_file_that_is_cut_off_gives_what_it_has(tmp_path: Path, keep: float) -> None:
    """The disk was full, or the run died while writing."""
    whole = training(steps=8).text()
    path = tmp_path / "trace.json"
    path.write_text(whole[: int(len(whole) * keep)])

    trace = read(path)

    assert 0 < len(trace.kind) <= len([event for event in training(steps=8).events if event["ph"] == "X"])
    assert any("cut off" in sentence for sentence in trace.missing)


@pytest.mark.parametrize(
    ("damage", "says"),
    [(lambda data, half: data[:half], "gzip data end early"),
     (lambda data, half: data[:half] + bytes([data[half] ^ 0xFF]) + data[half + 1 :], "gzip data are damaged")],
)  # fmt: skip
def test_a_zipped_file_that_is_damaged_gives_what_it_has(
    tmp_path: Path, damage: Callable[[bytes, int], bytes], says: str
) -> None:
    """Half a trace is worth more than an error, if it says that it is half."""
    data = gzip.compress(training(steps=60).text().encode())
    path = tmp_path / "trace.json.gz"
    path.write_bytes(damage(data, len(data) // 2))

    trace = read(path)

    assert len(trace.kind)
    assert any(says in sentence for sentence in trace.missing)


def test_members_of_a_gzip_file_follow_one_another(tmp_path: Path) -> None:
    """``cat a.gz b.gz`` is a gzip file, with zeros behind it on a tape."""
    text = training(steps=2).text().encode()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text[:1000]) + gzip.compress(text[1000:]) + b"\0" * 100)

    trace = read(path)

    assert len(trace.kind) == len([event for event in training(steps=2).events if event["ph"] == "X"])
    assert trace.missing == ()


def test_zeros_behind_a_zipped_trace_are_passed_over(tmp_path: Path) -> None:
    """A disk that was full leaves a hole of gigabytes, which took minutes byte by byte; a member may follow it."""
    path = training(steps=2).write(tmp_path / "trace.json.gz")
    whole = read(path)
    os.truncate(path, 8 << 30)
    with path.open("ab") as file:
        file.write(gzip.compress(b" \n"))
    os.truncate(path, 12 << 30)

    trace = read(path)

    assert (trace.missing, trace.spans.name.tolist()) == (whole.missing, whole.spans.name.tolist())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b"\x80\x04\x95pickle", "expected JSON"),
        (b"<html></html>", "expected JSON"),
        (b'{"a": 1}', "no traceEvents"),
        (b'{"traceEvents": 5}', "no traceEvents"),
        (b'{"traceEvents": {"a": 1}}', "no traceEvents"),
        (b'{"traceEvents": [{"ph": "X", "na', "cut off|middle of an event"),
        (b"[" * 100_000, "no event could be read"),
        (b'{"a":' * 100_000, "no traceEvents"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b"\x1f\x8b\x08\x00broken gzip", "gzip data"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_reason(tmp_path: Path, content: bytes, says: str) -> None:
    """The message says what is wrong with the file; a traceback does not."""
    path = tmp_path / "trace.json"
    path.write_bytes(content)

    with pytest.raises(TraceError, match=says):
        read(path)


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    """The command line turns it into one line."""
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "nowhere.json")


@pytest.mark.parametrize(("document", "events", "said"), [
    # A schedule that never became active writes such a file.
    pytest.param({"schemaVersion": 1, "traceEvents": []}, 0, "no events", id="an empty list of events"),
    # The format may change under us; silence would look like certainty.
    pytest.param({"schemaVersion": 9, "traceEvents": [EVENT]}, 1, "version 9", id="a version that is not known"),
])  # fmt: skip
def test_what_a_trace_cannot_say_is_said(
    tmp_path: Path, document: dict[str, Any], events: int, said: str
) -> None:
    """It is a trace all the same."""
    trace = read(write(tmp_path / "t.json", document))

    assert len(trace.kind) == events
    assert any(said in sentence for sentence in trace.missing)


def bomb() -> bytes:
    """32 MB of events in 50 KB."""
    packed = zlib.compressobj(9, wbits=31)
    return packed.compress(b"[" + (json.dumps(EVENT).encode() + b",") * 400_000) + packed.flush()


@pytest.mark.parametrize(("limits", "content", "said"), [
    pytest.param({"EXPANSION": 10, "FREE_BYTES": 1 << 20}, bomb, "unpack to more than", id="it grows without bounds"),
    # Each took three microseconds, and 13 MB of gzip unpack to an hour of them.
    pytest.param({"DEEPEST": 1000}, lambda: b'{"traceEvents": ' + b"[" * 2000, "nested deeper than 1,000 levels",
                 id="brackets alone"),
    # One string that never ends must not be held as a whole.
    pytest.param({"LONGEST_BYTES": 4 << 20}, lambda: gzip.compress(b'[{"name": "' + b"a" * (8 << 20)),
                 "no event ends within", id="no event ends"),
    # Each of its quotes was tried as the beginning of a text: 40 kB took 8 s, a megabyte hours.
    pytest.param({}, lambda: b'{"traceEvents": [{"ph": "X", "name": "' + b'\\"' * 500_000,
                 "it ends in the middle of an event", id="a text of quotes does not end"),
])  # fmt: skip
def test_a_file_that_would_take_too_much_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    limits: dict[str, int],
    content: Callable[[], bytes],
    said: str,
) -> None:
    """And says by which limit."""
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content())
    for name, limit in limits.items():
        monkeypatch.setattr(reader, name, limit)

    with pytest.raises(TraceError, match=said):
        read(path)


@pytest.mark.parametrize(
    "change",
    [
        {"ts": "5.0", "dur": "2.0"},
        {"args": {"stream": "seven"}},
        {"args": {"correlation": 10**40}},
        {"args": {"External id": 1.0}},
        {"args": [1, 2]},
        {"args": None},
        {"pid": None, "tid": {"a": 1}},
        {"cat": 5},
        {"args": {"device": None, "bytes": True}},
    ],
)
def test_a_value_of_another_type_counts_as_not_said(tmp_path: Path, change: dict[str, Any]) -> None:
    """One odd event must not cost the megabyte around it."""
    trace = read(write(tmp_path / "t.json", {"traceEvents": [EVENT, {**EVENT, **change}, EVENT]}))

    assert len(trace.kind) == 3
    assert trace.spans.dur_ns.tolist() == [2000] * 3


@pytest.mark.parametrize(
    "change", [{"ts": 1e300}, {"ts": "NaN"}, {"dur": -1.0}, {"dur": 10**400}, {"ts": None}, {"dur": 1e18}]
)
def test_an_event_without_an_instant_is_left_out_and_counted(tmp_path: Path, change: dict[str, Any]) -> None:
    """It would stretch every value."""
    events = [EVENT, {**EVENT, **change}, EVENT]

    trace = read(write(tmp_path / "t.json", {"traceEvents": events}))

    assert len(trace.kind) == 2
    assert any("without a valid start" in sentence for sentence in trace.missing)


def test_one_event_that_is_no_json_is_skipped_and_counted(tmp_path: Path) -> None:
    """Kineto once wrote names with a lone backslash."""
    good = json.dumps(EVENT)
    path = tmp_path / "t.json"
    path.write_text(f'{{"traceEvents": [{good}, {good.replace("aten::mm", chr(92) + "q")}, {good}]}}')

    trace = read(path)

    assert len(trace.kind) == 2
    assert any("cannot be read as events: 1." in sentence for sentence in trace.missing)


def test_deep_nesting_costs_at_most_the_event(tmp_path: Path) -> None:
    """A parser that recurses dies of it. That of Python 3.14 reads this one."""
    deep = json.dumps(EVENT)[:-1] + ', "args": {"x": ' + "[" * 200_000 + "]" * 200_000 + "}}"
    path = tmp_path / "t.json"
    path.write_text(f'{{"traceEvents": [{json.dumps(EVENT)}, {deep}, {json.dumps(EVENT)}]}}')

    assert len(read(path).kind) in (2, 3)


def test_the_slow_reader_agrees_with_the_quick_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without msgspec the standard library reads; nothing may depend on which."""
    path = training(steps=3, world_size=2).write(tmp_path / "t.json")
    quick = read(path)
    monkeypatch.setattr(reader, "_msgspec_decoder", lambda: None)

    slow = read(path)

    assert quick.names == slow.names
    one: Any
    other: Any
    for one, other in zip(quick.spans, slow.spans, strict=True):
        assert one.dtype == other.dtype
        assert str(one.tolist()) == str(other.tolist())  # NaN is not equal to itself


def test_a_long_trace_is_read_whole_with_progress(tmp_path: Path) -> None:
    """TraceFileReader are cut at events: none is lost or counted twice at a cut."""
    path = tmp_path / "long.json"
    events = write_long(path, text_bytes=3 * PIECE_BYTES, layers=4)
    seen: list[tuple[int, int]] = []

    trace = read(path, progress=lambda done, of: seen.append((done, of)))

    assert len(trace.kind) + trace.memory.at_ns.size == events
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    assert trace.missing == ()


def test_shapes_are_read_on_demand(tmp_path: Path) -> None:
    """They are half of the file and one question in a hundred."""
    made = MadeTrace()
    inputs: list[Any] = [[[2, 3], []], [[4, 5], []], [[2, 3], []]]
    for number, dims in enumerate(inputs):
        made.op("aten::mm", number * 10.0, 4.0, **{"Input Dims": dims})
    made.op("aten::add", 50, 1, **{"Input Dims": inputs[0]})

    found = events.shapes(made.write(tmp_path / "t.json.gz"), "aten::mm")

    assert [(row["shapes"], row["count"]) for row in found] == [("[[2, 3], []]", 2), ("[[4, 5], []]", 1)]
    assert found[0]["seconds"] == pytest.approx(8e-6)


def test_space_before_a_trace_is_not_kept(tmp_path: Path) -> None:
    """A small gzip file may hold megabytes of it; each part was joined to all before it, for minutes."""
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * (32 << 20), 1))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="the file is empty"):
            read(path)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most_bytes < 8 << 20


def test_ranges_of_early_versions_are_no_operators(tmp_path: Path) -> None:
    """They had the category of operators: no step was found, and each took the time of the operators in it."""

    def event(name: str, start: float, lasted: float) -> dict[str, Any]:
        return {**EVENT, "cat": "Operator", "name": name, "ts": start, "dur": lasted}

    events = [
        each
        for step in range(3)
        for each in (
            event(f"ProfilerStep#{step}", step * 100.0, 100.0),
            event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", step * 100.0, 20.0),
            event("aten::mm", step * 100.0 + 30, 40.0),
            event("Optimizer.step#SGD.step", step * 100.0 + 80, 10.0),
        )
    ]
    analysis = summarize(read(write(tmp_path / "trace.json", {"traceEvents": events})))

    assert analysis["breakdown"]["steps"] == 3
    assert [row["name"] for row in analysis["top_cpu_ops"]] == ["aten::mm"]
    assert {row["stage"]: row["share"] for row in analysis["breakdown"]["stages"]} == pytest.approx(
        {"data": 0.2, "optimizer": 0.1, "other": 0.7}
    )
