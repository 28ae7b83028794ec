"""Logs rows to TensorBoard event files."""

from __future__ import annotations

import sys
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train.config.settings import TRACKER_MODULES
from otel_train.datamodel import NS_PER_S
from otel_train.files import make_folder
from otel_train.trackers import OpeningTracker, TrackerKind

if TYPE_CHECKING:
    from otel_train.trackers.metrics import FlatRow


class TensorBoardTracker:
    """Writes event files to a folder, or to a given ``SummaryWriter`` by ``add_scalar(tag, value, step)``.

    Args:
        folder: folder for event files; None without a run directory.
        writer: the given ``SummaryWriter``; None for none.
        asked: write also if the program does not use TensorBoard.
        is_of_run: the folder is in the run directory.
    """

    name = "TensorBoard"

    def __init__(
        self, folder: Path | None, writer: Any = None, *, asked: bool = False, is_of_run: bool = False
    ) -> None:  # Any: see above
        self._folder = folder
        self._given = writer
        self._requested = asked
        self._is_of_run = is_of_run
        self._writer: Any = None

    def wanted(self) -> bool:
        """Returns whether event files are to be written."""
        if self._given is not None or self._requested:
            return True
        return any(name in sys.modules for name in TRACKER_MODULES["tensorboard"]) and self._is_installed

    @cached_property
    def _is_installed(self) -> bool:
        """Whether event files can be written: tensorboardX does not need the package tensorboard."""
        return find_spec("tensorboard") is not None

    def place(self) -> Any:
        """Returns the given writer, else the folder."""
        return self._given if self._given is not None else self._folder

    def write(self, row: FlatRow, place: Any) -> None:
        """Writes a row as scalars to the given writer, else as one event to the event file."""
        if self._given is not None:
            for key, value in row.values.items():
                place.add_scalar(key, value, row.step)
            return
        if self._writer is None:
            files: Any = import_module("tensorboard.summary.writer.event_file_writer")
            if self._is_of_run:  # EventFileWriter would make it with the mode of the umask
                make_folder(Path(place))
            self._writer = files.EventFileWriter(str(place))
        event: Any = import_module("tensorboard.compat.proto.event_pb2").Event
        summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
        values = [summary.Value(tag=key, simple_value=value) for key, value in row.values.items()]
        self._writer.add_event(
            event(wall_time=row.unix_ns / NS_PER_S, step=row.step, summary=summary(value=values))
        )
        self._writer.flush()  # for a running TensorBoard

    def close(self) -> None:
        """Closes the event file; a given writer stays open."""
        if self._writer is not None:
            self._writer.close()


def _make(opening: OpeningTracker) -> TensorBoardTracker:
    settings = opening.settings
    given = (settings or {}).get("log_dir")
    folder = opening.folder if given is None else Path(given)
    return TensorBoardTracker(folder, opening.run, asked=settings is not None, is_of_run=given is None)


KIND = TrackerKind(
    setting="tensorboard",
    imports=("tensorboard.summary.writer.event_file_writer", "tensorboard.compat.proto.event_pb2"),
    attribute="add_scalar",
    named_by="log_dir",
    keys=("log_dir",),
    expected="a SummaryWriter",
    make=_make,
)
