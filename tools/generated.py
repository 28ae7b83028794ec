"""Command line of the scripts that generate files from the code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[1]


def write_or_check(files: Mapping[Path, str], *, says: str | None) -> int:
    """Writes stale files, or lists them with ``--check``, and returns the exit code. ``says``: the text of ``--help``."""
    parser = argparse.ArgumentParser(description=says, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true", help="write the files")
    choice.add_argument("--check", action="store_true", help="exit with 1 when one is stale")
    write = parser.parse_args().write
    stale = {
        path: text
        for path, text in files.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        else:
            print(
                f"{path.relative_to(ROOT)} is stale: the same command with --write writes it", file=sys.stderr
            )
    return int(bool(stale) and not write)
