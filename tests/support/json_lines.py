"""Files of JSON lines, read as a test wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from otel_train.files import parse_line, predecessor


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every whole object of a file and its rotated predecessor, oldest first; none of a file that does not exist."""
    parts = [part.read_bytes() for part in (predecessor(path), path) if part.exists()]
    values = [parse_line(line) for part in parts for line in part.splitlines(keepends=True)]
    return [value for value in values if value is not None]
