"""Photographs every Grafana dashboard of the stack while the demo trains: one PNG per dashboard.

Needs Docker with its Compose plugin, network access for the images, and Chromium on PATH. Takes about ten minutes.
Starts the shipped stack as a Compose project of its own, with empty volumes, and removes both at the end. The ports in
.env must be free: stop a running stack first with `otel-train stack down`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from otel_train.stack import configuration  # noqa: E402 - the checkout's own
from tests.support.chromium import CHROMIUM, Chromium  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RUN_ID = "screenshots"
WIDTH_PX = 1440
GRID_UNIT_PX, HEADER_PX = 38, 150
"""Height of a row of Grafana's grid with its gap, and of what can be above the first row."""

REPEATS = 3
"""Copies of a repeated row (one per loader) that the first window height can show."""

QUERY_TIME_S = 15
"""Wait after the first panel title appears, until all queries of a dashboard are answered."""

DOCKER_S = 30
"""Longest time until Docker answers."""

OTEL_TRAIN = [sys.executable, "-m", "otel_train"]
BOTTOM = "Math.max(0, ...[...document.querySelectorAll('.react-grid-item')].map(e => e.getBoundingClientRect().bottom))"


def main() -> None:
    """Checks what is needed, starts the stack and the demo, photographs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="training before the first picture (6)")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "screenshots", help="(screenshots/)")
    chosen = parser.parse_args()
    require_docker()
    if CHROMIUM is None:
        sys.exit("screenshots: no Chromium on PATH; install it: apt-get install chromium")

    environ = {**os.environ, "COMPOSE_PROJECT_NAME": "otel-train-screenshots", "GRAFANA_ANONYMOUS": "true"}
    settings = configuration.settings(environ)
    chosen.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, running_stack(environ):
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{settings['OTLP_HTTP_PORT']}"
        with training(chosen.minutes, Path(folder), environ):
            browser = Chromium(Path(folder) / "profile", (WIDTH_PX, 900))
            try:
                for path in sorted((ROOT / "grafana" / "json").glob("*.json")):
                    picture = chosen.output_dir / f"{path.stem}.png"
                    photograph(browser, json.loads(path.read_text(encoding="utf-8")), settings, picture)
                    print(picture)
            finally:
                browser.close()


def require_docker() -> None:
    """Exits with a message unless Docker, its Compose plugin and its daemon answer."""
    try:
        result = subprocess.run(
            ["docker", "compose", "ls"], capture_output=True, text=True, check=False, timeout=DOCKER_S
        )
        error = result.stderr.strip().partition("\n")[0] if result.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as fault:
        error = str(fault)
    if error:
        sys.exit(
            f"screenshots: `docker compose ls` failed ({error}); no picture was taken; install Docker with its Compose "
            "plugin and start its daemon"
        )


@contextmanager
def running_stack(environ: Mapping[str, str]) -> Iterator[None]:
    """Starts the shipped stack, and removes it with its volumes at the end."""
    try:
        if subprocess.run([*OTEL_TRAIN, "stack", "up"], cwd=ROOT, env=environ, check=False).returncode:
            sys.exit("screenshots: the stack did not start; the reason is above")
        yield
    finally:
        subprocess.run([*OTEL_TRAIN, "stack", "down", "--data"], cwd=ROOT, env=environ, check=False)


@contextmanager
def training(minutes: float, folder: Path, environ: Mapping[str, str]) -> Iterator[None]:
    """Runs the demo; enters the block after ``minutes`` of training, which continues inside it."""
    command = [*OTEL_TRAIN, "demo", "--minutes", str(minutes + 30), "--run-dir", str(folder / "runs")]
    settings = {"OTEL_TRAIN_RUN_ID": RUN_ID, "OTEL_TRAIN_PROFILER_EVERY": "minutes=1"}
    process = subprocess.Popen(command, cwd=ROOT, env={**environ, **settings})
    try:
        process.wait(minutes * 60)
        sys.exit(f"screenshots: the demo ended with code {process.returncode} before any picture was taken")
    except subprocess.TimeoutExpired:
        yield
    finally:
        process.terminate()
        process.wait()


def photograph(
    browser: Chromium, dashboard: Mapping[str, Any], settings: Mapping[str, str], picture: Path
) -> None:
    """Photographs one dashboard, at its full height: Grafana queries only for panels inside the window."""
    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    copies = REPEATS if any(panel.get("repeat") for panel in panels) else 1
    resize(browser, rows * copies * GRID_UNIT_PX + HEADER_PX)
    first = next(panel["title"] for panel in panels if panel["type"] != "row")
    address = f"http://127.0.0.1:{settings['GRAFANA_PORT']}/d/{dashboard['uid']}"
    browser.open(
        f"{address}?from=now-5m&to=now&var-run={RUN_ID}&theme=light&kiosk",
        until=f"document.body.innerText.includes({json.dumps(first)})",
    )
    time.sleep(QUERY_TIME_S)
    if bottom := browser.ask(BOTTOM):
        resize(browser, int(bottom) + 8)
    browser.picture(picture)


def resize(browser: Chromium, height_px: int) -> None:
    """Sets the height of the page's window."""
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=WIDTH_PX,
        height=height_px,
        deviceScaleFactor=1,
        mobile=False,
    )


if __name__ == "__main__":
    main()
