"""The tab that answers where the time of a step goes."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from otel_train.analyze.drawing import area
from otel_train.analyze.report import histograms, stage_table, table
from otel_train.analyze.report_text import ABSENT, duration, figure
from otel_train.ui.components import section
from otel_train.ui.overview import last_steps, written

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.ui.live_view import RankView


def timing(view: RankView) -> str:
    """The tab as HTML."""
    document = {"summary": view.summary, "histograms": view.histograms}
    return "".join(
        (
            section("Stages", lambda: stage_table(document), beside=written(view)),
            section("On the device", lambda: _device(view)),
            section("Whole steps", lambda: _steps(view)),
            section("The last steps", lambda: last_steps(view), beside="from the flight file, by stage"),
            section("Stages over time", lambda: _course(view), beside="mean per training step"),
            section("Loaders", lambda: _loaders(view)),
            section("Distributions", lambda: histograms(document)),
        )
    )


def _name(row: Mapping[str, Any], *words: str) -> str:
    return escape(" · ".join(str(row[word]) for word in words if row.get(word)))


def _device(view: RankView) -> str:
    rows = [
        [
            _name(row, "phase", "loader", "stage"),
            figure(row["device_count"]),
            duration(row["device_seconds"] / row["device_count"]),
            duration(row["device_p50"]),
            duration(row["device_p99"]),
        ]
        for row in view.summary.get("stages") or ()
        if row.get("device_count")
    ]
    return table(("stage", "measured", "mean", "p50", "p99"), rows)


def _steps(view: RankView) -> str:
    rows = [
        [
            _name(row, "phase", "loader"), figure(row["count"]),
            *(duration(row[key]) for key in ("avg", "p50", "p95", "p99", "max", "total_seconds")),
        ]
        for row in view.summary.get("step_durations") or ()
    ]  # fmt: skip
    return table(("steps of", "count", "avg", "p50", "p95", "p99", "max", "total"), rows)


def _course(view: RankView) -> str:
    series = view.series
    if not series:
        return ""
    return area(
        series["times"], series["stages"], label="Mean time per training step by stage", unit=duration
    )


def _loaders(view: RankView) -> str:
    summary = view.summary
    facts = {row["loader"]: row for row in summary.get("loaders") or ()}
    rows = [
        _loader(name, count, (summary.get("samples") or {}).get(name), facts.get(name, {}))
        for name, count in (summary.get("batches") or {}).items()
    ]
    heads = (
        "loader",
        "batches",
        "samples",
        "workers",
        "build, avg",
        "build, p95",
        "wait, avg",
        "wait, p95",
        "errors",
        "dead workers",
    )
    return table(heads, rows)  # fmt: skip


def _loader(name: str, count: int, samples: int | None, row: Mapping[str, Any]) -> list[str]:
    build, wait = row.get("build") or {}, row.get("wait") or {}
    exits = row.get("worker_exits")
    return [
        escape(name), figure(count), figure(samples), figure(row.get("workers")),
        duration(build.get("avg")), duration(build.get("p95")), duration(wait.get("avg")), duration(wait.get("p95")),
        _many(row.get("errors")), _many(exits),
    ]  # fmt: skip


def _many(value: object) -> str:
    """A count, or counts by kind."""
    if isinstance(value, dict):
        return figure(sum(value.values()))
    return figure(value) if isinstance(value, (int, float)) else ABSENT
