"""Builds Grafana panels from ``Panel`` descriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    gauge,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    text,
    timeseries,
)
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grafana.queries import Query

RUNBOOKS: Final = "https://github.com/otel-train/otel-train/blob/main/docs/runbooks"
NO_DATA: Final = "no data"
SOURCE: Final = kinds.DataSourceRef(type_val="prometheus", uid="${datasource}")

GREEN: Final = "green"
ORANGE: Final = "orange"
RED: Final = "red"
BLUE: Final = "blue"

NOWHERE: Final = "nowhere"
"""Value of ``leads`` for a panel without a link."""

_FULL: Final = 70


class Panel(NamedTuple):
    """Description of one panel, without types of the Grafana SDK."""

    title: str
    kind: str  # a key of ``_MAKERS``
    unit: str  # id of a Grafana unit
    says: str  # description, one sentence
    bad: str  # sign of a problem; completes "Bad when"
    queries: Sequence[Query]
    width: int = 8  # of the 24 columns of the grid
    height: int = 8  # in rows of the grid
    limits: Sequence[tuple[float, str]] = ()  # of the alert: value in ``unit``, and colour from there on
    first: str = GREEN  # colour below the first limit
    runbook: str = ""  # name of the alert on this
    needs: str = ""  # data source that a run on a laptop lacks
    top: float | None = None  # maximum of the axis; the minimum is then 0
    states: Sequence[tuple[str, str, str]] = ()  # value, text and colour, for ``states``
    empty: str = NO_DATA  # text if no series is found
    leads: str = ""  # file of the dashboard it links to; "": ``Board.leads``, ``NOWHERE``: no link
    columns: Sequence[tuple[str, str]] = ()  # of a table, before those of the queries: (label, heading)

    @property
    def description(self) -> str:
        """Text of the panel's info tooltip."""
        link = f"\n\n[Runbook {self.runbook}]({RUNBOOKS}/{self.runbook}.md)" if self.runbook else ""
        return f"{self.says}\n\nBad when {self.bad}.{link}"


class Row(NamedTuple):
    """A row heading and the panels below it."""

    title: str
    panels: Sequence[Panel]  # left to right; they wrap at the edge
    repeat: str = ""  # a variable; the row is shown once for each of its values


def place(row: Row, top: int) -> tuple[list[tuple[Panel, model.GridPos]], int]:
    """Returns where each panel goes, and where the next row begins."""
    x, y, tallest = 0, top, 0
    placed = []
    for panel in row.panels:
        if x + panel.width > _GRID:
            x, y, tallest = 0, y + tallest, 0
        placed.append((panel, model.GridPos(h=panel.height, w=panel.width, x=x, y=y)))
        x, tallest = x + panel.width, max(tallest, panel.height)
    return placed, y + tallest


_GRID: Final = 24


def build(panel: Panel, position: model.GridPos) -> Any:
    """Returns the SDK's builder of a panel."""
    made = _MAKERS[panel.kind](panel)
    made.title(panel.title).description(panel.description).grid_pos(position)
    if panel.kind == "text":
        return made
    made.datasource(SOURCE).unit(panel.unit).no_value(panel.empty).thresholds(_limits(panel))
    if panel.top is not None:
        made.min(0).max(panel.top)
    if panel.states:
        made.mappings([_mapping(panel)])
    for query in panel.queries:
        if query.unit:
            made.override_by_name(query.legend, _own_unit(panel, query))
    for number, query in enumerate(panel.queries):
        made.with_target(_target(panel, query, chr(ord("A") + number)))
        if query.right or query.dashed:
            made.override_by_query(chr(ord("A") + number), _override(query))
    return made


def _target(panel: Panel, query: Query, ref: str) -> prometheus.Dataquery:
    made = prometheus.Dataquery().ref_id(ref).expr(query.expr).legend_format(query.legend or "__auto")
    if query.instant:
        rows = PromQueryFormat.TABLE if panel.kind == "table" else PromQueryFormat.TIME_SERIES
        made.instant().format(rows)
    else:
        made.range().format(PromQueryFormat.HEATMAP if query.heatmap else PromQueryFormat.TIME_SERIES)
    return made.exemplar(query.exemplar)


def _own_unit(panel: Panel, query: Query) -> list[model.DynamicConfigValue]:
    unit = [model.DynamicConfigValue("unit", query.unit)]
    if not panel.limits:
        return unit
    return [*unit, model.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": panel.first})]


def _override(query: Query) -> list[model.DynamicConfigValue]:
    if query.dashed:
        return [model.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 8]})]
    return [
        model.DynamicConfigValue("custom.axisPlacement", "right"),
        model.DynamicConfigValue("unit", query.right),
    ]


def _limits(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [model.Threshold(value=None, color=panel.first)]
    steps += [model.Threshold(value=value, color=color) for value, color in panel.limits]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _mapping(panel: Panel) -> model.ValueMap:
    return model.ValueMap(
        options={
            value: model.ValueMappingResult(text=text, color=color, index=number)
            for number, (value, text, color) in enumerate(panel.states)
        }
    )


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).values(False)


def _stat(panel: Panel) -> stat.Panel:
    named = any(query.legend for query in panel.queries)
    mode = kinds.BigValueTextMode.NAME if panel.unit == "none" else (
        kinds.BigValueTextMode.VALUE_AND_NAME if named else kinds.BigValueTextMode.VALUE
    )  # fmt: skip
    coloured = kinds.BigValueColorMode.VALUE
    graph = kinds.BigValueGraphMode.NONE if panel.unit == "none" else kinds.BigValueGraphMode.AREA
    return stat.Panel().reduce_options(_last()).text_mode(mode).color_mode(coloured).graph_mode(graph)


def _gauge(_: Panel) -> gauge.Panel:
    return gauge.Panel().reduce_options(_last())


def _bargauge(_: Panel) -> bargauge.Panel:
    horizontal = kinds.VizOrientation.HORIZONTAL
    return bargauge.Panel().reduce_options(_last()).orientation(horizontal)


def _series(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(kinds.LegendDisplayMode.LIST)
    legend = legend.placement(kinds.LegendPlacement.BOTTOM).show_legend(True)
    tooltip = common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI)
    made = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1).fill_opacity(0)
    made.show_points(kinds.VisibilityMode.NEVER)
    if panel.limits:
        style = common.GraphThresholdsStyleConfig().mode(kinds.GraphThresholdsStyleMode.DASHED)
        made.thresholds_style(style)
    return made


def _area(panel: Panel) -> timeseries.Panel:
    stacked = common.StackingConfig().mode(kinds.StackingMode.NORMAL).group("A")
    return _series(panel).stacking(stacked).fill_opacity(_FULL)


def _bars(panel: Panel) -> timeseries.Panel:
    return _area(panel).draw_style(kinds.GraphDrawStyle.BARS)


def _heatmap(_: Panel) -> heatmap.Panel:
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    return heatmap.Panel().calculate(False).color(color)


def _states(_: Panel) -> statetimeline.Panel:
    return statetimeline.Panel().show_value(kinds.VisibilityMode.NEVER).row_height(0.8).fill_opacity(_FULL)


def _table(panel: Panel) -> table.Panel:
    hidden = dict.fromkeys(("Time", "__name__", "job", "instance", "service_name"), True)
    values = _columns(panel)
    hidden |= {column: True for column, name in values.items() if not name}
    shown = {**dict(panel.columns), **{column: name for column, name in values.items() if name}}
    options: dict[str, Any] = {"excludeByName": hidden, "renameByName": shown}
    made = table.Panel()
    if panel.columns:
        options["indexByName"] = {column: number for number, column in enumerate(shown)}
    if panel.states:
        made.override_by_name(
            "state", [model.DynamicConfigValue("custom.cellOptions", {"type": "color-text"})]
        )
    if len(panel.queries) > 1:
        made.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    return made.with_transformation(model.DataTransformerConfig(id_val="organize", options=options))


def _columns(panel: Panel) -> dict[str, str]:
    """Returns the heading of each value column; a column with "" is hidden."""
    if len(panel.queries) == 1:
        return {"Value": panel.queries[0].legend or "value"}
    return {f"Value #{chr(ord('A') + n)}": query.legend for n, query in enumerate(panel.queries)}


def _text(panel: Panel) -> text.Panel:
    return text.Panel().mode(TextMode.MARKDOWN).content(panel.says)


_MAKERS: Final = {
    "stat": _stat,
    "gauge": _gauge,
    "bargauge": _bargauge,
    "lines": _series,
    "area": _area,
    "bars": _bars,
    "heatmap": _heatmap,
    "states": _states,
    "table": _table,
    "text": _text,
}
