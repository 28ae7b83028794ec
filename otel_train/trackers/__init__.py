"""The interface of trackers: W&B, MLflow, TensorBoard, console."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from otel_train.fast_classes import fast_dataclass

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.trackers.metrics import FlatRow

__all__ = ["OpeningTracker", "Tracker", "TrackerKind"]


class Tracker(Protocol):
    """A tracker. ``write`` and ``close`` are called on its own thread, and may block or raise.

    The other two are called by whoever makes the rows, and are quick.
    """

    name: str
    """As people call it."""

    def wanted(self) -> bool:
        """Returns whether there may be a run to log to."""

    def place(self) -> Any:
        """Returns where a row that is made now belongs, for ``write``; None for nowhere.

        By the time it is written, the program's run may be over and the next one open.
        """

    def write(self, row: FlatRow, place: Any, /) -> None:
        """Logs one row."""

    def close(self) -> None:
        """Gives back what was opened."""


@fast_dataclass(frozen=True, kw_only=True)
class OpeningTracker:
    """Arguments for opening a tracker."""

    run: Any  # run or writer that the program gave: wandb's Run, MLflow's, a SummaryWriter
    # The dict that it gave; {} for ``on``; None where no tracker was asked for.
    settings: Mapping[str, Any] | None
    folder: Path | None  # where files of a tracker go by default; None without a run directory
    thread: int  # the training thread
    before_finish: Callable[[], object]  # for a thread of the program's that is about to finish a run


@fast_dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """Setting, checks and constructor of a tracker. Each module of this package has one, ``KIND``."""

    setting: str  # its name, and that of the package that is imported
    imports: tuple[str, ...]  # where it is asked for, at the start: that takes seconds
    attribute: str  # what a run or writer of it has, to be distinguished from anything else
    named_by: str  # key of its dict that gives a name
    keys: tuple[str, ...] = ()  # of its dict; empty where that is passed on
    expected: str  # a run or writer of it, in words
    make: Callable[[OpeningTracker], Tracker]
