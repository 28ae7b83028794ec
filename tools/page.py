"""The command line of a script that writes one page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write_or_check(path: Path, text: str, *, says: str | None) -> int:
    """Write the page, or say whether it is fresh.

    Args:
        path: of the page.
        text: as it should read.
        says: what the script does, for ``--help``.

    Returns:
        The exit code: 1 if the page was to be checked and is stale.
    """
    parser = argparse.ArgumentParser(description=says)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true", help="write the page")
    choice.add_argument("--check", action="store_true", help="exit with 1 when the page is stale")
    if parser.parse_args().write:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return 0
    script = Path(sys.argv[0]).name
    print(f"{path.relative_to(ROOT)} is stale: python tools/{script} --write", file=sys.stderr)
    return 1
