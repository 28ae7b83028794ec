"""How a launcher learns what became of the ranks below it: each agent leaves a file in the launcher's folder."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from otel_train.atomic import replace_json
from otel_train.errors import RunDirectoryError
from otel_train.files import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER: Final = "OTEL_TRAIN_LAUNCH"
"""Names the launcher's private folder to the programs below it. It is gone when the launcher ends."""

PATIENCE_S: Final = 3.0
"""How long processes that the program left behind may take to end by themselves."""

WRITING_S: Final = 10.0
"""How long the agent of a rank that is gone may take to count it to its end."""

_OPEN, _ENDED = ".open", ".ended"
_POLL_S = 0.02


class RankEnd(NamedTuple):
    """A rank that has ended without a word, and was counted to its end by its agent.

    Attributes:
        rank_path: its folder.
        rank: which.
        steps: training steps counted, up to the end.
        lost: edges that had been overwritten before anybody counted them.
    """

    rank_path: Path
    rank: int
    steps: int
    lost: int


class LauncherFolder:
    """Tells a launcher that a rank is observed, and how it ended. Does nothing without a launcher.

    Args:
        environ: of the rank.
        pid: of the rank.
    """

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        folder = environ.get(FOLDER, "")
        self._path = Path(folder) / str(pid) if folder else None

    def opened(self, agent: int = 0) -> None:
        """The rank is observed by this process; 0: by one that starts."""
        self._write(_OPEN, {"agent": agent})

    def ended(self, end: RankEnd) -> None:
        """The rank is gone, and was counted to its end."""
        self._write(_ENDED, {**end._asdict(), "rank_path": str(end.rank_path)})
        self.closed()

    def closed(self) -> None:
        """There is nothing more to wait for."""
        if self._path is not None:
            with suppress(OSError):
                self._path.with_suffix(_OPEN).unlink()

    def _write(self, suffix: str, document: dict[str, object]) -> None:
        if self._path is None:
            return
        with suppress(OSError):  # the launcher is gone, and its folder
            replace_json(self._path.with_suffix(suffix), document)


def wait_for_ends(folder: Path) -> list[RankEnd]:
    """The ranks below a launcher that ended without a word, in order. Waits until their agents have counted them.

    Args:
        folder: of the launcher.
    """
    began_s = time.monotonic()
    while any(_is_worth_waiting(path, time.monotonic() - began_s) for path in folder.glob(f"*{_OPEN}")):
        time.sleep(_POLL_S)
    found = []
    for path in folder.glob(f"*{_ENDED}"):
        with suppress(RunDirectoryError, TypeError, KeyError):
            said = read_json(path)
            found.append(RankEnd(Path(said["rank_path"]), said["rank"], said["steps"], said["lost"]))
    return sorted(found, key=lambda end: end.rank)


def _is_worth_waiting(path: Path, waited_s: float) -> bool:
    if _lives(int(path.stem)):
        return waited_s < PATIENCE_S
    with suppress(RunDirectoryError, TypeError, KeyError):
        agent = read_json(path)["agent"]
        return waited_s < WRITING_S and (agent == 0 or _lives(agent))
    return False


def _lives(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
