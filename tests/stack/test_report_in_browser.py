"""The report as a real browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from otel_train.cli.main import main
from otel_train.ui.charts import COLORS
from tests.unit.test_report import a_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium"),
]

PROBE = """
<script>
const faults = [];
addEventListener('error', event => faults.push(event.message));
addEventListener('securitypolicyviolation', event => faults.push(event.violatedDirective));
addEventListener('load', () => {
  const said = [], put = (key, value) => said.push(key + '=' + value);
  put('background', getComputedStyle(document.body).backgroundColor);
  put('overflow', document.documentElement.scrollWidth > innerWidth);
  const box = document.querySelector('.flame'), all = [...box.querySelectorAll('button')];
  const press = key => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
  all[0].focus();
  put('text', box.nextElementSibling.textContent === all[0].title);
  press('ArrowRight'); put('right', all.indexOf(document.activeElement) > 0);
  press('ArrowLeft'); put('left', document.activeElement === all[0]);
  const parent = all.find(each => all.some(other => other.dataset.p == all.indexOf(each)));
  parent.focus(); press('ArrowDown'); put('down', all[document.activeElement.dataset.p] === parent);
  const child = document.activeElement;
  press('ArrowUp'); put('up', document.activeElement === parent);
  child.click(); put('zoomed', child.getBoundingClientRect().width > 0.95 * box.getBoundingClientRect().width);
  child.focus(); press('Escape'); put('out', child.getBoundingClientRect().width < 0.95 * box.getBoundingClientRect().width);
  put('drawn', [...document.querySelectorAll('svg')].every(each => each.getBoundingClientRect().height > 50));
  put('faults', faults.length);
  const probe = document.createElement('pre'); probe.id = 'probe'; probe.textContent = said.join(' '); document.body.append(probe);
});
</script>
"""


def shown(path: Path, *options: str) -> dict[str, str]:
    """What the probe saw once the page was loaded."""
    assert CHROMIUM is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-sync",
             "--disable-component-update", f"--user-data-dir={path.parent / 'profile'}", "--window-size=1000,800")  # fmt: skip
    command = [CHROMIUM, *flags, *options, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
    assert found, done.stderr[-2000:]
    return dict(pair.split("=", 1) for pair in found[1].replace(", ", ",").split(" "))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    path = folder / "report.html"
    assert main(["report", str(a_run(folder)), "--output", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</head>", PROBE + "</head>"), encoding="utf-8")
    return path


def test_the_page_works_in_a_browser_by_keys_alone(page: Path) -> None:
    """Looked at, not assumed: layout, script, focus, zoom, no fault and nothing blocked."""
    found = shown(page)

    assert found == {
        "background": "rgb(255,255,255)", "overflow": "false", "text": "true", "right": "true", "left": "true",
        "down": "true", "up": "true", "zoomed": "true", "out": "true", "drawn": "true", "faults": "0",
    }  # fmt: skip


def test_the_page_is_dark_where_the_browser_is(page: Path) -> None:
    """By the scheme the reader has chosen, without a switch."""
    found = shown(page, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")

    assert found["background"] == "rgb(21,23,26)"


def test_the_page_fits_a_phone(page: Path) -> None:
    """Tables scroll in their own box; the page does not."""
    assert shown(page, "--window-size=420,800")["overflow"] == "false"


def test_every_colour_of_a_chart_is_defined(page: Path) -> None:
    """A class without a rule draws black on black."""
    text = page.read_text(encoding="utf-8")

    assert {f"--{name}:" for name in COLORS} <= set(re.findall(r"--[a-z]+:", text))
