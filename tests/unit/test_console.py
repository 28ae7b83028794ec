"""The run summary: what a person sees of a run."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # it publishes no types

from otel_train.console.summary import render_run_summary
from otel_train.console.text import (
    TextLayout,
    bar,
    cut,
    display_width,
    duration,
    flow,
    pad,
    percent,
    stacked,
    wrap,
)

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def stage(name: str, loader: str, phase: str, **values: Any) -> dict[str, Any]:
    """A row of ``stages``; ``each`` seconds per occurrence."""
    each, number = values.pop("each", None), values.pop("count", None)
    total = None if each is None else each * number
    row = {"stage": name, "loader": loader, "phase": phase, "model": "", "count": number, "failed": 0}
    row |= {"inclusive_seconds": total, "self_seconds": total}
    row |= {key: None if each is None else each * factor for key, factor in FACTORS.items()}
    return row | values


FACTORS = {"min": 0.5, "avg": 1.0, "p50": 0.9, "p95": 1.5, "p99": 2.0, "max": 3.0}


def step(loader: str, phase: str, number: int, each: float) -> dict[str, Any]:
    """A row of ``step_durations``."""
    values = {key: each * factor for key, factor in FACTORS.items()}
    return {"loader": loader, "phase": phase, "count": number, "total_seconds": number * each} | values


def empty(**values: Any) -> dict[str, Any]:
    """The summary of a run in which nothing has happened yet."""
    return {
        "schema": "otel_train.summary/2", "run_id": "r1", "run_name": "r1", "attempt": 1, "rank": 0, "world_size": 1,
        "pid": 7, "host": "box", "state": "running", "started_unix_s": 1.8e9, "wall_seconds": 0.0,
        "step_source": "none", "updates": 0, "throughput": throughput(0.0), "checkpoints": {"count": 0, "seconds": 0.0},
        **{key: {} for key in ("steps", "partial_steps", "batches", "samples", "tokens", "activities")},
        **{key: [] for key in ("stages", "loaders", "rates", "step_durations", "instrumentation_gaps", "findings")},
        "telemetry": {
            **dict.fromkeys(("overhead_seconds", "overhead_us_per_step", "agent_cpu_seconds")),
            "records": 0, "records_lost": 0, "drops": {}, "faults": {},
        },
        **dict.fromkeys(("skipped_updates", "metrics_url", "run_dir")),
    } | values  # fmt: skip


def throughput(wall_s: float, steps: int | None = None) -> dict[str, Any]:
    """Training over the wall clock."""
    per_second = steps / wall_s if steps is not None else None
    unknown = dict.fromkeys(("batches_per_second", "samples_per_second"))
    return {"wall_seconds": wall_s, "steps_per_second": per_second, **unknown}


def rate(
    loader: str, phase: str, seconds: float, batches: int, *, samples: int, tokens: int | None = None
) -> dict[str, Any]:
    """A row of ``rates``."""
    counts = {"batches": batches, "samples": samples, "tokens": tokens}
    rates = {f"{unit}_per_second": None if n is None else n / seconds for unit, n in counts.items()}
    return {"loader": loader, "phase": phase, "seconds": seconds, **counts, **rates}


def loader(name: str = "code", *, each: float = 0.04, **facts: Any) -> dict[str, Any]:
    """A row of ``loaders``: four workers, three passes."""
    took = {"count": 420, "total_seconds": 420 * each, "min": each, "avg": each, "p50": each}
    took |= {"p95": 1.1 * each, "p99": 1.3 * each, "max": 2 * each}
    return {
        "loader": name, "workers": 4, "prefetch_factor": 2, "persistent_workers": False,
        "build": {"measured_in": "worker", "lost": 0, **took}, "wait": took,
        "start": {"making_seconds": 0.3, "first_batch_seconds": 3.3, **took, "avg": 1.2},
        "batch_bytes": {"sampled": 9, "min": 2.4e6, "avg": 2.4e6, "max": 2.4e6},
        "endings": {"epoch_end": 3}, "errors": {}, "worker_exits": {},
    } | facts  # fmt: skip


def finding(**fields: Any) -> dict[str, Any]:
    """A finding about loader ``code``."""
    return {
        "name": "input_bound", "loader": "code", "phase": "train", "severity": "warning", "share": 0.39, "seconds": 21.7,
        "summary": "Training waits for loader code: 40 % of the training time goes into fetching its batches.",
        "evidence": {"data_wait_seconds": 22.0, "data_wait_share": 0.4, "batches": 840},
        "advice": "Raise DataLoader(num_workers=...) of loader code, now 0, so that its batches are read while the "
        "model works.",
    } | fields  # fmt: skip


def full(**values: Any) -> dict[str, Any]:
    """A run of two training loaders and one for validation, as the demo leaves it."""
    val = {
        "endings": {"short": 2, "error": 1},
        "errors": {"OSError": 1},
        "worker_exits": {"SIGKILL": 2},
        "batch_bytes": None,
    }
    return empty(
        run_id="20260131-x7", run_name="demo", state="finished", wall_seconds=62.0, step_source="update",
        steps={"train": 420, "eval": 24}, partial_steps={"train": 1}, updates=420, skipped_updates=2,
        batches={"code": 420, "prose": 420, "val": 24}, samples={"code": 6720, "prose": 6720, "val": 384},
        tokens={"code": 645120},
        stages=[
            stage("other", "code", "train", self_seconds=0.4),
            stage("optimizer", "code", "train", count=420, each=0.0036),
            stage("data", "code", "train", count=420, each=0.0524),
            stage("forward", "code", "train", count=420, each=0.011),
            stage("backward", "code", "train", count=420, each=0.02),
            stage("data", "prose", "train", count=420, each=0.00042),
            stage("forward", "prose", "train", count=420, each=0.0112, failed=1),
            stage("backward", "prose", "train", count=420, each=0.0202),
            stage("data", "val", "eval", count=24, each=0.00042),
            stage("forward", "val", "eval", count=24, each=0.0083),
        ],
        loaders=[loader("code"), loader("prose", workers=0, build=None), loader("val", each=0.004, **val)],
        rates=[
            rate("code", "train", 36.9, 420, samples=6720, tokens=645120),
            rate("prose", "train", 13.4, 420, samples=6720),
            rate("val", "eval", 0.209, 24, samples=384),
        ],
        throughput=throughput(62.0, 420),
        step_durations=[step("code", "train", 420, 0.131), step("val", "eval", 24, 0.0088)],
        activities={"init": 1.2, "compile": 0.0, "productive": 32.8, "data_wait": 22.2, "eval": 0.21, "other": 5.59},
        findings=[finding()],
        instrumentation_gaps=[
            {"what": "model", "name": "teacher", "reason": "its forward was never called through the module"}
        ],
        telemetry={
            "overhead_seconds": 0.0034, "overhead_us_per_step": 8.1, "agent_cpu_seconds": 0.21, "records": 10500,
            "records_lost": 3, "drops": {"ring_overrun": 3}, "faults": {"prometheus": 1},
        },
        metrics_url="http://127.0.0.1:9464/metrics", run_dir="runs/20260131-x7",
    ) | values  # fmt: skip


HOSTILE = [
    "a\nb\r\tc", "[bold red]markup[/] {x} %s", "\x1b[2J\x1b[31mclear", "loader-" + "x" * 300 + "-end", "数据加载器" * 12,
    "zero\u200bwidth \u202ereversed", "e\u0301\u0301\u0301 combining", "lone \udc80 surrogate",
]  # fmt: skip


def hostile() -> dict[str, Any]:
    """Names that are legal and break layouts."""
    rows = [stage("data", name, "train", count=2, each=0.1) for name in HOSTILE]
    return full(
        run_name=HOSTILE[0],
        host=HOSTILE[2],
        batches=dict.fromkeys(HOSTILE, 2),
        stages=[*rows, stage(HOSTILE[3], "code", "train", count=1, each=0.1, model=HOSTILE[4])],
        loaders=[loader(HOSTILE[0], errors={HOSTILE[1]: 1})],
        step_durations=[],
        findings=[finding(summary=HOSTILE[0] + HOSTILE[3], advice=HOSTILE[4], evidence={HOSTILE[2]: 1.0})],
        instrumentation_gaps=[{"what": HOSTILE[1], "name": HOSTILE[5], "reason": HOSTILE[3]}],
        run_dir="runs/" + HOSTILE[2],
    )


RUN_SUMMARIES: dict[str, tuple[Callable[[], dict[str, Any]], TextLayout]] = {
    "run_summary_80": (full, TextLayout(80)),
    "run_summary_120": (full, TextLayout(120)),
    "run_summary_ascii_80": (full, TextLayout(80, unicode=False)),
    "run_summary_empty_80": (empty, TextLayout(80)),
    "run_summary_hostile_80": (hostile, TextLayout(80)),
    "run_summary_hostile_ascii_120": (hostile, TextLayout(120, unicode=False)),
}


@pytest.mark.parametrize("name", RUN_SUMMARIES)
def test_the_run_summary_looks_as_it_was_approved(name: str) -> None:
    """A change of the run summary is read as a diff: rewrite with GOLDEN=write. Colours change nothing but colours."""
    make, page = RUN_SUMMARIES[name]
    path = GOLDEN / f"{name}.txt"
    text, coloured = (render_run_summary(page._replace(color=color), make()) for color in (False, True))

    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert "\x1b[" in coloured
    assert [line.rstrip() for line in ANSI.sub("", coloured).splitlines()] == text.splitlines()


@pytest.mark.parametrize("width", [1, 60, 69, 79, 80, 93, 120, 500])
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_the_page(width: int, unicode: bool) -> None:
    """A line that the terminal wraps breaks every table below it."""
    for make in (empty, full, hostile):
        for line in render_run_summary(TextLayout(width, unicode=unicode), make()).splitlines():
            assert display_width(line) <= max(60, min(width, 120)) or line.startswith("  files"), line


def test_without_unicode_nothing_but_ascii_leaves() -> None:
    """A log file in the C locale must not stop a run at its very end."""
    for make in (empty, full, hostile):
        assert render_run_summary(TextLayout(80, color=True, unicode=False), make()).isascii()


def test_a_name_cannot_move_the_cursor() -> None:
    """A loader's name is a stranger's text: it must not clear the screen or forge a line."""
    text = render_run_summary(TextLayout(80), hostile())

    assert not set(text) & {"\x1b", "\r", "\t", "\u200b", "\u202e", "\udc80"}
    assert "a\\nb\\r\\tc" in text


def test_values_that_are_not_known_show_as_a_dash_and_never_as_zero() -> None:
    """Zero is a measurement; a run summary that invents one sends people the wrong way."""
    row = stage("data", "code", "train", count=None)

    text = render_run_summary(TextLayout(80), empty(stages=[row], wall_seconds=None))

    assert re.search(r"^  data( +–){6}$", text, re.MULTILINE)  # noqa: RUF001 - the sign itself
    assert not re.search(r"(?<![\d.,])0(\.0)? (s|ms|µs|%)", text)


def test_a_summary_with_nothing_in_it_still_makes_a_run_summary() -> None:
    """The run summary is also printed at the end of a crash, when little is known."""
    text = render_run_summary(TextLayout(80), {})

    assert "otel_train" in text
    assert "no stage has been seen yet" in text


def test_a_row_without_a_stage_still_makes_a_run_summary() -> None:
    """Such a row is no wrong value for a reader: another version may have written the file."""
    nameless = {
        key: value for key, value in stage("other", "", "", self_seconds=1.0).items() if key != "stage"
    }

    assert "input_bound" not in render_run_summary(
        TextLayout(80), full(stages=[*full()["stages"], nameless], findings=[])
    )


def test_shares_are_of_the_phase_so_that_loaders_can_be_compared() -> None:
    """30 of 100 seconds of training spent on one loader's data is 30 %, whatever that loader's own total."""
    rows = [
        stage("data", "a", "train", count=10, each=3.0),
        stage("forward", "b", "train", count=10, each=7.0),
        stage("forward", "c", "eval", count=10, each=100.0),
    ]

    text = render_run_summary(TextLayout(80), empty(stages=rows))

    assert re.findall(r"(\d+\.\d) %  █", text) == ["30.0", "70.0", "100.0"]


def test_rates_are_what_was_counted_over_the_time_it_took() -> None:
    """Ten batches of 4 in five seconds are 2 batches and 8 samples per second: the key's value, not one of the run summary's."""
    rows = [stage("data", "a", "train", count=1, each=4.0), stage("data", "a", "eval", count=1, each=1.0)]
    rates = [rate("a", "train", 5.0, 10, samples=40)]

    text = render_run_summary(TextLayout(80), empty(stages=rows, rates=rates))

    assert "train · a   5.00 s · 10 batches · 2 batches/s · 8 samples/s" in text
    assert "eval · a   1.00 s\n" in text


def test_stages_say_their_model_only_where_there_are_several() -> None:
    """With one model its name is noise; with two it is the whole point."""
    one = [stage("forward", "a", "train", count=1, each=1.0, model="net")]
    two = [*one, stage("forward", "a", "train", count=1, each=1.0, model="critic")]

    run_summaries = [render_run_summary(TextLayout(80), empty(stages=rows)) for rows in (one, two)]

    assert "net" not in run_summaries[0]
    assert "forward net" in run_summaries[1]
    assert "forward critic" in run_summaries[1]


def test_what_does_not_fit_one_look_is_counted() -> None:
    """Two hundred loaders must not scroll the finding off the screen, nor vanish silently."""
    rows = [stage("data", f"loader{number}", "train", count=1, each=1.0) for number in range(200)]

    text = render_run_summary(TextLayout(80), empty(stages=rows, findings=[finding()]))

    assert len(text.splitlines()) < 60
    assert "and 192 more in summary.json" in text


@pytest.mark.parametrize("severity", ["ok", "info", "warning", "critical"])
@pytest.mark.parametrize(
    ("phase", "of"), [("train", "the training time"), ("", "the run"), ("eval", "the run")]
)
def test_a_finding_says_summary_cost_evidence_and_advice(severity: str, phase: str, of: str) -> None:
    """The four things one needs to act, in that order. Half of the run in evaluation is not half of the training time."""
    text = render_run_summary(TextLayout(120), full(findings=[finding(severity=severity, phase=phase)]))

    parts = ("Training waits", f"21.7 s, 39.0 % of {of}\n", "data_wait_share 40.0 %", "Raise Data")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_time_outside_every_batch_has_a_place_on_the_strip() -> None:
    """Saving and sleeping between epochs must not look like a stage of training."""
    activities = {"productive": 50.0, "outside": 50.0}
    for unicode, glyph in ((True, "□"), (False, "_")):
        text = render_run_summary(TextLayout(80, unicode=unicode), full(activities=activities))

        assert f"{glyph} outside" in text


def test_a_long_path_is_not_cut_and_a_long_name_is_with_a_sign() -> None:
    """The command with the cut path named another folder, and a cut name looked whole."""
    run = f"/scratch/{'a' * 450}/run1"
    left = {"waiting": 1, "rejected": 0, "run": run}

    text = render_run_summary(TextLayout(80), full(run_dir=run, undelivered=left))

    assert f"otel-train replay {run}\n" in text
    assert f"files     {run}\n" in re.sub(" {2,}files +", "files     ", text)
    assert TextLayout(80).safe("n" * 500) == "n" * 399 + "…"


def test_an_address_is_never_cut() -> None:
    """It is there to be pasted."""
    url = "http://127.0.0.1:9464/" + "m" * 200

    assert url in render_run_summary(TextLayout(80), full(metrics_url=url))


@pytest.mark.parametrize("make", [empty, full])
def test_what_these_tests_show_is_what_the_schema_describes(make: Any) -> None:
    """A run summary tested on summaries that cannot occur would prove nothing."""
    schema = json.loads((ROOT / "otel_train" / "rundata" / "summary.schema.json").read_text())
    Draft202012Validator.check_schema(schema)

    assert not list(Draft202012Validator(schema).iter_errors(make()))
    assert list(Draft202012Validator(schema).iter_errors(make() | {"state": "fine"}))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),  # noqa: RUF001 - the sign itself
        (float("nan"), "–"),  # noqa: RUF001 - the sign itself
        (0, "0 s"),
        (4.2e-8, "42.0 ns"),
        (8.1e-6, "8.10 µs"),
        (9.996e-4, "1.00 ms"),
        (0.0262, "26.2 ms"),
        (0.9999, "1.00 s"),
        (62, "62.0 s"),
        (119.96, "2.00 min"),
        (3600, "60.0 min"),
        (7200, "2.00 h"),
        (360000, "100 h"),
        (3.6e7, "10,000 h"),
        (-0.5, "-500 ms"),
    ],
)
def test_a_duration_has_three_significant_digits_and_the_unit_that_suits_it(
    seconds: float | None, text: str
) -> None:
    """0.0000081 s and 62000 ms are both right and both unreadable."""
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "–"), (0, "0.0 %"), (1e-6, "<0.01 %"), (0.0034, "0.34 %"), (0.4, "40.0 %"), (1, "100.0 %")],  # noqa: RUF001
)
def test_a_small_share_is_not_shown_as_nothing(share: float | None, text: str) -> None:
    """The cost of the telemetry is such a share, and it is not zero."""
    assert percent(share) == text


@given(st.text(), st.integers(0, 40))
def test_cutting_and_padding_hit_the_column(text: str, columns: int) -> None:
    """Alignment holds for any script, because it is counted in columns and not in characters."""
    safe = TextLayout().safe(text)

    assert display_width(cut(safe, columns)) <= columns
    assert display_width(pad(safe, columns)) == columns


@given(st.lists(st.text(min_size=1), max_size=12), st.integers(4, 60))
def test_wrapping_loses_no_word(words: list[str], columns: int) -> None:
    """Advice that ends in mid-sentence is no advice."""
    safe = [TextLayout().safe(word).replace(" ", "") for word in words]

    lines = wrap(safe, columns)

    assert "".join(lines).replace(" ", "") == "".join(safe)
    assert all(display_width(line) <= columns for line in lines)
    assert all(display_width(line) <= columns for line in flow(safe, columns))


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=9), st.integers(1, 120))
def test_the_parts_of_a_stacked_bar_fill_it(weights: list[float], columns: int) -> None:
    """A bar of the whole wall time has no gap, since the wall time has none."""
    cells = stacked(weights, columns)

    assert sum(cells) == (columns if sum(weights) > 0 else 0)
    assert min(cells) >= 0


@given(st.floats(0, 1), st.integers(1, 60))
def test_a_bar_is_as_long_as_its_share(share: float, columns: int) -> None:
    """Within an eighth of a column, and never nothing for something."""
    drawn = bar(share, columns)

    eighths = drawn.count("█") * 8 + ("▏▎▍▌▋▊▉".index(drawn[-1]) + 1 if drawn and drawn[-1] != "█" else 0)
    assert abs(eighths - share * columns * 8) <= 1
    assert bool(drawn) == (share > 0)


class _Stream(io.StringIO):
    def __init__(self, *, terminal: bool, encoding: str) -> None:
        super().__init__()
        self._terminal, self._encoding = terminal, encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the standard library's is an attribute
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("stream", "environ", "page"),
    [
        (_Stream(terminal=True, encoding="utf-8"), {}, TextLayout(90, color=True, unicode=True)),
        (_Stream(terminal=True, encoding="utf-8"), {"NO_COLOR": "1"}, TextLayout(90, color=False, unicode=True)),
        (_Stream(terminal=True, encoding="ascii"), {"TERM": "dumb"}, TextLayout(90, color=False, unicode=False)),
        (_Stream(terminal=False, encoding="utf-8"), {"COLUMNS": ""}, TextLayout(100, color=False, unicode=True)),
        (_Stream(terminal=False, encoding="latin-1"), {"FORCE_COLOR": "1"}, TextLayout(90, color=True, unicode=False)),
        (_Stream(terminal=False, encoding="no-such-code"), {}, TextLayout(90, color=False, unicode=False)),
    ],
)  # fmt: skip
def test_the_page_suits_the_stream(
    stream: _Stream, environ: dict[str, str], page: TextLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escape codes in a log file, or a UnicodeEncodeError at the end of a run, would be ours to answer for."""
    usual = {"COLUMNS": "90", "NO_COLOR": "", "FORCE_COLOR": "", "TERM": "xterm"}
    for name, value in (usual | environ).items():
        monkeypatch.setenv(name, value)

    assert TextLayout.of(stream) == page


def inside(text: str) -> list[str]:
    """The lines of the run summary about loaders."""
    lines = text.splitlines()
    first = next((n for n, line in enumerate(lines) if "inside the loaders" in line), len(lines))
    return [line.strip() for line in lines[first + 1 : lines.index("", first)]] if first < len(lines) else []


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        # Its stage table says everything.
        ({"workers": 0, "build": None}, []),
        # The first thing to know when a loop has stopped with an error about pids.
        (
            {"workers": 2, "build": None, "start": None, "worker_exits": {"SIGKILL": 1}},
            ["code  2 workers · 2.40 MB per batch", "worker died: SIGKILL"],
        ),
    ],
    ids=["it reads on the training thread and is well", "a worker was killed"],
)
def test_a_loader_has_the_lines_that_its_stage_table_does_not_say(
    facts: dict[str, Any], lines: list[str]
) -> None:
    """And very many loaders, such as a sweep over folds has, do not fill the run summary."""
    many = empty(loaders=[loader(f"fold{n}") for n in range(9)])

    assert inside(render_run_summary(TextLayout(100), empty(loaders=[loader(**facts)]))) == lines
    assert inside(render_run_summary(TextLayout(120), many))[-1] == "and 3 more in summary.json"
