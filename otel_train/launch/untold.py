"""What of the spans and events of a killed process it has not told itself."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from otel_train import catalog
from otel_train.export.jsonl import read_jsonl

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from otel_train.records import Event, Span

# Any throughout: this is JSON from files that the process has written.


def untold_spans(spans: Iterable[Span], path: Path) -> tuple[Span, ...]:
    """Spans without those on file: counting the same edges again makes the same ids again."""
    told = set()
    for line in read_jsonl(path):
        request: Any = line
        for group in request.get("resourceSpans", ()):
            told |= {
                span["traceId"] + span["spanId"] for part in group["scopeSpans"] for span in part["spans"]
            }
    return tuple(span for span in spans if f"{span.trace_id:032x}{span.span_id:016x}" not in told)


def untold_events(events: Iterable[Event], path: Path, *, since_unix_ns: int) -> tuple[Event, ...]:
    """Events without the first so many of each kind as are on file.

    When an event was noticed depends on who looked, so they are counted and not compared.

    Args:
        events: made by counting on.
        path: what the process has told itself.
        since_unix_ns: what is older was told before the account that was counted on.
    """
    told: Counter[tuple[object, ...]] = Counter()
    for line in read_jsonl(path):
        event: Any = line
        if event.get("time_unix_ns", 0) > since_unix_ns:
            told[_mark(event.get("name"), event.get("attributes") or {})] += 1
    untold = []
    for made in events:
        mark = _mark(made.name, made.attributes)
        told[mark] -= 1
        if told[mark] < 0:
            untold.append(made)
    return tuple(untold)


def _mark(name: str, attributes: Mapping[str, object]) -> tuple[object, ...]:
    return name, attributes.get(catalog.SPAN_LOADER.name)
