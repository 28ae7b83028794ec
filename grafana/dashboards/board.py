"""Builds a Grafana dashboard from a ``Board``: variables, links, annotations, rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grafana_foundation_sdk.builders import dashboard, prometheus
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.common import DataSourceRef

from grafana.panels import NOWHERE, SOURCE, Panel, Row, build, place
from grafana.queries import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TAG: Final = "otel_train"

# Runs with a heartbeat in the displayed time range, the latest heartbeat first.
_RUNS: Final = (
    "query_result(topk(50, max by (train_run_id) (last_over_time(train_heartbeat_time_seconds[$__range]))))"
)
_RUN_ID: Final = '/train_run_id="([^"]+)"/'

_MINUTE: Final = "[1m]"
ANNOTATIONS: Final = (
    (
        "Alerts", "red", "{{alertname}}",
        'ALERTS{train_run_id="$run",alertstate="firing",alertname!="Watchdog"}',
    ),
    ("Captures", "purple", "profiler capture", f"max({run('train_profiler_active')}) > 0"),
    (
        "Checkpoints", "green", "checkpoint",
        f"max(changes({run('train_checkpoint_last_success_time_seconds')}{_MINUTE})) > 0",
    ),
    ("Restarts", "orange", "restart", f"max(changes({run('train_run_restarts_total')}{_MINUTE})) > 0"),
)  # fmt: skip
"""Annotations on the graphs of one run: (name, colour, text, PromQL)."""

SHOWN: Final = {"train_run_id": "run", "train_phase": "phase", "train_loader": "loader", "train_rank": "rank"}
"""Dashboard variable that filters by each series label."""

_VARIABLE: Final = re.compile(r"\$\{?([a-z_]\w*)")


class Board(NamedTuple):
    """A dashboard."""

    uid: str  # part of the URL: a change breaks links
    title: str
    description: str  # the question it answers
    rows: Sequence[Row]
    start: str = "now-1h"  # start of the time range when it is opened
    leads: str = NOWHERE  # file of the dashboard that panels link to, unless ``Panel.leads`` names one
    annotations: Sequence[tuple[str, str, str, str]] = ANNOTATIONS  # (name, colour, text, PromQL)

    @property
    def file(self) -> str:
        """Name of the JSON file, without extension."""
        return self.uid.removeprefix("otel-train-")


def make(board: Board, boards: Mapping[str, Board]) -> model.Dashboard:
    """Returns the Grafana model of a dashboard. ``boards``: all dashboards by file, as targets of links."""
    made = dashboard.Dashboard(board.title).uid(board.uid).description(board.description).tags([TAG])
    made.readonly().refresh("30s").time(board.start, "now").timezone("browser")
    made.tooltip(model.DashboardCursorSync.CROSSHAIR)
    link = dashboard.DashboardLink("Training dashboards").type(model.DashboardLinkType.DASHBOARDS)
    made.link(link.tags([TAG]).as_dropdown(True).include_vars(True).keep_time(True))
    for variable in variables(board):
        made.with_variable(_variable(variable))
    for name, color, text, expr in board.annotations:
        made.annotation(_annotation(name, color, text, expr))
    top = 0
    for row in board.rows:
        header = dashboard.Row(row.title).grid_pos(model.GridPos(h=1, w=24, x=0, y=top))
        made.with_row(header.repeat(row.repeat) if row.repeat else header)
        placed, top = place(row, top + 1)
        for panel, position in placed:
            built = build(panel, position)
            if (next_level := leads(board, panel)) != NOWHERE:
                _link(built, panel, variables(board), boards[next_level])
            made.with_panel(built)
    return _numbered(made.build())


def leads(board: Board, panel: Panel) -> str:
    """Returns the file of the dashboard that a panel leads to, or ``NOWHERE``."""
    return NOWHERE if panel.kind == "text" else panel.leads or board.leads


def variables(board: Board) -> list[str]:
    """Returns the variables that the dashboard's queries use, and those that the queries for their values use."""
    texts = [expr for *_, expr in board.annotations]
    for row in board.rows:
        texts += [row.title, f"${row.repeat}" if row.repeat else ""]
        for panel in row.panels:
            texts += [query.expr for query in panel.queries]
            texts += [panel.says] if panel.kind == "text" else []
    used = {name for text in texts for name in _VARIABLE.findall(text)}
    while True:
        more = {name for each in used & _QUERIES.keys() for name in _VARIABLE.findall(_QUERIES[each].query)}
        if more <= used:
            return ["datasource", *(name for name in _QUERIES if name in used)]
        used |= more


def _link(built: Any, panel: Panel, here: Sequence[str], there: Board) -> None:
    """Links a panel to ``there`` with the chosen variables, and each series or table row with its own labels."""
    known = [name for name in variables(there) if name in here]
    built.links([_to(there, known)])
    labels = {label for query in panel.queries for label in re.findall(r"{{(\w+)}}", query.legend)}
    of = {SHOWN[label]: label for label in labels & SHOWN.keys() if SHOWN[label] in variables(there)}
    if of:
        picked = {name: f"${{__field.labels.{label}}}" for name, label in sorted(of.items())}
        built.data_links([_to(there, [name for name in known if name not in of], picked)])
    for label, column in panel.columns:
        if label in SHOWN and SHOWN[label] in variables(there):
            link = _to(there, known, {SHOWN[label]: f"${{__data.fields.{column}}}"}).build()
            built.override_by_name(column, [model.DynamicConfigValue("links", [link])])


def _to(
    there: Board, known: Sequence[str], picked: Mapping[str, str] | None = None
) -> dashboard.DashboardLink:
    asks = [f"${{{name}:queryparam}}" for name in known]
    asks += [f"var-{name}={value}" for name, value in (picked or {}).items()]
    url = f"/d/{there.uid}?{'&'.join([*asks, '${__url_time_range}'])}"
    return dashboard.DashboardLink(there.title).type(model.DashboardLinkType.LINK).url(url)


def _numbered(made: model.Dashboard) -> model.Dashboard:
    """Numbers the panels in order: links to a panel contain its id, which must be the same in every build."""
    for number, panel in enumerate(made.panels or [], start=1):
        panel.id_val = number
    return made


class _Variable(NamedTuple):
    """A dashboard variable: label, query for its values, and whether several values may be chosen."""

    label: str
    query: str
    many: bool = True


_QUERIES: Final = {
    "team": _Variable("Team", "label_values(train_run_info, train_team)"),
    "run": _Variable("Run", _RUNS, many=False),
    "phase": _Variable("Phase", f"label_values({run('train_steps_total')}, train_phase)", many=False),
    "loader": _Variable("Loader", f"label_values({run('train_batches_total')}, train_loader)"),
    "rank": _Variable("Rank", f"label_values({run('train_heartbeat_time_seconds')}, train_rank)"),
}


def _variable(name: str) -> dashboard.DatasourceVariable | dashboard.QueryVariable:
    if name == "datasource":
        return dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    label, query, many = _QUERIES[name]
    picked = _pick(name, label, query, many=many)
    return picked.regex(_RUN_ID) if name == "run" else picked


def _pick(name: str, label: str, query: str, *, many: bool) -> dashboard.QueryVariable:
    made = dashboard.QueryVariable(name).label(label).query(query).datasource(SOURCE)
    made.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    if many:
        return made.multi(True).include_all(True).all_value(".*").current(_chosen("All", "$__all"))
    return made.current(_chosen("train", "train")) if name == "phase" else made


def _chosen(text: str, value: str) -> model.VariableOption:
    return model.VariableOption(selected=True, text=text, value=value)


def _annotation(name: str, color: str, text: str, expr: str) -> dashboard.AnnotationQuery:
    made = dashboard.AnnotationQuery().name(name).enable(True).icon_color(color).expr(expr)
    made.datasource(DataSourceRef(type_val="prometheus", uid="${datasource}")).title_format(text).step("30s")
    return made.target(prometheus.Dataquery().ref_id("Anno").expr(expr))
