"""Writes the artifacts of a run: documents, tables, trace."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from otel_train.config.settings import SECRETS
from otel_train.datamodel import FLIGHT_FILE, NS_PER_S, SUMMARY_FILE
from otel_train.errors import RunDirectoryError
from otel_train.files import (
    make_folder,
    make_gitignored_folder,
    mark_of,
    open_given,
    problem_of,
    replace_json,
    replace_text,
    replacing,
    unzipped,
)
from otel_train.profiler.storage import metadata_path
from otel_train.rundata.files import mapping
from otel_train.rundata.metrics_history import all_points, values_of
from otel_train.rundata.run import RunReader, read_run
from otel_train.safety import Guard

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.config import Config
    from otel_train.rundata.flight import Timeline
    from otel_train.trace_analysis.events import Trace


VERSIONS = {"profiler_summary": 2}
"""Schema versions of documents, if not 1."""

MOST_STEPS = 10_000
"""Most rows of ``per_step``: two megabytes of JSON."""

WORDS = ("phase", "loader", "model", "stage")
_NUMBERS = (
    "count", "failed", "inclusive_seconds", "self_seconds", "min", "avg", "p50", "p95", "p99", "max",
    "device_count", "device_seconds", "device_p50", "device_p99",
)  # fmt: skip


def schema(name: str) -> str:
    """Returns the value of the key ``schema`` of a document."""
    return f"otel_train.artifacts.{name}/{VERSIONS.get(name, 1)}"


def config(reader: RunReader) -> dict[str, Any]:
    """Returns the document ``config.json``: identity, host, versions and settings, without secrets."""
    about = {key: value for key, value in without_secrets(reader.about).items() if key != "schema"}
    return {"schema": schema("config"), **run_identity(reader), **about, "rank": reader.rank}


def without_secrets(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``run.json`` with ``(set)`` in place of the values of secret settings; ``settings`` is always an object."""
    settings = mapping(about.get("settings"))
    hidden = {name: "(set)" for name in SECRETS if settings.get(name)}
    return {**about, "settings": {**settings, **hidden}}


def run_identity(reader: RunReader) -> dict[str, Any]:
    """Returns the first keys of every document: the identity of run and rank."""
    known = {**reader.about, **reader.summary}
    return {key: known.get(key) for key in ("run_id", "run_name", "attempt")} | {"rank": reader.rank}


def metrics(reader: RunReader) -> dict[str, Any]:
    """Returns the document ``metrics.json``: the last exported value of every metric of the rank."""
    rows = list(_metric_rows(reader.metrics)) if reader.metrics else []
    instants = [row.pop("at") for row in rows]
    return {
        "schema": schema("metrics"),
        **run_identity(reader),
        "as_of_unix_s": max(instants, default=None),
        "metrics": rows,
    }


def _metric_rows(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for metric, kind, point in all_points(line):
        row = {
            "name": metric["name"],
            "unit": metric.get("unit", ""),
            "kind": "histogram" if kind == "exponentialHistogram" else kind,
            "attributes": values_of(point),
            "at": int(point.get("timeUnixNano", 0)) / NS_PER_S,
        }
        if kind == "exponentialHistogram":
            row |= {name: parsed_number(point.get(name)) for name in ("count", "sum", "min", "max")}
        else:
            row["value"] = parsed_number(point["asDouble"])
        yield row


def parsed_number(value: object) -> float | int | None:
    """Returns a finite number, also from text, in which OTLP/JSON has 64-bit integers; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(found):
        return None
    return int(found) if found.is_integer() and not isinstance(value, float) else found


def totals(reader: RunReader) -> tuple[str, list[dict[str, Any]]]:
    """Returns the name of the file that has the totals, and a row per phase, loader, model and stage.

    That is the summary, unless the rank was killed: then its last summary is older than the last event, and the flight
    file is more complete if it still has the first event.
    """
    timeline = reader.timeline
    if reader.summary and (timeline is None or not timeline.whole or reader.ended):
        rows, source = reader.summary.get("stages", []), SUMMARY_FILE
    else:
        rows, source = timeline.totals() if timeline is not None else [], FLIGHT_FILE
    return source, [{key: row.get(key) for key in (*WORDS, *_NUMBERS)} for row in rows]


def steps(reader: RunReader) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns rows for the last ``MOST_STEPS`` steps, and rows for the epochs on file."""
    timeline = reader.timeline
    if timeline is None or not len(timeline):
        return [], []
    first, first_epoch = timeline.first_step(reader.summary) or 0, _first_epoch(reader.summary, timeline)
    per_step = [
        {
            "step": first + row,
            "epoch": first_epoch + int(timeline.epoch[row]),
            "ended_unix_s": timeline.unix_s(int(timeline.ended_ns[row])),
            "seconds": int(timeline.duration_ns[row]) / NS_PER_S,
            "stages": timeline.stages_s(timeline.selves_ns[row]),
        }
        for row in range(max(0, len(timeline) - MOST_STEPS), len(timeline))
    ]
    per_epoch = []
    for place, epoch in enumerate(np.unique(timeline.epoch).tolist()):
        in_epoch = timeline.epoch == epoch
        per_epoch.append(
            {
                "epoch": first_epoch + epoch,
                "steps": int(np.count_nonzero(in_epoch)),
                "seconds": int(timeline.duration_ns[in_epoch].sum()) / NS_PER_S,
                "stages": timeline.stages_s(timeline.selves_ns[in_epoch].sum(axis=0)),
                "whole": place > 0 or timeline.whole,
            }
        )
    return per_step, per_epoch


def _first_epoch(summary: Mapping[str, Any], timeline: Timeline) -> int:
    """Returns the number to add to ``Timeline.epoch``: 0 for marked epochs, else that of the first epoch on file, from 1."""
    if timeline.whole or timeline.marked:
        return 0 if timeline.marked else 1
    endings = (row["endings"] for row in summary.get("loaders", ()) if row["loader"] == timeline.loader)
    ended = int(sum(next(endings, {}).values()))
    return 1 + max(0, ended - timeline.passes - 1)


def stage_times(reader: RunReader, source: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the document ``stage_times.json``: totals, the last steps, the epochs."""
    per_step, per_epoch = steps(reader)
    kept = ("count", "inclusive_seconds", "self_seconds", "avg")
    timeline = reader.timeline
    return {
        "schema": schema("stage_times"),
        **run_identity(reader),
        "totals_from": source,
        "totals": [{key: row[key] for key in (*WORDS, *kept)} for row in rows],
        "per_step": per_step,
        "per_epoch": per_epoch,
        "epochs_of": timeline.loader if timeline is not None else "",
        "steps_on_file": len(timeline) if timeline is not None else 0,
        "whole": timeline is not None and timeline.whole,
    }


def by_stage(reader: RunReader, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the document ``profiler_context/stage_times.json``: the totals by stage alone, in the layout of a stage timer."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = found.setdefault(row["stage"], {"count": 0, "total_seconds": 0.0, "self_seconds": 0.0})
        one["count"] += row["count"] or 0
        column = "self_seconds" if row["inclusive_seconds"] is None else "inclusive_seconds"
        one["total_seconds"] += row[column] or 0.0
        one["self_seconds"] += row["self_seconds"] or 0.0
    for one in found.values():
        one["avg_seconds"] = one["total_seconds"] / one["count"] if one["count"] else None
        one["count"] = one["count"] or None
    return {"schema": schema("by_stage"), **run_identity(reader), "stages": found}


_log = logging.getLogger("otel_train")


def write_at_end_of_run(config: Config, rank: int, run: Path | None) -> None:
    """Writes the artifacts if the setting is on, on rank 0 only; logs errors. ``run`` is None if it could not be created."""
    if not config.artifacts or rank != 0:
        return
    if run is None:
        _log.warning("Artifacts are not written: there is no run directory to make them from")
        return

    with Guard("artifacts", limit=1):
        try:
            write(run, rank)
        except RunDirectoryError as error:
            _log.warning("Artifacts are not written: %s", error)


FOLDER = "artifacts"
"""Folder in the run directory with the artifacts of rank 0; those of other ranks are in its folders ``rank<r>``."""

CONFIG, METRICS, SUMMARY = "config.json", "metrics.json", "profiler_summary.json"
STAGE_TIMES, BY_STAGE = "stage_times.json", "profiler_context/stage_times.json"
OPS, TRACE, CAPTURES = "op_stats.csv", "trace.json", "torch_profiler"
NAMES = (CONFIG, METRICS, STAGE_TIMES, BY_STAGE, OPS, TRACE, CAPTURES)
"""Artifacts that ``profiler_summary.json``, which is written last, lists with their sizes."""

MARK = ".otel-train-artifacts"
"""File that marks a folder as written by otel-train."""

OP_COLUMNS = ("kind", "name", "count", "self_seconds", "total_seconds", "share")
MOST_OPS = 5000
_NO_CAPTURE = "no readable capture; take one with 'otel-train profile' or the setting profiler_every"


@dataclass(kw_only=True)
class WrittenArtifacts:
    """Artifacts of one rank that were written."""

    folder: Path
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: size, or why it is absent
    warnings: list[str] = field(default_factory=list)  # a sentence for each source that could not be read

    def put(self, name: str) -> None:
        """Records a file that was written."""
        self.files[name] = {"bytes": (self.folder / name).stat().st_size}

    def leave_out(self, name: str, reason: str) -> None:
        """Records a file that is not written, and removes the one of an earlier export."""
        (self.folder / name).unlink(missing_ok=True)
        self.files[name] = {"absent": reason}


def artifact_folder(run: Path, rank: int) -> Path:
    """Returns the default folder of a rank's artifacts."""
    return run / FOLDER if rank == 0 else run / FOLDER / f"rank{rank}"


def write(run: Path, rank: int, folder: Path | None = None) -> WrittenArtifacts:
    """Writes the artifacts of one rank to ``folder``. Existing files are replaced atomically.

    Nothing else in the run directory is changed. Raises RunDirectoryError if the rank has no data, or if the folder has files
    that otel-train did not write or cannot be written.
    """
    reader = read_run(run, rank)
    target = artifact_folder(run, rank) if folder is None else folder
    try:
        _prepare_folder(target, ours=folder is None)
        return _write(reader, target)
    except OSError as error:
        raise RunDirectoryError(f"{target}: cannot be written: {error.strerror or error}") from error


def _write(reader: RunReader, folder: Path) -> WrittenArtifacts:
    written = WrittenArtifacts(folder=folder)
    source, rows = totals(reader)
    documents: dict[str, Mapping[str, Any]] = {
        CONFIG: config(reader),
        METRICS: metrics(reader),
        STAGE_TIMES: stage_times(reader, source, rows),
        BY_STAGE: by_stage(reader, rows),
    }
    for name, document in documents.items():
        make_folder((folder / name).parent)
        replace_json(folder / name, document)
        written.put(name)
    found = reader.newest_trace()
    capture = _operations(found, written)
    _trace(reader, found, written)
    _captures(reader, written)
    written.warnings = [*reader.warnings, *_remarks(reader, source)]
    summary = _summary(reader, rows, capture)
    replace_json(folder / SUMMARY, {**summary, "artifacts": written.files, "warnings": written.warnings})
    written.put(SUMMARY)
    return written


def _summary(reader: RunReader, rows: list[dict[str, Any]], capture: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of ``summary.json`` with the totals of the artifacts, and the analysis of the newest capture."""
    timeline = reader.timeline
    steps = reader.summary.get("steps", {})
    if not reader.ended and timeline is not None and timeline.whole:
        steps = {**steps, "train": len(timeline)}
    known = {key: value for key, value in reader.summary.items() if key not in ("schema", "stages", "steps")}
    return {
        "schema": schema("profiler_summary"),
        **run_identity(reader),
        "state": None,
        **known,
        "ended": reader.ended,
        "steps": steps,
        "stages": rows,
        "capture": capture,
    }


def _remarks(reader: RunReader, source: str) -> list[str]:
    remarks = []
    if not reader.ended:
        remarks.append(f"The run has recorded no end: the totals are those of {source} as it is now.")
    if reader.timeline is None:
        remarks.append("There is no flight file: nothing is known of single steps.")
    elif not reader.timeline.whole:
        remarks.append(
            "The flight file no longer holds the first steps: rows per step and per epoch begin later."
        )
    return remarks


def _operations(found: tuple[Path, Trace] | None, written: WrittenArtifacts) -> dict[str, Any]:
    if found is None:
        written.leave_out(OPS, _NO_CAPTURE)
        return {"absent": _NO_CAPTURE}
    from otel_train.trace_analysis.summary import summarize

    path, trace = found
    analysis = summarize(trace, most=MOST_OPS)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(OP_COLUMNS)
    for kind, rows in (("operator", analysis["top_cpu_ops"]), ("kernel", analysis["top_cuda_ops"])):
        for row in rows:
            total_s = row.get("total_seconds", row["seconds"])
            table.writerow((kind, row["name"], row["count"], row["seconds"], total_s, row["share"]))
    replace_text(written.folder / OPS, text.getvalue())
    written.put(OPS)
    shown = {**analysis, "path": path.name, "file": path.name}
    for key in ("top_cpu_ops", "top_cuda_ops"):
        shown[key] = shown[key][:10]
    return shown


def _trace(reader: RunReader, found: tuple[Path, Trace] | None, written: WrittenArtifacts) -> None:
    if found is not None:
        try:
            _unpack(found[0], written.folder / TRACE)
        except (RunDirectoryError, EOFError, zlib.error) as error:
            reader.warnings.append(f"trace.json is not the capture {found[0].name}: {error}.")
        else:
            written.put(TRACE)
            return
    timeline = reader.timeline
    if timeline is None or not len(timeline):
        written.leave_out(TRACE, "there is no capture, and no step on file to make it from")
        return
    replace_json(written.folder / TRACE, _from_stages(reader, timeline))
    written.put(TRACE)


def _captures(reader: RunReader, written: WrittenArtifacts) -> None:
    """Copies the captures with their metadata; copies of removed captures stay."""
    captures = [path for path in reader.captures if _is_small_enough(path, reader.warnings)]
    if not captures:
        written.files[CAPTURES] = {"absent": _NO_CAPTURE}
        return
    folder = written.folder / CAPTURES
    make_folder(folder)
    for path in captures:
        for one in (path, metadata_path(path)):
            if not problem_of(one) and _is_small_enough(one, reader.warnings):
                with open_given(one) as source, replacing(folder / one.name) as copy:
                    shutil.copyfileobj(source, copy)
    written.files[CAPTURES] = {"files": sorted(path.name for path in captures)}


def _is_small_enough(path: Path, warnings: list[str]) -> bool:
    """Returns whether a file is small enough to be copied; adds a warning if it is not."""
    mark = mark_of(path)
    if mark is None or mark.size_bytes <= MOST_TRACE_BYTES:
        return True
    problem = f"{path.name} has {mark.size_bytes:,} bytes, more than {MOST_TRACE_BYTES >> 30} GiB"
    warnings.append(f"{problem}: it is not copied.")
    return False


def _prepare_folder(folder: Path, *, ours: bool) -> None:
    """Creates the folder, or checks that otel-train wrote the artifacts in it; raises RunDirectoryError if it did not."""
    if ours and (folder.is_symlink() or folder.parent.is_symlink()):
        raise RunDirectoryError(
            f"{folder}: is a link, so nothing is written there. Say where to write with --output-dir"
        )
    if os.path.lexists(folder) and not folder.is_dir():
        raise RunDirectoryError(f"{folder}: is not a folder. Give another with --output-dir")
    if folder.is_dir():
        foreign = [name for name in (*NAMES, SUMMARY) if os.path.lexists(folder / name)]
        if foreign and not (folder / MARK).is_file():
            raise RunDirectoryError(
                f"{folder}: holds {', '.join(foreign)} that otel-train did not write; nothing was overwritten. "
                "Give another folder with --output-dir"
            )
    else:
        make_gitignored_folder(folder)
    for name in (CAPTURES, BY_STAGE.partition("/")[0]):
        if (folder / name).is_symlink():
            raise RunDirectoryError(f"{folder / name}: is a link, so nothing is written there")
    replace_text(folder / MARK, "Written by otel-train export, which may replace what is here.\n")


ABOUT = "otel_train"
"""Key of ``trace.json`` with the source of the trace; viewers ignore keys they do not know."""

LAST_STEPS = 200
"""Most steps of a trace that is made from stages."""

MOST_TRACE_BYTES = 2 << 30
"""Largest trace that is copied: about the limit of Perfetto for JSON in a browser."""

_CHUNK_BYTES = 1 << 20
_STEPS, _STAGES = 1, 2
_NS_PER_US = 1e3


def _unpack(capture: Path, target: Path) -> None:
    """Writes a capture as uncompressed JSON with the key ``ABOUT``; raises RunDirectoryError if it is too large for a viewer."""
    about = {"source": "capture", "capture": capture.name}
    with replacing(target) as sink, open_given(capture) as file:
        plain = iter(lambda: file.read(_CHUNK_BYTES), b"")
        parts = unzipped(file) if capture.suffix == ".gz" else plain
        head = next(parts, b"").lstrip(b"\xef\xbb\xbf \t\r\n")
        is_array = head[:1] == b"["  # the other form of the Trace Event Format: the list of events alone
        rest = head if is_array else head[1:].lstrip()
        is_empty = rest[:1] == b"}"
        sink.write(f'{{"{ABOUT}": {json.dumps(about)}{"" if is_empty else ", "}'.encode())
        sink.write(b'"traceEvents": ' if is_array else b"")
        written = 0
        while rest:
            written += len(rest)
            if written > MOST_TRACE_BYTES:
                raise RunDirectoryError(f"{capture.name} unpacks to more than {MOST_TRACE_BYTES >> 30} GiB")
            sink.write(rest)
            rest = next(parts, b"")
        sink.write(b"}" if is_array else b"")


def _from_stages(reader: RunReader, timeline: Timeline) -> dict[str, Any]:
    """Returns a trace of the last steps, with one track of steps and one of stage calls."""
    first, begin = timeline.first_step(reader.summary) or 0, max(0, len(timeline) - LAST_STEPS)
    origin_ns = int(timeline.started_ns[begin])
    events = [
        _track_name("process_name", 0, f"rank {reader.rank}"),
        _track_name("thread_name", _STEPS, "steps"),
        _track_name("thread_name", _STAGES, "stages"),
    ]
    starts, ends = timeline.started_ns[begin:].tolist(), timeline.ended_ns[begin:].tolist()
    events += [
        _event(f"step {row}", "step", _STEPS, (started - origin_ns, ended - started))
        for row, (started, ended) in enumerate(zip(starts, ends, strict=True), first + begin)
    ]
    events += [
        _event(call.stage, "stage", _STAGES, (call.started_ns - origin_ns, call.lasted_ns), of=call.about)
        for call in timeline.calls(origin_ns)
    ]
    about = {
        "source": "stages",
        "steps": [first + begin, first + len(timeline) - 1],
        "started_unix_s": timeline.unix_s(origin_ns),
        "reason": "no readable capture: the trace has the timed stages, without operations",
    }
    return {ABOUT: about, "displayTimeUnit": "ms", "traceEvents": events}


def _event(name: str, category: str, track: int, span_ns: tuple[int, int], **args: str) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "cat": category, "pid": 0, "tid": track,
        "ts": span_ns[0] / _NS_PER_US, "dur": span_ns[1] / _NS_PER_US,
        "args": {key: value for key, value in args.items() if value},
    }  # fmt: skip


def _track_name(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 0, "tid": track, "args": {"name": name}}
