"""Writes the artifacts of a run into one folder."""

from __future__ import annotations

import csv
import io
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from otel_train.artifacts import documents, traces
from otel_train.artifacts.run_reader import RunReader, left_by
from otel_train.atomic import make_ignored, replace_json, replace_text
from otel_train.errors import RunDirectoryError
from otel_train.files import create, make_folder, open_given, problem_of
from otel_train.profiler.metadata import RECORD_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from otel_train.analyze.trace import Trace

FOLDER = "artifacts"
"""Below the run directory; those of further ranks in a folder ``rank<r>`` of it."""

CONFIG, METRICS, SUMMARY, STAGE_TIMES = (
    "config.json",
    "metrics.json",
    "profiler_summary.json",
    "stage_times.json",
)
OPS, TRACE, BY_STAGE, CAPTURES = (
    "op_stats.csv",
    "trace.json",
    "profiler_context/stage_times.json",
    "torch_profiler",
)
NAMES = (CONFIG, METRICS, STAGE_TIMES, BY_STAGE, OPS, TRACE, CAPTURES)
"""What ``profiler_summary.json`` accounts for: it is written last, so that it knows."""

MARK = ".otel-train-artifacts"
"""Says that a folder is ours."""

OP_COLUMNS = ("kind", "name", "count", "self_seconds", "total_seconds", "share")
MOST_OPS = 5000
_NO_CAPTURE = (
    "there is no capture that can be read: take one with 'otel-train profile', or capture_every_steps="
)


@dataclass(kw_only=True)
class Written:
    """What was written.

    Attributes:
        folder: where.
        files: by name: how many bytes, or why it is absent.
        notes: what could not be read, a sentence each.
    """

    folder: Path
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, name: str) -> None:
        """A file is there."""
        self.files[name] = {"bytes": (self.folder / name).stat().st_size}

    def leave_out(self, name: str, reason: str) -> None:
        """A file is not there, nor one of an earlier time."""
        (self.folder / name).unlink(missing_ok=True)
        self.files[name] = {"absent": reason}


def home_of(run: Path, rank: int) -> Path:
    """Where the artifacts of a rank go when nobody says where."""
    return run / FOLDER if rank == 0 else run / FOLDER / f"rank{rank}"


def write(run: Path, rank: int, folder: Path | None = None) -> Written:
    """Write the artifacts of one rank. What is there of an earlier time is replaced, file by file, as a whole.

    Args:
        run: the run directory; nothing in it is changed but its folder of artifacts.
        rank: whose.
        folder: where to; made when missing, and then git is told to ignore it.

    Raises:
        RunDirectoryError: the rank has left nothing, the folder is somebody else's, or it cannot be written.
    """
    left = left_by(run, rank)
    target = home_of(run, rank) if folder is None else folder
    try:
        _claim(target, ours=folder is None)
        return _write(left, target)
    except OSError as error:
        raise RunDirectoryError(f"{target}: cannot be written: {error.strerror or error}") from error


def _write(left: RunReader, folder: Path) -> Written:
    written = Written(folder=folder)
    source, rows = documents.totals(left)
    plain: dict[str, Mapping[str, Any]] = {
        CONFIG: documents.config(left),
        METRICS: documents.metrics(left),
        STAGE_TIMES: documents.stage_times(left, source, rows),
        BY_STAGE: documents.by_stage(left, rows),
    }
    for name, document in plain.items():
        make_folder((folder / name).parent)
        replace_json(folder / name, document)
        written.put(name)
    found = left.newest_trace()
    analysis = _operations(found, written)
    _trace(left, found, written)
    _captures(left, written)
    written.notes = [*left.notes, *_doubts(left, source)]
    summary = _summary(left, rows, analysis, written)
    replace_json(folder / SUMMARY, {**summary, "artifacts": written.files, "notes": written.notes})
    written.put(SUMMARY)
    return written


def _summary(
    left: RunReader, rows: list[dict[str, Any]], analysis: dict[str, Any] | None, written: Written
) -> dict[str, Any]:
    """The figures of ``summary.json`` with the totals of these artifacts, and what the newest capture says."""
    timeline = left.timeline
    steps = left.summary.get("steps")
    if not left.ended and timeline is not None and timeline.whole:
        steps = {**(steps if isinstance(steps, dict) else {}), "train": len(timeline)}
    known = {key: value for key, value in left.summary.items() if key not in ("schema", "stages", "steps")}
    return {
        "schema": documents.schema("profiler_summary"),
        **documents.identity(left),
        "state": None,
        **known,
        "ended": left.ended,
        "steps": steps or {},
        "stages": rows,
        "capture": analysis if analysis is not None else {"absent": written.files[OPS]["absent"]},
    }


def _doubts(left: RunReader, source: str) -> list[str]:
    said = []
    if not left.ended:
        said.append(
            f"The run has not come to an end that anybody wrote down: the totals are those of {source} as it is now."
        )
    if left.timeline is None:
        said.append("There is no flight file: nothing is known of single steps.")
    elif not left.timeline.whole:
        said.append(
            "The flight file no longer holds the first steps: rows per step and per epoch begin later."
        )
    return said


def _operations(found: tuple[Path, Trace] | None, written: Written) -> dict[str, Any] | None:
    """Write ``op_stats.csv``; what the analysis of the newest capture says."""
    if found is None:
        written.leave_out(OPS, _NO_CAPTURE)
        return None
    from otel_train.analyze.summary import summarize

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


def _trace(left: RunReader, found: tuple[Path, Trace] | None, written: Written) -> None:
    if found is not None:
        try:
            traces.unpack(found[0], written.folder / TRACE)
        except (RunDirectoryError, EOFError) as error:
            left.notes.append(f"trace.json is not the capture {found[0].name}: {error}.")
        else:
            written.put(TRACE)
            return
    timeline = left.timeline
    if timeline is None or not len(timeline):
        written.leave_out(TRACE, "there is no capture, and no step on file to make it from")
        return
    replace_json(written.folder / TRACE, traces.from_stages(left, timeline, documents.first_step(left)))
    written.put(TRACE)


def _captures(left: RunReader, written: Written) -> None:
    """The captures as they are, with their records; what is there of captures that are gone stays."""
    if not left.captures:
        written.files[CAPTURES] = {"absent": _NO_CAPTURE}
        return
    folder = written.folder / CAPTURES
    make_folder(folder)
    for path in left.captures:
        beside = path.with_name(path.name.removesuffix(".gz").removesuffix(".json") + RECORD_SUFFIX)
        for one in (path, beside):
            if not problem_of(one):
                _copy(one, folder / one.name)
    written.files[CAPTURES] = {"files": sorted(path.name for path in left.captures)}


def _copy(source: Path, target: Path) -> None:
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open_given(source) as from_, os.fdopen(create(fresh), "wb") as to:
            shutil.copyfileobj(from_, to)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def _claim(folder: Path, *, ours: bool) -> None:
    """Make a folder, or make sure that what lies there under our names is ours.

    Raises:
        RunDirectoryError: it is not.
        OSError: it cannot be made.
    """
    if ours and (folder.is_symlink() or folder.parent.is_symlink()):
        raise RunDirectoryError(
            f"{folder}: is a link, so it is left alone. Say where to write with --output-dir"
        )
    if os.path.lexists(folder) and not folder.is_dir():
        raise RunDirectoryError(f"{folder}: is no folder. Give another with --output-dir")
    if folder.is_dir():
        foreign = [name for name in (*NAMES, SUMMARY) if os.path.lexists(folder / name)]
        if foreign and not (folder / MARK).is_file():
            raise RunDirectoryError(
                f"{folder}: holds {', '.join(foreign)} that otel-train has not written, and they are left alone. "
                "Give another folder with --output-dir"
            )
    else:
        make_ignored(folder)
    for name in (CAPTURES, BY_STAGE.partition("/")[0]):
        if (folder / name).is_symlink():
            raise RunDirectoryError(f"{folder / name}: is a link, so it is left alone")
    replace_text(folder / MARK, "Written by otel-train artifacts, which may replace what is here.\n")
