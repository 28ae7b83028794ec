"""Renders the analysis of a profiler trace as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_train.console.text import (
    INDENT,
    TextLayout,
    bar,
    bytes_of,
    count,
    cut,
    duration,
    flow,
    hang,
    pad,
    percent,
    plural,
    right,
)

Row = Mapping[str, Any]
Document = Mapping[str, Any]  # what otel_train.trace_analysis.summary.summarize returns

_COUNT, _VALUE, _SHARE, _BAR, _LABEL = 9, 10, 9, 14, 22
_STYLES = {"critical": "red", "warning": "yellow", "info": "", "ok": "green"}
_CAUSES = {
    "data": "waiting for data", "sync": "drained by a sync", "host": "waiting for the host",
    "kernel_gap": "between kernels",
}  # fmt: skip
_PARTS = {
    "host": "host", "launch": "launching", "compute": "computing", "communication": "communicating",
    "copy": "copying", "kernel_gap": "between kernels", "sync": "sync returning",
}  # fmt: skip


def render_trace_summary(page: TextLayout, document: Document) -> str:
    """Returns the analysis of one trace as text, findings first."""
    sections = (_head, _findings, _stages, _device, _path, _ranks, _ops, _shapes, _kernels, _memory, _missing)
    return page.finish(line for section in sections for line in section(page, document))


def _head(page: TextLayout, document: Document) -> Iterator[str]:
    parts = document["breakdown"]
    rank = "" if document["rank"] is None else f"rank {document['rank']}"
    world = f" of {document['world_size']}" if rank and document["world_size"] else ""
    steps = plural(parts["steps"], "step") if parts["steps"] else "no steps marked"
    name = page.safe(Path(document["path"]).name)
    yield page.rule([("otel_train", "bold"), (name, "cyan")], (f"{rank}{world}" or "trace", "bold"))
    facts = [steps, duration(parts["seconds"]), plural(document["events"], "event")]
    if parts["step_seconds"]:
        facts.append(f"{duration(parts['step_seconds']['median'])} per step")
    yield INDENT + " · ".join(facts)
    yield ""


def _findings(page: TextLayout, document: Document) -> Iterator[str]:
    for finding in document["findings"]:
        style = _STYLES.get(finding["severity"], "")
        title = finding["name"].replace("_", " ")
        yield page.line(f"▲ {title}" if style in {"red", "yellow"} else f"• {title}", style, "bold")
        for line in page.prose(finding["summary"], indent=4):
            yield INDENT * 2 + line
        for line in hang("→ ", 2, page.prose(finding["advice"], indent=6)):
            yield INDENT * 2 + page.paint(line, "dim")
        for place in finding["where"]:
            at = page.paint("at: ", "dim") + page.paint(cut(page.safe(place), page.columns - 8), "dim")
            yield INDENT * 2 + at
        if finding["share"]:
            hours = f"{duration(finding['hours_per_day'] * 3600)} of each day of training"
            yield INDENT * 2 + page.paint(f"{hours} · confidence {finding['confidence']}", "dim")
        yield ""


def _stages(page: TextLayout, document: Document) -> Iterator[str]:
    rows = document["breakdown"]["stages"]
    heads = right("count", _COUNT) + right("host", _VALUE) + right("device", _VALUE) + right("share", _SHARE)
    guessed = ", by PyTorch's own ranges" if document["breakdown"]["guessed"] else ""
    yield page.line(pad("stage", _LABEL) + heads + f"  of the steps{guessed}", "dim")
    for row in rows:
        values = _values(row, "device_seconds")
        yield f"{INDENT}{pad(page.safe(row['stage']), _LABEL)}{values}  {bar(row['share'], _BAR)}"
    yield ""


def _values(row: Row, more: str) -> str:
    """Returns the cells of a row: count, time, the duration under the key ``more``, share."""
    seconds = right(duration(row["seconds"]), _VALUE) + right(duration(row[more]), _VALUE)
    return right(count(row["count"]), _COUNT) + seconds + right(percent(row["share"]), _SHARE)


def _device(page: TextLayout, document: Document) -> Iterator[str]:
    idle, overlap, launches = document["idle"], document["overlap"], document["launches"]
    if idle is None:
        return
    yield page.line(f"device idle {percent(idle['share'])} of the steps, {duration(idle['seconds'])}", "bold")
    for cause, label in _CAUSES.items():
        part = idle["causes"][cause]
        values = right(duration(part["seconds"]), _VALUE) + right(percent(part["share"]), _SHARE)
        yield f"{INDENT}{pad(label, _LABEL)}{right(plural(part['gaps'], 'gap'), _COUNT + 6)}{values}  {bar(part['share'], _BAR)}"
    facts = []
    if overlap is not None:
        hidden, exposed = percent(overlap["overlap_share"]), duration(overlap["exposed_seconds"])
        facts += [f"{hidden} of communication is hidden", f"{exposed} is not"]
    if launches is not None:
        kernel, queue = duration(launches["kernel_seconds"]), duration(launches["queue_seconds"]["p50"])
        facts += [f"{count(launches['count'])} launches", f"{kernel} median kernel", f"{queue} in the queue"]
    if document["occupancy"] is not None:
        facts.append(f"{percent(document['occupancy'])} occupancy")
    if document["tensor_cores"] is not None:
        facts.append(f"{percent(document['tensor_cores']['share'])} of kernel time on tensor cores")
    for line in flow(facts, page.columns - len(INDENT)):
        yield INDENT + line
    yield ""


def _path(page: TextLayout, document: Document) -> Iterator[str]:
    path = document["critical_path"]
    if path is None or document["device"] is None:
        return
    step = "" if path["step"] is None else f" of step {path['step']}"
    yield page.line(f"critical path{step}, {duration(path['seconds'])}", "bold")
    for kind, seconds in path["parts"].items():
        share = seconds / path["seconds"] if path["seconds"] else None
        values = right(duration(seconds), _VALUE) + right(percent(share), _SHARE)
        yield f"{INDENT}{pad(_PARTS[kind], _LABEL)}{values}  {bar(share, _BAR)}"
    yield ""


def _ranks(page: TextLayout, document: Document) -> Iterator[str]:
    ranks = document.get("ranks")
    if not ranks:
        return
    yield page.line(f"{plural(ranks['collectives'], 'collective')} of {len(ranks['ranks'])} ranks", "bold")
    yield page.line(_rank_row("rank", "step", "waited", "made wait"), "dim")
    for row in ranks["ranks"]:
        seconds = (duration(row[f"{what}_seconds"]) for what in ("step", "waited", "caused"))
        yield INDENT + _rank_row(str(row["rank"]), *seconds)
    if ranks["unmatched"]:
        yield page.line(f"{plural(ranks['unmatched'], 'collective')} had no counterpart", "yellow")
    yield ""


def _rank_row(*cells: str) -> str:
    return "".join(map(right, cells, (6, _VALUE, _VALUE, _VALUE + 2)))


def _ops(page: TextLayout, document: Document) -> Iterator[str]:
    yield from _table(page, "operators, by self time", document["top_cpu_ops"], ("total_seconds", "total"))


def _shapes(page: TextLayout, document: Document) -> Iterator[str]:
    for name, rows in document.get("shapes", {}).items():
        if not rows:
            yield page.line(f"no shapes of {page.safe(name)}: was record_shapes=True set?", "dim")
        available = page.columns - len(INDENT) - _COUNT - _VALUE
        for row in rows:
            values = right(count(row["count"]), _COUNT) + right(duration(row["seconds"]), _VALUE)
            yield INDENT + pad(page.safe(f"{name} {row['shapes']}"), available) + values
        yield ""


def _kernels(page: TextLayout, document: Document) -> Iterator[str]:
    yield from _table(page, "kernels and copies", document["top_cuda_ops"], ("mean_seconds", "mean"))


def _table(page: TextLayout, title: str, rows: Sequence[Row], more: tuple[str, str]) -> Iterator[str]:
    if not rows:
        return
    key, head = more
    available = page.columns - len(INDENT) - _COUNT - 2 * _VALUE - _SHARE
    heads = right("count", _COUNT) + right("time", _VALUE) + right(head, _VALUE) + right("share", _SHARE)
    yield page.line(pad(title, available) + heads, "dim")
    for row in rows:
        yield INDENT + pad(page.safe(row["name"]), available) + _values(row, key)
    yield ""


def _memory(page: TextLayout, document: Document) -> Iterator[str]:
    for part in document["memory"]:
        peak = part["peaks"][0]
        reserved = f", {bytes_of(peak['reserved_bytes'])} reserved" if peak["reserved_bytes"] else ""
        step = f" in step {peak['step']}" if peak["step"] is not None else ""
        yield f"{INDENT}{pad('memory ' + page.safe(part['device']), _LABEL)}peak {bytes_of(peak['bytes'])}{reserved}, at {duration(peak['time_seconds'])}{step}"
    if document["memory"]:
        yield ""


def _missing(page: TextLayout, document: Document) -> Iterator[str]:
    for sentence in document["missing"]:
        for line in page.prose(sentence, indent=4):
            yield page.line(line, "dim")
