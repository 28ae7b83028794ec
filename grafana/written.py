"""Files that are written from code: written, or found stale."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).parents[1]


def write_or_check(pages: Mapping[Path, str], *, what: str, target: str) -> int:
    """The command line of a module that writes files.

    Args:
        pages: their texts.
        what: they are, for ``--help``.
        target: of make, that writes them.

    Returns:
        The exit code: 1 if ``--check`` was asked for and one is stale.
    """
    parser = argparse.ArgumentParser(description=f"Write {what}.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if they are stale")
    options = parser.parse_args()
    stale = {
        path: text
        for path, text in pages.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        if options.check:
            print(f"{path.relative_to(ROOT)} is stale: run `make {target}`", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return int(bool(stale) and options.check)
