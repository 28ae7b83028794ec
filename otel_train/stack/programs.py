"""Where the programs of the stack are, or how to get them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from otel_train.errors import StackError

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES = {
    "collector": ("otelcol-train", "otelcol-contrib"),
    "prometheus": ("prometheus",),
    "alertmanager": ("alertmanager", "prometheus-alertmanager"),
    "jaeger": ("jaeger",),
    "promtool": ("promtool",),
    "amtool": ("amtool",),
    "compose": ("docker-compose",),
    "kustomize": ("kustomize",),
}
"""What a component's program may be called. Debian calls Alertmanager by the second name."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where ``tools/get_components.sh`` puts the programs."""
    named = environ.get("OTEL_TRAIN_TEST_BIN")
    if named:
        return Path(named)
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "otel-train" / "stack" / "bin"


def find(component: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The program of a component: the cache first, whose version is known, then PATH.

    Raises:
        StackError: it is in neither; the message says how to get it.
    """
    cache = cache_folder(environ)
    for name in NAMES[component]:
        if os.access(cache / name, os.X_OK):
            return cache / name
    for name in NAMES[component]:
        found = shutil.which(name, path=environ.get("PATH"))
        if found:
            return Path(found)
    raise StackError(
        f"{component}: no program {' or '.join(NAMES[component])} in {cache} or on PATH. In a checkout run "
        "tools/get_components.sh, which builds what is missing from its Go modules; elsewhere put the project's "
        "own release into that folder"
    )
