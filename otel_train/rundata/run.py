"""Reads the files of one rank of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from otel_train.datamodel import CAPTURES_FOLDER, FLIGHT_FILE, METRICS_FILE, RUN_FILE, SUMMARY_FILE
from otel_train.errors import RunDirectoryError, TraceError
from otel_train.files import (
    OF_A_RANK,
    JsonFileCache,
    is_folder,
    last_metrics,
    names_in,
    problem_of,
    read_json,
    read_word,
)
from otel_train.profiler.storage import METADATA_SUFFIX, captures_of
from otel_train.recording.flight_recorder import Flight, read_flight
from otel_train.rundata.files import current_document, has_ended, summary_of, version_problem, whole
from otel_train.rundata.flight import FlightHistory, Timeline
from otel_train.rundata.schemas import check, checked, wrong_values

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.trace_analysis.events import Trace

T = TypeVar("T")


@dataclass(kw_only=True)
class RunReader:
    """Contents of the files of one rank. Those of a file that is missing or unreadable are empty.

    ``warnings`` has a sentence for each unreadable file. ``captures`` are in order of time.
    """

    rank: int
    about: dict[str, Any] = field(default_factory=dict)  # run.json
    summary: dict[str, Any] = field(default_factory=dict)
    flight: Flight | None = None  # None also if no thread has written an event
    metrics: dict[str, Any] = field(default_factory=dict)  # the last line
    captures: list[Path] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the summary has an end state."""
        return bool(self.summary) and has_ended(self.summary)

    @cached_property
    def timeline(self) -> Timeline | None:
        """Timeline of the flight file; None without one. Accounts for all events, which takes seconds for a long file."""
        return None if self.flight is None else FlightHistory(self.flight).timeline

    def newest_trace(self) -> tuple[Path, Trace] | None:
        """Returns the newest capture that is complete; None if there is none. Adds a warning for each newer one."""
        for path in reversed(self.captures):
            if trace := trace_of(path, _complete_trace, self.warnings.append):
                return path, trace
        return None


def read_run(run: Path, rank: int) -> RunReader:
    """Reads the files of a rank. Nothing in the run directory is changed.

    Raises:
        RunDirectoryError: there is neither a summary nor a flight file that can be read; the message says why.
    """
    try:
        return _read(run, rank)
    except OSError as error:  # no permission, or removed while it was read
        raise RunDirectoryError(f"{run}: cannot be read: {error.strerror or error}") from error


def _read(run: Path, rank: int) -> RunReader:
    folder = run / f"rank{rank}"
    reader = RunReader(rank=rank)
    if not is_folder(folder):
        raise RunDirectoryError(f"{folder}: is not the folder of a rank")
    documents = JsonFileCache()
    about = documents.get_or_empty(run / RUN_FILE, reader.warnings)
    reader.about = checked(about, "files/run", run / RUN_FILE, reader.warnings)
    summary = summary_of(documents, folder, reader.warnings)
    reader.summary = checked(summary, "summary", folder / SUMMARY_FILE, reader.warnings, complete=False)
    if reader.summary and is_of_earlier_attempt(reader.summary, folder):
        reader.warnings.append(f"{SUMMARY_FILE} is of an earlier start of the run: it is passed over.")
        reader.summary = {}
    flight = _read_if_there(reader, folder / FLIGHT_FILE, read_flight, f"{FLIGHT_FILE} cannot be read: ")
    if flight is not None and any(len(thread.times) for thread in flight.threads):
        reader.flight = flight
    if not reader.summary and reader.flight is None:
        problem = " ".join(reader.warnings) or f"there is neither {SUMMARY_FILE} nor {FLIGHT_FILE}."
        raise RunDirectoryError(f"{folder}: nothing to make artifacts from: {problem} Has training begun?")
    reader.metrics = _read_if_there(reader, folder / METRICS_FILE, read_metrics) or {}
    captures = [path for path in captures_of(run, folder) if _is_of_rank(path, rank)]
    reader.captures = openable(captures, reader.warnings.append)
    return reader


def read_summary(path: Path) -> Mapping[str, Any]:
    """Returns one rank's ``summary.json``.

    Raises:
        RunDirectoryError: the file cannot be read, is not JSON, has an unknown version, or has wrong values.
    """
    try:
        summary = current_document(read_json(path))
    except RunDirectoryError as error:
        raise RunDirectoryError(f"{path.parent}: {error}") from error
    if problem := version_problem(summary):
        raise RunDirectoryError(f"{path}: {problem}. Use the otel-train that wrote it")
    check(summary, "summary", path, complete=False)
    return summary


def is_of_earlier_attempt(summary: Mapping[str, Any], folder: Path) -> bool:
    """Returns whether the rank has started another attempt since the summary: a new attempt writes its first one after 30 s."""
    try:
        text = read_word(folder / "attempt")
    except OSError:
        return False
    return text.isdecimal() and text != str(summary.get("attempt"))


def read_metrics(path: Path) -> dict[str, Any]:
    """Returns the last complete line of a rank's metrics; raises RunDirectoryError if there is none or its values are wrong."""
    line = last_metrics(path)
    check(line, "files/metrics", path)
    return line


def record_cache() -> JsonFileCache:
    """Returns a cache for metadata of captures. That with wrong values is empty."""
    return JsonFileCache(_record_of)


def _record_of(document: dict[str, Any]) -> dict[str, Any]:
    record = current_document(document)
    return {} if wrong_values(record, "files/capture") else record


def records_below(run: Path, cached: JsonFileCache | None = None) -> list[dict[str, Any]]:
    """Returns the metadata of a run's captures, oldest first; unreadable files and those with wrong values are skipped.

    ``cached``: a ``record_cache`` to share; None for a new one.
    """
    records = cached or record_cache()
    folder = run / CAPTURES_FOLDER
    paths = [folder / name for name in names_in(folder) if name.endswith(METADATA_SUFFIX)]
    found = filter(None, (records.get_or_empty(path, []) for path in paths))
    return sorted(
        found, key=lambda record: [whole(record.get(key)) or 0 for key in ("ended_unix_ns", "rank")]
    )


def _read_if_there(reader: RunReader, path: Path, read: Callable[[Path], T], said: str = "") -> T | None:
    """Returns the result of ``read``; None without a file, or if it is unreadable, with a warning that begins with ``said``."""
    if not os.path.lexists(path):
        return None
    try:
        return read(path)
    except RunDirectoryError as error:
        reader.warnings.append(f"{said}{error}")
        return None


def openable(captures: Iterable[Path], warn: Callable[[str], object]) -> list[Path]:
    """Returns the captures that can be opened; calls ``warn`` with a sentence for each other one."""
    problems = {path: problem_of(path) for path in captures}
    for path, problem in problems.items():
        if problem:
            warn(_passed_over(path, f"{problem}."))
    return [path for path, problem in problems.items() if not problem]


def trace_of(capture: Path, read: Callable[[Path], Trace], warn: Callable[[str], object]) -> Trace | None:
    """Returns the trace in a capture; None, after ``warn`` was called with a sentence, if ``read`` raises TraceError."""
    try:
        return read(capture)
    except TraceError as error:
        warn(_passed_over(capture, error))
        return None


def _complete_trace(path: Path) -> Trace:
    """Returns a trace; raises TraceError if it is cut off or empty."""
    from otel_train.trace_analysis.events import read

    trace = read(path)
    if trace.broken or not trace.spans.name.size:
        raise TraceError(
            f"The file is cut off: {trace.broken}." if trace.broken else "there is no event in it."
        )
    return trace


def _passed_over(capture: Path, why: object) -> str:
    return f"The capture {capture.name} is passed over: {why}"


def _is_of_rank(capture: Path, rank: int) -> bool:
    match = OF_A_RANK.search(capture.name)
    return match is not None and int(match[1]) == rank
