"""The tab that answers how the run is doing."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from otel_train.analyze.drawing import HALF_WIDTH, area, color_of, lines
from otel_train.analyze.report import share_bar, table
from otel_train.analyze.report_text import (
    ABSENT,
    activity_shares,
    bytes_of,
    duration,
    figure,
    percent,
    steps_per_second,
)
from otel_train.ui.components import address, moment, section, share_strip, texts, tiles
from otel_train.ui.notices import facts_of
from otel_train.ui.run_list import number, text, whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from otel_train.ui.live_view import RankView

_EVENTS_SHOWN = 15
_RANKS_SHOWN = 100
PROCESS_MEMORY = "process memory usage"


def overview(view: RankView) -> str:
    """The tab as HTML."""
    return "".join(
        (
            section("Now" if view.state.live else "At the end", lambda: _tiles(view)),
            section("The last steps", lambda: last_steps(view), beside="from the flight file, by stage"),
            section("Where the time went", lambda: _activities(view), beside=written(view)),
            section("Over time", lambda: _course(view), beside=_every(view)),
            section("Ranks", lambda: _ranks(view)),
            section("Events", lambda: _events(view)),
        )
    )


def written(view: RankView) -> str:
    """When the figures of the summary were written down."""
    return f"written {moment(view.written_unix_s)}" if view.summary and view.written_unix_s else ""


def last_steps(view: RankView) -> str:
    """The last steps of the flight file, stage upon stage."""
    pulse = view.pulse
    return area(pulse.times_s, pulse.stages_s, label="Duration of the last steps by stage", unit=duration)


def step_row(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Figures of all training steps of a rank; those of the loader with the most of them."""
    rows = [row for row in summary.get("step_durations") or () if row["phase"] == "train"]
    return max(rows, key=lambda row: row["count"], default={})


def _tiles(view: RankView) -> str:
    summary, pulse = view.summary, view.pulse
    steps, speed, shares = view.steps, steps_per_second(summary), activity_shares(summary)
    wait, productive = shares.get("data_wait"), shares.get("productive")
    now_s, whole_run = pulse.now_step_s, step_row(summary)
    memory = [
        value for value in (view.series.get("memory") or {}).get(PROCESS_MEMORY, ()) if value is not None
    ]
    ranks = summary.get("ranks") or {}
    going = view.state.live
    return tiles(
        (
            ("training steps", ("" if pulse.exact or not going else "≈ ") + figure(steps), _run_time(view)),
            (
                "steps per second",
                figure(1 / now_s if now_s else None),
                f"whole run {figure(speed)}" if speed else "",
            ),
            ("step", duration(now_s), f"median {duration(whole_run.get('p50'))}, p99 {duration(whole_run.get('p99'))}" if whole_run else ""),
            ("waiting for data", percent(pulse.now_share("data")), f"whole run {percent(wait)}" if wait is not None else ""),
            ("productive", percent(productive), "of the wall time" if productive is not None else ""),
            ("process memory", bytes_of(memory[-1]) if memory else "", f"most {bytes_of(max(memory))}" if memory else ""),
            ("ranks reporting", f"{figure(ranks['reporting'])} of {figure(ranks['world_size'])}" if ranks else "", ""),
            ("right now", _doing(view), _inside(view)),
        )
    )  # fmt: skip


def _run_time(view: RankView) -> str:
    started_s, wall_s = number(view.summary.get("started_unix_s")), number(view.summary.get("wall_seconds"))
    last_s = view.pulse.last_edge_unix_s
    if view.state.live and started_s and last_s and last_s > started_s:
        wall_s = last_s - started_s
    return f"in {duration(wall_s)}" if wall_s else ""


def _doing(view: RankView) -> str:
    if view.state.word not in {"running", "silent"} or not view.pulse.beat:
        return ""
    return str(view.pulse.open[-1]["stage"]) if view.pulse.open else "between stages"


def _inside(view: RankView) -> str:
    if not _doing(view) or not view.pulse.open:
        return ""
    inside = view.pulse.open[-1]
    about = f"loader {inside['loader']}, " if inside.get("loader") else ""
    return f"{about}for {duration(inside['for_seconds'])}"


def _activities(view: RankView) -> str:
    spent = {name: seconds for name, seconds in (view.summary.get("activities") or {}).items() if seconds}
    shares = activity_shares(view.summary)
    if not spent or not shares:
        return ""
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    colors = {name: color_of(name, place) for place, name in enumerate(spent)}
    strip = share_strip(
        [(name, shares.get(name, 0.0), colors[name]) for name, _ in ordered], label="Where the time went"
    )
    items = "".join(
        f'<li><span class="key b-{colors[name]}"></span>{escape(name.replace("_", " "))} '
        f"<strong>{percent(shares.get(name))}</strong> {duration(seconds)}</li>"
        for name, seconds in ordered
    )
    return f'{strip}<ul class="legend">{items}</ul>'


def _every(view: RankView) -> str:
    every_s = number((view.about.get("settings") or {}).get("export_every_s")) if view.series else None
    return f"a point every {duration(every_s)}" if every_s else ""


def _course(view: RankView) -> str:
    series = view.series
    if not series:
        return ""
    speed = lines(
        series["times"],
        {"steps per second": series["steps_per_s"]},
        label="Training steps per second over time",
        unit=figure,
        width=HALF_WIDTH,
    )
    doing = area(
        series["times"],
        series["activities"],
        label="Share of time by activity",
        unit=percent,
        width=HALF_WIDTH,
    )
    drawn = [("Training steps per second", speed), ("What the run was doing", doing)]
    return (
        '<div class="two">'
        + "".join(f"<div><h3>{title}</h3>{chart}</div>" for title, chart in drawn if chart)
        + "</div>"
        if speed or doing
        else ""
    )


def _ranks(view: RankView) -> str:
    if len(view.ranks) <= 1:
        return ""
    rows = [_rank(view, rank) for rank in view.ranks[:_RANKS_SHOWN]]
    left = len(view.ranks) - len(rows)
    more = (
        f'<p class="dim">{left:,} more ranks are not in this table; choose one above.</p>' if left > 0 else ""
    )
    return table(("rank", "steps", "step, median", "data wait", "lost", "verdict"), rows) + more


def _rank(view: RankView, rank: int) -> list[str]:
    summary = view.others.get(rank, {})
    wait = activity_shares(summary).get("data_wait")
    leading: Mapping[str, Any] = next(iter(summary.get("verdicts") or ()), {})
    link = f'<a href="{address(view.run.name, rank=rank)}">rank {rank}</a>'
    return [
        f"<strong>{link}</strong>" if rank == view.rank else link,
        figure((summary.get("steps") or {}).get("train")),
        duration(step_row(summary).get("p50")),
        ABSENT if wait is None else share_bar(wait, "data"),
        figure(whole((summary.get("telemetry") or {}).get("records_lost"))),
        escape(text(leading.get("name")).replace("_", " ") or ABSENT),
    ]


def _events(view: RankView) -> str:
    """Events of one kind about one thing together, the latest first."""
    together: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for event in view.events:
        about = (fact for fact in facts_of(event) if not fact.startswith("step"))
        together.setdefault((event["name"], *about), []).append(event)
    latest = sorted(together.values(), key=lambda group: -(number(group[-1].get("time_unix_ns")) or 0.0))
    rows = [
        [
            escape(group[-1]["name"][:200]),
            f"{len(group):,}",
            moment(at_ns / 1e9 if (at_ns := number(group[-1].get("time_unix_ns"))) else None),
            escape(" · ".join(facts_of(group[-1]))[:400]),
        ]
        for group in latest[:_EVENTS_SHOWN]
    ]
    return texts(table(("event", "times", "last", "about"), rows))
