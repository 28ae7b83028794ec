"""Draws the run summary as an SVG: docs/img/run-summary.svg."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from otel_train.console.summary import render_run_summary  # noqa: E402 - the checkout's own, installed or not
from otel_train.console.text import TextLayout  # noqa: E402
from otel_train.exporters.run_directory import find_run  # noqa: E402
from otel_train.files import rank_folders  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

PICTURE = ROOT / "docs" / "img" / "run-summary.svg"
COLUMNS = 100
COLUMN_PX, LINE_PX, MARGIN_PX, BASELINE_PX = 8.4, 18, 16, 13
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "34": "#79c0ff", "35": "#d2a8ff", "36": "#76e3ea"}
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")
WORDS = re.compile(r"\S+(?: \S+)*")


def spans(line: str) -> Iterator[tuple[int, str, frozenset[str]]]:
    """Returns (column, text, ANSI codes in force) of each stretch of a line. Every character is one column wide.

    A stretch has no two consecutive spaces: SVG collapses them, and the columns would not line up.
    """
    column, codes = 0, frozenset[str]()
    pieces = ESCAPE.split(line)
    for text, change in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        for words in WORDS.finditer(text):
            yield column + words.start(), words.group(), codes
        column += len(text)
        changed = frozenset(change.split(";"))
        codes = frozenset() if changed & {"", "0"} else codes | changed


def tspan(column: int, text: str, codes: frozenset[str]) -> str:
    """Returns a stretch of text as ``tspan``; ``textLength`` fixes its width in columns for any font."""
    ink = next((INK[code] for code in sorted(codes) if code in INK), "")
    style = f' fill="{ink}"' if ink else ""
    style += ' font-weight="bold"' if "1" in codes else ""
    style += ' opacity="0.6"' if "2" in codes else ""
    place = f'x="{MARGIN_PX + column * COLUMN_PX:.1f}" textLength="{len(text) * COLUMN_PX:.1f}"'
    return f'<tspan {place} lengthAdjust="spacingAndGlyphs"{style}>{escape(text)}</tspan>'


def picture(summary: str) -> str:
    """Returns ``summary``, with its ANSI colours, as SVG."""
    lines = summary.rstrip("\n").split("\n")
    width = round(COLUMNS * COLUMN_PX + 2 * MARGIN_PX)
    height = len(lines) * LINE_PX + 2 * MARGIN_PX
    rows = []
    for number, line in enumerate(lines):
        drawn = "".join(tspan(*span) for span in spans(line))
        if drawn:
            rows.append(f'<text y="{MARGIN_PX + number * LINE_PX + BASELINE_PX}">{drawn}</text>')
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    label = "The run summary in the terminal"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">',
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
            f'<g font-family="{FONT}" font-size="14" fill="#e6edf3">',
            *rows,
            "</g>",
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Draws the newest run, or the one named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "run", nargs="?", help="run directory or run id (default: the newest run below runs/)"
    )
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args()
    folder = next(iter(rank_folders(find_run(args.run, Path("runs"))).values()))
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    text = render_run_summary(TextLayout(COLUMNS, color=True), summary)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(picture(text), encoding="utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
