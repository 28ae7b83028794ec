"""Dashboards ask for what is published, say what they show, and are fresh."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="dashboards are built with the dev extra")

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.build import BOARDS, JSON, NOT_SHOWN
from grafana.dashboards.board import Board, leads, variables
from grafana.dashboards.fleet import ACTIVE_STATES
from grafana.panels import NOWHERE
from grafana.queries import LOST
from otel_train.catalog import ALL, Kind
from tests.support.dashboard_queries import filled_in
from tests.support.promql import asked, impossible, published
from tools.alerts_pages import ALERT_FILES, rules

ROOT = Path(__file__).parents[2]
RECORDED = {name: rule["expr"] for name, rule in rules("histograms-native", "recording").items()}
RUNBOOKS = {"", *rules(*ALERT_FILES)}
EVERY = [(board, panel) for board in BOARDS for row in board.rows for panel in row.panels]
PANELS = {f"{board.file}: {panel.title}": panel for board, panel in EVERY}
EXPRESSIONS = {
    f"{name} #{number}": query.expr
    for name, panel in PANELS.items()
    for number, query in enumerate(panel.queries)
}
EXPRESSIONS |= {f"annotation {name}": expr for board in BOARDS for name, _, _, expr in board.annotations}
[OVERVIEW] = [board for board in BOARDS if board.file == "overview"]
FINEST = {"hardware", "pipeline", "captures"}
"""Dashboards that show all there is."""


def document(board: Board) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((JSON / f"{board.file}.json").read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_panel_asks_for_what_is_published(name: str) -> None:
    """A misspelt name is an empty panel, and an empty panel looks like good news."""
    for selector in asked(filled_in(EXPRESSIONS[name], "r")):
        if selector.metric not in RECORDED and selector.metric:
            labels = published(selector.metric)
            assert labels is not None, f"{selector.metric} is in no catalogue"
            assert set(selector.labels) <= labels
            assert impossible(selector) == {}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_what_replaces_a_missing_value_is_the_same_series(name: str) -> None:
    """A selector keeps the name of its metric, an operation drops it: a stat would show both, the older with its last value."""
    assert not re.match(r"[\w:]+\{[^{}]*\} or 0 ", EXPRESSIONS[name])


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_says_what_it_shows_and_when_to_worry(name: str) -> None:
    """Who reads it at night did not build it."""
    panel = PANELS[name]

    assert sum(name == f"{board.file}: {each.title}" for board, each in EVERY) == 1
    assert panel.unit
    assert panel.says.endswith((".", ")"))
    assert panel.bad
    assert not panel.bad.endswith(".")
    assert "Bad when" in panel.description
    assert panel.runbook in RUNBOOKS


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.file)
def test_a_dashboard_is_what_grafana_reads(board: Board) -> None:
    """The types are Grafana's own: a field it does not know would get lost on the way through them."""
    made = document(board)
    again = json.loads(json.dumps(Dashboard.from_json(made), cls=JSONEncoder))

    assert again == made
    assert made["uid"] == board.uid
    if board.file != "fleet":
        names = {annotation["name"] for annotation in made["annotations"]["list"]}
        assert names >= {"Alerts", "Captures", "Checkpoints", "Restarts"}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.file)
def test_a_dashboard_has_the_variables_that_it_asks_by_and_no_other(board: Board) -> None:
    """One that changes nothing is tried again and again; one that is missing asks for its own name."""
    made = document(board)
    offered = made["templating"].pop("list")
    links = [*made.pop("links"), *(panel.pop("links", None) for panel in made["panels"])]
    asks = json.dumps(made) + json.dumps([variable.get("query") for variable in offered])
    asks = re.sub(r'"url": "[^"]*"', "", asks)
    used = {name for name in re.findall(r"\$\{?([a-z]\w*)", asks) if not name.startswith("__")}
    used |= {panel["repeat"] for panel in made["panels"] if panel.get("repeat")}

    assert links
    assert used == {variable["name"] for variable in offered}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.file)
def test_a_panel_leads_to_the_next_level_with_what_was_picked(board: Board) -> None:
    """Who has seen that something is slow asks what, and does not want to pick the run again."""
    by_uid = {each.uid: each for each in BOARDS}
    panels = [panel for panel in document(board)["panels"] if panel["type"] != "row"]
    wanted = {panel.title: leads(board, panel) for row in board.rows for panel in row.panels}
    for panel in panels:
        urls = re.findall(r'"url": "([^"]*)"', json.dumps(panel))
        assert bool(urls) == (wanted[panel["title"]] != NOWHERE), panel["title"]
        for url in urls:
            uid, _, asks = url.removeprefix("/d/").partition("?")
            there = by_uid[uid]
            assert there.file == wanted[panel["title"]] != board.file
            references = re.findall(r"\$\{(\w+):queryparam\}|var-(\w+)=", asks)
            names = [first or second for first, second in references]
            assert len(set(names)) == len(names)
            assert set(names) <= set(variables(there))
            assert set(names) >= set(variables(there)) & set(variables(board))
            assert asks.endswith("&${__url_time_range}")
    if board.file not in FINEST:
        assert NOWHERE not in wanted.values() or len(set(wanted.values())) > 1
    else:
        assert set(wanted.values()) == {NOWHERE}


def test_the_fleet_and_the_rules_agree_on_which_runs_are_active() -> None:
    """The list of states is written in both."""
    assert f'{{train_run_state=~"{ACTIVE_STATES}"}}' in RECORDED["run:train_active:bool"]


def test_every_run_of_the_fleet_leads_to_its_overview() -> None:
    """From the table by its row, from a graph by its line."""
    [fleet] = [board for board in BOARDS if board.file == "fleet"]
    panels = {panel["title"]: panel for panel in document(fleet)["panels"]}
    rows = [
        override
        for override in panels["Runs"]["fieldConfig"]["overrides"]
        if any(changed["id"] == "links" for changed in override["properties"])
    ]

    assert [override["matcher"]["options"] for override in rows] == ["run"]
    assert "var-run=${__data.fields.run}" in json.dumps(rows)
    assert "var-run=${__field.labels.train_run_id}" in json.dumps(panels["Goodput"]["fieldConfig"])


def test_what_is_published_or_recorded_is_shown_or_said_not_to_be() -> None:
    """A metric that is on no dashboard costs as much as the others."""
    shown: set[str] = set()
    ask = {selector.metric for expr in EXPRESSIONS.values() for selector in asked(filled_in(expr, "r"))}
    while ask:
        shown |= ask
        ask = {read.metric for name in ask & RECORDED.keys() for read in asked(RECORDED[name])} - shown
    missing = {name for name in RECORDED if name not in shown}
    for metric in ALL:
        parts = ("", "_sum", "_count", "_bucket") if metric.kind is Kind.HISTOGRAM else ("",)
        if not shown & {f"{metric.prometheus}{part}" for part in parts}:
            missing.add(metric.prometheus)

    assert missing == NOT_SHOWN.keys()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.file)
def test_a_dashboard_is_laid_out_without_overlap(board: Board) -> None:
    """Grafana moves what overlaps, and the rest with it."""
    taken: dict[tuple[int, int], str] = {}
    panels = document(board)["panels"]
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert sum(panel["type"] != "row" for panel in panels) <= 24


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_with_a_threshold_of_the_run_has_no_fixed_limits(name: str) -> None:
    """The threshold depends on settings and steps: a fixed limit would colour a healthy run red, or the threshold itself."""
    panel = PANELS[name]

    if any(re.search("threshold|heartbeat", query.expr) for query in panel.queries) and panel.unit == "s":
        assert not panel.limits


def test_progress_is_coloured_by_its_share_of_the_threshold_alone() -> None:
    """A stalled run is red; an age of five seconds is not, although it is over the limit of the share."""
    [made] = [panel for panel in document(OVERVIEW)["panels"] if panel["title"] == "Last progress"]
    [age] = made["fieldConfig"]["overrides"]
    red = [step for step in made["fieldConfig"]["defaults"]["thresholds"]["steps"] if step["color"] == "red"]

    assert [target["legendFormat"] for target in made["targets"]] == ["last", "of threshold"]
    assert "train_stall_threshold_seconds" in made["targets"][1]["expr"]
    assert red == [{"color": "red", "value": 1}]
    assert age["matcher"] == {"id": "byName", "options": "last"}
    assert {"id": "color", "value": {"fixedColor": "blue", "mode": "fixed"}} in age["properties"]


def test_lost_records_are_those_of_the_alert_on_lost_records() -> None:
    """Records in the spool are sent later: a panel that counts them as lost contradicts the alert."""
    alert = rules("alerts")["TrainTelemetryDropping"]["expr"]
    [trusted] = [
        query for query in PANELS["overview: Can these metrics be trusted?"].queries if "drops" in query.expr
    ]

    assert LOST in alert
    assert LOST in trusted.expr


def test_an_exemplar_leads_to_its_trace() -> None:
    """A slow point that leads nowhere is a picture, not a tool."""
    provisioned = (ROOT / "grafana" / "provisioning" / "datasources" / "datasources.yaml").read_text()
    exemplars = [query for panel in PANELS.values() for query in panel.queries if query.exemplar]

    assert exemplars
    assert all(re.search(r"_bucket\{", query.expr) for query in exemplars)
    assert "exemplarTraceIdDestinations" in provisioned
    assert "trace_id" in provisioned
