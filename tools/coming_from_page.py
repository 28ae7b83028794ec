"""Writes docs/reference/coming-from.md from the rows in coming_from_rows.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.coming_from_rows import ROWS, SYSTEMS, Row  # noqa: E402 - the checkout's own

PAGE = ROOT / "docs" / "reference" / "coming-from.md"
HEAD = """\
<!-- Generated from tools/coming_from_rows.py by `python tools/coming_from_page.py --write`. -->

# Coming from

You had a system of your own that timed training. This page has every feature of five such systems: what you write now,
and the test that proves it. Find the one that is like yours; a feature you miss here is a bug.

Before anything else: `otel_train.instrument(model, loaders)` in the script, or `otel-train run train.py` around it. What
follows needs no more than that unless it says so. Keys of charts keep their names; [flat names](flat-names.md) has them
all. There are programs to copy from in [examples](../../examples/README.md).
"""


def page() -> str:
    """The page as it should read."""
    text = HEAD
    for letter, name in SYSTEMS.items():
        text += f"\n## {name}\n\n| Looked for | Write now | Proved by |\n| --- | --- | --- |\n"
        text += "".join(map(_line, sorted((row for row in ROWS if row.system == letter), key=_place)))
    return text


def _place(row: Row) -> int:
    return row.number


def _line(row: Row) -> str:
    return f"| {row.feature} | {row.write} | {'<br>'.join(map(_link, row.tests))} |\n"


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../../{path})"


def main() -> int:
    """Write the page, or say whether it is fresh."""
    parser = argparse.ArgumentParser(description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true", help="write the page")
    choice.add_argument("--check", action="store_true", help="exit with 1 when the page is stale")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is stale: python tools/coming_from_page.py --write", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
