"""What a process leaves with its launcher, in case it is killed."""

from __future__ import annotations

import os
import pickle
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.export.estate import Estate
from otel_train.export.pump import Route
from otel_train.guard import Guard
from otel_train.launch.names import WILL

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.records import Batch
    from otel_train.session import Session

_BREATH_S = 50e-6


class Will:
    """Writes down a session's estate with every export, and takes it back when the session closes.

    A pickle, because the account is continued from it edge by edge: figures that were sent never go back and
    are never counted twice. It lies in the launcher's private folder, and only the launcher reads it.

    Args:
        session: whose.
        folder: of the launcher.
    """

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self._path = folder / f"{os.getpid()}{WILL}"

    @classmethod
    def deposit(cls, session: Session, folder: Path) -> None:
        """Keep a will for as long as ``session`` is open."""
        session.add_route(Route(cls(session, folder), Guard("will"), session.config.export_every_s))

    def export(self, batch: Batch) -> None:
        """Write the estate as it is now, in the beginning and when figures are sent."""
        begins = not (batch.spans or batch.events or batch.final)
        if (batch.snapshot is not None or begins) and self._path.parent.is_dir():
            self.write()

    def write(self) -> None:
        """Write the estate, replacing the one before as a whole."""
        estate = self._session.estate()
        if estate is None:  # nothing could be found of it later
            return
        estate = estate._replace(
            config=replace(estate.config, capture_token="")
        )  # nobody is captured any more
        part = self._path.with_suffix(".part")
        with part.open("wb") as opened:
            pickle.Pickler(_Breathing(opened), protocol=5).dump(estate)
        part.replace(self._path)

    def close(self, timeout_s: float) -> None:
        """The session has ended by itself."""
        del timeout_s
        self._path.unlink(missing_ok=True)


class _Breathing(NamedTuple):
    """A file that lets others have the interpreter after each of the pickler's pieces, 64 KiB or so."""

    file: Any

    def write(self, data: Any) -> int:  # Any: a buffer
        written: int = self.file.write(data)
        time.sleep(_BREATH_S)
        return written


def read_wills(folder: Path) -> list[Estate]:
    """The estates of all sessions that have not closed. One that cannot be read is left out."""
    found = []
    for path in sorted(folder.glob(f"*{WILL}")):
        try:
            # The folder is ours alone, and so is what our own processes wrote there.
            estate = pickle.loads(path.read_bytes())  # noqa: S301  # see above
        except (OSError, EOFError, AttributeError, ImportError, pickle.UnpicklingError):
            continue
        if isinstance(estate, Estate):
            found.append(estate)
    return found
