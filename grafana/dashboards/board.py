"""A dashboard of the house: variables, links, annotations, rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from grafana_foundation_sdk.builders import dashboard, prometheus
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.common import DataSourceRef

from grafana.panels import SOURCE, Row, build, place
from grafana.queries import run

if TYPE_CHECKING:
    from collections.abc import Sequence

TAG: Final = "otel_train"

# Only runs that were heard of in the time that is shown, the one that was heard of last first.
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
"""(name, colour, text, PromQL) of what is marked on every graph."""


class Board(NamedTuple):
    """A dashboard.

    Attributes:
        uid: never changes; links lead there.
        title: what one sees.
        description: which question it answers.
        rows: top to bottom.
        start: how far back it looks at first.
    """

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    start: str = "now-1h"

    @property
    def file(self) -> str:
        """Name of its file, without ending."""
        return self.uid.removeprefix("otel-train-")


def make(board: Board) -> model.Dashboard:
    """As Grafana wants it."""
    made = dashboard.Dashboard(board.title).uid(board.uid).description(board.description).tags([TAG])
    made.readonly().refresh("30s").time(board.start, "now").timezone("browser")
    made.tooltip(model.DashboardCursorSync.CROSSHAIR)
    link = dashboard.DashboardLink("Training dashboards").type(model.DashboardLinkType.DASHBOARDS)
    made.link(link.tags([TAG]).as_dropdown(True).include_vars(True).keep_time(True))
    for variable in _variables():
        made.with_variable(variable)
    for name, color, text, expr in ANNOTATIONS:
        made.annotation(_annotation(name, color, text, expr))
    top = 0
    for row in board.rows:
        header = dashboard.Row(row.title).grid_pos(model.GridPos(h=1, w=24, x=0, y=top))
        made.with_row(header.repeat(row.repeat) if row.repeat else header)
        placed, top = place(row, top + 1)
        for panel, position in placed:
            made.with_panel(build(panel, position))
    return _numbered(made.build())


def _numbered(made: model.Dashboard) -> model.Dashboard:
    """The same panel has the same number in every build: links to it hold."""
    for number, panel in enumerate(made.panels or [], start=1):
        panel.id_val = number
    return made


def _variables() -> tuple[dashboard.DatasourceVariable | dashboard.QueryVariable, ...]:
    return (
        dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        dashboard.DatasourceVariable("traces").label("Traces").type("tempo"),
        _pick("run", "Run", _RUNS, many=False).regex(_RUN_ID),
        _pick("phase", "Phase", f"label_values({run('train_steps_total')}, train_phase)", many=False),
        _pick("loader", "Loader", f"label_values({run('train_batches_total')}, train_loader)"),
        _pick("rank", "Rank", f"label_values({run('train_heartbeat_time_seconds')}, train_rank)"),
        _pick("host", "Host", f"label_values({run('train_heartbeat_time_seconds')}, host_name)"),
    )


def _pick(name: str, label: str, query: str, *, many: bool = True) -> dashboard.QueryVariable:
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
