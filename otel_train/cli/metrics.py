"""``otel-train metrics``: the names we publish, for readers."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from otel_train import catalog

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from otel_train.catalog import Label, Metric, SpanType

REFERENCE = Path("docs") / "reference"
"""Where the generated pages lie, seen from the root of the repository."""

DESCRIPTION = """\
Print the names this version publishes: metrics with kind and unit, spans, events, and the
attributes they carry.
"""
EPILOG = ""

GENERATED = "<!-- Generated from otel_train/catalog.py by `python -m otel_train.cli.metrics --write`. -->\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the names, or write or check the reference pages; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m otel_train.cli.metrics", description=__doc__)
    add_arguments(parser)
    pages = parser.add_mutually_exclusive_group()
    pages.add_argument("--write", action="store_true", help="write the reference pages")
    pages.add_argument("--check", action="store_true", help="exit with 1 if the pages are stale")
    parser.add_argument("--folder", type=Path, default=REFERENCE, help="of the pages (%(default)s)")
    args = parser.parse_args(argv)
    if args.write:
        write(args.folder)
    elif args.check:
        stale = stale_pages(args.folder)
        for path in stale:
            print(f"{path} is stale: run python -m otel_train.cli.metrics --write")
        return 1 if stale else 0
    else:
        return run(args)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="everything, reserved names too, for programs")
    how.add_argument("--prometheus", action="store_true", help="the metrics alone, as Prometheus names them")


def run(args: argparse.Namespace) -> int:
    """Print the names as ``args`` ask for; the exit code."""
    print_names(as_json=args.json, prometheus=args.prometheus)
    return 0


def write(folder: Path) -> None:
    """Write the reference pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in _pages().items():
        (folder / name).write_text(text, encoding="utf-8")


def stale_pages(folder: Path) -> list[Path]:
    """The pages in ``folder`` that are missing or say something else than the catalogue."""
    return [folder / name for name, text in _pages().items() if _read(folder / name) != text]


def print_names(*, as_json: bool = False, prometheus: bool = False) -> None:
    """Print what is published by name; or the metrics' names in Prometheus; or everything as JSON."""
    if as_json:
        print(json.dumps(_facts(), indent=2))
    elif prometheus:
        print("\n".join(metric.prometheus for metric in catalog.PUBLISHED))
    else:
        print("\n".join(_names()))


def _names() -> list[str]:
    width = max(len(metric.name) for metric in catalog.PUBLISHED)
    carried = {label.name for label in _labels(catalog.PUBLISHED)}
    carried.update(attribute.name for attribute in catalog.ATTRIBUTES)
    return [
        "metrics",
        *(f"  {one.name:<{width}}  {one.kind.value:<13}  {one.unit}" for one in catalog.PUBLISHED),
        "spans",
        *(f"  {span.name}" for span in catalog.SPANS if span.published),
        "events",
        *(f"  {event.name}" for event in catalog.EVENTS if event.published),
        "attributes",
        *(f"  {name}" for name in sorted(carried)),
    ]


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

_RESERVED_INTRO = """
## Reserved names

This version does not publish these; nothing else may use the names.
"""

_SPANS_INTRO = f"""{GENERATED}
# Spans and events

There is no span for the whole run: traces are short and link to the run's start. Steps become spans
after the fact, and only those worth keeping.
"""


def render_metrics() -> str:
    """The reference page of metrics and their attributes, as Markdown."""
    reserved = [metric for metric in catalog.ALL if not metric.published]
    known = _labels(catalog.PUBLISHED)
    parts = [
        *(_METRICS_INTRO, *_metric_table(catalog.PUBLISHED)),
        *(_LABELS_INTRO, *_label_table(known)),
        *(_RESERVED_INTRO, *_metric_table(reserved)),
        "\nTheir attributes, where not listed above:\n",
        *_label_table(label for label in _labels(reserved) if label not in known),
    ]
    return "\n".join([*parts, ""])


def render_spans() -> str:
    """The reference page of spans, events and their attributes, as Markdown."""
    rows = ((f"`{one.name}`", one.type, one.meaning) for one in catalog.ATTRIBUTES)
    parts = [
        *(_SPANS_INTRO, *_span_table(span for span in catalog.SPANS if span.published)),
        *("\n## Events\n", *_span_table(event for event in catalog.EVENTS if event.published)),
        *("\n## Attributes\n", *_table(("Attribute", "Type", "Meaning"), rows)),
        _RESERVED_INTRO,
        *_span_table(one for one in (*catalog.SPANS, *catalog.EVENTS) if not one.published),
    ]
    return "\n".join([*parts, ""])


def _pages() -> dict[str, str]:
    return {"metrics.md": render_metrics(), "spans.md": render_spans()}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


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
                "priority": metric.priority,
                "published": metric.published,
            }
            for metric in catalog.ALL
        ],
        "spans": [
            {"name": span.name, "meaning": span.meaning, "published": span.published}
            for span in catalog.SPANS
        ],
        "events": [
            {"name": event.name, "meaning": event.meaning, "published": event.published}
            for event in catalog.EVENTS
        ],
        "attributes": [attribute._asdict() for attribute in catalog.ATTRIBUTES],
        "labels": [label._asdict() for label in _labels(catalog.ALL)],
    }


def _metric_table(metrics: Iterable[Metric]) -> list[str]:
    rows = (
        (
            f"`{metric.name}`",
            f"`{metric.prometheus}`",
            metric.kind.value,
            f"`{metric.unit}`",
            _codes(label.name for label in metric.labels),
            metric.emit.value,
            metric.meaning,
        )
        for metric in metrics
    )
    return _table(("Name", "In Prometheus", "Kind", "Unit", "Attributes", "Ranks", "Meaning"), rows)


def _label_table(labels: Iterable[Label]) -> list[str]:
    rows = (
        (
            f"`{label.name}`",
            f"`{label.prometheus}`",
            str(label.bound),
            _codes(label.values) + (" and your own" if label.open and label.values else ""),
            label.meaning,
        )
        for label in labels
    )
    return _table(("Attribute", "In Prometheus", "Bound", "Values", "Meaning"), rows)


def _span_table(spans: Iterable[SpanType]) -> list[str]:
    rows = (
        (
            f"`{span.name}`",
            f"`{span.parent}`" if span.parent else "",
            _codes(one.name for one in span.attributes),
            span.meaning,
        )
        for span in spans
    )
    return _table(("Name", "Parent", "Attributes", "Meaning"), rows)


def _labels(metrics: Iterable[Metric]) -> list[Label]:
    return list(dict.fromkeys(label for metric in metrics for label in metric.labels))


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


if __name__ == "__main__":
    sys.exit(main())
