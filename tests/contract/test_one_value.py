"""The run summary, ``/metrics``, OTLP and the report of ten loops show the values of ``summary.json``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.contract.goldens.loops import LOOPS
from tests.support.metrics_shown import METRICS, metric_differences, of_otlp, of_page
from tests.support.run_summary import run_summary_differences
from tests.support.shown import Shown
from tests.support.summary_laws import laws_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Summary = Mapping[str, Any]

GOLDEN = Path(__file__).parents[1] / "golden" / "loops"


def summary_of(loop: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text_of(loop, "summary.json"))
    return found


def text_of(loop: str, file: str) -> str:
    return (GOLDEN / loop / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("loop", LOOPS)
def test_the_summary_of_a_loop_is_lawful(loop: str) -> None:
    """What all other outputs are compared with agrees with itself."""
    assert laws_of(summary_of(loop)) == []


@pytest.mark.parametrize("loop", LOOPS)
def test_every_value_of_the_run_summary_is_a_key(loop: str) -> None:
    """Whoever reads the run summary and whoever parses the file must not get two numbers for one thing."""
    assert list(run_summary_differences(text_of(loop, "run_summary.txt"), summary_of(loop))) == []


@pytest.mark.parametrize("loop", LOOPS)
def test_what_is_pushed_and_pulled_is_what_the_summary_says(loop: str) -> None:
    """A dashboard and the run summary show one number for one run."""
    summary, pushed = summary_of(loop), of_otlp(text_of(loop, "metrics.otlp.jsonl"))
    pulled = of_page(text_of(loop, "metrics.txt"), [*METRICS, *pushed])

    assert list(metric_differences(pushed, summary)) == []
    assert list(metric_differences(pulled, summary)) == []
    assert {name for name in METRICS if name in pushed} == {name for name in METRICS if name in pulled}


def report_rows(text: str, head: str) -> dict[str, list[str]]:
    """Cells of a table of the report by those of its first column."""
    lines = text.splitlines()
    begin = next((place for place, each in enumerate(lines) if each.startswith(f"{head} | ")), len(lines))
    found = {}
    for each in lines[begin + 1 :]:
        first, *cells = each.split(" | ")
        if not cells:
            break
        found[first] = cells
    return found


def report_differences(text: str, summary: Summary) -> Iterator[str]:
    """Cells of the report that are not what their key says."""
    wall_s, said = summary["wall_seconds"], next(each for each in text.splitlines() if " after " in each)
    speed = summary["throughput"]["steps_per_second"]
    head = re.search(r"after (.+?) · (.+?) training steps(?: · (.+?) steps/s of wall time)?", said)
    assert head is not None
    expected: list[tuple[str, str, float | None]] = [
        ("wall time", head[1], wall_s), ("steps", head[2], summary["steps"].get("train")),
        ("steps/s", re.search(r"(\S+) steps/s", said)[1] if speed else "–", speed or None),  # type: ignore[index]  # noqa: RUF001
    ]  # fmt: skip
    phases: dict[str, float] = {}
    for row in summary["stages"]:
        phases[row["phase"]] = phases.get(row["phase"], 0.0) + row["self_seconds"]
    stages: dict[str, list[list[float | None]]] = {}
    for row in summary["stages"]:
        name = " · ".join(part for part in (row["phase"], row["loader"], row["stage"]) if part)
        keys = [row[key] for key in ("count", "avg", "p50", "p95", "p99", "self_seconds")]
        stages.setdefault(name, []).append([*keys, row["self_seconds"] / phases[row["phase"]] or None])
    for name, cells in report_rows(text, "stage").items():
        fits = [
            all(Shown.of(cell).is_of(key) for cell, key in zip(cells, keys, strict=True))
            for keys in stages[name]
        ]
        if not any(fits):
            yield f"stage {name} is {cells}; the keys are {stages[name]}"
    waits = {row["loader"]: row["wait"] or {} for row in summary["loaders"]}
    for name, cells in report_rows(text, "loader").items():
        keys = [summary[key].get(name) for key in ("batches", "samples", "tokens")]
        keys += [waits.get(name, {}).get(key) for key in ("total_seconds", "avg", "p95")]
        expected += [(f"loader {name}", cell, key) for cell, key in zip(cells, keys, strict=False)]
    shares = re.findall(r"(?m)^(\S+ %) of (?:training time|the run) · ", text)
    shares.sort(key=lambda cell: float(cell.split()[0]))  # the report has the most severe finding first
    found = sorted(finding["share"] for finding in summary["findings"] if finding["share"])
    expected += [("share of a finding", cell, key) for cell, key in zip(shares, found, strict=True)]
    for what, cell, key in expected:
        if not Shown.of(cell).is_of(key):
            yield f"{what} is {cell}; the key is {key}"
    for finding in summary["findings"]:
        if finding["summary"].replace("`", "") not in text:
            yield f"the summary of {finding['name']} is not there as it is"


@pytest.mark.parametrize("loop", LOOPS)
def test_every_value_of_the_report_is_a_key(loop: str) -> None:
    """The report is what is passed on; it must not divide by something else than the run summary."""
    assert list(report_differences(text_of(loop, "report.txt"), summary_of(loop))) == []
