"""What holds for every trace, and for every text that is given as one."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_train import TraceError
from otel_train.trace_analysis import intervals
from otel_train.trace_analysis.events import Trace, read
from otel_train.trace_analysis.summary import summarize
from otel_train.trace_analysis.timeline import _nested
from tests.support.made_trace import NCCL_STREAM, MadeTrace, training

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
KEYS = st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id"])
WORDS = st.sampled_from(
    ["X", "i", "B", "M", "[memory]", "cpu_op", "kernel", "user_annotation", "cuda_runtime", "ProfilerStep#1", "ncclKernel",
     "cudaDeviceSynchronize", "otel_train:data", "cudaLaunchKernel"]
)  # fmt: skip
ARGS = st.dictionaries(
    st.sampled_from(
        ["External id", "correlation", "stream", "device", "bytes", "Total Allocated", "Device Type", "Bytes"]
    ),
    SCALARS | st.integers(0, 3),
)
EVENTS = st.lists(
    st.dictionaries(KEYS, WORDS | st.integers(0, 100) | st.floats(0, 100) | ARGS | JSON) | JSON, max_size=12
)


def of_text(data: bytes) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(data)
        return read(path)


def instants(ranges: list[tuple[int, int]]) -> set[int]:
    return {at for start, length in ranges for at in range(start, start + length)}


def made(ranges: list[tuple[int, int]]) -> intervals.Intervals:
    return intervals.union([start for start, _ in ranges], [start + length for start, length in ranges])


def of(these: intervals.Intervals) -> set[int]:
    return {at for start, end in zip(*these, strict=True) for at in range(start, end)}


@given(RANGES, RANGES)
def test_intervals_are_sets_of_instants(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    """Every analysis is built of these four."""
    assert of(made(one)) == instants(one)
    assert of(intervals.intersect(made(one), made(other))) == instants(one) & instants(other)
    assert of(intervals.subtract(made(one), made(other))) == instants(one) - instants(other)
    assert of(intervals.gaps(made(one), 5, 50)) == set(range(5, 50)) - instants(one)
    assert intervals.covered(made(one), [5], [50]).tolist() == [len(instants(one) & set(range(5, 50)))]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=15))
def test_self_times_add_up_whatever_overlaps_what(ranges: list[tuple[int, int]]) -> None:
    """Rounded instants make calls outlast the call around them; no time may be counted twice for it."""
    ordered = sorted(ranges, key=lambda item: (item[0], -item[1]))
    start = np.array([begun for begun, _ in ordered], np.int64)
    end = start + np.array([length for _, length in ordered], np.int64)

    parent, clamped = _nested(start, end)

    for number, outer in enumerate(parent.tolist()):
        assert outer < number
        assert outer < 0 or (start[outer] <= start[number] and clamped[number] <= clamped[outer])
    roots = clamped[parent < 0] - start[parent < 0]
    inside = np.zeros(len(ordered), np.int64)
    np.add.at(inside, parent[parent >= 0], (clamped - start)[parent >= 0])
    assert (clamped - start - inside).sum() == roots.sum()


@settings(deadline=None, max_examples=200)
@given(EVENTS, st.dictionaries(st.sampled_from(["schemaVersion", "distributedInfo", "x"]), JSON))
def test_any_json_is_read_or_refused(events: list[object], about: dict[str, object]) -> None:
    """Traces come from strangers: no input may end in another error than ours."""
    try:
        document = summarize(of_text(json.dumps({**about, "traceEvents": events}).encode()))
    except TraceError:
        return
    assert document["findings"]


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 3000), st.booleans())
def test_any_damage_is_read_or_refused(damage: bytes, at: int, zipped: bool) -> None:
    """Half-written files, broken disks."""
    text = training(steps=1, layers=1).text().encode()
    data = gzip.compress(text) if zipped else text
    at = min(at, len(data))
    try:
        document = summarize(of_text(data[:at] + damage + data[at + len(damage) :]))
    except TraceError:
        return
    assert document["findings"]


KERNELS = st.lists(
    st.tuples(st.integers(0, 80), st.integers(0, 30), st.integers(0, 40), st.sampled_from([7, NCCL_STREAM])),
    max_size=8,
)


@settings(deadline=None, max_examples=200)
@given(KERNELS, st.lists(st.tuples(st.integers(0, 90), st.integers(0, 30)), max_size=3), st.integers(0, 40))
def test_parts_add_up_to_the_whole(
    kernels: list[tuple[int, int, int, int]], syncs: list[tuple[int, int]], data: int
) -> None:
    """Idle causes to idle time, the critical path to its step, stages to the steps: nothing lost, nothing twice."""
    trace = MadeTrace()
    trace.step(1, 0, 100)
    trace.note("otel_train:data", 0, data)
    for launched, length, delay, stream in kernels:
        trace.kernel(
            "ncclKernel" if stream == NCCL_STREAM else "gemm",
            launched + delay,
            length,
            launched=launched,
            stream=stream,
        )
    for start, length in syncs:
        trace.call("cudaStreamSynchronize", start, length)

    found = summarize(of_text(trace.text().encode()))

    path, parts, idle = found["critical_path"], found["breakdown"], found["idle"]
    assert abs(sum(path["parts"].values()) - path["seconds"]) < 1e-9
    assert abs(sum(row["seconds"] for row in parts["stages"]) - parts["seconds"]) < 1e-9
    if idle is not None:
        assert abs(sum(cause["seconds"] for cause in idle["causes"].values()) - idle["seconds"]) < 1e-9
        assert all(cause["seconds"] >= 0 for cause in idle["causes"].values())
