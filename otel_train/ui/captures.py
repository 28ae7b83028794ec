"""Captures, artifacts and files of a run, as HTML."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from otel_train.artifacts.writer import FOLDER, SUMMARY, without_secrets
from otel_train.console.text import ABSENT, bytes_of, duration, percent, plural, rounded
from otel_train.datamodel import CAPTURES_FOLDER, NS_PER_S
from otel_train.errors import RunDirectoryError, TraceError
from otel_train.files import Mark, is_folder, read_json
from otel_train.profiler.storage import is_trace
from otel_train.rundata.files import MOST_FILES, File, files_of, has_postmortem, number, text, whole
from otel_train.ui import escape
from otel_train.ui.charts import lines
from otel_train.ui.components import address, finding, flame_graph, moment, section, share_bar, table, texts

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.rundata.live_view import RankView
    from otel_train.trace_analysis.events import Trace

_MOST_TRACE_BYTES = 32 << 20
"""Largest trace file that a page analyzes: a larger one takes seconds, and several times its size in memory."""

_one_at_a_time = threading.Lock()


def analyzed(file: File) -> dict[str, Any]:
    """Returns the analysis of a capture, one at a time. Raises TraceError if it is too large for a page, or not a trace."""
    if file.mark.size_bytes > _MOST_TRACE_BYTES:
        raise TraceError(f"{bytes_of(file.mark.size_bytes)} is too large for a page: use otel-train analyze")
    with _one_at_a_time:
        return _analyzed(file.path, file.mark)


@lru_cache(maxsize=4)
def _analyzed(path: Path, _: Mark) -> dict[str, Any]:
    from otel_train.trace_analysis.events import read

    return analysis_of(read(path))


def analysis_of(trace: Trace) -> dict[str, Any]:
    """Returns the arguments of ``capture_analysis`` for a trace."""
    from otel_train.trace_analysis.hot_spots import flame
    from otel_train.trace_analysis.summary import summarize
    from otel_train.trace_analysis.timeline import TraceTimeline

    return {"analysis": summarize(trace), "flame": flame(TraceTimeline(trace))}


def artifacts(view: RankView, chosen: str | None) -> str:
    """Returns the tab as HTML, with the analysis of the capture named ``chosen``."""
    files = files_of(view.run, view.rank)
    selected = _traces(files).get(chosen or "")
    return "".join(
        (
            section("Capture", lambda: _capture(selected)) if selected is not None else "",
            section("Captures", lambda: captures_table(view, chosen=chosen)),
            section("Artifacts", lambda: _artifact_list(view)),
            section("Files", lambda: _files(view, files), beside=f"in <code>{escape(str(view.run))}</code>"),
            section("Settings", lambda: _settings(view)),
            section("On the command line", lambda: _commands(view)),
        )
    )


def _traces(files: Sequence[File]) -> dict[str, File]:
    captures = (file for file in files if file.name.startswith(f"{CAPTURES_FOLDER}/"))
    return {file.name: file for file in captures if is_trace(file.name)}


def _capture(file: File) -> str:
    try:
        found = analyzed(file)
    except (TraceError, OSError) as error:
        return f'<p class="dim">It cannot be analyzed: {escape(str(error))}</p>'
    return f"<p><code>{escape(file.name)}</code></p>" + capture_analysis(**found)


def capture_analysis(analysis: Mapping[str, Any], flame: Sequence[Mapping[str, Any]]) -> str:
    """Returns the analysis of a capture as HTML."""
    parts, idle = analysis["breakdown"], analysis["idle"]
    facts = [
        f"{rounded(parts['steps'])} steps" if parts["steps"] else "no steps marked",
        duration(parts["seconds"]),
        f"device idle {percent(idle['share'])}" if idle else "nothing on a device",
        f"data {percent(parts['data_share'])}" if parts["data_share"] is not None else "",
    ]
    return (
        f"<p>{' · '.join(fact for fact in facts if fact)}</p>"
        + "".join(map(finding, analysis["findings"]))
        + flame_graph(flame)
        + "".join(map(_memory_chart, analysis["memory"]))
        + _hot_spots("operator", analysis["top_cpu_ops"])
        + _hot_spots("kernel", analysis["top_cuda_ops"])
        + "".join(f'<p class="dim">{escape(sentence)}</p>' for sentence in analysis["missing"])
    )


def _memory_chart(part: Mapping[str, Any]) -> str:
    chart = lines(
        [at - part["timeline"][0][0] for at, _ in part["timeline"]],
        {part["device"]: [size for _, size in part["timeline"]]},
        label=f"Memory allocated on {part['device']} during the capture",
        unit=bytes_of,
    )
    return f"<h3>Memory allocated on {escape(part['device'])}</h3>{chart}"


def _hot_spots(what: str, rows: Sequence[Mapping[str, Any]]) -> str:
    body = [
        [f"<code>{escape(row['name'])}</code>", rounded(row["count"]), duration(row["seconds"]), share_bar(row["share"], "")]
        for row in rows
    ]  # fmt: skip
    return table((what, "count", "time", "share"), body)


def captures_table(view: RankView, *, chosen: str | None = None, static: bool = False, shown: int = 0) -> str:
    """Returns a table of captures that have a file, metadata, or both; ``static`` without links.

    ``chosen`` is the capture analyzed on the same page. ``shown`` is the number of those analyzed below a static table.
    """
    traces = _traces(files_of(view.run, view.rank))
    records = {_trace_name(record): record for record in view.records}
    rows = [
        _capture_row(view, name, file, records.get(name, {}), link=not static and name != chosen)
        for name, file in traces.items()
    ]
    rows += [
        _capture_row(view, name, None, record, link=False)
        for record in view.records
        if (name := _trace_name(record)) not in traces
    ]
    if rows:
        heads = ("capture", "taken", "size", "rank", "steps", "requested by", "finding")
        return texts(table(heads, rows))
    if static:
        return "" if shown else '<p class="dim">No capture was taken.</p>'
    return (
        '<p class="empty">No capture has been taken. <code>otel-train profile '
        f"{escape(shlex.quote(str(view.run)))}</code> takes one of a live run.</p>"
    )


def _trace_name(record: Mapping[str, Any]) -> str:
    """Returns the path of the trace of some metadata, below the run directory; "" for a capture that failed."""
    file = text(record.get("file")).rpartition("/")[2]
    return f"captures/{file}" if file else ""


def _capture_row(
    view: RankView, name: str, file: File | None, record: Mapping[str, Any], *, link: bool
) -> list[str]:
    short = escape(name.removeprefix("captures/"))
    target = address(view.run.name, tab="artifacts", rank=view.rank, capture=name)
    leading, steps, warnings = record.get("finding"), record.get("steps"), record.get("warnings")
    requested_by = (text(record.get(key)) for key in ("trigger", "reason"))
    results = [text(leading.get("summary")) if isinstance(leading, dict) else "", text(record.get("problem"))]
    results += [text(warning) for warning in warnings] if isinstance(warnings, list) else []
    return [
        f'<a href="{target}" data-go>{short}</a>'
        if link and file is not None
        else f"<strong>{short or ABSENT}</strong>",
        ABSENT if file is None else moment(file.mark.changed_ns / NS_PER_S),
        ABSENT if file is None else bytes_of(file.mark.size_bytes),
        rounded(whole(record.get("rank"))),
        escape(" to ".join(str(step)[:20] for step in steps) if isinstance(steps, list) else ABSENT),
        escape(" · ".join(part for part in requested_by if part) or ABSENT),
        escape(" · ".join(part for part in results if part) or ABSENT),
    ]


def _artifact_list(view: RankView) -> str:
    command = f"<code>otel-train export {escape(shlex.quote(str(view.run)))}</code>"
    absent = f'<p class="empty">None have been written. {command} writes them.</p>'
    if not is_folder(view.run / FOLDER):
        return absent
    try:
        entries = read_json(view.run / FOLDER / SUMMARY).get("artifacts") or {}
    except RunDirectoryError:
        return absent
    rows = [[f"<code>{escape(name[:200])}</code>", _artifact_entry(row)] for name, row in entries.items()]
    return texts(table(("artifact", "there"), rows))


def _artifact_entry(row: Mapping[str, Any]) -> str:
    if (size := number(row.get("bytes"))) is not None:
        return f"✓ {bytes_of(size)}"
    files = row.get("files")
    if isinstance(files, list):
        return f"✓ {plural(len(files), 'file')}"
    return f'<span class="dim">absent: {escape(text(row.get("absent")) or "no reason recorded")}</span>'


def _files(view: RankView, files: Sequence[File]) -> str:
    rows = [
        [
            f'<a href="{address(view.run.name, rank=view.rank, file=file.name)}" download>{escape(file.name)}</a>',
            bytes_of(file.mark.size_bytes),
            moment(file.mark.changed_ns / NS_PER_S),
        ]
        for file in files
    ]
    more = f'<p class="dim">The first {MOST_FILES} are shown.</p>' if len(files) == MOST_FILES else ""
    return table(("file", "size", "written"), rows) + more


def _settings(view: RankView) -> str:
    facts: dict[str, object] = {}
    for name, value in without_secrets(view.about).items():
        if isinstance(value, dict):
            facts |= {f"{name[:200]}.{str(key)[:200]}": inside for key, inside in value.items()}
        else:
            facts[name[:200]] = value
    if not facts:
        return ""
    rows = [[f"<code>{escape(name)}</code>", escape(str(value)[:500])] for name, value in facts.items()]
    return f"<details><summary>{len(rows)} settings and facts of <code>run.json</code></summary>{texts(table(('name', 'value'), rows))}</details>"


def _commands(view: RankView) -> str:
    where = shlex.quote(str(view.run))
    commands = ["summary", "report", *["postmortem"] * has_postmortem(view.run), "export", "validate"]
    return "<pre>" + "\n".join(f"otel-train {name} {escape(where)}" for name in commands) + "</pre>"
