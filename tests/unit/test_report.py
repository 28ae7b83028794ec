"""The report of a run: complete, self-contained, safe."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from otel_train.rundata.live_view import RankView
from otel_train.trace_analysis.events import read
from otel_train.trace_analysis.hot_spots import flame
from otel_train.trace_analysis.timeline import TraceTimeline
from otel_train.ui.captures import analysis_of
from otel_train.ui.charts import COLORS, LEFT, WIDTH, area, bars, elapsed, held, lines
from otel_train.ui.components import asset, flame_graph
from otel_train.ui.pages import report_page
from tests.support.command_line import Cli
from tests.support.made_trace import MadeTrace, training

EVIL = '<script>alert("x")</script>'
VOID = {"meta", "rect", "line", "polygon", "polyline"}


class Tags(HTMLParser):
    """Checks that what is opened is closed, and keeps ids and links."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"]] if values.get("id") else []  # type: ignore[list-item]
        self.links += [value for key, value in attrs if key in {"href", "src"} and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag


def attributes(**labels: str) -> list[dict[str, Any]]:
    return [{"key": f"train.{key}", "value": {"stringValue": value}} for key, value in labels.items()]


def metrics_line(second: int, trained: int = -1) -> dict[str, Any]:
    """What one line of metrics says after so many seconds, ``trained`` of them, or all, in steps.

    2 ms of data and 8 ms of forward per step, 100 steps/s.
    """
    trained = second if trained < 0 else trained

    def number(name: str, kind: str, values: list[tuple[dict[str, str], float]]) -> dict[str, Any]:
        points = [
            {
                "attributes": attributes(**labels),
                "asDouble": value,
                "timeUnixNano": str((1000 + second) * 10**9),
            }
            for labels, value in values
        ]
        return {"name": name, kind: {"dataPoints": points}}

    def histogram(stage: str, seconds: float) -> dict[str, Any]:
        return {
            "attributes": attributes(stage=stage, loader="code", phase="train"), "count": "100", "sum": seconds * 100 * trained,
            "scale": 4, "zeroCount": "0", "min": seconds, "max": seconds * 1.1,
            "positive": {"offset": -145, "bucketCounts": ["60", "0", "40"]},
        }  # fmt: skip

    stages = [histogram("data", 0.002), histogram("forward", 0.008)]
    metrics = [
        number("train.run.time", "sum", [
            ({"run.activity": "productive"}, trained * 0.8), ({"run.activity": "data_wait"}, trained * 0.2),
            *([({"run.activity": "outside"}, float(second - trained))] if second > trained else ())
        ]),
        number("train.steps", "sum", [({"phase": "train"}, 100.0 * trained)]),
        number("process.memory.usage", "sum", [({}, 5e8 + second * 1e6)]),
        {"name": "train.stage.duration", "exponentialHistogram": {"dataPoints": stages}},
    ]  # fmt: skip
    return {"resourceMetrics": [{"resource": {"attributes": []}, "scopeMetrics": [{"metrics": metrics}]}]}


def a_run(folder: Path, *, name: str = "quiet-otter", capture: bool = True) -> Path:
    """A run of two ranks, with ten lines of metrics and a capture."""
    run = folder / "20260131-x7"
    stage = dict.fromkeys(("count", "avg", "p50", "p95", "p99", "self_seconds"), 1.0)
    finding = {
        "name": "input_bound",
        "summary": "Training waits.",
        "advice": "Read ahead.",
        "share": 0.2,
        "severity": "critical",
    }
    for rank in range(2):
        (run / f"rank{rank}").mkdir(parents=True)
        summary = {
            "schema": "otel_train.summary/2", "run_id": "x", "run_name": name, "rank": rank, "world_size": 2, "host": EVIL,
            "state": "finished", "wall_seconds": 10.0, "steps": {"train": 1000}, "batches": {EVIL: 1000}, "samples": {},
            "activities": {"data_wait": 2.0}, "findings": [finding],
            "stages": [{**stage, "stage": "data", "loader": EVIL, "phase": "train"}],
        }  # fmt: skip
        (run / f"rank{rank}/summary.json").write_text(json.dumps(summary))
    lines = [json.dumps(metrics_line(second)) for second in range(1, 11)]
    (run / "rank0/metrics.otlp.jsonl").write_text("\n".join(lines) + '\n{"torn')
    (run / "run.json").write_text("{}")
    if capture:
        (run / "captures").mkdir()
        made = training(steps=3)
        made.op(EVIL, 0, 900)
        made.write(run / "captures/epoch_1-rank0.json.gz")
    return run


@pytest.fixture
def page(tmp_path: Path, cli: Cli) -> str:
    run = a_run(tmp_path)
    assert cli("report", run).printed.strip() == str(run / "report.html")
    return (run / "report.html").read_text(encoding="utf-8")


def test_the_page_has_every_section(page: str) -> None:
    """What is promised is there, and can be reached from the top."""
    tags = Tags()
    tags.feed(page)

    assert tags.open == []
    sections = ["overview", "timing", "memory", "captures"]
    assert [name for name in tags.ids if not name.startswith("h-") and name != "main"] == sections
    assert {link.removeprefix("#") for link in tags.links} == {*sections, "main"}


def test_the_page_needs_nothing_else(page: str) -> None:
    """It is opened on a plane, and mailed."""
    assert not re.search(r"https?:|//[a-z]|url\(|@import", page)
    assert "default-src 'none'" in page


def test_names_cannot_become_code(page: str) -> None:
    """A loader, a host or a kernel may be called anything."""
    assert EVIL not in page
    assert "&lt;script&gt;alert" in page


def test_colours_follow_the_browser(page: str) -> None:
    """Light by day, dark by night."""
    assert "prefers-color-scheme: dark" in page
    assert "color-scheme: light dark" in page


def luminance(color: str) -> float:
    """Returns that of WCAG 2.2, of a colour such as #2d6cd8 or #fff."""
    digits = color[1:] if len(color) > 4 else "".join(digit * 2 for digit in color[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    ("names", "least"), [(("fg", "dim", "blue", "warn", "bad", "good"), 4.5), ((*COLORS,), 3.0)]
)
def test_colours_have_contrast(names: tuple[str, ...], least: float) -> None:
    """Text on the page and in a box, and lines of charts, in light and dark. Gray is also the edge of a field."""
    found = re.findall(r":root \{([^}]*--bg[^}]*)\}", asset("page.css"))
    assert len(found) == 2
    for palette in found:
        colors = dict(re.findall(r"--(\w+): (#\w+)", palette))
        low = [
            (name, ground)
            for name in names
            for ground in ("bg", "box")
            if (ratio := [luminance(colors[each]) + 0.05 for each in (name, ground)])
            and max(ratio) / min(ratio) < least
        ]
        assert low == []


def test_sections_of_the_report_are_below_their_parts(page: str) -> None:
    """All were of the second level: a list of headings did not show what belongs to what."""
    found = re.findall(r"<h([1-6])[^>]*>(.*?)</h\1>", page)
    levels = [(int(level), re.sub(" ?<.*", "", text)) for level, text in found]

    assert [text for level, text in levels if level == 2] == ["Overview", "Timing", "Memory", "Captures"]
    assert (3, "Stages") in levels
    assert all(after <= before + 1 for (before, _), (after, _) in pairwise(levels))


def test_the_timeline_is_what_happened_between_lines(tmp_path: Path, cli: Cli) -> None:
    """Counters only grow; a reader wants to know about this minute. 20 % waiting, 2 ms of data per step, throughout."""
    series = json.loads(cli("report", a_run(tmp_path), "--json").printed)["series"]

    assert series["times"] == pytest.approx(list(range(1, 10)))
    assert series["activities"]["data_wait"] == pytest.approx([0.2] * 9)
    assert series["stages"]["data"] == pytest.approx([0.002] * 9)
    assert series["memory"]["process memory usage"][0] == pytest.approx(5.02e8)


def test_a_histogram_keeps_its_empty_buckets(tmp_path: Path, cli: Cli) -> None:
    """Two peaks drawn side by side would look like one."""
    [first, _] = json.loads(cli("report", a_run(tmp_path), "--json").printed)["histograms"]

    assert (first["name"], first["numbers"]) == ("train · code · forward", [60, 0, 40])


def test_a_run_without_captures_or_metrics_has_a_report(tmp_path: Path, cli: Cli) -> None:
    """It may have died early, or been set to write little."""
    run = a_run(tmp_path, capture=False)
    (run / "rank0/metrics.otlp.jsonl").unlink()
    target = tmp_path / "there.html"

    assert cli("report", run, "--output", target).code == 0

    page = target.read_text(encoding="utf-8")
    assert "No capture was taken." in page
    assert "Over time" not in page


def test_a_report_passes_over_a_capture_that_cannot_be_read(tmp_path: Path, cli: Cli) -> None:
    """One odd file must not cost the report of a whole run; the process may have been killed while it wrote the trace."""
    run = a_run(tmp_path)
    os.mkfifo(run / "captures" / "epoch_1-step_2-rank0.json.gz")
    (run / "captures/epoch_1-rank1.json").write_text('{"traceEvents": [{"ph":')
    code, _, err = cli("report", run)

    assert code == 0
    assert "epoch_1-step_2-rank0.json.gz is passed over" in err
    assert "epoch_1-rank1.json is passed over: " in err
    assert "epoch_1-rank0" in (run / "report.html").read_text(encoding="utf-8")


def test_a_report_leaves_out_a_rank_whose_summary_cannot_be_read(tmp_path: Path, cli: Cli) -> None:
    """One damaged file of a thousand ranks cost the report of all."""
    run = a_run(tmp_path)
    (run / "rank1/summary.json").write_text('{"schema": ')
    code, out, err = cli("report", run)

    assert code == 1
    assert out.strip() == str(run / "report.html")
    assert "rank1" in err
    assert [each["rank"] for each in json.loads(cli("report", run, "--json").out)["ranks"]] == [0]


def test_validate_writes_the_same_report(tmp_path: Path, cli: Cli) -> None:
    """It replaced the one that was there by one without flight file, metrics and flame graphs."""
    run = a_run(tmp_path)
    reports = []
    for words in (["report", run], ["validate", run, "--report"]):
        cli(*words)
        reports.append((run / "report.html").read_text(encoding="utf-8"))

    assert reports[0] == reports[1]


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path, cli: Cli) -> None:
    """A full disk, a folder that is not ours."""
    target = tmp_path / "no/such/folder.html"

    assert "cannot be written" in cli("report", a_run(tmp_path, capture=False), "--output", target).refused


@pytest.mark.parametrize("behind_a_link", [False, True])
def test_a_report_takes_the_place_of_no_device_and_no_pipe(
    tmp_path: Path, cli: Cli, behind_a_link: bool
) -> None:
    """``--output /dev/null``, or ``/dev/stdout``, by root: the device would be gone for the whole machine."""
    run = a_run(tmp_path)
    there = tmp_path / "there"
    os.mkfifo(there)
    named = tmp_path / "link" if behind_a_link else there
    if behind_a_link:
        named.symlink_to(there)

    said = f"{named}: cannot be written: a pipe, a socket or a device, which no file replaces. Name a file"
    assert said in cli("report", run, "--output", named).refused
    assert there.is_fifo()
    assert named.is_symlink() == behind_a_link


def calls() -> MadeTrace:
    """Two steps; linear takes 40 and 60, of which addmm takes 30 and 50."""
    made = MadeTrace()
    for number, (outer, inner) in enumerate(((40, 30), (60, 50))):
        made.step(number, number * 100, 100)
        made.op("aten::linear", number * 100, outer)
        made.op("aten::addmm", number * 100 + 5, inner)
    return made


def test_a_flame_graph_puts_the_same_callers_together(tmp_path: Path) -> None:
    """Steps are left out: 100 in linear, 80 of it in addmm."""
    found = flame(TraceTimeline(read(calls().write(tmp_path / "trace.json"))))

    assert [(call["name"], call["depth"], call["count"]) for call in found] == [
        ("aten::linear", 0, 2),
        ("aten::addmm", 1, 2),
    ]
    assert [call["share"] for call in found] == pytest.approx([1.0, 0.8])
    assert [call["seconds"] for call in found] == pytest.approx([100e-6, 80e-6])
    assert [call["parent"] for call in found] == [-1, 0]


def test_boxes_lie_within_their_callers(tmp_path: Path) -> None:
    """Otherwise the picture lies."""
    found = flame(TraceTimeline(read(training(steps=3, world_size=2).write(tmp_path / "trace.json"))))

    assert len(found) > 8
    for number, call in enumerate(found):
        assert call["parent"] < number
        if call["parent"] >= 0:
            above = found[call["parent"]]
            assert above["depth"] == call["depth"] - 1
            assert above["start_share"] - 1e-9 <= call["start_share"]
            assert call["start_share"] + call["share"] <= above["start_share"] + above["share"] + 1e-9


def test_one_box_of_a_flame_graph_is_in_the_order_of_tabs() -> None:
    """Hundreds of boxes must not stand between the keyboard and the rest of the page; arrows move inside."""
    call = {
        "name": "f",
        "parent": -1,
        "depth": 0,
        "start_share": 0.0,
        "share": 0.5,
        "seconds": 1.0,
        "count": 1,
    }

    html = flame_graph([call, {**call, "start_share": 0.5}])

    assert html.count('tabindex="0"') == 1
    assert html.count('tabindex="-1"') == 1


def test_an_empty_chart_is_no_chart() -> None:
    """A frame around nothing says that something was measured."""
    assert area([1.0], {"a": [1.0]}, label="x", unit=str) == ""
    assert flame_graph([]) == ""


def test_an_area_has_a_hole_where_nothing_was() -> None:
    """Steps of 1 s until 2 s and from 4 s: the evaluation between them looked like steps that became faster."""
    times, series = held([(0.0, 1.0), (1.0, 2.0), (4.0, 5.0)], {"data": [1.0, 1.0, 1.0]})
    page = area(times, series, label="Steps", unit=str)
    areas = re.findall(r'<polygon class="c-amber" points="([^"]*)"', page)
    across = [[float(point.split(",")[0]) for point in area.split()] for area in areas]

    second = (WIDTH - LEFT) / 5
    assert [(min(part), max(part)) for part in across] == [
        (LEFT, pytest.approx(LEFT + 2 * second, abs=0.1)),
        (pytest.approx(LEFT + 4 * second, abs=0.1), WIDTH),
    ]


def test_a_line_has_a_hole_where_nothing_is_known() -> None:
    """None is no value between its neighbours."""
    page = lines([0.0, 1.0, 2.0, 3.0, 4.0], {"a": [1.0, 2.0, None, 3.0, 4.0]}, label="x", unit=str)

    assert len(re.findall("<polyline", page)) == 2


def test_a_chart_says_its_values_without_a_picture() -> None:
    """A screen reader had the title alone. Lines differ by their dashes, not by their colour alone."""
    page = lines([0.0, 1.0, 2.0], {"a": [1.0, 3.0, 2.0], "b_c": [4.0, 4.0, 4.0]}, label="Speed", unit=str)

    assert 'aria-label="Speed: a min 1.0, last 2.0, max 3.0; b c min 4.0, last 4.0, max 4.0"' in page
    assert 'class="s-blue"' in page
    assert 'class="s-teal d1"' in page
    assert '<span class="key b-teal line d1">' in page


@pytest.mark.parametrize(
    ("end_s", "marks"),
    [
        (12.9, ["0 s", "5 s", "10 s"]),
        (0.8, ["0 s", "0.2 s", "0.4 s", "0.6 s", "0.8 s"]),
        (48, ["0 s", "10 s", "20 s", "30 s", "40 s"]),
        (300, ["0 s", "1:00", "2:00", "3:00", "4:00", "5:00"]),
        (20_000, ["0 s", "2:00:00", "4:00:00"]),
        (900_000, ["0 s", "120:00:00", "240:00:00"]),
    ],
)
def test_an_axis_of_time_is_marked_with_round_times(end_s: float, marks: list[str]) -> None:
    """3.21, 6.43 and 9.64 s are no times that a reader can add to."""
    page = lines([0.0, end_s], {"a": [1.0, 1.0]}, label="x", unit=lambda _: "")

    assert re.findall(r'text-anchor="(?:start|middle|end)">([\d. s:]+)</text>', page) == marks


def test_time_reads_as_a_clock() -> None:
    """2:05:00 is read faster than 7,500 s."""
    assert [elapsed(seconds) for seconds in (4.5, 200, 7500)] == ["4.5 s", "3:20", "2:05:00"]


def test_a_report_of_almost_nothing_is_a_page(tmp_path: Path) -> None:
    """The first second of a run."""
    page = report_page(RankView.of_summary(tmp_path, {}), [])

    assert page.startswith("<!doctype html>")


def test_a_report_of_artifacts_names_the_run_and_denies_no_capture(tmp_path: Path) -> None:
    """``validate --report`` has no run directory: it said that no capture was taken, above the one that it shows."""
    analysis = {
        "name": "epoch_1-rank0.json.gz",
        **analysis_of(read(training(steps=3).write(tmp_path / "t.json"))),
    }
    page = report_page(RankView.of_summary(tmp_path / "artifacts", {"run_id": "20260131-x7"}), [analysis])

    assert "No capture was taken" not in page
    assert "<code>20260131-x7</code>" in page
    assert "<code>artifacts</code>" not in page


@pytest.mark.parametrize("most", [1, 3, 9, 39, 41, 12_345])
def test_an_axis_of_counts_is_marked_with_whole_numbers(most: int) -> None:
    """A mark at 2.25, written as 2, is in the wrong place."""
    page = bars([(1.0, 2.0), (2.0, 4.0)], [most, 0], name="step", label="steps", unit=str)
    marks = [int(text.replace(",", "")) for text in re.findall(r'text-anchor="end">([\d,]+)</text>', page)]

    assert marks == [marks[1] * part for part in range(5)]
    assert marks[-1] >= most
