"""Writes docs/reference/metrics.md and docs/reference/spans.md from the catalog."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from otel_train import catalog  # noqa: E402 - the checkout's own
from tools.generated import write_or_check  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from otel_train.catalog import Label, Metric, SpanType

REFERENCE = ROOT / "docs" / "reference"
GENERATED = "<!-- Generated from otel_train/catalog.py by `python tools/catalog_pages.py --write`. -->\n"

_METRICS_INTRO = f"""{GENERATED}
# Metrics

Counters and states whose attribute values are known beforehand are there with 0 from the start. A
gauge or histogram that was not measured is absent: missing is not zero.

Histograms travel as base-2 exponential ones over OTLP (native histograms in Prometheus). The classic
view has these edges, in seconds: {", ".join(f"{bound:g}" for bound in catalog.DURATION_BOUNDS)}.
"""

_LABELS_INTRO = f"""
## Attributes

A value beyond the bound becomes `{catalog.OTHER_VALUE}` and is counted in
`{catalog.TELEMETRY_ATTRIBUTE_OVERFLOWS.name}`.
"""

_SPANS_INTRO = f"""{GENERATED}
# Spans and events

There is no span for the whole run: traces are short and link to the run's start. Steps become spans
after the fact, and only those worth keeping.
"""


def render_metrics() -> str:
    """Returns the reference page of metrics and their attributes, as Markdown."""
    parts = [
        *(_METRICS_INTRO, *_metric_table(catalog.ALL)),
        *(_LABELS_INTRO, *_label_table(catalog.LABELS)),
    ]
    return "\n".join([*parts, ""])


def render_spans() -> str:
    """Returns the reference page of spans, events and their attributes, as Markdown."""
    rows = [["Attribute", "Type", "Meaning"]]
    rows += [[f"`{one.name}`", one.type, one.meaning] for one in catalog.ATTRIBUTES]
    parts = [
        *(_SPANS_INTRO, *_span_table(catalog.SPANS)),
        *("\n## Events\n", *_span_table(catalog.EVENTS)),
        *("\n## Attributes\n", *_table(rows)),
    ]
    return "\n".join([*parts, ""])


def _metric_table(metrics: Iterable[Metric]) -> list[str]:
    rows = [["Name", "In Prometheus", "Kind", "Unit", "Attributes", "Ranks", "Meaning"]]
    for one in metrics:
        labels = _codes(label.name for label in one.labels)
        names = [f"`{one.name}`", f"`{one.prometheus}`"]
        rows.append([*names, one.kind.value, f"`{one.unit}`", labels, one.emit.value, one.meaning])
    return _table(rows)


def _label_table(labels: Iterable[Label]) -> list[str]:
    rows = [["Attribute", "In Prometheus", "Bound", "Values", "Meaning"]]
    for one in labels:
        values = _codes(one.values) + (" and your own" if one.open and one.values else "")
        rows.append([f"`{one.name}`", f"`{one.prometheus}`", str(one.bound), values, one.meaning])
    return _table(rows)


def _span_table(spans: Iterable[SpanType]) -> list[str]:
    rows = [["Name", "Parent", "Attributes", "Meaning"]]
    for one in spans:
        attributes = _codes(attribute.name for attribute in one.attributes)
        rows.append([f"`{one.name}`", f"`{one.parent}`" if one.parent else "", attributes, one.meaning])
    return _table(rows)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


if __name__ == "__main__":
    pages = {REFERENCE / "metrics.md": render_metrics(), REFERENCE / "spans.md": render_spans()}
    sys.exit(write_or_check(pages, says=__doc__))
