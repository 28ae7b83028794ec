"""The tab that shows what the run has left on disk: files, captures, settings."""

from __future__ import annotations

import shlex
import threading
from html import escape
from typing import TYPE_CHECKING, Any

from otel_train.analyze.report import finding, flame_graph, share_bar, table
from otel_train.analyze.report_text import ABSENT, bytes_of, duration, figure
from otel_train.artifacts.writer import without_secrets
from otel_train.errors import RunDirectoryError, TraceError
from otel_train.files import Mark, is_folder, read_json
from otel_train.ui.components import address, moment, section, texts
from otel_train.ui.run_list import MOST_FILES, files_of, number, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from otel_train.ui.live_view import RankView
    from otel_train.ui.run_list import File

ACCOUNT = "artifacts/profiler_summary.json"
RECORD = ".record.json"
_TRACES = (".json", ".json.gz")
_MOST_TRACE_BYTES = 32 << 20
"""A larger trace is for a command: reading it takes seconds, and several times its size in memory."""

_KEPT = 4


class Captures:
    """Analyses of captures, made when somebody asks for one, one at a time: others look at other pages meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[Path, Mark], dict[str, Any]] = {}

    def analysis(self, file: File) -> dict[str, Any]:
        """What a capture says.

        Raises:
            TraceError: it cannot be read, or is too large for a page.
        """
        if file.mark.size_bytes > _MOST_TRACE_BYTES:
            raise TraceError(
                f"{bytes_of(file.mark.size_bytes)} are too many for a page: use otel-train analyze"
            )
        key = (file.path, file.mark)
        with self._lock:
            if key not in self._kept:
                found = _analysis(file.path)
                while len(self._kept) >= _KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = found
            return self._kept[key]


def _analysis(path: Path) -> dict[str, Any]:
    from otel_train.analyze.events import read
    from otel_train.analyze.hot_spots import flame
    from otel_train.analyze.summary import summarize
    from otel_train.analyze.timeline import Scene

    trace = read(path)
    return {"analysis": summarize(trace), "flame": flame(Scene(trace))}


def artifacts(view: RankView, captures: Captures, chosen: str | None) -> str:
    """The tab as HTML.

    Args:
        view: the run.
        captures: analyses made before.
        chosen: name of the capture to look into; None for none.
    """
    files = files_of(view.run, view.rank)
    traces = {file.name: file for file in files if _is_trace(file.name)}
    looked = traces.get(chosen or "")
    return "".join(
        (
            section("Capture", lambda: _capture(captures, looked)) if looked is not None else "",
            section("Captures", lambda: _captures(view, traces, chosen)),
            section("Artifacts", lambda: _account(view)),
            section("Files", lambda: _files(view, files), beside=f"in <code>{escape(str(view.run))}</code>"),
            section("Settings", lambda: _settings(view)),
            section("On the command line", lambda: _commands(view)),
        )
    )


def _is_trace(name: str) -> bool:
    return name.startswith("captures/") and name.endswith(_TRACES) and not name.endswith(RECORD)


def _capture(captures: Captures, file: File) -> str:
    try:
        found = captures.analysis(file)
    except (TraceError, OSError) as error:
        return f'<p class="dim">It cannot be looked into: {escape(str(error))}</p>'
    analysis = found["analysis"]
    parts = analysis["breakdown"]
    facts = [
        f"{figure(parts['steps'])} steps" if parts["steps"] else "no steps marked",
        duration(parts["seconds"]),
    ]
    hot = "".join(
        table(
            (what, "count", "time", "share"),
            [
                [f"<code>{escape(row['name'])}</code>", figure(row["count"]), duration(row["seconds"]), share_bar(row["share"], "")]
                for row in analysis[key]
            ],
        )
        for what, key in (("operator", "top_cpu_ops"), ("kernel", "top_cuda_ops"))
    )  # fmt: skip
    said = "".join(finding(each) for each in analysis["findings"])
    return (
        f"<p><code>{escape(file.name)}</code> {' · '.join(facts)}</p>{said}{flame_graph(found['flame'])}{hot}"
    )


def _captures(view: RankView, traces: Mapping[str, File], chosen: str | None) -> str:
    rows = [_capture_row(view, name, file, chosen=name == chosen) for name, file in traces.items()]
    if not rows:
        return (
            '<p class="empty">No capture has been taken. <code>otel-train profile '
            f"{escape(shlex.quote(str(view.run)))}</code> takes one of a run that is going on.</p>"
        )
    return texts(table(("capture", "taken", "size", "steps", "asked for by", "what was found"), rows))


def _capture_row(view: RankView, name: str, file: File, *, chosen: bool) -> list[str]:
    record = _record(file.path)
    short = escape(name.removeprefix("captures/"))
    link = address(view.run.name, tab="artifacts", rank=view.rank, capture=name)
    said = record.get("finding")
    claim = text(said.get("claim")) if isinstance(said, dict) else ""
    steps = record.get("steps")
    return [
        f"<strong>{short}</strong>" if chosen else f'<a href="{link}" data-go>{short}</a>',
        moment(file.mark.changed_ns / 1e9),
        bytes_of(file.mark.size_bytes),
        escape(" to ".join(str(step)[:20] for step in steps) if isinstance(steps, list) else ABSENT),
        escape(text(record.get("trigger")) or ABSENT),
        escape(claim or text(record.get("problem")) or ABSENT),
    ]


def _record(trace: Path) -> Mapping[str, Any]:
    try:
        return read_json(trace.with_name(trace.name.removesuffix(".gz").removesuffix(".json") + RECORD))
    except RunDirectoryError:
        return {}


def _account(view: RankView) -> str:
    """What ``profiler_summary.json`` says of the artifacts beside it."""
    command = f"<code>otel-train artifacts {escape(shlex.quote(str(view.run)))}</code>"
    absent = f'<p class="empty">None have been written. {command} writes them.</p>'
    if not is_folder(view.run / "artifacts"):
        return absent
    try:
        told = read_json(view.run / ACCOUNT).get("artifacts") or {}
    except RunDirectoryError:
        return absent
    rows = [[f"<code>{escape(name[:200])}</code>", _there(row)] for name, row in told.items()]
    return texts(table(("artifact", "there"), rows))


def _there(row: Mapping[str, Any]) -> str:
    if (size := number(row.get("bytes"))) is not None:
        return f"✓ {bytes_of(size)}"
    files = row.get("files")
    if isinstance(files, list):
        return f"✓ {len(files)} file{'s' if len(files) != 1 else ''}"
    return f'<span class="dim">absent: {escape(text(row.get("absent")) or "nobody says why")}</span>'


def _files(view: RankView, files: Sequence[File]) -> str:
    rows = [
        [
            f'<a href="{_download(view, file)}" download>{escape(file.name)}</a>',
            bytes_of(file.mark.size_bytes),
            moment(file.mark.changed_ns / 1e9),
        ]
        for file in files
    ]
    more = f'<p class="dim">The first {MOST_FILES} are shown.</p>' if len(files) == MOST_FILES else ""
    return table(("file", "size", "written"), rows) + more


def _download(view: RankView, file: File) -> str:
    return address(view.run.name, rank=view.rank, file=file.name)


def _settings(view: RankView) -> str:
    rows = [[f"<code>{escape(name)}</code>", escape(value)] for name, value in _said(view.about)]
    if not rows:
        return ""
    return f"<details><summary>{len(rows)} settings and facts of <code>run.json</code></summary>{texts(table(('name', 'value'), rows))}</details>"


def _said(about: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in without_secrets(about).items():
        if isinstance(value, dict):
            yield from (
                (f"{name[:200]}.{str(key)[:200]}", str(inside)[:500]) for key, inside in value.items()
            )
        else:
            yield name[:200], str(value)[:500]


def _commands(view: RankView) -> str:
    where = shlex.quote(str(view.run))
    commands = ("summary", "report", "postmortem", "artifacts", "check")
    return "<pre>" + "\n".join(f"otel-train {name} {escape(where)}" for name in commands) + "</pre>"
