"""The pages: list of runs; overview, timing and memory of a run; the report in one file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from otel_train.console.summary import activity_shares, data_wait_s, steps_per_second
from otel_train.console.text import ABSENT, bytes_of, duration, percent, plural, rounded
from otel_train.datamodel import NS_PER_S
from otel_train.rundata.alerts import facts_of
from otel_train.rundata.files import mapping, number, text, whole
from otel_train.rundata.live_view import RankView, RunRow, state_of
from otel_train.rundata.liveness import written_until
from otel_train.ui import escape
from otel_train.ui.captures import artifacts, capture_analysis, captures_table
from otel_train.ui.charts import HALF_WIDTH, area, bars, color_of, held, lines
from otel_train.ui.components import (
    address,
    asset,
    badge,
    board,
    labelled,
    leading_values,
    moment,
    section,
    share_bar,
    share_strip,
    table,
    texts,
)

if TYPE_CHECKING:
    from pathlib import Path


_EVENTS_SHOWN = 15
_RANKS_SHOWN = 100
PROCESS_MEMORY = "process memory usage"


def overview(view: RankView, *, static: bool = False) -> str:
    """Returns the tab "overview" as HTML; ``static`` without links."""
    return "".join(
        (
            section("Now" if view.state.live else "At the end", lambda: _leading_values(view)),
            _last_steps(view),
            section("Where the time went", lambda: _activities(view), beside=written(view)),
            section("Over time", lambda: _history(view), beside=_interval_note(view)),
            section("Ranks", lambda: _ranks(view, static=static)),
            section("Events", lambda: _events(view)),
        )
    )


def written(view: RankView) -> str:
    """Returns when the summary was written."""
    return f"written {moment(view.written_unix_s)}" if view.summary and view.written_unix_s else ""


def _last_steps(view: RankView) -> str:
    label = "Duration of the last steps by stage"
    draw = partial(area, *held(view.progress.spans_s, view.progress.stages_s), label=label, unit=duration)
    beside = "from the flight file, by stage; a hole is an evaluation, a checkpoint or a pause"
    return section("The last steps", draw, beside=beside)


def step_row(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the training step durations of a rank, of the loader with most steps."""
    rows = [row for row in summary.get("step_durations") or () if row["phase"] == "train"]
    return max(rows, key=lambda row: row["count"], default={})


def _leading_values(view: RankView) -> str:
    summary, progress = view.summary, view.progress
    steps, speed, shares = view.steps, steps_per_second(summary), activity_shares(summary)
    wait, productive = shares.get("data_wait"), shares.get("productive")
    now_s, whole_run = progress.now_step_s, step_row(summary)
    memory = [value for value in _series(view).get(PROCESS_MEMORY, ()) if value is not None]
    ranks = summary.get("ranks") or {}
    going = view.state.live
    return leading_values(
        (
            ("training steps", ("" if progress.exact or not going else "≈ ") + rounded(steps), _run_time(view)),
            (
                "steps per second",
                "0" if view.state.word == "stalled" else rounded(1 / now_s if now_s else None),
                _without_step(view) or (f"whole run {rounded(speed)}" if speed else ""),
            ),
            ("step", duration(now_s), f"median {duration(whole_run.get('p50'))}, p99 {duration(whole_run.get('p99'))}" if whole_run else ""),
            ("waiting for data", percent(progress.now_data_share), f"whole run {percent(wait)}" if wait is not None else ""),
            ("productive", percent(productive), "of the wall time" if productive is not None else ""),
            ("process memory", bytes_of(memory[-1]) if memory else "", f"most {bytes_of(max(memory))}" if memory else ""),
            ("ranks reporting", f"{rounded(ranks['reporting'])} of {rounded(ranks['world_size'])}" if ranks else "", ""),
            ("right now", _current_stage(view), _stage_and_duration(view)),
        )
    )  # fmt: skip


def _run_time(view: RankView) -> str:
    until_s, wall_s = written_until(view.summary), number(view.summary.get("wall_seconds"))
    last_s = view.progress.last_edge_unix_s
    if view.state.live and until_s and wall_s and last_s and last_s > until_s:
        wall_s += last_s - until_s
    return f"in {duration(wall_s)}" if wall_s else ""


def _without_step(view: RankView) -> str:
    quiet_s = view.progress.without_step_s if view.state.live else None
    return "" if quiet_s is None else f"no step has ended for {duration(quiet_s)}"


def _current_stage(view: RankView) -> str:
    if not (view.state.running or view.state.word == "silent") or view.progress.problem:
        return ""
    return str(view.progress.open[-1]["stage"]) if view.progress.open else "between stages"


def _stage_and_duration(view: RankView) -> str:
    if not _current_stage(view):
        return ""
    if not view.progress.open:
        return f"for {duration(view.progress.quiet_s)}" if view.progress.quiet_s else ""
    inside = view.progress.open[-1]
    about = f"loader {inside['loader']}, " if inside.get("loader") else ""
    return f"{about}for {duration(inside['for_seconds'])}"


def _activities(view: RankView) -> str:
    spent = {name: seconds for name, seconds in (view.summary.get("activities") or {}).items() if seconds}
    shares = activity_shares(view.summary)
    if not spent or not shares:
        return ""
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    colors = {name: color_of(name, place) for place, name in enumerate(spent)}
    parts = [(name, shares.get(name, 0.0), colors[name]) for name, _ in ordered]
    strip = share_strip(parts, label="Where the time went")
    items = "".join(
        f'<li><span class="key b-{colors[name]}"></span>{escape(name.replace("_", " "))} '
        f"<strong>{percent(shares.get(name))}</strong> {duration(seconds)}</li>"
        for name, seconds in ordered
    )
    return f'{strip}<ul class="legend">{items}</ul>'


def _interval_note(view: RankView) -> str:
    every_s = number(mapping(view.about.get("settings")).get("export_interval_s")) if view.series else None
    return f"a point every {duration(every_s)}" if every_s else ""


def _history(view: RankView) -> str:
    series = view.series
    if not series:
        return ""
    spans, steps = list(pairwise([0.0, *series["times"]])), {"steps per second": series["steps_per_s"]}
    if len(spans) <= 1:
        return ""
    speed = lines(
        *held(spans, steps), label="Training steps per second over time", unit=rounded, width=HALF_WIDTH
    )
    label, shares = "Share of time by activity", series["activities"]
    doing = area(*held(spans, shares), label=label, unit=percent, width=HALF_WIDTH)
    drawn = [("Training steps per second", speed), ("What the run was doing", doing)]
    shown = "".join(f"<div><h3>{title}</h3>{chart}</div>" for title, chart in drawn if chart)
    return f'<div class="two">{shown}</div>' if shown else ""


def _ranks(view: RankView, *, static: bool) -> str:
    if len(view.ranks) <= 1:
        return ""
    rows = [_rank(view, rank, static=static) for rank in view.ranks[: None if static else _RANKS_SHOWN]]
    left = len(view.ranks) - len(rows)
    more = f'<p class="dim">{left:,} more ranks are not in this table; choose one above.</p>' if left else ""
    heads = (
        "rank",
        "state",
        "wall",
        "steps",
        "step, median",
        "data wait",
        "data wait, share",
        "lost records",
        "finding",
    )
    return table(heads, rows) + more


def _rank(view: RankView, rank: int, *, static: bool) -> list[str]:
    summary = view.others.get(rank, {})
    state, _ = state_of(view.run / f"rank{rank}", summary, view.about, time.time())
    wait = activity_shares(summary).get("data_wait")
    leading: Mapping[str, Any] = next(iter(summary.get("findings") or ()), {})
    link = f"rank {rank}" if static else f'<a href="{address(view.run.name, rank=rank)}">rank {rank}</a>'
    return [
        f"<strong>{link}</strong>" if rank == view.rank else link,
        state.word,
        duration(summary.get("wall_seconds")),
        rounded((summary.get("steps") or {}).get("train")),
        duration(step_row(summary).get("p50")),
        duration(data_wait_s(summary)),
        ABSENT if wait is None else share_bar(wait, "data"),
        rounded(whole((summary.get("telemetry") or {}).get("records_lost"))),
        escape(text(leading.get("name")).replace("_", " ") or ABSENT),
    ]


def _events(view: RankView) -> str:
    """Returns a table of events, those of one name with the same facts in one row, the latest first."""
    together: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for event in view.events:
        about = (fact for fact in facts_of(event) if not fact.startswith("step"))
        together.setdefault((event["name"], *about), []).append(event)
    latest = sorted(together.values(), key=lambda group: -(number(group[-1].get("time_unix_ns")) or 0.0))
    rows = [
        [
            escape(group[-1]["name"][:200]),
            f"{len(group):,}",
            moment(at_ns / NS_PER_S if (at_ns := number(group[-1].get("time_unix_ns"))) else None),
            escape(" · ".join(facts_of(group[-1]))[:400]),
        ]
        for group in latest[:_EVENTS_SHOWN]
    ]
    return texts(table(("event", "times", "last", "about"), rows))


_DEVICE = ("accelerator", "hw gpu")


def memory(view: RankView) -> str:
    """Returns the tab "memory" as HTML."""
    body = "".join(
        (
            section("Now" if view.state.live else "At the end", lambda: _leading_memory(view)),
            section("On the host", lambda: _chart(view, device=False)),
            section("On the device", lambda: _chart(view, device=True)),
            section("Batches", lambda: _batch_sizes(view)),
        )
    )
    if body:
        return body
    absence = "No memory metric was written."
    if view.state.live:
        absence = "No memory metric has been written yet. The first comes with the first export."
    return f'<p class="empty">{absence}</p>'


def _series(view: RankView) -> dict[str, Sequence[float | None]]:
    found: dict[str, Sequence[float | None]] = view.series.get("memory") or {}
    return found


def _leading_memory(view: RankView) -> str:
    cells = []
    for name, values in sorted(_series(view).items(), key=lambda item: item[0] != PROCESS_MEMORY):
        known = [value for value in values if value is not None]
        if known:
            title = "process, resident" if name == PROCESS_MEMORY else name.replace(" usage", "")
            cells.append((title, bytes_of(known[-1]), f"most {bytes_of(max(known))}"))
    return leading_values(cells)


def _chart(view: RankView, *, device: bool) -> str:
    mine = {name: values for name, values in _series(view).items() if name.startswith(_DEVICE) == device}
    label = f"Memory on the {'device' if device else 'host'} over time"
    return lines(view.series.get("times") or [], mine, label=label, unit=bytes_of)


def _batch_sizes(view: RankView) -> str:
    rows = [
        [escape(str(row["loader"])), *(bytes_of(size) if (size := number(sizes.get(key))) is not None else ABSENT for key in ("min", "avg", "max"))]
        for row in view.summary.get("loaders") or ()
        if isinstance(sizes := row.get("batch_bytes"), dict)
    ]  # fmt: skip
    return table(("a batch of loader", "min", "avg", "max"), rows)


def timing(view: RankView, *, static: bool = False) -> str:
    """Returns the tab "timing" as HTML; ``static`` without the section that the overview has, too."""
    return "".join(
        (
            section("Stages", lambda: _stages(view), beside=written(view)),
            section("On the device", lambda: _device(view)),
            section("Whole steps", lambda: _steps(view)),
            "" if static else _last_steps(view),
            section("Stages over time", lambda: _timing_course(view), beside="mean per training step"),
            section("Loaders", lambda: _loaders(view)),
            section(
                "Distributions", lambda: _histograms(view), beside="calls by duration, on a logarithmic axis"
            ),
        )
    )


def _stages(view: RankView) -> str:
    rows = view.summary.get("stages") or ()
    phase_s: dict[str, float] = {}
    for row in rows:
        phase_s[row["phase"]] = phase_s.get(row["phase"], 0.0) + (row["self_seconds"] or 0.0)
    body = [
        [
            _name(row, "phase", "loader", "stage"), rounded(row["count"]),
            *(duration(row[key]) for key in ("avg", "p50", "p95", "p99", "self_seconds")),
            share_bar(row["self_seconds"] / phase_s[row["phase"]], row["stage"]) if row["self_seconds"] else ABSENT,
        ]
        for row in rows
    ]  # fmt: skip
    return table(
        ("phase · loader · stage", "count", "avg", "p50", "p95", "p99", "self", "share of phase"), body
    )


def _histograms(view: RankView) -> str:
    drawn = "".join(
        f"<div><h3>{escape(each['name'])}</h3>"
        + bars(each["edges"], each["numbers"], name=each["stage"], label=f"Histogram of {each['name']}", unit=duration)
        + "</div>"
        for each in view.histograms
    )  # fmt: skip
    return f'<div class="two">{drawn}</div>' if drawn else ""


def _name(row: Mapping[str, Any], *words: str) -> str:
    return escape(" · ".join(str(row[word]) for word in words if row.get(word)))


def _device(view: RankView) -> str:
    rows = [
        [
            _name(row, "phase", "loader", "stage"),
            rounded(row["device_count"]),
            duration(row["device_seconds"] / row["device_count"]),
            duration(row["device_p50"]),
            duration(row["device_p99"]),
        ]
        for row in view.summary.get("stages") or ()
        if row.get("device_count")
    ]
    return table(("phase · loader · stage", "measured", "mean", "p50", "p99"), rows)


def _steps(view: RankView) -> str:
    rows = [
        [
            _name(row, "phase", "loader"), rounded(row["count"]),
            *(duration(row[key]) for key in ("avg", "p50", "p95", "p99", "max", "total_seconds")),
        ]
        for row in view.summary.get("step_durations") or ()
    ]  # fmt: skip
    return table(("phase · loader", "count", "avg", "p50", "p95", "p99", "max", "total"), rows)


def _timing_course(view: RankView) -> str:
    series = view.series
    if not series:
        return ""
    trained = series["steps_per_s"]  # an interval without steps has no time per step
    stages = {
        name: [value if steps else None for value, steps in zip(values, trained, strict=True)]
        for name, values in series["stages"].items()
    }
    label, spans = "Mean time per training step by stage", list(pairwise([0.0, *series["times"]]))
    return area(*held(spans, stages), label=label, unit=duration) if sum(map(bool, trained)) > 1 else ""


def _loaders(view: RankView) -> str:
    summary = view.summary
    facts = {row["loader"]: row for row in summary.get("loaders") or ()}
    rows = [_loader(summary, name, facts.get(name, {})) for name in summary.get("batches") or ()]
    heads = (
        "loader", "batches", "samples", "tokens", "waited for", "wait, avg", "wait, p95", "workers", "build, avg",
        "build, p95", "errors", "dead workers",
    )  # fmt: skip
    return table(heads, rows)


def _loader(summary: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> list[str]:
    build, wait = row.get("build") or {}, row.get("wait") or {}
    return [
        escape(name),
        *(rounded((summary.get(key) or {}).get(name)) for key in ("batches", "samples", "tokens")),
        *(duration(wait.get(key)) for key in ("total_seconds", "avg", "p95")),
        rounded(row.get("workers")),
        *(duration(build.get(key)) for key in ("avg", "p95")),
        _count_text(row.get("errors")),
        _count_text(row.get("worker_exits")),
    ]


def _count_text(value: object) -> str:
    if isinstance(value, dict):
        return rounded(sum(value.values()))
    return rounded(value) if isinstance(value, (int, float)) else ABSENT


TABS = ("overview", "timing", "memory", "artifacts")


def _head(title: str, policy: str = "") -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · otel_train</title>{policy}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
    )


def frame(title: str, main: str, *, trail: str = "", every_s: float) -> str:
    """Returns a whole page: ``main`` and ``trail`` (breadcrumbs) are HTML; it reloads its content every ``every_s``."""
    where = f'<span aria-hidden="true">/</span> {trail}' if trail else ""
    return (
        _head(title)
        + '<link rel="icon" href="/icon.svg"><link rel="stylesheet" href="/style.css"><script src="/page.js" defer></script>'
        f'</head><body data-every="{every_s:g}"><a class="skip" href="#main">Skip to the content</a>'
        f'<header class="top"><nav aria-label="Where you are"><a class="brand" href="/">otel_train</a> {where}</nav>'
        '<span id="status" role="status"></span></header>'
        f'<main id="main">{main}</main></body></html>\n'
    )


def run_page(view: RankView, tab: str, *, capture: str | None) -> str:
    """Returns the page of a run with one of ``TABS``, and the analysis of the capture named ``capture``."""
    draw = {"overview": overview, "timing": timing, "memory": memory}.get(tab)
    body = draw(view) if draw is not None else artifacts(view, capture)
    if not body:
        body = '<p class="empty">Nothing has been written yet. Metrics appear as soon as training begins.</p>'
    main = (
        f"{title_of(view, beside=_rank_links(view, tab))}{_tabs(view, tab)}"
        f'<div role="tabpanel" id="panel" aria-labelledby="tab-{tab}" tabindex="0">'
        f"{board(view.notices, unfold=int(tab == TABS[0]))}{body}</div>"
    )
    return frame(
        f"{shown_name(view)} · {tab}",
        main,
        trail=f"<span><bdi>{escape(view.run.name)}</bdi></span>",
        every_s=1.0 if view.state.live else 5.0,
    )


def no_such_run_page(name: str) -> str:
    """Returns the page for a run that does not exist, or no longer does."""
    main = (
        f'<div class="title"><h1><bdi>{escape(name[:200])}</bdi></h1></div><p class="empty">There is no such run in the folder. '
        'It may have been moved or deleted. <a href="/">All runs</a></p>'
    )
    return frame("no such run", main, every_s=5.0)


def busy_page(what: str, waited_s: float) -> str:
    """Returns the page for a request that has waited for another one, which reads ``what``."""
    main = (
        f'<div class="title"><h1>Still reading</h1></div><p class="empty">{escape(what)} still being read for another request, '
        f"after {waited_s:g} s: they are large, or the disk does not answer. Then <code>ls</code> of the folder hangs as well.</p>"
    )
    return frame("still reading", main, every_s=5.0)


def shown_name(view: RankView) -> str:
    """Returns the name of the run that is shown."""
    return text(view.summary.get("run_name")) or text(view.about.get("run_name")) or view.run.name


def title_of(view: RankView, *, beside: str = "", static: bool = False) -> str:
    """Returns name, state and facts of a run, as HTML; ``static``: with the time of the data even if the run is live."""
    known = {**view.about, **view.summary}
    begun_s = (number(view.about.get("started_unix_ns")) or 0.0) / NS_PER_S
    started_s = number(view.summary.get("started_unix_s")) or begun_s
    training, attempt = whole(known.get("training")) or 1, whole(known.get("attempt"))
    world_size = whole(known.get("world_size")) or len(view.ranks)
    facts = [
        *(_progress(view.summary) if static or not view.state.live else ()),
        f"training {training}" if training > 1 else "",
        f"attempt {attempt}" if attempt else "",
        "" if view.state.live else escape(text(known.get("end_cause"))),
        f"rank {view.rank} of {world_size}" if view.rank is not None else "",
        escape(text(known.get("host"))),
        f"started {moment(started_s)}" if started_s else "",
        f"<bdi><code>{escape(_id_of(view))}</code></bdi>",
    ]
    shown = " · ".join(fact for fact in facts if fact)
    return f'<div class="title"><h1><bdi>{escape(shown_name(view))}</bdi></h1>{badge(view.state)}{beside}</div><p class="dim facts">{shown}</p>'


def _id_of(view: RankView) -> str:
    """Returns the name of the run's folder; for a folder of artifacts, which may have any name, the run id."""
    return view.run.name if view.ranks else text(view.summary.get("run_id")) or view.run.name


def _progress(summary: Mapping[str, Any]) -> Iterator[str]:
    if not summary:
        return
    steps, throughput = (mapping(summary.get(key)) for key in ("steps", "throughput"))
    yield f"{escape(text(summary.get('state')))} after {duration(number(summary.get('wall_seconds')))}"
    yield f"{rounded(number(steps.get('train')))} training steps"
    speed = number(throughput.get("steps_per_second"))
    yield "" if speed is None else f"{rounded(speed)} steps/s of wall time"


def _rank_links(view: RankView, tab: str) -> str:
    """Returns the selection of a rank: a form, so that it works without the script."""
    if len(view.ranks) <= 1:
        return ""
    options = "".join(
        f'<option value="{rank}"{" selected" if rank == view.rank else ""}>rank {rank}</option>'
        for rank in view.ranks
    )
    return (
        f'<form class="ranks" action="{address(view.run.name)}"><input type="hidden" name="tab" value="{tab}">'
        f'<label>Rank <select name="rank">{options}</select></label><noscript><button>Show</button></noscript></form>'
    )


def _tabs(view: RankView, chosen: str) -> str:
    links = "".join(
        f'<a role="tab" id="tab-{tab}" href="{address(view.run.name, tab=tab, rank=view.rank)}" aria-controls="panel" '
        f'aria-selected="{str(tab == chosen).lower()}" tabindex="{0 if tab == chosen else -1}">{tab.capitalize()}</a>'
        for tab in TABS
    )
    return f'<div role="tablist" aria-label="Views of this run">{links}</div>'


PAGE = 50
_HEADS = ("run", "state", "finding", "steps", "steps/s", "started", "ranks", "host")
_LONGEST_FINDING = 200
_EVERY_S = 2.0


def runs_page(rows: Sequence[RunRow], root: Path, *, words: str, page: int) -> str:
    """Returns the list of runs that match all ``words``; pages count from 1, and one past the last is the last."""
    found = [row for row in rows if row.says(words)]
    pages = max(1, -(-len(found) // PAGE))
    page = min(max(1, page), pages)
    shown = found[(page - 1) * PAGE : page * PAGE]
    body = table(_HEADS, map(_row, shown)) or _empty_list(root, words=words, runs=len(rows))
    going = sum(row.state.running for row in rows)
    facts = f"{plural(len(rows), 'run')} in <code>{escape(str(root))}</code>"
    facts += f", {going:,} running" if going else ""
    main = (
        f'<div class="title"><h1>Runs</h1>{_filter(words)}</div><p class="dim facts">{facts}</p>'
        f'<div class="runs" id="runs">{labelled(body, "Runs")}</div>{_pages(words, page, pages, len(found))}'
    )
    return frame("Runs", main, every_s=_EVERY_S)


def _row(row: RunRow) -> list[str]:
    name = f"<strong><bdi>{escape(row.run_name)}</bdi></strong>"
    beside = f' <bdi class="dim">{escape(row.name)}</bdi>' if row.name != row.run_name else ""
    finding = escape((row.cause or row.finding.replace("_", " "))[:_LONGEST_FINDING]) or ABSENT
    return [
        f'<a href="{address(row.name)}">{name}{beside}</a>',
        badge(row.state),
        finding,
        rounded(row.steps),
        rounded(row.speed),
        moment(row.started_unix_s or None),
        rounded(row.ranks),
        escape(row.host) or ABSENT,
    ]


def _filter(words: str) -> str:
    return (
        '<form class="filter" role="search" action="/"><label><span class="sr">Show runs with these words</span>'
        f'<input type="search" name="filter" value="{escape(words)}" placeholder="Filter: name, host, state, finding" '
        'autocomplete="off" spellcheck="false"></label><noscript><button>Show</button></noscript></form>'
    )


def _empty_list(root: Path, *, words: str, runs: int) -> str:
    if runs:
        return f'<p class="empty">No run has all of these words: <strong>{escape(words)}</strong></p>'
    return (
        f'<p class="empty">There is no run in <code>{escape(str(root))}</code> yet. This page shows the first as soon as it begins: '
        "<code>otel-train run train.py</code>, or <code>otel-train demo</code>.</p>"
    )


def _pages(words: str, page: int, pages: int, found: int) -> str:
    if pages == 1:
        return ""
    first = (page - 1) * PAGE + 1

    def link(number: int, text: str) -> str:
        if not 1 <= number <= pages:
            return f'<span class="dim">{text}</span>'
        query = urlencode({**({"filter": words} if words else {}), "page": number})
        return f'<a href="/?{escape(query)}">{text}</a>'

    return (
        f'<nav class="pages" aria-label="Pages of the list">{link(page - 1, "Newer")} '
        f"<span>{first:,} to {min(found, page * PAGE):,} of {found:,}</span> {link(page + 1, 'Older')}</nav>"
    )


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def report_page(view: RankView, captures: Sequence[Mapping[str, Any]]) -> str:
    """Returns the report as HTML. Every name in it is escaped, and it loads nothing.

    ``captures``: ``name``, ``analysis`` (by ``trace_analysis.summarize``) and ``flame`` of the newest capture of each rank.
    """
    parts = {
        "Overview": overview(view, static=True),
        "Timing": timing(view, static=True),
        "Memory": memory(view),
        "Captures": _captures(view, captures),
    }
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in parts)
    body = "".join(
        f'<div id="{name.lower()}" role="region" aria-labelledby="h-{name.lower()}">'
        f'<h2 class="part" id="h-{name.lower()}">{name}</h2>{_one_level_lower(part)}</div>'
        for name, part in parts.items()
    )
    return (
        _head(shown_name(view), f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">')
        + f'<style>{asset("page.css")}</style></head><body><a class="skip" href="#main">Skip to the findings</a>'
        f'<header class="top"><nav aria-label="Sections"><span class="brand">otel_train</span> {links}</nav></header>'
        f'<main id="main">{title_of(view, static=True)}{board(view.notices, unfold=len(view.notices))}{body}</main>'
        f"<script>{asset('flames.js')}flames();scrollers();</script></body></html>\n"
    )


def _one_level_lower(part: str) -> str:
    """Lowers headings by one level: h2 becomes h3, h3 becomes h4."""
    for level in (3, 2):
        part = part.replace(f"<h{level}>", f"<h{level + 1}>").replace(f"</h{level}>", f"</h{level + 1}>")
    return part


def _captures(view: RankView, captures: Sequence[Mapping[str, Any]]) -> str:
    return section("All captures", lambda: captures_table(view, static=True, shown=len(captures))) + "".join(
        section(each["name"], partial(capture_analysis, each["analysis"], each["flame"])) for each in captures
    )
