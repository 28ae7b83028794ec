"""Files that are replaced as a whole, so that nobody ever reads half of one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from typing import TYPE_CHECKING

from otel_train.files import FOLDER_MODE, create

if TYPE_CHECKING:
    from pathlib import Path


def make_ignored(folder: Path) -> None:
    """Make a folder of ours that is missing, for our user alone, and let git ignore it. One that is there stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        return
    replace_text(folder / ".gitignore", "*\n")


def replace_json(path: Path, value: object) -> None:
    """Replace a file with a JSON document as a whole.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    replace_text(path, dump_json(value, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replace a file as a whole; only our user may read it.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        fresh.unlink(missing_ok=True)  # of a process with our number that was killed here
        with os.fdopen(create(fresh), "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text)
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def dump_json(value: object, indent: int | None = None) -> str:
    """JSON that every parser takes: NaN and infinities become null, foreign objects their text."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=str, ensure_ascii=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, default=str, ensure_ascii=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
