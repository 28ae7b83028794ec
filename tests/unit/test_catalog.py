"""The catalogue keeps its own rules, and is printed and written by name."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from otel_train import catalog
from otel_train.catalog import Kind, Metric
from tests.support.command_line import Cli
from tools import generated

LABELS = {label.name: label for label in catalog.LABELS}

PACKAGE = Path(catalog.__file__).parent
SOURCES = "".join(
    path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "catalog.py"
)


@pytest.mark.parametrize("listed", [catalog.ALL, (*catalog.SPANS, *catalog.EVENTS), catalog.ATTRIBUTES])
def test_every_name_is_listed_once(
    listed: tuple[catalog.Metric | catalog.SpanType | catalog.Attribute, ...],
) -> None:
    """Two rows of one name on a reference page contradict each other."""
    names = [one.name for one in listed]

    assert names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("attribute", catalog.ATTRIBUTES, ids=lambda attribute: attribute.name)
def test_an_attribute_of_the_reference_page_is_written_by_a_module(attribute: catalog.Attribute) -> None:
    """Who searches traces for one that no span carries finds nothing, and no reason."""
    constants = [name for name, value in vars(catalog).items() if value is attribute]

    assert f'"{attribute.name}"' in SOURCES or any(re.search(rf"\b{name}\b", SOURCES) for name in constants)


@pytest.mark.parametrize(
    "label",
    catalog.LABELS,
    ids=lambda label: label.name,
)
def test_a_value_of_the_reference_page_is_written_by_a_module(label: catalog.Label) -> None:
    """A series that nothing counts says 0 of what is never looked at: activations that were not finite, for instance."""
    assert [value for value in label.values if f'"{value}"' not in SOURCES] == []


def test_no_two_metrics_share_a_prometheus_name() -> None:
    """Two families of one name make the whole scrape invalid."""
    names = [metric.prometheus for metric in catalog.ALL]

    assert len(set(names)) == len(names)


IN_NO_NAME = {"seconds", "ms", "ns", "bytes", "mb", "gb", "percent", "total", "per_second"}
UNITS = r"s|By|1|W|Cel|\{sample\}/s|\{flop\}/s|\{[a-z_]+\}"

RULES: dict[str, Callable[[Metric], object]] = {
    # ``otel.*`` is reserved by the specification; foreign roots would clash with other libraries.
    "a name is lower case and dotted under our roots":
        lambda m: re.fullmatch(r"(train|process|hw)(\.[a-z][a-z0-9]*(_[a-z0-9]+)*)+", m.name),
    # An unknown unit would be appended to the Prometheus name by some exporters and not by others.
    "a unit is one that translates as we say": lambda m: re.fullmatch(UNITS, m.unit),
    # Prometheus appends it: ``..._ms_milliseconds`` exists in the wild.
    "the unit is not in the name": lambda m: not IN_NO_NAME & set(re.split(r"[._]", m.name)),
    # Unit 1 gauges get ``_ratio`` on the push path only, so the name must have it on both.
    "a ratio ends in ratio and nothing else does":
        lambda m: m.name.endswith(".ratio") == (m.kind is Kind.GAUGE and m.unit == "1"),
    # A histogram without bounds is invisible in the classic view.
    "only histograms have bounds": lambda m: bool(m.bounds) == (m.kind is Kind.HISTOGRAM),
    "bounds rise": lambda m: list(m.bounds) == sorted(set(m.bounds)),
    # The meaning becomes the description on the wire and in the docs.
    "a meaning is a sentence": lambda m: re.fullmatch(r"([A-Z0-9]|k).*\.", m.meaning),
    # Prometheus appends ``_total``; a second one would stay.
    "a counter is plural or a sum of time or bytes":
        lambda m: m.kind is not Kind.COUNTER or re.search(r"(s|[.]time|[.]io)$", m.name),
}  # fmt: skip


@pytest.mark.parametrize("metric", catalog.ALL, ids=lambda metric: metric.name)
def test_a_metric_keeps_the_rules_of_names_units_bounds_and_meanings(metric: Metric) -> None:
    """What breaks one is renamed by some exporters, or hidden by some stores."""
    assert [rule for rule, holds in RULES.items() if not holds(metric)] == []


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_a_label_has_a_bound_and_its_values_fit(label: catalog.Label) -> None:
    """Unbounded attributes are how telemetry takes down the system that stores it."""
    assert label.bound > 0
    assert len(set(label.values)) == len(label.values) <= label.bound
    assert label.open or label.values, "a closed set without values allows nothing"


def test_a_label_name_has_one_meaning() -> None:
    """Two labels of one name would join series that have nothing to do with each other."""
    assert len(LABELS) == len(catalog.LABELS)
    assert len({label.prometheus for label in catalog.LABELS}) == len(catalog.LABELS)


def test_a_span_points_to_a_parent_that_exists() -> None:
    """A child under an unknown name is an orphan in every trace view."""
    names = {span.name for span in catalog.SPANS}

    assert {span.parent for span in catalog.SPANS} <= {"", *names}


def test_built_in_stages_have_a_span_each_and_other_has_none() -> None:
    """``other`` is time in no stage: it is the gap between the spans."""
    assert set(catalog.STAGE_SPANS) == set(catalog.STAGES) - {"other"}


def test_a_stale_page_is_named_and_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check must be able to fail, and say which file and what to do."""
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    pages = {tmp_path / "metrics.md": "one", tmp_path / "spans.md": "two"}

    def done(option: str) -> int:
        monkeypatch.setattr(sys, "argv", ["a_script.py", option])
        return generated.write_or_check(pages, says="Writes pages.")

    assert done("--check") == 1
    capsys.readouterr()
    assert done("--write") == 0
    assert done("--check") == 0
    (tmp_path / "spans.md").write_text("edited manually")

    assert done("--check") == 1

    said = capsys.readouterr().err
    assert "spans.md" in said
    assert "--write" in said
    assert "metrics.md" not in said


def test_the_json_list_has_every_metric(cli: Cli) -> None:
    """Programs that build dashboards read it."""
    facts = json.loads(cli("metrics", "--json").printed)

    assert [fact["name"] for fact in facts["metrics"]] == [metric.name for metric in catalog.ALL]


def test_the_prometheus_list_has_the_translated_names(cli: Cli) -> None:
    """People paste these into queries."""
    names = cli("metrics", "--prometheus").printed.split()

    assert "train_stage_duration_seconds" in names
    assert len(names) == len(catalog.ALL)


def test_the_plain_list_has_metrics_spans_and_attributes(cli: Cli) -> None:
    """People grep it for what they can query."""
    words = cli("metrics").printed.split()

    assert {"train.stage.duration", "train.rank_step", "train.keep.reason", "error.type"} <= set(words)


def test_bounds_of_step_time_are_near_enough_for_a_quantile_to_tell() -> None:
    """Where two bounds are 2.5 apart, a step that takes twice as long may look like one that takes as long."""
    apart = [above / below for below, above in pairwise(catalog.STEP_BOUNDS)]

    assert max(apart) <= 1.19
    assert (catalog.STEP_BOUNDS[0], catalog.STEP_BOUNDS[-1]) == (0.000518, 61.1)
    assert catalog.STEP_DURATION.bounds == catalog.STEP_BOUNDS
