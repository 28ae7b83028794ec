"""The artifacts of a run that ends now, where its settings ask for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from otel_train.errors import RunDirectoryError
from otel_train.guard import Guard

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.config import Config

_log = logging.getLogger("otel_train")


def write_at_the_end(config: Config, rank: int, run: Path | None) -> None:
    """Write them, on rank 0; what goes wrong is logged and hurts nobody.

    Args:
        config: of the run.
        rank: this process, or the one that is gone.
        run: the run directory; None where none could be made.
    """
    if not config.artifacts or rank != 0:
        return
    if run is None:
        _log.warning("Artifacts are not written: there is no run directory to make them from")
        return
    from otel_train.artifacts.write import write

    with Guard("artifacts", limit=1):
        try:
            write(run, rank)
        except RunDirectoryError as error:
            _log.warning("Artifacts are not written: %s", error)
