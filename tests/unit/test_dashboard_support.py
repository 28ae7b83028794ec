"""What the dashboard tests ask and serve is what Grafana asks and a run publishes."""

from __future__ import annotations

from otel_train.catalog import ALL
from tests.support.dashboard_queries import filled_in
from tests.support.synthetic_metrics import RUN, page


def test_variables_are_filled_in_as_grafana_does() -> None:
    """What was not chosen is everything; what is no variable stays."""
    expr = 'a{train_run_id="$run",train_loader=~"$loader"}[$__rate_interval]'

    assert filled_in(expr, "r") == 'a{train_run_id="r",train_loader=~".*"}[1m]'
    assert filled_in(expr, "r", loader="code") == 'a{train_run_id="r",train_loader=~"code"}[1m]'
    assert filled_in('label_replace(a, "b", "$1", "b", "x")', "r") == 'label_replace(a, "b", "$1", "b", "x")'


def test_synthetic_metrics_have_the_names_of_the_catalogue() -> None:
    """They stand in for a real run, so the names must be those a real run has."""
    text = page(100.0, 1e9)

    for metric in ALL:
        assert f'\n{metric.prometheus}{{train_run_id="{RUN}"' in f"\n{text}" or (
            f"\n{metric.prometheus}_bucket{{" in f"\n{text}"
        ), metric.name
