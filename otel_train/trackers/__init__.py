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
    """A tracker. ``write`` and ``close`` are called on a thread of the tracker, and may block or raise.

    ``wanted`` and ``place`` are called where rows are handed over, and must be quick.
    """

    name: str
    """Name in messages."""

    def wanted(self) -> bool:
        """Returns whether there may be a run to log to."""

    def place(self) -> Any:
        """Returns the run or folder to which the present rows belong, for ``write``; None for none.

        When a row is written, the program's run may be over and the next one open.
        """

    def write(self, row: FlatRow, place: Any, /) -> None:
        """Logs one row."""

    def close(self) -> None:
        """Closes the run or file that the tracker itself opened."""


@fast_dataclass(frozen=True, kw_only=True)
class OpeningTracker:
    """Arguments for opening a tracker."""

    run: Any  # run or writer of the program: a Run of wandb or MLflow, a SummaryWriter; None for none
    # The dict that the program passed; {} for ``on``; None if the tracker is not requested.
    settings: Mapping[str, Any] | None
    folder: Path | None  # default folder for files of the tracker; None without a run directory
    thread: int  # identifier of the training thread
    end_state: Callable[[], str]  # returns how the run ended: one of ``exit_hook.ENDS``
    before_finish: Callable[[], object]  # to call on a thread of the program before it finishes a run


@fast_dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """Setting, checks and constructor of a tracker. Each module of this package has one, ``KIND``."""

    setting: str  # name of the setting and of the package
    imports: tuple[str, ...]  # modules to import at the start if it is requested: that takes seconds
    attribute: str  # attribute by which a run or writer of it is recognised; ``a.b`` for one of an attribute
    named_by: str  # key of the dict for a name that was passed as text; used in a message
    keys: tuple[str, ...] = ()  # allowed keys of the dict; empty if they are those of the package's ``init``
    expected: str  # description of a run or writer of it, for messages
    make: Callable[[OpeningTracker], Tracker]
