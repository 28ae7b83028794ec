"""The page that shows runs, as a real browser shows it while a real training runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import CHROMIUM, Chromium
from tests.support.waiting import until
from tests.unit.test_report import a_run

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium"),
]

TRAINING = """
import time, torch, otel_train

loader = torch.utils.data.DataLoader([(torch.randn(8), 1.0)] * 64, batch_size=8)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
otel_train.instrument(model, {"train": loader}, run_id="live", run_dir=RUNS, prometheus=False, otlp="off",
                      console=False, tuning={"summary_interval_s": 2}, export_interval_s=1)
while True:
    for x, y in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        time.sleep(0.02)
"""
STEPS = "+(document.querySelector('.values dd')?.textContent ?? '').replace(/[^0-9]/g, '')"
SELECTED = "document.querySelector('[role=tab][aria-selected=true]')?.textContent"
FOCUSED = "document.activeElement.textContent"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    made = Chromium(tmp_path / "profile")
    yield made
    made.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    a_run(tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def address(runs: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "otel_train", "ui", str(runs), "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        yield served.stdout.readline().split()[-1].rstrip("/")
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == 130


@pytest.fixture
def training(runs: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", TRAINING.replace("RUNS", repr(str(runs)))]) as process:
        until((runs / "live/rank0/flight.bin").exists, "training has begun", 120)
        yield process
        process.kill()


def test_a_run_is_followed_while_it_trains(
    address: str, browser: Chromium, training: subprocess.Popen[bytes]
) -> None:
    """Steps rise by themselves, and an end is an end, without a reload."""
    browser.open(address)
    browser.wait("document.querySelector('a[href=\"/run/live\"]') !== null")
    assert "running" in browser.wait(
        "document.querySelector('#runs').textContent.includes('running') && document.body.textContent"
    )
    browser.open(f"{address}/run/live", until=f"({STEPS}) > 0")
    browser.ask("document.querySelector('#panel').marked = true")

    first = browser.ask(STEPS)
    second = browser.wait(f"({STEPS}) > {first} && {STEPS}")
    assert browser.wait(f"({STEPS}) > {second}")
    browser.wait("document.querySelector('svg') !== null")
    browser.wait("document.querySelector('.strip') !== null")
    training.kill()
    assert browser.wait("document.querySelector('.state.critical')?.textContent", 90).endswith("gone")

    assert browser.ask("document.querySelector('#panel').marked"), "the page was changed in place"
    assert "postmortem" in browser.ask("document.querySelector('.board').textContent")
    assert browser.faults == []


def test_tabs_work_by_keys_alone(address: str, browser: Chromium) -> None:
    """Arrows go round, Home and End to the ends; the focus is seen, stays, and the address says where one is."""
    browser.open(f"{address}/run/20260131-x7", until=f"{SELECTED} === 'Overview'")
    for _ in range(10):
        browser.press("Tab")
        if browser.ask("document.activeElement.role") == "tab":
            break
    assert browser.ask(FOCUSED) == "Overview"
    assert browser.ask("getComputedStyle(document.activeElement).outlineStyle") != "none"

    seen = []
    for key in ("ArrowRight", "ArrowRight", "End", "ArrowRight", "ArrowLeft", "Home"):
        browser.press(key)
        focused = browser.ask(FOCUSED)
        browser.wait(
            f"{SELECTED} === {focused!r} && document.getElementById('panel').getAttribute('aria-labelledby') === 'tab-' + {focused.lower()!r}"
        )
        seen.append(focused)

    assert seen == ["Timing", "Memory", "Artifacts", "Overview", "Artifacts", "Overview"]
    browser.press("ArrowRight")
    browser.wait(
        "location.search.includes('tab=timing') && document.querySelector('h2').textContent.startsWith('Stages')"
    )
    browser.ask("history.back()")
    browser.wait(f"{SELECTED} === 'Overview'")
    browser.press("Tab")
    assert browser.ask("document.activeElement.id") == "panel"
    assert browser.faults == []


def test_everything_that_can_be_used_has_a_name(address: str, browser: Chromium) -> None:
    """What a screen reader says of it."""
    for target in (
        "/",
        *(f"/run/20260131-x7?tab={tab}" for tab in ("overview", "timing", "memory", "artifacts")),
    ):
        browser.open(address + target)
        tree = browser.call("Accessibility.getFullAXTree")["nodes"]
        nameless = [
            node["role"]["value"] for node in tree if _usable(node) and not node.get("name", {}).get("value")
        ]
        assert nameless == []
    roles = {node["role"]["value"] for node in tree if not node.get("ignored")}
    assert {"tablist", "tab", "tabpanel", "main", "banner", "navigation", "heading", "table"} <= roles


def _usable(node: dict[str, Any]) -> bool:
    return not node.get("ignored") and node["role"]["value"] in {
        "link",
        "button",
        "tab",
        "combobox",
        "searchbox",
        "img",
        "tabpanel",
        "tablist",
        "disclosuretriangle",
    }


def test_ranks_and_runs_are_chosen(address: str, browser: Chromium) -> None:
    """A word in the filter leaves the runs that say it; a rank in the list shows its metrics."""
    browser.open(address, until="document.querySelectorAll('#runs tbody tr').length === 1")
    browser.ask("document.querySelector('.filter input').focus()")
    browser.write("nowhere")
    browser.wait("document.querySelectorAll('#runs tbody tr').length === 0")
    assert browser.ask("document.querySelector('.filter input').value") == "nowhere"
    browser.ask("const box = document.querySelector('.filter input'); box.select(); undefined")
    browser.write("otter")
    browser.wait("document.querySelectorAll('#runs tbody tr').length === 1")

    browser.open(f"{address}/run/20260131-x7?tab=timing")
    browser.ask("document.querySelector('.ranks select').focus()")
    browser.write("rank 1")
    browser.ask(
        "const pick = document.querySelector('.ranks select'); pick.value = '1'; pick.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    browser.wait(
        "location.search.includes('rank=1') && document.querySelector('.facts').textContent.includes('rank 1')"
    )
    assert browser.ask(SELECTED) == "Timing"
    assert browser.faults == []


def test_what_is_unfolded_stays_unfolded(address: str, browser: Chromium, runs: Path) -> None:
    """The page changes every second under the reader's eyes."""
    browser.open(f"{address}/run/20260131-x7?tab=memory")
    browser.ask("document.querySelector('details').open = true")
    summary = runs / "20260131-x7/rank0/summary.json"
    summary.write_text(summary.read_text().replace("Training waits.", "Training waits no more."))

    browser.wait("document.querySelector('.board').textContent.includes('no more')")

    assert browser.ask("document.querySelector('details').open") is True


def test_a_capture_is_looked_into(address: str, browser: Chromium) -> None:
    """Its flame graph works as that of the report does, and keeps its zoom while the page asks on."""
    browser.open(f"{address}/run/20260131-x7?tab=artifacts")
    browser.ask("document.querySelector('a[data-go]').click()")
    browser.wait("document.querySelector('.flame button') !== null")

    browser.ask("const inner = document.querySelectorAll('.flame button')[1]; inner.focus(); inner.click()")

    wide = "document.querySelectorAll('.flame button')[1].getBoundingClientRect().width > 0.95 * document.querySelector('.flame').getBoundingClientRect().width"
    assert browser.ask(wide)
    browser.ask("load(location.href)")
    assert browser.ask(wide)
    browser.press("ArrowRight")
    browser.press("Escape")
    assert not browser.ask(wide)
    assert browser.faults == []


def test_the_page_says_when_the_server_is_gone(address: str, browser: Chromium, runs: Path) -> None:
    """Metrics that stand still because the server is gone must not look live."""
    browser.open(f"{address}/run/20260131-x7")
    browser.ask(
        "const ask = fetch; window.fetch = () => Promise.reject(new TypeError('gone')); window.again = () => { window.fetch = ask; }"
    )
    browser.ask("load(location.href)")
    assert "does not answer" in browser.wait("document.getElementById('status').textContent")
    browser.ask("again()")
    browser.wait("document.getElementById('status').textContent === ''")


@pytest.mark.parametrize(
    ("scheme", "background"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(21, 23, 26)")]
)
def test_the_page_follows_the_readers_colours_and_window(
    scheme: str, background: str, address: str, browser: Chromium
) -> None:
    """Light and dark, wide and narrow: text stands out from what is behind it, and nothing sticks out."""
    browser.prefer(scheme)
    for width in (1200, 380):
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False
        )
        for target in (
            "/",
            *(f"/run/20260131-x7?tab={tab}" for tab in ("overview", "timing", "memory", "artifacts")),
        ):
            browser.open(address + target)
            assert browser.ask("getComputedStyle(document.body).backgroundColor") == background
            assert browser.ask("document.documentElement.scrollWidth <= innerWidth"), (width, target)
            assert browser.ask(SQUEEZED) == [], (width, target)
            faint = browser.ask(FAINT)
            assert faint == [], (target, faint)


SQUEEZED = """[...document.querySelectorAll('th:first-child, td:first-child')].filter(node => node.clientWidth < 100)
  .concat([...document.querySelectorAll('[role=tab]')].filter(node => node.clientHeight > 50)).map(node => node.textContent)"""
"""Cells and tabs whose words are broken into letters."""

FAINT = """(() => {
  const parts = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => parts(color).slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, place) => sum + v * [.2126, .7152, .0722][place], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if ((parts(color)[3] ?? 1) === 1) return color;
    }
  };
  const found = [];
  for (const node of document.querySelectorAll('h1, h2, p, td, th, a, dt, dd, li, strong, .state, .dim, summary'))
    if (node.innerText?.trim() && !node.closest('.sr, .flame')) {
      const [one, other] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
      if ((one + .05) / (other + .05) < 4.5) found.push(node.className + ' ' + node.innerText.slice(0, 40));
    }
  return found;
})()"""
"""Contrast below 4.5 to 1: success criterion 1.4.3 of WCAG 2.2, level AA."""
