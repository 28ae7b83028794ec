"""Whatever a flight file holds, its readers say what they find or that it is none."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from otel_train.cli.postmortem import headline, render
from otel_train.console.text import TextLayout
from otel_train.errors import RunDirectoryError
from otel_train.exporters.run_directory import down_s
from otel_train.files import mark_of
from otel_train.recording.flight_recorder import read_flight
from otel_train.recording.shared_memory import HEADER, PAGE
from otel_train.rundata.flight import FlightHistory, read_postmortem
from otel_train.rundata.live_view import progress_of
from tests.support.left_run import leave_run

NAMES, RINGS = 2 * PAGE, 2 * PAGE + 256 * 1024
EDGES = 256
WORDS = st.one_of(
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.sampled_from([0, 1, -1, 2, 1 << 31, 1 << 58, 1 << 62, (1 << 63) - 1, -(1 << 63)]),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "identity": st.dictionaries(
            st.sampled_from(["run_id", "rank", "attempt", "host", "started_unix_ns", "x"]), JSON
        ),
        "sources": st.one_of(
            JSON,
            st.lists(
                st.tuples(
                    st.integers(-1, 12), st.text(max_size=9), st.sampled_from(["", "train", "eval", "x"])
                )
            ),
        ),
    },
)


class Content(bytes):
    """Bytes that a failing test does not print."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Content:
    """A flight file of ten steps; the rings of side threads are left off."""
    run = leave_run(tmp_path_factory.mktemp("runs"), [5, 5], edges=EDGES)
    return Content((run / "rank0" / "flight.bin").read_bytes()[: RINGS + EDGES * 16])


def word_at(offset: int) -> st.SearchStrategy[tuple[int, bytes]]:
    return WORDS.map(lambda word: (offset, struct.pack("<q", word)))


CHANGES = st.lists(
    st.one_of(
        st.integers(1, 9).flatmap(lambda field: word_at(8 * field)),
        st.tuples(st.integers(0, 15), st.integers(0, 2)).flatmap(
            lambda at: word_at(PAGE + 128 * at[0] + 8 * at[1])
        ),
        st.integers(0, 2 * EDGES - 1).flatmap(lambda word: word_at(RINGS + 8 * word)),
        st.tuples(st.integers(0, HEADER.size), st.binary(min_size=1, max_size=4)),
        st.tuples(st.integers(NAMES, NAMES + 700), st.binary(min_size=1, max_size=9)),
        st.tuples(st.integers(RINGS, RINGS + EDGES * 16), st.binary(min_size=1, max_size=64)),
    ),
    min_size=1,
    max_size=6,
)


def changed(whole: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    data = bytearray(whole)
    for offset, piece in changes:
        data[offset : offset + len(piece)] = piece
    return bytes(data)


def with_table(whole: bytes, table: object) -> bytes:
    text = json.dumps(table).encode()
    header = list(HEADER.unpack_from(whole))
    header[7:9] = 0, len(text)
    return changed(whole, [(0, HEADER.pack(*header)), (NAMES, text)])


def read_everywhere(folder: Path) -> None:
    """Every reader of a flight file, as commands and pages call it."""
    path = folder / "flight.bin"
    with suppress(RunDirectoryError):
        FlightHistory(read_flight(path))
    with suppress(RunDirectoryError):
        document = read_postmortem(folder)
        json.dumps(document)
        headline(document)
        render(TextLayout(80), document)
    mark = mark_of(path)
    assert mark is not None
    progress_of(path, mark, {})
    path.rename(folder / "flight-0.bin")
    down_s(folder, 0, 10**18)


@settings(max_examples=1200, suppress_health_check=list(HealthCheck))
@given(changes=CHANGES)
def test_a_flight_file_with_anything_in_it_is_read_or_refused(
    whole: Content, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]
) -> None:
    """A torn page, a disk that forgets, a forged file: one line says so, never a traceback."""
    folder = Path(tmp_path_factory.getbasetemp())
    (folder / "flight.bin").write_bytes(changed(whole, changes))

    read_everywhere(folder)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(table=TABLES)
def test_a_flight_file_with_any_table_of_names_is_read_or_refused(
    whole: Content, tmp_path_factory: pytest.TempPathFactory, table: object
) -> None:
    """Names and kinds go into every metric; codes point past the end of a table that is too short."""
    folder = Path(tmp_path_factory.getbasetemp())
    (folder / "flight.bin").write_bytes(with_table(whole, table))

    read_everywhere(folder)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(size=st.integers(0, RINGS + EDGES * 16))
def test_a_flight_file_that_was_cut_off_is_read_or_refused(
    whole: Content, tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    """A disk was full when it was copied."""
    folder = Path(tmp_path_factory.getbasetemp())
    (folder / "flight.bin").write_bytes(whole[:size])

    read_everywhere(folder)
