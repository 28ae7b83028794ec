"""Rules ask for what is published, alerts and runbooks belong together, generated files are fresh."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.prometheus import build
from deploy.prometheus.recording import CLASSIC, NATIVE, Form, histogram_groups, plain_groups
from otel_train.catalog import Kind, by_name
from tests.support.promql import asked, grouped_by, impossible, published

ROOT = Path(__file__).parents[2]
RECORDED = {rule.name for group in (*histogram_groups(NATIVE), *plain_groups()) for rule in group.rules}
EXPRESSIONS = {
    **{
        f"{form.name} {rule.name}": rule.expr
        for form in (NATIVE, CLASSIC)
        for group in histogram_groups(form)
        for rule in group.rules
    },
    **{rule.name: rule.expr for group in plain_groups() for rule in group.rules},
    **{alert.name: alert.expr for alert in build.ALERTS},
}
ALERTS = {alert.name: alert for alert in build.ALERTS}
HEADINGS = ["Meaning", "Likely causes", "What to run", "When to ignore it"]


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
    """Grouping by a label nobody has throws different things together, silently."""
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


def test_both_histogram_forms_record_the_same_names() -> None:
    """Dashboards and alerts need not know how histograms are kept."""
    native, classic = (
        [rule.name for group in histogram_groups(form) for rule in group.rules] for form in (NATIVE, CLASSIC)
    )

    assert native == classic
    assert len(set(native)) == len(native)


@pytest.mark.parametrize("form", [NATIVE, CLASSIC], ids=lambda form: form.name)
def test_every_histogram_rule_reads_a_histogram_of_its_form(form: Form) -> None:
    """Both files may be loaded: the rules of the form that is missing must find nothing to record."""
    histograms = {metric.prometheus for metric in by_name.values() if metric.kind is Kind.HISTOGRAM}
    parts = {f"{name}_{part}" for name in histograms for part in ("sum", "count", "bucket")}
    for group in histogram_groups(form):
        for rule in group.rules:
            read = {selector.metric for selector in asked(rule.expr)}
            assert read & (histograms if form is NATIVE else parts), rule.name


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_tells_what_is_wrong_with_which_run(name: str) -> None:
    """Woken at night one reads the summary, and nothing else."""
    alert = ALERTS[name]

    assert alert.summary.endswith(".")
    assert alert.description.endswith(".")
    assert alert.severity in {"critical", "warning", "none"}
    if name.startswith("Train"):
        assert "{{ $labels.train_run_id }}" in alert.summary
    shown = set(re.findall(r"\$labels\.(\w+)", alert.summary))
    assert shown <= grouped_by(alert.expr) | {"train_run_id", "host_name", "train_rank"}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    """The link in the page must lead somewhere, and no page may outlive its alert."""
    pages = {path.stem for path in build.RUNBOOKS.glob("*.md")} - {"README"}

    assert pages == set(ALERTS)
    for rule in build.alerting(build.EVERY_GROUP)["groups"]:
        for alert in rule["rules"]:
            assert alert["annotations"]["runbook_url"].endswith(f"/docs/runbooks/{alert['alert']}.md")


@pytest.mark.parametrize("name", ALERTS)
def test_a_runbook_answers_the_four_questions(name: str) -> None:
    """What is it, what causes it, what do I do, may I go back to sleep."""
    text = (build.RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")

    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    for part in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        assert part.strip()


def test_the_written_rules_are_fresh() -> None:
    """What is loaded must be what was reviewed and tested."""
    checked = subprocess.run(
        [sys.executable, "-m", "deploy.prometheus.build", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert checked.returncode == 0, checked.stderr
