"""Writes docs/reference/coming-from.md from the rows in coming_from_rows.py."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.coming_from_rows import ROWS, SYSTEMS, Row  # noqa: E402 - the checkout's own
from tools.page import write_or_check  # noqa: E402 - as above

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


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), says=__doc__))
