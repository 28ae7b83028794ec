"""The preview shows what the JSON says, at the place it says."""

from __future__ import annotations

import pytest

from grafana.preview.ask import Answer, filled_in, name_of
from grafana.preview.madeup import RUN, page
from grafana.preview.render import laid_out
from grafana.preview.units import shown, ticks
from otel_train.catalog import ALL


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (90, "s", "1.5 min"),
        (3 * 2.0**30, "bytes", "3 GiB"),
        (0.905, "percentunit", "90.5 %"),
        (1755, "suffix: MHz", "1755 MHz"),
        (0, "short", "0"),
        (2_500_000, "short", "2.5 M"),
        (float("nan"), "s", "NaN"),
    ],
)
def test_values_are_shown_with_their_unit(value: float, unit: str, text: str) -> None:
    """12.3 ms is read at once, 0.0123 is not."""
    assert shown(value, unit) == text


def test_ticks_are_round_and_inside() -> None:
    """An axis is read by its labels."""
    assert ticks(0, 1, "percentunit") == [0, 0.25, 0.5, 0.75, 1.0]
    assert all(tick % 2.0**30 == 0 for tick in ticks(0, 24 * 2.0**30, "bytes"))


def test_variables_are_filled_in_as_grafana_does() -> None:
    """What was not chosen is everything; what is no variable stays."""
    expr = 'a{train_run_id="$run",train_loader=~"$loader"}[$__rate_interval]'

    assert filled_in(expr, "r") == 'a{train_run_id="r",train_loader=~".*"}[1m]'
    assert filled_in(expr, "r", loader="code") == 'a{train_run_id="r",train_loader=~"code"}[1m]'
    assert filled_in('label_replace(a, "b", "$1", "b", "x")', "r") == 'label_replace(a, "b", "$1", "b", "x")'


def test_a_legend_is_filled_in() -> None:
    """Two lines of the same name cannot be told apart."""
    answer = Answer({"legendFormat": "rank {{train_rank}}"}, [], "r")

    assert name_of(answer, {"metric": {"train_rank": "3"}}) == "rank 3"
    assert name_of(answer._replace(target={}), {"metric": {"a": "1", "__name__": "x"}}) == "a=1"


def test_a_repeated_row_comes_once_for_each_loader() -> None:
    """And what is below it moves down."""
    panels = [
        {"type": "row", "repeat": "loader", "gridPos": {"y": 0, "h": 1}},
        {"type": "stat", "gridPos": {"y": 1, "h": 4}},
        {"type": "row", "gridPos": {"y": 5, "h": 1}},
    ]

    assert [(panel["type"], moved, chosen) for panel, moved, chosen in laid_out(panels)] == [
        ("row", 0, {"loader": "code"}),
        ("stat", 0, {"loader": "code"}),
        ("row", 5, {"loader": "prose"}),
        ("stat", 5, {"loader": "prose"}),
        ("row", 5, {}),
    ]


def test_made_up_figures_have_the_names_of_the_catalogue() -> None:
    """They stand in for a real run, so the names must be those a real run has."""
    text = page(100.0, 1e9)

    for metric in ALL:
        assert f'\n{metric.prometheus}{{train_run_id="{RUN}"' in f"\n{text}" or (
            f"\n{metric.prometheus}_bucket{{" in f"\n{text}"
        ), metric.name
