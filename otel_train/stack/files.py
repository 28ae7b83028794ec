"""Where the configuration files of the stack lie, and what they are told by the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from otel_train.errors import StackError

if TYPE_CHECKING:
    from collections.abc import Mapping

MARK = "docker-compose.yml"


def folder() -> Path:
    """The folder with ``docker-compose.yml``, ``.env``, ``deploy`` and ``grafana``.

    A wheel carries them beside this module; a checkout has them at its top.

    Raises:
        StackError: they are in neither place.
    """
    here = Path(__file__).resolve()
    for candidate in (here.parent / "files", here.parents[2]):
        if (candidate / MARK).is_file() and (candidate / "deploy").is_dir():
            return candidate
    raise StackError(
        f"the stack's files are not beside {here.parent}: this installation of otel-train is not complete. "
        "Install it again from a wheel or a checkout"
    )


def settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The names of ``.env`` with their values; the environment wins, as it does for compose."""
    found = {}
    for line in (folder() / ".env").read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not name.startswith("#"):
            found[name] = environ.get(name) or value
    return found


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the stack keeps what it writes: data, logs, process ids. Not made."""
    home = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "otel-train" / "stack"
