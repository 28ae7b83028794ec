"""Draws every dashboard from its JSON and a real Prometheus. Not Grafana: our own renderer.

python -m grafana.preview.render --minutes 15      start a Prometheus, let it fill, draw docs/img/dashboard-*.svg
python -m grafana.preview.render --from URL        draw from a Prometheus that is filled already
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grafana.preview import graphs, svg, tiles
from grafana.preview.ask import RUNS, Span, answers, filled_in
from grafana.preview.graphs import Box, Mark
from grafana.preview.madeup import RUN as MADE_UP
from grafana.preview.prometheus import REAL_RUN, ROOT, Store, Ways, filled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from grafana.preview.ask import Answer

JSON: Final = ROOT / "grafana" / "json"
IMAGES: Final = ROOT / "docs" / "img"
WIDTH: Final = 1440
_GRID: Final = 24
_UNIT: Final = 38
_GAP: Final = 8
_HEAD: Final = 58
_REPEATED: Final = ("code", "prose")
"""Values of a repeated row that are drawn: those the real run trains on."""

_OF_MADE_UP: Final = ("otel-train-distributed",)
"""Dashboards that say little about a run of one rank."""


def draw(dashboard: Mapping[str, Any], store: Store, span: Span) -> str:
    """A dashboard as SVG."""
    marks = marks_of(dashboard, store, span)
    runs = (MADE_UP,) if dashboard["uid"] in _OF_MADE_UP else RUNS
    parts = _header(dashboard, span, runs[0])
    bottom = 0.0
    for panel, top, chosen in laid_out(dashboard["panels"]):
        box = _box(panel["gridPos"], top)
        bottom = max(bottom, box.y + box.height)
        if panel["type"] == "row":
            title = filled_in(panel["title"], REAL_RUN, **chosen)
            parts.append(svg.text(box.x + 4, box.y + 24, f"▾ {title}", size=15, bold=True))
        else:
            parts += card(panel, box, View(store, span, marks, runs), chosen)
    return svg.document(WIDTH, bottom + _GAP, parts)


def laid_out(panels: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], int, dict[str, str]]]:
    """(panel, rows it is moved down, values chosen); a repeated row comes once for each value."""
    placed: list[tuple[dict[str, Any], int, dict[str, str]]] = []
    moved = 0
    for number, panel in enumerate(panels):
        if panel["type"] != "row":
            continue
        group = [panel]
        for member in panels[number + 1 :]:
            if member["type"] == "row":
                break
            group.append(member)
        values = _REPEATED if panel.get("repeat") else ("",)
        height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in group) - panel["gridPos"]["y"]
        for turn, value in enumerate(values):
            chosen = {panel["repeat"]: value} if value else {}
            placed += [(member, moved + turn * height, chosen) for member in group]
        moved += (len(values) - 1) * height
    return placed


def _box(position: Mapping[str, int], moved: int) -> Box:
    column = (WIDTH - _GAP) / _GRID
    return Box(
        _GAP + position["x"] * column,
        _HEAD + (position["y"] + moved) * _UNIT,
        position["w"] * column - _GAP,
        position["h"] * _UNIT - _GAP,
    )


def _header(dashboard: Mapping[str, Any], span: Span, run: str) -> list[str]:
    first, end = (time.strftime("%H:%M", time.gmtime(at)) for at in (span.start_s, span.end_s))
    return [
        svg.text(_GAP + 4, 26, dashboard["title"], size=19, bold=True),
        svg.text(
            _GAP + 4,
            46,
            f"run {run}, {first} to {end} UTC. {dashboard['description']}",
            size=12,
            fill=svg.DIM,
        ),
        svg.text(
            WIDTH - _GAP - 4,
            26,
            "Preview by our own renderer, not Grafana",
            size=12,
            fill=svg.DIM,
            anchor="end",
        ),
        svg.rect(WIDTH - 270, 36, 6, 12, fill="#b877d9"),
        svg.text(
            WIDTH - _GAP - 4,
            46,
            "made-up figures: a laptop has no such part",
            size=12,
            fill=svg.DIM,
            anchor="end",
        ),
    ]


class View(NamedTuple):
    """What a panel is drawn from.

    Attributes:
        store: where it asks.
        span: the time that is shown.
        marks: the annotations.
        runs: which run it shows; the next where the first has nothing.
    """

    store: Store
    span: Span
    marks: Sequence[Mark]
    runs: Sequence[str]


def card(panel: Mapping[str, Any], box: Box, view: View, chosen: Mapping[str, str]) -> list[str]:
    """One panel with its title."""
    parts = [svg.rect(box.x, box.y, box.width, box.height, fill=svg.CARD, edge=svg.EDGE, radius=3)]
    inner = Box(box.x + 10, box.y + 30, box.width - 20, box.height - 38)
    found = answers(view.store, panel, view.span, view.runs, **chosen) if panel.get("targets") else []
    if any(answer.run == MADE_UP and answer.series for answer in found):
        parts.append(svg.rect(box.x + box.width - 14, box.y + 8, 6, 14, fill="#b877d9"))
        view = view._replace(marks=())
    parts.append(svg.text(box.x + 10, box.y + 20, panel["title"], size=13, bold=True))
    return parts + _content(panel, inner, view, found)


def _content(panel: Mapping[str, Any], box: Box, view: View, found: Sequence[Answer]) -> list[str]:
    store, span, marks, _ = view
    kind = panel["type"]
    if kind == "text":
        return tiles.words(panel, box)
    if kind == "timeseries":
        points = [point for answer in found for point in _exemplars(answer, store, span)]
        return [
            *graphs.graph(panel, box, found, span, marks),
            *graphs.exemplars(panel, box, points, found, span),
        ]
    if kind in {"heatmap", "state-timeline"}:
        return (graphs.heatmap if kind == "heatmap" else graphs.states)(panel, box, found, span)
    drawers = {"stat": tiles.stat, "gauge": tiles.gauge, "bargauge": tiles.bar_gauge, "table": tiles.table}
    return drawers[kind](panel, box, found)


def _exemplars(answer: Answer, store: Store, span: Span) -> list[tuple[float, float]]:
    if not answer.target.get("exemplar"):
        return []
    asked = store.ask(
        "query_exemplars",
        query=filled_in(answer.target["expr"], answer.run),
        start=f"{span.start_s:.3f}",
        end=f"{span.end_s:.3f}",
    )
    return [(entry["timestamp"], float(entry["value"])) for series in asked for entry in series["exemplars"]]


def marks_of(dashboard: Mapping[str, Any], store: Store, span: Span) -> list[Mark]:
    """What is marked on every graph."""
    marks = []
    for annotation in dashboard["annotations"]["list"]:
        expr = filled_in(annotation["expr"], REAL_RUN)
        data = store.ask(
            "query_range", query=expr, start=f"{span.start_s:.3f}", end=f"{span.end_s:.3f}", step="30"
        )
        for series in data["result"]:
            before = 0.0
            for at, _ in series["values"]:
                if at - before > 90:
                    marks.append(Mark(at, annotation["iconColor"]))
                before = at
    return marks


def draw_all(store: Store, minutes: float) -> None:
    """Every dashboard."""
    now = time.time()
    span = Span(now - minutes * 60, now, max(5.0, minutes * 60 / 150))
    IMAGES.mkdir(exist_ok=True)
    for path in sorted(JSON.glob("*.json")):
        picture = IMAGES / f"dashboard-{path.stem}.svg"
        picture.write_text(draw(json.loads(path.read_text(encoding="utf-8")), store, span), encoding="utf-8")
        print(f"drew {picture.relative_to(ROOT)}")


def main() -> int:
    """Draw; exit code."""
    parser = argparse.ArgumentParser(description="Draw previews of the dashboards.")
    parser.add_argument("--minutes", type=float, default=15, help="how much time is shown (default: 15)")
    parser.add_argument("--from", dest="url", help="a Prometheus that is filled already")
    parser.add_argument("--prometheus", type=Path, default=Path("prometheus"), help="the program")
    options = parser.parse_args()
    if options.url:
        draw_all(Store(options.url), options.minutes)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"filling a Prometheus for {options.minutes:g} minutes")
        with filled(Path(folder), Ways(options.prometheus, push=False), options.minutes * 60) as store:
            draw_all(store, options.minutes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
