"""Synthetic snapshots and spans, small enough to check by head."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

from otel_train.catalog import Kind, Label, Metric
from otel_train.datamodel import (
    AttributeValue,
    Exemplar,
    HistogramPoint,
    MetricFamily,
    Point,
    Snapshot,
    Span,
    SpanLink,
)

LOADER = Label(name="train.loader", bound=16, meaning="Which loader.")
STEPS = Metric(name="train.steps", unit="{step}", kind=Kind.COUNTER, meaning="Steps done.", labels=(LOADER,))
WORKERS = Metric(name="train.loader.workers", unit="{worker}", kind=Kind.UPDOWN, meaning="Workers alive.")
HEARTBEAT = Metric(name="train.heartbeat.time", unit="s", kind=Kind.GAUGE, meaning="When we last looked.")
STEP = Metric(
    name="train.step.duration",
    unit="s",
    kind=Kind.HISTOGRAM,
    meaning='Wall time of a step, in "seconds".\nNot more.',
    labels=(LOADER,),
    bounds=(0.1, 1.0, 10.0),
)

RESOURCE: dict[str, AttributeValue] = {
    "service.name": "otel-train",
    "train.run.id": "run-1",
    "train.rank": 3,
    "train.debug": True,
    "train.share": 0.5,
}

START_NS = 1_700_000_000_000_000_000
TRACE_ID = 0x0123456789ABCDEF0123456789ABCDEF
SPAN_ID = 0x00FEDCBA98765432


def step_durations(
    durations_s: Iterable[float],
    *,
    bounds: Sequence[float] = STEP.bounds,
    loader: str = "code",
    exemplars: Iterable[Exemplar] = (),
) -> HistogramPoint:
    """The series of a loader's steps that took so long, in explicit buckets alone."""
    each, counts = list(durations_s), [0] * (len(bounds) + 1)
    for duration_s in each:
        counts[bisect.bisect_left(bounds, duration_s)] += 1
    whose, ends = (("train.loader", loader),), (min(each), max(each))
    return HistogramPoint(
        whose, len(each), math.fsum(each), *ends, 0, 0, 0, (), tuple(counts), tuple(exemplars)
    )


def snapshot(steps: float = 7.0, *, second: int = 10) -> Snapshot:
    """Four families; the histogram holds 0.5, 0.5 and 4.0, the last with an exemplar."""
    code = (("train.loader", "code"),)
    empty = HistogramPoint((("train.loader", "val"),), 0, 0.0, math.nan, math.nan, 0, 0, 0, (), (0, 0, 0, 0))
    full = HistogramPoint(
        attributes=code,
        count=3,
        sum=5.0,
        min=0.5,
        max=4.0,
        zero_count=0,
        scale=0,
        offset=-2,
        exponential_counts=(2, 0, 0, 1),
        explicit_counts=(0, 2, 1, 0),
        exemplars=(Exemplar(4.0, START_NS + 5_000_000_000, TRACE_ID, SPAN_ID),),
    )
    return Snapshot(
        start_unix_ns=START_NS,
        time_unix_ns=START_NS + second * 1_000_000_000,
        families=(
            MetricFamily(STEP, (full, empty)),
            MetricFamily(STEPS, (Point(code, steps),)),
            MetricFamily(WORKERS, (Point((), 2.0),)),
            MetricFamily(HEARTBEAT, (Point((), 1_700_000_010.5),)),
        ),
    )


def spans() -> tuple[Span, ...]:
    """A failed step with one child and a link to another trace."""
    step = Span(
        name="train.step",
        trace_id=TRACE_ID,
        span_id=SPAN_ID,
        start_unix_ns=START_NS,
        end_unix_ns=START_NS + 4_000_000_000,
        attributes={"train.step.index": 12, "train.keep.reason": "slow", "train.losses": (1.5, 2.5)},
        links=(SpanLink(TRACE_ID + 1, SPAN_ID + 1),),
        error="ValueError",
    )
    child = Span(
        name="train.stage",
        trace_id=TRACE_ID,
        span_id=SPAN_ID + 2,
        parent_id=SPAN_ID,
        start_unix_ns=START_NS + 1,
        end_unix_ns=START_NS + 2,
        attributes={"train.stage": "data"},
    )
    return (step, child)
