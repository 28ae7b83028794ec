"""The captures that lie in a run directory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from otel_train.profiler.metadata import RECORD_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OF_A_RANK = re.compile(r"[-_.]?rank_?(\d+)")
_TRACES = (".json", ".json.gz")


def captures_of(run: Path) -> list[Path]:
    """The captures of a run, the oldest first."""
    folders = [run / "captures", *run.glob("rank*/captures")]
    found = [
        path
        for folder in folders
        for path in folder.glob("*")
        if path.name.endswith(_TRACES) and not path.name.endswith(RECORD_SUFFIX)
    ]
    return sorted(found, key=lambda path: (path.lstat().st_mtime_ns, path.name))


def together(captures: Sequence[Path], one: Path) -> list[Path]:
    """The captures of all ranks that were taken with one."""
    name = OF_A_RANK.sub("", one.name)
    return sorted(
        (path for path in captures if OF_A_RANK.sub("", path.name) == name), key=lambda path: path.name
    )
