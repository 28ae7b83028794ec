"""A number reads the same wherever it is shown: by ``console.text``."""

from __future__ import annotations

import ast
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_train.console.summary import render_run_summary
from otel_train.console.text import TextLayout, bytes_of, duration, percent, rounded
from otel_train.rundata.live_view import RankView
from otel_train.ui.pages import report_page

PACKAGE = Path(__file__).parents[2] / "otel_train"
SHOWN = (
    "console/summary.py", "console/trace_summary.py", "cli/summary.py", "cli/postmortem.py", "cli/analyze.py",
    "rundata/alerts.py", "ui/components.py", "ui/captures.py", "ui/pages.py",
)  # fmt: skip
"""Modules that write numbers of a run for readers."""

OTHER_SPECS = re.compile(r"%[A-Za-z%:. -]+|<?\d+|,|\.[36]f|g")
"""Dates, padding, thousands of a whole number, and lengths in styles: no measurement."""

SECONDS = st.floats(min_value=1e-6, max_value=1e6)


def summary_of(wall_s: float, share: float, size: float) -> dict[str, Any]:
    """A run whose wall time, share of waiting and batch size are given."""
    return {
        "state": "finished", "wall_seconds": wall_s, "steps": {"train": 10}, "batches": {"a": 10},
        "throughput": {"steps_per_second": 10 / wall_s},
        "activities": {"productive": wall_s * (1 - share), "data_wait": wall_s * share},
        "loaders": [{
            "loader": "a", "workers": 1, "batch_bytes": {"min": size, "avg": size, "max": size},
            "build": {"measured_in": "worker", "avg": wall_s, "p50": wall_s, "p95": wall_s, "p99": wall_s},
        }],
    }  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(wall_s=SECONDS, share=st.floats(1e-5, 0.999), size=st.floats(1, 1e13))
def test_summary_and_report_write_a_number_alike(wall_s: float, share: float, size: float) -> None:
    """0.9996 s is not 1.00 s here and 1,000 ms there."""
    summary = summary_of(wall_s, share, size)
    terminal = render_run_summary(TextLayout(120), summary)
    page = unescape(report_page(RankView.of_summary(Path("run"), summary), []))
    whole_s = sum(summary["activities"].values())
    shown = [
        duration(wall_s),
        percent(summary["activities"]["data_wait"] / whole_s),
        bytes_of(size),
        f"{rounded(10 / wall_s)} steps/s",
    ]

    assert [text for text in shown if text not in terminal] == []
    assert [text for text in shown if text not in page] == []


@pytest.mark.parametrize("module", SHOWN)
def test_no_module_has_a_format_of_its_own(module: str) -> None:
    """A second way to write seconds, shares or bytes is how two of them come to disagree."""
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    specs = [
        ast.literal_eval(node.format_spec.values[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.FormattedValue)
        and isinstance(node.format_spec, ast.JoinedStr)
        and isinstance(node.format_spec.values[0], ast.Constant)
    ]

    assert [spec for spec in specs if not OTHER_SPECS.fullmatch(spec)] == []
