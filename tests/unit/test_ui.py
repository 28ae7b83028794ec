"""The page that shows runs: complete, safe, and undisturbed by whatever lies in the folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from otel_train import files
from otel_train.rundata.files import File, files_of
from otel_train.rundata.live_view import RankReader, RankView, RunList
from otel_train.ui import captures, server
from otel_train.ui.charts import LEFT, WIDTH
from otel_train.ui.server import application
from tests.support.asking import Answer, ask
from tests.support.left_run import TOKEN, leave_run, say_summary
from tests.unit.test_report import EVIL, a_run, metrics_line

TABS = ("overview", "timing", "memory", "artifacts")
CAPTURE = "captures/epoch_1-rank0.json.gz"
VOID = {"meta", "link", "input", "rect", "line", "polygon", "polyline"}


class Html(HTMLParser):
    """Checks that what is opened is closed, and keeps what a reader and a browser would meet."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.seen if name == tag]


def page(root: Path, run: str = "20260131-x7", **query: str) -> Answer:
    words = "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items())
    return ask(application(root), f"/run/{quote(run, safe='')}?{words}")


@pytest.mark.parametrize("tab", TABS)
def test_every_tab_has_the_findings(tmp_path: Path, tab: str) -> None:
    """Whoever looks at memory must learn that the run waits for data, too."""
    a_run(tmp_path)

    answer = page(tmp_path, tab=tab)

    assert answer.status == 200
    seen = Html(answer.text)
    assert [attrs["aria-selected"] for attrs in seen.of("a") if attrs.get("role") == "tab"] == [
        str(tab == other).lower() for other in TABS
    ]
    assert "Training waits." in answer.text
    assert "Read ahead." in answer.text


def test_a_run_that_was_killed_says_so_once_with_the_cause(tmp_path: Path) -> None:
    """Its last event says the same as its state."""
    run = leave_run(tmp_path, [3])
    say_summary(run, state="killed", end_cause="OOM kill")
    event = {"time_unix_ns": 1, "name": "train.run.killed", "attributes": {"train.run.end_cause": "OOM kill"}}
    (run / "rank0/events.jsonl").write_text(json.dumps(event) + "\n")

    text = page(tmp_path, "r1").text

    assert text.count('class="notice critical"') == 1
    assert '<p class="dim">OOM kill</p>' in text


def alerted(run: Path, name: str, about: dict[str, Any]) -> None:
    """Write the one event of a run."""
    event = {"time_unix_ns": 10**18, "name": name, "attributes": about}
    (run / "rank0/events.jsonl").write_text(json.dumps(event) + "\n")


@pytest.mark.parametrize(
    ("name", "about", "said"),
    [
        (
            "train.stall",
            {"train.rank": 0, "train.step.index": 37, "train.stage": "other", "train.loader": "", "train.stall.age": 300.3},
            "No progress since step 37, between two stages: 5.00 min until this notice.",
        ),
        (
            "train.stall",
            {"train.rank": 2, "train.step.index": 9, "train.stage": "data", "train.loader": "code", "train.stall.age": 60.0, "train.stall.suspect": True},
            "Rank 2, which the others wait for, made no progress since step 9, in stage <code>data</code> of loader <code>code</code>: 60.0 s until this notice.",
        ),
        (
            "train.nonfinite",
            {"train.step.index": 12, "train.nonfinite.kind": "loss", "name": "loss/chat"},
            "<code>loss/chat</code> was not finite at step 12.",
        ),
        (
            "train.loader.worker.exit",
            {"train.step.index": 7, "train.loader": "code", "error.type": "SIGKILL", "train.loader.worker.id": 1, "train.loader.worker.pid": 4711},
            "Worker 1 (pid 4711) of loader <code>code</code> ended at step 7: SIGKILL. The kernel sends SIGKILL where memory is short.",
        ),
        (
            "train.straggler",
            {"train.rank": 2, "train.stage": "data", "train.straggler.excess": 0.042, "train.step.index": 187},
            "Rank 2 was slow at step 187, in stage <code>data</code>: 42.0 ms more per step than the median rank. The others waited for it.",
        ),
    ],
)  # fmt: skip
def test_a_notice_says_what_happened_with_its_values(
    tmp_path: Path, name: str, about: dict[str, Any], said: str
) -> None:
    """It was the catalog's sentence on events of its kind, above their attributes without units."""
    run = leave_run(tmp_path, [3])
    alerted(run, name, about)

    assert said in page(tmp_path, "r1").text


def test_a_finding_about_a_slow_rank_replaces_the_notice_about_it(tmp_path: Path) -> None:
    """Both said that rank 2 is slow; one about another rank is news."""
    run = leave_run(tmp_path, [3])
    finding = {"name": "straggler_bound", "summary": "Rank 2 is slow.", "advice": "", "evidence": {"rank": 2}}
    say_summary(run, findings=[finding])
    for rank, notices in ((2, 0), (1, 1)):
        alerted(run, "train.straggler", {"train.rank": rank, "train.stage": "data"})

        assert page(tmp_path, "r1").text.count("<strong>straggler</strong>") == notices


def test_facts_of_an_event_have_units_and_no_empty_values(tmp_path: Path) -> None:
    """They were: loader, stall age 300."""
    run = leave_run(tmp_path, [3])
    alerted(run, "train.stall", {"train.step.index": 37, "train.loader": "", "train.stall.age": 300.0})

    assert "<td>step 37 · without progress for 5.00 min</td>" in page(tmp_path, "r1").text


def test_a_run_of_which_another_rank_failed_says_so_on_the_page_of_every_rank(tmp_path: Path) -> None:
    """Ranks that outlive it finish: the page of one of them must not look as if the run went well."""
    run = leave_run(tmp_path, [3])
    say_summary(run)
    for rank, values in enumerate(
        ({"state": "failed", "end_cause": "ValueError: no"}, {"state": "killed"}), 1
    ):
        other = json.loads((run / "rank0/summary.json").read_text()) | values | {"rank": rank}
        (run / f"rank{rank}").mkdir()
        (run / f"rank{rank}/summary.json").write_text(json.dumps(other))

    first, second = page(tmp_path, "r1").text, page(tmp_path, "r1", rank="1").text

    assert "2 other ranks failed or were killed." in first
    assert '<p class="dim">rank 1: ValueError: no · rank 2: killed</p>' in first
    assert "1 other rank failed or was killed." in second
    assert second.count("ValueError: no</p>") == 1


def test_stages_over_time_have_no_value_where_no_step_ended(tmp_path: Path) -> None:
    """Between passes and after the loop a step does not take 0 s: there is none."""
    run = a_run(tmp_path)
    lines = [metrics_line(second, trained=min(second, 4)) for second in range(1, 9)]
    (run / "rank0/metrics.otlp.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    text = page(tmp_path, tab="timing").text
    chart = text[text.index('aria-label="Mean time per training step by stage') :]
    points = re.search(r'<polygon class="c-blue" points="([^"]*)"', chart)

    assert points is not None
    across = [float(point.split(",")[0]) for point in points[1].split()]
    assert len(across) == 2 * 2 * 3
    assert min(across) == LEFT
    assert max(across) == pytest.approx(LEFT + 3 / 7 * (WIDTH - LEFT), abs=0.1)


@pytest.mark.parametrize(
    ("tab", "sections"),
    [
        ("overview", ["At the end", "Where the time went", "Over time", "Ranks"]),
        ("timing", ["Stages", "Stages over time", "Loaders", "Distributions"]),
        ("memory", ["At the end", "On the host"]),
        ("artifacts", ["Captures", "Artifacts", "Files", "Settings", "On the command line"]),
    ],
)
def test_a_tab_has_its_sections_and_no_empty_ones(tmp_path: Path, tab: str, sections: list[str]) -> None:
    """A heading above nothing says that something was measured."""
    (a_run(tmp_path) / "run.json").write_text('{"run_id": "x"}')

    found = re.findall(r"<h2>(.*?)(?: <span|</h2>)", page(tmp_path, tab=tab).text)

    assert found == sections


@pytest.mark.parametrize("query", [*({"tab": tab} for tab in TABS), {"tab": "artifacts", "capture": CAPTURE}])
def test_names_cannot_become_code(tmp_path: Path, query: dict[str, str]) -> None:
    """A loader, a host, an event or a kernel may be called anything, and files may say anything anywhere."""
    run = a_run(tmp_path, name=EVIL)
    event = {"time_unix_ns": 1, "name": EVIL, "rank": EVIL, "attributes": {EVIL: EVIL}}
    alert = {"time_unix_ns": 1, "name": "train.nonfinite", "attributes": {EVIL: EVIL, "train.loader": EVIL}}
    (run / "rank0/events.jsonl").write_text(f"{json.dumps(event)}\n{json.dumps(alert)}\n")
    (run / "run.json").write_text(
        json.dumps({"run_name": EVIL, EVIL: EVIL, "settings": {EVIL: EVIL}, "host": EVIL})
    )
    (run / "artifacts").mkdir()
    account = {"artifacts": {EVIL: {"absent": EVIL}}}
    (run / "artifacts/profiler_summary.json").write_text(json.dumps(account))
    (run / "captures/epoch_1-rank0.record.json").write_text(
        json.dumps({"trigger": EVIL, "steps": [EVIL], "finding": {"summary": EVIL}})
    )

    text = page(tmp_path, **query).text

    assert EVIL not in text
    assert [attrs["src"] for attrs in Html(text).of("script")] == ["/page.js"]


def test_names_in_the_list_cannot_become_code(tmp_path: Path) -> None:
    """The name of a folder is as free as any other."""
    shutil.copytree(a_run(tmp_path / "made", name=EVIL), tmp_path / "runs" / '"><img src=x onerror=alert(1)>')

    answer = ask(application(tmp_path / "runs"), f"/?filter={quote(EVIL)}")

    assert Html(answer.text).of("img") == []
    answer = ask(application(tmp_path / "runs"), "/")
    assert Html(answer.text).of("img") == []
    assert EVIL not in answer.text
    [link] = [
        attrs["href"] for attrs in Html(answer.text).of("a") if (attrs["href"] or "").startswith("/run/")
    ]
    assert ask(application(tmp_path / "runs"), str(link)).status == 200


def test_what_opens_doors_is_not_shown(tmp_path: Path) -> None:
    """The token arms captures: whoever may look at values may not do that."""
    run = leave_run(tmp_path, [5])
    (run / "rank0/capture-token").write_text(TOKEN)

    pages = [page(tmp_path, "r1", tab=tab) for tab in TABS]
    files = [
        page(tmp_path, "r1", file=name, rank="0")
        for name in ("run.json", "rank0/capture-token", "rank0/attempt")
    ]

    assert all(TOKEN not in answer.text for answer in pages)
    assert "(set)" in pages[-1].text
    assert [answer.status for answer in files] == [404, 404, 404]


@pytest.mark.parametrize(
    "name",
    [
        "../secret.json",
        "rank0/../../secret.json",
        "/etc/passwd",
        "rank0/link.json",
        "captures/a.json",
        "captures",
        "",
        "rank0/\0",
    ],
)
def test_no_path_leads_out_of_the_run(tmp_path: Path, name: str) -> None:
    """Dots, absolute paths and links: what is not in the list is not there."""
    run = leave_run(tmp_path / "runs", [5])
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    (run / "rank0/link.json").symlink_to(tmp_path / "secret.json")
    (run / "captures").symlink_to(tmp_path)
    (tmp_path / "a.json").write_text("{}")

    assert page(tmp_path / "runs", "r1", file=name).status == 404


def test_captures_of_many_ranks_do_not_hide_the_files_of_the_shown_rank(tmp_path: Path) -> None:
    """64 ranks with eight captures each have more files than a page lists: none of its own rank may be missing."""
    run = leave_run(tmp_path, [5])
    say_summary(run)
    (run / "captures").mkdir()
    for at_s, step in enumerate((900, 1000, 1100, 1200), 1):
        for rank in range(64):
            for end in ("json.gz", "record.json"):
                path = run / f"captures/epoch_1-step_{step}-rank{rank}.{end}"
                path.write_text("{}")
                os.utime(path, (at_s, at_s))
    own = [f"captures/epoch_1-step_{step}-rank0.json.gz" for step in (1200, 1100, 1000, 900)]

    names = [file.name for file in files_of(run, 0)]

    assert [name for name in names if name.endswith("-rank0.json.gz")] == own
    assert {"rank0/summary.json", "rank0/flight.bin"} < set(names)
    assert names.index("captures/epoch_1-step_1200-rank1.json.gz") > max(map(names.index, own))
    assert page(tmp_path, "r1", file=own[0], rank="0").status == 200


@pytest.mark.parametrize("name", ["..", ".", "link", "secret.json", "nothing", "a/b", "r1/../r1", "", "\0"])
def test_no_name_of_a_run_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """As above, one storey higher."""
    leave_run(tmp_path / "elsewhere", [5])
    leave_run(tmp_path / "runs", [5])
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere/r1")
    (tmp_path / "runs/secret.json").write_text("{}")

    answer = page(tmp_path / "runs", name)

    assert answer.status == 404
    assert names(ask(application(tmp_path / "runs"), "/")) == ["r1"]


def test_links_inside_a_run_are_passed_over(tmp_path: Path) -> None:
    """A hostile run directory may name any file of this machine."""
    run = leave_run(tmp_path / "runs", [5])
    say_summary(run, run_name="of another user")
    (run / "rank0/summary.json").rename(tmp_path / "summary.json")
    (run / "rank0/summary.json").symlink_to(tmp_path / "summary.json")
    shutil.copytree(run / "rank0", tmp_path / "rank7")
    (run / "rank7").symlink_to(tmp_path / "rank7")

    for tab in TABS:
        text = page(tmp_path / "runs", "r1", tab=tab).text
        assert "of another user" not in text
        assert "rank 7" not in text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8420", 200), ("127.0.0.1:8420", 200), ("[::1]:8420", 200), ("LOCALHOST", 200), ("trainer:8420", 200),
        ("evil.example:8420", 421), ("127.0.0.1.evil.example", 421), ("localhost.evil.example:8420", 421), ("", 421),
    ],
)  # fmt: skip
def test_a_hostile_site_cannot_borrow_the_readers_browser(tmp_path: Path, host: str, status: int) -> None:
    """DNS rebinding: its own name points here, and the browser takes the answer for its own."""
    assert ask(application(tmp_path, hosts=["trainer"]), "/", host=host).status == status


def test_the_page_can_only_be_read(tmp_path: Path) -> None:
    """Nothing that is sent here changes anything."""
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(application(tmp_path), "/", method=method).status == 405
    assert ask(application(tmp_path), "/", method="HEAD").status == 200


@pytest.mark.parametrize(
    "target",
    ["/", "/run/20260131-x7", "/run/none", "/style.css", "/page.js", "/icon.svg", "/no/such/address"],
)
def test_every_answer_says_what_a_browser_may_do_with_it(tmp_path: Path, target: str) -> None:
    """Also errors: they echo names."""
    a_run(tmp_path)

    answer = ask(application(tmp_path), target)

    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["cache-control"] == "no-store"


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    """It is used on nodes that have none."""
    a_run(tmp_path)

    for target in (
        "/",
        *(f"/run/20260131-x7?tab={tab}" for tab in TABS),
        "/style.css",
        "/page.js",
        "/icon.svg",
    ):
        text = ask(application(tmp_path), target).text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|src=\"//|url\(|@import", text)


def test_a_file_of_the_run_can_be_downloaded(tmp_path: Path) -> None:
    """As a file, whatever is in it: a browser must not show a foreign report as a page of otel_train."""
    run = a_run(tmp_path)
    (run / "report.html").write_text(EVIL)

    answer = page(tmp_path, file="report.html")

    assert answer.text == EVIL
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == 'attachment; filename="report.html"'
    assert page(tmp_path, file=CAPTURE).body == (run / CAPTURE).read_bytes()


def test_a_file_that_shrinks_while_it_is_sent_is_sent_without_a_length(tmp_path: Path) -> None:
    """Summaries are written anew; a browser would wait for what is no longer there."""
    run = a_run(tmp_path)
    (run / "report.html").write_text("long")

    assert "content-length" not in page(tmp_path, file="report.html").headers


def test_what_has_not_changed_is_not_sent_again(tmp_path: Path) -> None:
    """A page asks once a second."""
    a_run(tmp_path)
    site = application(tmp_path)

    first = ask(site, "/run/20260131-x7")
    again = ask(site, "/run/20260131-x7", if_none_match=first.headers["etag"])

    assert (again.status, again.body) == (304, b"")


def test_a_rank_can_be_chosen(tmp_path: Path) -> None:
    """And one that is not there is none."""
    run = a_run(tmp_path)
    second = run / "rank1/summary.json"
    second.write_text(second.read_text().replace('"train": 1000', '"train": 77'))

    chosen = Html(page(tmp_path, rank="1").text)

    assert [attrs["value"] for attrs in chosen.of("option") if "selected" in attrs] == ["1"]
    assert "<dt>training steps</dt><dd>77</dd>" in page(tmp_path, rank="1").text
    for rank in ("9", "-1", "1e9", "٣", "9" * 30, EVIL):
        assert "<dd>1,000</dd>" in page(tmp_path, rank=rank).text


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path) -> Path:
    """An empty folder in place of whatever is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.mkdir()
    return path


BREAKAGES: dict[str, Callable[[Path], object]] = {
    "no summary": lambda run: (run / "rank0/summary.json").unlink(),
    "an empty summary": lambda run: (run / "rank0/summary.json").write_text(""),
    "half a summary": lambda run: (run / "rank0/summary.json").write_text('{"schema": "otel_train.su'),
    "a summary of bytes": lambda run: (run / "rank0/summary.json").write_bytes(bytes(range(256))),
    "a foreign summary": lambda run: (run / "rank0/summary.json").write_text('["not", "ours"]'),
    "a summary of another version": lambda run: (run / "rank0/summary.json").write_text('{"schema": "otel_train.summary/9"}'),
    "a summary without end": lambda run: fifo(run / "rank0/summary.json"),
    "a summary that is a folder": lambda run: folder(run / "rank0/summary.json"),
    "a deep summary": lambda run: (run / "rank0/summary.json").write_text("[" * 100_000),
    "a large summary": lambda run: (run / "rank0/summary.json").write_text(" " * (5 << 20)),
    "values that are lists": lambda run: say_summary(run, stages=5, steps=[1], activities="x", findings={}, telemetry=[], ranks=3),
    "values that are words": lambda run: say_summary(
        run, wall_seconds="long", started_unix_s="early", steps={"train": "many"}, stages=[{"stage": {}}], loaders=["x"],
        findings=["x"], batches={"a": "b"}, step_durations=[None], activities={"data_wait": "x"}, world_size="two",
    ),
    "values too large": lambda run: say_summary(
        run, wall_seconds=1e999, started_unix_s=1e300, steps={"train": 10**400}, activities={"data_wait": float("nan")}, state=[],
    ),
    "surrogates": lambda run: say_summary(run, run_name="\ud800", host="\udfff"),
    "a torn flight file": lambda run: (run / "rank0/flight.bin").write_bytes((run / "rank0/flight.bin").read_bytes()[:9000]),
    "a foreign flight file": lambda run: (run / "rank0/flight.bin").write_bytes(os.urandom(1 << 20)),
    "a flight file of lies": lambda run: (run / "rank0/flight.bin").write_bytes(b"OTELTRN1" + b"\x01" * (1 << 20)),
    "foreign events": lambda run: (run / "rank0/events.jsonl").write_text('5\n{"name": 5}\n{"name": "train.nonfinite", "attributes": 5, "attempt": {}}\n{'),
    "foreign metrics": lambda run: (run / "rank0/metrics.otlp.jsonl").write_text('5\n{"resourceMetrics": 5}\n{"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"name": "train.steps"}]}]}]}\n'),
    "a foreign run.json": lambda run: (run / "run.json").write_text('{"settings": 5, "started_unix_ns": "x", "run_name": []}'),
    "foreign captures": lambda run: (run / "captures").write_text("a file"),
    "foreign artifacts": lambda run: (folder(run / "artifacts") / "profiler_summary.json").write_text('{"artifacts": {"a": 5}}'),
    "nothing in the rank": lambda run: folder(run / "rank0"),
    "no rank": lambda run: shutil.rmtree(run / "rank0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_run_is_shown_as_far_as_it_goes(tmp_path: Path, name: str) -> None:
    """Runs die at any moment, and folders hold what people put there."""
    run = leave_run(tmp_path, [5])
    say_summary(run)
    leave_run(tmp_path / "other", [3]).rename(tmp_path / "whole")
    BREAKAGES[name](run)
    site = application(tmp_path)

    for tab in TABS:
        answer = ask(site, f"/run/r1?tab={tab}")
        assert answer.status == 200
        Html(answer.text)
    listed = ask(site, "/")
    assert listed.status == 200
    assert "/run/whole" in listed.text


def test_a_run_whose_folder_has_no_utf_8_name_is_listed_and_shown(tmp_path: Path) -> None:
    """One such folder, of an old file system, and the list answered 500 for all runs on its page."""
    run = leave_run(tmp_path, [5])
    say_summary(run)
    name = os.fsdecode(b"M\xfcller")
    run.rename(tmp_path / name)
    site = application(tmp_path)

    assert "/run/M%FCller" in ask(site, "/").text
    for tab in TABS:
        assert ask(site, f"/run/M%FCller?tab={tab}").status == 200
    assert ask(application(tmp_path, only=name), "/").headers["location"] == "/run/M%FCller"


@pytest.mark.parametrize("capture", ["torn", "foreign", "none"])
def test_a_capture_that_cannot_be_read_is_said(tmp_path: Path, capture: str) -> None:
    """The rest of the page is shown all the same."""
    run = a_run(tmp_path)
    path = run / CAPTURE
    if capture == "torn":
        path.write_bytes(path.read_bytes()[:20])
    elif capture == "foreign":
        path.write_bytes(b"foreign")
    name = "captures/none.json.gz" if capture == "none" else CAPTURE

    answer = page(tmp_path, tab="artifacts", capture=name)

    assert answer.status == 200
    assert ("It cannot be analyzed" in answer.text) == (capture != "none")


def test_a_slow_capture_does_not_block_other_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one takes seconds; runs that go on are followed meanwhile."""
    a_run(tmp_path)
    begun, over, analyzed = threading.Event(), threading.Event(), captures.analyzed

    def slow(file: File) -> dict[str, Any]:
        begun.set()
        over.wait(60)
        return analyzed(file)

    monkeypatch.setattr(captures, "analyzed", slow)
    site = application(tmp_path)
    answers: list[Answer] = []
    target = f"/run/20260131-x7?tab=artifacts&capture={quote(CAPTURE, safe='')}"
    patient = threading.Thread(target=lambda: answers.append(ask(site, target)))
    patient.start()
    assert begun.wait(60)

    meanwhile = ask(site, "/run/20260131-x7")
    waited = not answers
    over.set()
    patient.join()

    assert (meanwhile.status, waited) == (200, True)
    assert "aten::addmm" in answers[0].text


def test_a_run_that_takes_long_to_read_holds_up_no_other_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One disk hangs: a second page of its run says so, and the pages of others come as ever."""
    a_run(tmp_path)
    shutil.copytree(tmp_path / "20260131-x7", tmp_path / "other")
    begun, over, read = threading.Event(), threading.Event(), RankReader.view

    def slow(reader: RankReader, run: Path, rank: int | None) -> RankView:
        if run.name != "other":
            begun.set()
            over.wait(60)
        return read(reader, run, rank)

    monkeypatch.setattr(RankReader, "view", slow)
    monkeypatch.setattr(server, "WAIT_S", 0.1)
    site = application(tmp_path)
    answers: list[Answer] = []
    patient = threading.Thread(target=lambda: answers.append(ask(site, "/run/20260131-x7")))
    patient.start()
    assert begun.wait(60)

    listed, other, second = (ask(site, path) for path in ("/", "/run/other", "/run/20260131-x7"))
    waited = not answers
    over.set()
    patient.join()

    assert (listed.status, other.status, second.status, waited) == (200, 200, 503, True)
    assert "are still being read" in second.text
    assert answers[0].status == ask(site, "/run/20260131-x7").status == 200


def test_a_run_may_vanish_while_it_is_read(tmp_path: Path) -> None:
    """Its folder is deleted: every answer is a page, and nothing is raised."""
    kept = leave_run(tmp_path / "kept", [200])
    say_summary(kept)
    site = application(tmp_path / "runs")
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            shutil.copytree(kept, tmp_path / "runs/r1")
            shutil.rmtree(tmp_path / "runs/r1")

    busy = threading.Thread(target=come_and_go)
    busy.start()
    try:
        answers = [
            ask(site, target) for _ in range(15) for target in ("/", *(f"/run/r1?tab={tab}" for tab in TABS))
        ]
    finally:
        over.set()
        busy.join()
    assert {answer.status for answer in answers} <= {200, 404}


def many(root: Path, number: int) -> None:
    for each in range(number):
        run = root / f"run-{each:04}"
        (run / "rank0").mkdir(parents=True)
        about = {"run_name": f"sweep-{each % 10}", "started_unix_ns": (each + 1) * 10**9, "host": "gpu-17"}
        (run / "run.json").write_text(json.dumps(about))


def names(answer: Answer) -> list[str]:
    links = [attrs["href"] or "" for attrs in Html(answer.text).of("a")]
    return [link.removeprefix("/run/") for link in links if link.startswith("/run/")]


def test_a_thousand_runs_are_a_page_of_fifty(tmp_path: Path) -> None:
    """The newest first, the rest a click or a word away."""
    many(tmp_path, 1000)
    site = application(tmp_path)

    assert names(ask(site, "/")) == [f"run-{each:04}" for each in range(999, 949, -1)]
    assert names(ask(site, "/?page=20"))[-1] == "run-0000"
    assert names(ask(site, "/?page=99999")) == names(ask(site, "/?page=20"))
    assert "51 to 100 of 1,000" in ask(site, "/?page=2").text
    assert names(ask(site, "/?filter=sweep-7+GPU-17+run-09"))[:2] == ["run-0997", "run-0987"]
    assert "No run has all of these words" in ask(site, "/?filter=nowhere").text


def test_a_list_of_runs_that_have_ended_reads_again_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they are more than documents are kept; with ten thousand each look took half a minute."""
    monkeypatch.setattr("otel_train.rundata.live_view._MOST_ROWS", 4)
    many(tmp_path, 12)
    for run in tmp_path.iterdir():
        say_summary(run)
    read: list[str] = []
    before = files.read_json

    def noted(path: Path) -> Any:
        read.append(path.relative_to(tmp_path).parts[0])
        return before(path)

    monkeypatch.setattr(files, "read_json", noted)
    site = application(tmp_path)
    ask(site, "/")
    read.clear()
    ask(site, "/")
    assert read == []

    say_summary(tmp_path / "run-0003", run_name="renamed")
    shutil.rmtree(tmp_path / "run-0005")
    answer = ask(site, "/")

    assert set(read) == {"run-0003"}
    assert "renamed" in answer.text
    assert "run-0005" not in answer.text


def test_a_page_of_a_live_run_of_many_ranks_reads_again_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 4,096 ranks on it read every summary at each look, for seconds."""
    many(tmp_path, 1)
    run = tmp_path / "run-0000"
    say_state(run, 0, "running")
    for rank in range(1, 4100):
        (run / f"rank{rank}").mkdir()
        shutil.copy(run / "rank0/summary.json", run / f"rank{rank}/summary.json")
    read: list[str] = []
    before = files.read_json

    def noted(path: Path) -> Any:
        read.append(path.parent.name)
        return before(path)

    site = application(tmp_path)
    ask(site, "/")
    monkeypatch.setattr(files, "read_json", noted)
    say_state(run, 7, "failed")
    ask(site, "/run/run-0000?rank=3")
    assert set(read) <= {"run-0000", "rank0", "rank3", "rank7"}

    assert "1 other rank failed" in ask(site, "/run/run-0000?rank=3").text


def say_state(run: Path, rank: int, state: str, attempt: int = 0) -> None:
    """Write what ``rank`` left; one that is running wrote it just now."""
    (run / f"rank{rank}").mkdir(exist_ok=True)
    say_summary(run, state=state, attempt=attempt)
    (run / "rank0/summary.json").replace(run / f"rank{rank}/summary.json")


@pytest.mark.parametrize(
    ("states", "word"),
    [
        (["finished", "finished"], "finished"),
        (["finished", "failed", "finished"], "failed"),
        (["terminated", "failed", "terminated"], "failed"),
        (["failed", "killed"], "killed"),
        (["running", "failed"], "failed"),
        (["finished", "running"], "running"),
        (["terminated", "finished"], "terminated"),
        # A start with fewer ranks leaves the folder of the rank that failed before.
        (["finished 1", "failed 0"], "finished"),
    ],
)
def test_the_list_shows_the_worst_state_of_the_ranks(states: list[str], word: str, tmp_path: Path) -> None:
    """It showed that of the first: of a run that rank 3 had ended by an exception, finished or terminated."""
    many(tmp_path, 1)
    for rank, said in reversed(list(enumerate(states))):
        state, _, attempt = said.partition(" ")
        say_state(tmp_path / "run-0000", rank, state, int(attempt or 0))

    [row] = RunList(tmp_path).rows()

    assert row.state.word == word


def test_the_table_of_ranks_shows_each_as_the_list_of_runs_does(tmp_path: Path) -> None:
    """A rank that was lost with its agent had the state that it wrote last: running."""
    many(tmp_path, 1)
    run = tmp_path / "run-0000"
    for rank, state in ((1, "running"), (0, "finished")):
        say_state(run, rank, state)
    os.utime(run / "rank1/summary.json", (1e9, 1e9))

    text = page(tmp_path, "run-0000").text
    [row] = RunList(tmp_path).rows()

    assert row.state.word == "silent"
    assert re.search(r'rank=1">rank 1</a></td><td[^>]*>silent</td>', text)


def test_the_list_shows_why_a_run_failed(tmp_path: Path) -> None:
    """A failed run was "compute bound", which is true and not what its reader looks for."""
    many(tmp_path, 2)
    for run, state in (("run-0000", "failed"), ("run-0001", "finished")):
        finding = {"name": "compute_bound", "summary": "x", "advice": "y"}
        say_summary(tmp_path / run, state=state, end_cause="ValueError: no label 12", findings=[finding])

    text = ask(application(tmp_path), "/").text
    [failed] = RunList(tmp_path).rows()[1:]

    assert "<td>ValueError: no label 12</td>" in text
    assert text.count("<td>compute bound</td>") == 1
    assert failed.says("label 12")


def test_a_name_from_right_to_left_leaves_the_id_beside_it_as_it_is(tmp_path: Path) -> None:
    """20261127-180840-d4a2c7 was read as d4a2c7-180840-20261127 beside a name in Arabic."""
    name = "\u062a\u062c\u0631\u0628\u0629"
    a_run(tmp_path, name=name)

    for target in ("/", "/run/20260131-x7"):
        text = ask(application(tmp_path), target).text
        assert f"<bdi>{name}</bdi>" in text
        assert re.search(r"<bdi[^>]*>(<code>)?20260131-x7(</code>)?</bdi>", text)


def test_marks_of_direction_and_escape_sequences_in_names_show_as_their_escapes(tmp_path: Path) -> None:
    """A name reversed the numbers that stood beside it."""
    say_summary(leave_run(tmp_path, [5]), run_name="a\u202e", host="b\x1b[2J")
    site = application(tmp_path)

    for text in (ask(site, "/").text, ask(site, "/run/r1").text):
        assert "a\\u202e" in text
        assert "b\\x1b[2J" in text
        assert not {"\u202e", "\x1b"} & set(text)


def test_every_table_has_the_name_of_its_section(tmp_path: Path) -> None:
    """One that scrolls is a stop of the keyboard: a screen reader must say which."""
    a_run(tmp_path)

    for target, label in (
        ("/", "Runs"),
        ("/run/20260131-x7", "Ranks"),
        ("/run/20260131-x7?tab=timing", "Stages"),
    ):
        boxes = [
            each
            for each in Html(ask(application(tmp_path), target).text).of("div")
            if each.get("class") == "scroll"
        ]
        assert boxes
        assert all(each["role"] == "region" and each["aria-label"] for each in boxes)
        assert label in [each["aria-label"] for each in boxes]


def test_a_rank_that_ends_after_another_has_failed_is_not_missed(tmp_path: Path) -> None:
    """The row of a run that has ended is kept, and one that failed may still have ranks that run."""
    many(tmp_path, 1)
    for rank, state in ((1, "running"), (0, "failed")):
        say_state(tmp_path / "run-0000", rank, state)
    runs = RunList(tmp_path)
    [before] = runs.rows()
    kept = (tmp_path / "run-0000/rank0/summary.json").read_bytes()
    (tmp_path / "run-0000/rank1/summary.json").write_bytes(kept.replace(b'"failed"', b'"killed"'))

    [after] = runs.rows()

    assert (before.state.word, after.state.word) == ("failed", "killed")


def test_folders_that_are_no_runs_are_not_listed(tmp_path: Path) -> None:
    """Runs lie beside data and checkpoints."""
    many(tmp_path, 1)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "rank0").mkdir()
    (tmp_path / "other.txt").write_text("x")

    assert names(ask(application(tmp_path), "/")) == ["run-0000"]


def test_a_folder_without_runs_says_how_to_make_one(tmp_path: Path) -> None:
    """Also one that is not there yet: the page may be opened first."""
    for root in (tmp_path, tmp_path / "none"):
        assert "otel-train run train.py" in ask(application(root), "/").text


def test_one_run_is_shown_alone(tmp_path: Path) -> None:
    """Who names one run does not show the others."""
    many(tmp_path, 2)
    site = application(tmp_path, only="run-0001")

    assert ask(site, "/").headers["location"] == "/run/run-0001"
    assert ask(site, "/run/run-0001").status == 200
    assert ask(site, "/run/run-0000").status == 404
