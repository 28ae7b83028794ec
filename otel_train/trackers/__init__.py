"""Trackers of experiments: where rows of flat metrics go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from otel_train.fast_classes import fast_dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from otel_train.trackers.metrics import FlatRow

__all__ = ["OpeningTracker", "Tracker", "TrackerKind"]


class Tracker(Protocol):
    """One tracker. ``write`` and ``close`` are called from one thread of its own, and may take long or raise.

    The other two are called by whoever makes the rows, and are quick.
    """

    name: str
    """As people call it."""

    def wanted(self) -> bool:
        """Whether there may be a run to log to."""

    def place(self) -> Any:
        """Where a row that is made now belongs, for ``write``; None for nowhere.

        By the time it is written, the program's run may be over and the next one open.
        """

    def write(self, row: FlatRow, place: Any, /) -> None:
        """Log one row."""

    def close(self) -> None:
        """Give back what was opened."""


@fast_dataclass(frozen=True, kw_only=True)
class OpeningTracker:
    """What a tracker is opened with.

    Attributes:
        run: run or writer that the program gave; None where it gave none.
        settings: dict that the program gave; empty where the setting is ``on``; None where no tracker was asked for.
        folder: where files of a tracker go by default; None without a run directory.
        thread: the training thread.
        before_finish: called on a thread of the program's that is about to finish a run that rows go to.
    """

    run: Any  # Any: wandb's Run, MLflow's, a SummaryWriter
    settings: Mapping[str, Any] | None
    folder: Path | None
    thread: int
    before_finish: Callable[[], object]


@fast_dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """What is known of a tracker before it is used. Each module of this package has one, ``KIND``.

    Attributes:
        setting: name of its setting, and of the package that is imported.
        imports: modules that are imported where it is asked for: at the start, because that takes seconds.
        attribute: what a run or writer of it has, to be distinguished from anything else.
        named_by: key of its dict that gives a name.
        keys: what its dict may have in it; empty where it is passed on.
        expected: a run or writer of it, in words.
    """

    setting: str
    imports: tuple[str, ...]
    attribute: str
    named_by: str
    keys: tuple[str, ...] = ()
    expected: str
    make: Callable[[OpeningTracker], Tracker]
