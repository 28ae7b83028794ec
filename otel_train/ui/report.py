"""A run as one page of HTML that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from otel_train.console.summary import data_wait_s, steps_per_second
from otel_train.console.text import (
    ABSENT,
    bytes_of,
    duration,
    percent,
    rounded,
)
from otel_train.ui.charts import area, bars, color_of, lines
from otel_train.ui.components import COLORS, SCRIPT, STYLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Document = Mapping[str, Any]  # what otel_train.cli.report.gather returns

_ROW_PX = 20
_BAR = '<span class="bar'
_SECTIONS = ("Findings", "Timeline", "Stages", "Histograms", "Loaders", "Memory", "Ranks", "Captures")


def render(document: Document) -> str:
    """The page. Every name in it is escaped, and it asks no server for anything.

    Args:
        document: what is known of the run.
    """
    parts = (_findings, timeline, stage_table, histograms, _loaders, _memory, _ranks, _captures)
    bodies = {name: part(document) for name, part in zip(_SECTIONS, parts, strict=True)}
    shown = {name: body for name, body in bodies.items() if body}
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in shown)
    sections = "".join(
        f'<section id="{name.lower()}" aria-labelledby="h-{name.lower()}"><h2 id="h-{name.lower()}">{name}</h2>{body}</section>'
        for name, body in shown.items()
    )
    summary = document["summary"]
    title = escape(str(summary.get("run_name") or summary.get("run_id") or "run"))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} · otel_train</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{COLORS}</style></head><body>"
        '<a class="skip" href="#main">Skip to the findings</a>'
        f'<header><h1>{title}</h1>{_facts(document)}<nav aria-label="Sections">{links}</nav></header>'
        f'<main id="main">{sections}</main><script>{SCRIPT}</script></body></html>\n'
    )


def _facts(document: Document) -> str:
    summary = document["summary"]
    steps = (summary.get("steps") or {}).get("train")
    wall_s = summary.get("wall_seconds")
    facts = [
        f"{escape(str(summary.get('state')))} after {duration(wall_s)}",
        f"{rounded(steps)} training steps",
        f"{rounded(speed)} steps/s of wall time" if (speed := steps_per_second(summary)) else "",
        *([] if summary.get("training") in (None, 1) else [f"training {escape(str(summary['training']))}"]),
        f"rank {escape(str(summary.get('rank')))} of {escape(str(summary.get('world_size')))}",
        escape(str(summary.get("host") or "")),
    ]
    return f'<p class="dim">{" · ".join(fact for fact in facts if fact)}</p>'


def _findings(document: Document) -> str:
    of_run = "".join(map(finding, document["summary"].get("verdicts") or ()))
    return of_run + "".join(
        finding(each, source=capture["name"])
        for capture in document["captures"]
        for each in capture["analysis"]["findings"]
    )


def finding(each: Mapping[str, Any], *, source: str = "") -> str:
    """One finding, as a box; ``source`` is the capture that shows it."""
    title = escape(str(each["name"]).replace("_", " "))
    if source:
        title += f' <span class="dim">in <code>{escape(source)}</code></span>'
    gain = ""
    if each.get("share"):
        hours = (
            f", {each['hours_per_day']:.1f} h of each day of training" if each.get("hours_per_day") else ""
        )
        sure = f" · confidence {escape(each['confidence'])}" if each.get("confidence") else ""
        gain = f'<p class="dim">{percent(each["share"])} of the time to win back{hours}{sure}</p>'
    places = "".join(f"<li><code>{escape(place)}</code></li>" for place in each.get("where") or ())
    where = f"<ul>{places}</ul>" if places else ""
    severity = escape(str(each.get("severity") or "info"))
    return (
        f'<article class="finding {severity}"><h3>{title}</h3><p>{escape(each["claim"])}</p>'
        f"<p>{escape(each['advice'])}</p>{gain}{where}</article>"
    )


def timeline(document: Document) -> str:
    """What the run was doing over time, from its ``series``."""
    series = document["series"]
    activities = area(series["times"], series["activities"], label="Share of time by activity", unit=percent)
    stages = area(
        series["times"], series["stages"], label="Mean time per training step by stage", unit=duration
    )
    return (f"<h3>What the run was doing</h3>{activities}" if activities else "") + (
        f"<h3>Stages of a training step, mean</h3>{stages}" if stages else ""
    )


def stage_table(document: Document) -> str:
    """A row per stage, from its ``summary``."""
    rows = document["summary"].get("stages") or ()
    whole: dict[str, float] = {}
    for row in rows:
        whole[row["phase"]] = whole.get(row["phase"], 0.0) + (row["self_seconds"] or 0.0)
    body = [
        [
            escape(" · ".join(part for part in (row["phase"], row["loader"], row["stage"]) if part)),
            rounded(row["count"]), duration(row["avg"]), duration(row["p50"]), duration(row["p95"]), duration(row["p99"]),
            duration(row["self_seconds"]),
            share_bar(row["self_seconds"] / whole[row["phase"]], row["stage"]) if row["self_seconds"] else ABSENT,
        ]
        for row in rows
    ]  # fmt: skip
    return table(("stage", "count", "avg", "p50", "p95", "p99", "self", "share of phase"), body)


def histograms(document: Document) -> str:
    """A chart for each of its ``histograms``."""
    drawn = "".join(
        f"<div><h3>{escape(each['name'])}</h3>"
        + bars(
            each["edges"],
            each["numbers"],
            name=each["stage"],
            label=f"Histogram of {each['name']}",
            unit=duration,
        )
        + "</div>"
        for each in document["histograms"]
    )
    return f'<div class="two">{drawn}</div>' if drawn else ""


def _loaders(document: Document) -> str:
    summary = document["summary"]
    waits = {row["loader"]: row["wait"] or {} for row in summary.get("loaders") or ()}
    body = [
        [
            escape(name), rounded(number), rounded((summary.get("samples") or {}).get(name)),
            rounded((summary.get("tokens") or {}).get(name)),
            duration(waits.get(name, {}).get("total_seconds")), duration(waits.get(name, {}).get("avg")),
        ]
        for name, number in (summary.get("batches") or {}).items()
    ]  # fmt: skip
    return table(("loader", "batches", "samples", "tokens", "waited for", "per batch"), body)


def _memory(document: Document) -> str:
    series = document["series"]
    return lines(series["times"], series["memory"], label="Memory over time", unit=bytes_of)


def _ranks(document: Document) -> str:
    if len(document["ranks"]) <= 1:
        return ""
    body = [
        [
            escape(str(row.get("rank"))), escape(str(row.get("state"))), duration(row.get("wall_seconds")),
            rounded((row.get("steps") or {}).get("train")), duration(data_wait_s(row)),
            escape(str(next((verdict["name"] for verdict in row.get("verdicts") or ()), ABSENT))),
        ]
        for row in document["ranks"]
    ]  # fmt: skip
    return table(("rank", "state", "wall", "steps", "data wait", "verdict"), body)


def _captures(document: Document) -> str:
    records = table(
        ("capture", "trigger", "rank", "steps", "what was found"), map(_record, document["records"])
    )
    if not document["captures"]:
        return records or '<p class="dim">No capture was taken.</p>'
    return records + "".join(_capture(each) for each in document["captures"])


def _record(record: Mapping[str, Any]) -> list[str]:
    said = [str((record.get("finding") or {}).get("claim") or ""), str(record.get("problem") or "")]
    said += map(str, record.get("notes") or ())
    asked = " · ".join(str(part) for part in (record.get("trigger"), record.get("reason")) if part)
    return [
        f"<code>{escape(str(record.get('file') or ABSENT))}</code>", escape(asked), escape(str(record.get("rank"))),
        escape(" to ".join(map(str, record.get("steps") or ())) or ABSENT),
        escape(" · ".join(part for part in said if part)),
    ]  # fmt: skip


def _allocated(memory: Sequence[Mapping[str, Any]]) -> str:
    """Memory within a capture, where allocations were recorded."""
    return "".join(
        f"<h4>Memory allocated on {escape(part['device'])}</h4>"
        + lines(
            [at - part["timeline"][0][0] for at, _ in part["timeline"]],
            {part["device"]: [size for _, size in part["timeline"]]},
            label=f"Memory allocated on {part['device']} during the capture",
            unit=bytes_of,
        )
        for part in memory
    )


def _capture(capture: Mapping[str, Any]) -> str:
    analysis = capture["analysis"]
    parts = analysis["breakdown"]
    idle = analysis["idle"]
    facts = [
        f"{rounded(parts['steps'])} steps" if parts["steps"] else "no steps marked",
        duration(parts["seconds"]),
        f"device idle {percent(idle['share'])}" if idle else "nothing on a device",
        f"data {percent(parts['data_share'])}" if parts["data_share"] is not None else "",
    ]
    missing = "".join(f'<p class="dim">{escape(sentence)}</p>' for sentence in analysis["missing"])
    return (
        f"<h3><code>{escape(capture['name'])}</code></h3><p>{' · '.join(fact for fact in facts if fact)}</p>"
        + flame_graph(capture["flame"])
        + _allocated(analysis["memory"])
        + _hot("operator", analysis["top_cpu_ops"])
        + _hot("kernel", analysis["top_cuda_ops"])
        + missing
    )


def _hot(what: str, rows: Sequence[Mapping[str, Any]]) -> str:
    body = [
        [
            f"<code>{escape(row['name'])}</code>",
            rounded(row["count"]),
            duration(row["seconds"]),
            share_bar(row["share"], ""),
        ]
        for row in rows
    ]
    return table((what, "count", "time", "share"), body)


def flame_graph(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as boxes, callers above; arrow keys move, Enter zooms in, Escape out."""
    if not calls:
        return ""
    depth = max(call["depth"] for call in calls) + 1
    boxes = "".join(
        f'<button tabindex="{0 if number == 0 else -1}" class="b-{_warm(call["name"])}" data-s="{call["start_share"]:.6f}" '
        f'data-w="{call["share"]:.6f}" data-d="{call["depth"]}" data-p="{call["parent"]}" '
        f'style="left:{call["start_share"] * 100:.3f}%;width:{call["share"] * 100:.3f}%;top:{call["depth"] * _ROW_PX}px" '
        f'title="{_said(call)}">{escape(call["name"])}</button>'
        for number, call in enumerate(calls)
    )
    return (
        '<p class="dim">Time on the host by caller. Click or Enter zooms in, Escape out, arrow keys move.</p>'
        f'<div class="flame" role="group" aria-label="Flame graph" style="height:{depth * _ROW_PX}px">{boxes}</div>'
        '<p class="dim told" aria-live="polite"></p>'
    )


def _said(call: Mapping[str, Any]) -> str:
    return escape(
        f"{call['name']}: {duration(call['seconds'])}, {percent(call['share'])}, {call['count']:,} calls",
        quote=True,
    )


def _warm(name: str) -> str:
    stage = name.removeprefix("otel_train:")
    return color_of(
        stage, 3 if name.startswith("aten::") else 1 if "autograd" in name or "Backward" in name else 6
    )


def share_bar(share: float, name: str) -> str:
    """A cell of a table: a share as a bar, in the colour of what is called ``name``."""
    color = f" b-{color_of(name, 0)}" if name else ""
    return f'{_BAR}{color}" style="width:{min(share, 1.0) * 50:.1f}%"></span> {percent(share)}'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already; "" without rows."""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    return f'<td class="track">{text}</td>' if text.startswith(_BAR) else f"<td>{text}</td>"
