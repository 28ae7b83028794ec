"""``otel-train metrics``: lists metrics, spans, events and attributes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from otel_train import catalog
from otel_train.cli import print_json

if TYPE_CHECKING:
    from otel_train.catalog import SpanType

DESCRIPTION = (
    "List the names that this version exports: metrics with kind and unit, spans, events and attributes."
)
EPILOG = """\
examples:
  otel-train metrics | grep loader
  otel-train metrics --prometheus        names for PromQL
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print everything as JSON")
    how.add_argument("--prometheus", action="store_true", help="only metrics, under their Prometheus names")


def run(args: argparse.Namespace) -> int:
    """Prints all names with kind and unit, the metrics under their Prometheus names, or the whole catalogue as JSON."""
    if args.json:
        print_json(_facts(), indent=2)
    elif args.prometheus:
        print("\n".join(metric.prometheus for metric in catalog.ALL))
    else:
        print("\n".join(_names()))
    return 0


def _names() -> list[str]:
    width = max(len(metric.name) for metric in catalog.ALL)
    attributes = {label.name for label in catalog.LABELS}
    attributes.update(attribute.name for attribute in catalog.ATTRIBUTES)
    return [
        "metrics",
        *(f"  {one.name:<{width}}  {one.kind.value:<13}  {one.unit}" for one in catalog.ALL),
        "spans",
        *(f"  {span.name}" for span in catalog.SPANS),
        "events",
        *(f"  {event.name}" for event in catalog.EVENTS),
        "attributes",
        *(f"  {name}" for name in sorted(attributes)),
    ]


def _facts() -> dict[str, list[dict[str, object]]]:
    return {
        "metrics": [
            {
                "name": metric.name,
                "prometheus": metric.prometheus,
                "kind": metric.kind.value,
                "unit": metric.unit,
                "meaning": metric.meaning,
                "labels": [label.name for label in metric.labels],
                "bounds": list(metric.bounds),
                "emit": metric.emit.value,
            }
            for metric in catalog.ALL
        ],
        "spans": _named(catalog.SPANS),
        "events": _named(catalog.EVENTS),
        "attributes": [attribute._asdict() for attribute in catalog.ATTRIBUTES],
        "labels": [label._asdict() for label in catalog.LABELS],
    }


def _named(types: Iterable[SpanType]) -> list[dict[str, object]]:
    return [{"name": one.name, "meaning": one.meaning} for one in types]
