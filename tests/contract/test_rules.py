"""Rules ask for what is published, have the form that their names say, and alerts and runbooks belong together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from otel_train.catalog import Kind, by_name
from tests.support.promql import asked, grouped_by, impossible, published
from tools.alerts_pages import ALERT_FILES, RUNBOOKS, condition, on_one_line, rules

ROOT = Path(__file__).parents[2]
NATIVE, CLASSIC = rules("histograms-native"), rules("histograms-classic")
PLAIN = rules("recording")
ALERTS = rules(*ALERT_FILES)
RECORDED = {*NATIVE, *PLAIN}
EXPRESSIONS = {
    **{f"native {name}": rule["expr"] for name, rule in NATIVE.items()},
    **{f"classic {name}": rule["expr"] for name, rule in CLASSIC.items()},
    **{name: rule["expr"] for name, rule in PLAIN.items()},
    **{name: condition(rule) for name, rule in ALERTS.items()},
}
HEADINGS = ["Meaning", "Likely causes", "What to run", "When to ignore it"]
INFO = "run:train_info:last1h"
WHOSE = "train_run_name, train_team, train_owner, train_job, train_cluster, train_namespace"
HISTOGRAMS = {metric.prometheus for metric in by_name.values() if metric.kind is Kind.HISTOGRAM}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_rule_asks_for_what_is_published(name: str) -> None:
    """A misspelt name is no error for Prometheus: the alert just never fires."""
    for selector in asked(EXPRESSIONS[name]):
        if selector.metric in RECORDED:
            continue
        labels = published(selector.metric)
        assert labels is not None, f"{selector.metric} is in no catalogue"
        assert set(selector.labels) <= labels, f"{selector.metric} has no {set(selector.labels) - labels}"
        assert impossible(selector) == {}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_rule_groups_by_labels_that_exist(name: str) -> None:
    """Grouping by a label that no series has merges different series, silently."""
    known: set[str] = set()
    for selector in asked(EXPRESSIONS[name]):
        known |= carried(selector.metric)

    assert grouped_by(EXPRESSIONS[name]) <= known


def carried(metric: str) -> set[str]:
    """Labels that a metric, recorded or published, can have."""
    if metric not in RECORDED:
        return published(metric) or set()
    expr = EXPRESSIONS.get(metric) or EXPRESSIONS[f"native {metric}"]
    return grouped_by(expr).union(
        *(carried(selector.metric) for selector in asked(expr) if selector.metric in RECORDED)
    )


def test_both_histogram_forms_ask_the_same() -> None:
    """Dashboards and alerts need not know how histograms are kept: names, windows and labels are equal."""
    assert {name: on_one_line(rule["expr"]) for name, rule in CLASSIC.items()} == {
        name: in_classic_form(on_one_line(rule["expr"])) for name, rule in NATIVE.items()
    }
    assert list(CLASSIC) == list(NATIVE)


def in_classic_form(expr: str) -> str:
    """An expression over native histograms, rewritten to read the series of a classic one."""
    expr = re.sub(r"histogram_(sum|count)\(rate\((\w+)(.*?\])\)\)", r"rate(\2_\1\3)", expr)
    quantile = re.fullmatch(r"(histogram_quantile\([\d.]+, sum by \(.*?)\) \(rate\((\w+)(.*)", expr)
    return f"{quantile[1]}, le) (rate({quantile[2]}_bucket{quantile[3]}" if quantile else expr


@pytest.mark.parametrize("name", NATIVE)
def test_every_histogram_rule_reads_a_histogram_of_its_form(name: str) -> None:
    """Both files may be loaded: the rules of the form that is missing must find nothing to record."""
    parts = {f"{metric}_{part}" for metric in HISTOGRAMS for part in ("sum", "count", "bucket")}

    assert {selector.metric for selector in asked(NATIVE[name]["expr"])} & HISTOGRAMS
    assert {selector.metric for selector in asked(CLASSIC[name]["expr"])} & parts


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_on_a_run_has_the_labels_of_the_run(name: str) -> None:
    """Alertmanager routes by them; and what is on no run has none."""
    once = on_one_line(condition(ALERTS[name]))
    labelled = f"({once}) * on (train_run_id) group_left ({WHOSE}) {INFO}"

    assert on_one_line(ALERTS[name]["expr"]) == (labelled if about_run(name) else once)
    assert {"train_run_id", *WHOSE.split(", ")} == grouped_by(PLAIN[INFO]["expr"])


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_on_a_run_tells_the_newest_capture(name: str) -> None:
    """Its own capture first, where it asks for one."""
    text = ALERTS[name]["annotations"].get("capture", "")

    assert ("{train_run_id=%q}[1h]" in text) == about_run(name)
    own = re.findall(r'2 \* .*?train_profiler_alert="(\w+)"', text)
    assert own == ([name] if ALERTS[name]["labels"].get("capture") == "true" else [])


def about_run(name: str) -> bool:
    return "$labels.train_run_id" in ALERTS[name]["annotations"]["summary"]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_tells_what_is_wrong_with_which_run(name: str) -> None:
    """Woken at night one reads the summary, and nothing else."""
    summary = ALERTS[name]["annotations"]["summary"]

    assert summary.endswith(".")
    assert ALERTS[name]["annotations"]["description"].endswith(".")
    assert ALERTS[name]["labels"]["severity"] in {"critical", "warning", "none"}
    if name.startswith("Train"):
        assert "{{ $labels.train_run_id }}" in summary
    if name.startswith("OtelCollector"):  # there is one on every node
        assert re.search(r"{{ \$labels\.(instance|train_collector) }}", summary)
    shown = set(re.findall(r"\$labels\.(\w+)", summary))
    assert shown <= grouped_by(EXPRESSIONS[name]) | {"train_run_id", "host_name", "train_rank"}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    """The link in the page must lead somewhere, and no page may outlive its alert."""
    pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}

    assert pages == set(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"].endswith(f"/docs/runbooks/{name}.md")


@pytest.mark.parametrize("name", ALERTS)
def test_a_runbook_answers_the_four_questions(name: str) -> None:
    """What is it, what causes it, what do I do, may I go back to sleep."""
    text = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")

    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    for part in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        assert part.strip()


@pytest.mark.parametrize("name", ALERTS)
def test_a_runbook_asks_for_the_rate_of_one_metric(name: str) -> None:
    """Of several, rate() drops the names: series that differ in nothing else collide, and the query fails."""
    text = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")

    assert not re.search(r"\b(rate|increase|deriv|delta)\(\{", text)
