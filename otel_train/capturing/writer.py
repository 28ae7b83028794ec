"""The file of a capture, written, compressed and looked into beside training."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from otel_train.capturing.plan import Recorded
    from otel_train.capturing.profiler import Profiler

SUFFIX = ".json.gz"
RECORD_SUFFIX = ".record.json"
ANALYSIS_S = 300.0
"""Longest an analysis may take; it runs in a process of its own, at the lowest priority."""

_CHUNK_BYTES = 1 << 20
_LEVEL = 4
"""Of gzip: half the time of the default for a few per cent more bytes."""

_DEVICE_EVENTS = (b'"cat": "kernel"', b'"cat":"kernel"')


class Place(NamedTuple):
    """Where captures go.

    Attributes:
        folder: of all captures of the run, this rank's and others'.
        rank: this process.
        max_bytes: largest file that is kept.
        kept: captures of this rank that are kept; the oldest goes first.
        tensorboard: folder for TensorBoard's profiler plugin; "" for none.
        analyze: the command that finds something in a trace; empty for none.
    """

    folder: Path
    rank: int
    max_bytes: int
    kept: int
    tensorboard: str = ""
    analyze: tuple[str, ...] = (sys.executable, "-m", "otel_train", "analyze", "--json")


class Outcome(NamedTuple):
    """What came of writing.

    Attributes:
        file: path of the trace; "" where there is none.
        bytes: its size.
        problem: what went wrong; "" if nothing.
        notes: what is missing.
        finding: the leading finding, as its fields.
    """

    file: str = ""
    bytes: int = 0
    problem: str = ""
    notes: tuple[str, ...] = ()
    finding: Mapping[str, Any] = {}


class Writing:
    """One capture on its way to the disk, in a thread of its own.

    Args:
        recorded: what the training thread recorded.
        name: of the file, without suffix.
        place: where to.
        profiler: turns the trace into a file.
    """

    def __init__(self, recorded: Recorded, name: str, place: Place, profiler: Profiler) -> None:
        self.outcome = Outcome()
        self._trace: Any = recorded.trace
        self._wants_device = any(activity != "cpu" for activity in recorded.plan.options.activities)
        self._missing = bool(recorded.notes)
        self._name = name
        self._place = place
        self._profiler = profiler
        self._analysis: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="otel-train-capture", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether everything has been done that will be."""
        return not self._thread.is_alive()

    def end(self, timeout_s: float) -> None:
        """Wait for the file, not for what is found in it."""
        self._stopped = True
        analysis = self._analysis
        if analysis is not None:
            analysis.kill()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        partial = self._place.folder / f".{self._name}.partial"
        try:
            self._place.folder.mkdir(parents=True, exist_ok=True)
            self._write(partial)
        except Exception as error:  # noqa: BLE001  # a full disk, a profiler's fault: said in the record
            self.outcome = self.outcome._replace(
                file="", problem=f"not written: {error}".splitlines()[0][:300]
            )
        finally:
            self._trace = None
            partial.unlink(missing_ok=True)
            partial.with_suffix(".gz").unlink(missing_ok=True)

    def _write(self, partial: Path) -> None:
        self._profiler.save(self._trace, partial)
        self._trace = None
        packed = partial.with_suffix(".gz")
        kernels = _compress(partial, packed)
        size = packed.stat().st_size
        if size > self._place.max_bytes:
            self.outcome = Outcome(
                bytes=size,
                problem=f"too large: {size} bytes, of {self._place.max_bytes} allowed. Capture fewer steps",
            )
            return
        path = self._place.folder / (self._name + SUFFIX)
        packed.replace(path)
        notes: tuple[str, ...] = ()
        if self._wants_device and not kernels and not self._missing:
            notes = ("no device events: another tool may hold the counters, or they need a permission",)
        self.outcome = Outcome(str(path), size, notes=notes)
        if self._place.tensorboard:
            _show_in_tensorboard(path, Path(self._place.tensorboard), f"{self._name}.rank{self._place.rank}")
        make_room(self._place, keep=path)
        if self._place.analyze and not self._stopped:
            self.outcome = self.outcome._replace(finding=self._look_into(path))

    def _look_into(self, path: Path) -> Mapping[str, Any]:
        """The leading finding, found by another process: this one has a model to train."""
        with subprocess.Popen(  # noqa: S603  # our own command, and a path that we named
            [*self._place.analyze, str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env={**os.environ, "OTEL_TRAIN_DISABLED": "true"},
        ) as self._analysis:  # fmt: skip
            _give_way(self._analysis.pid)
            try:
                said, _ = self._analysis.communicate(timeout=ANALYSIS_S)
            except subprocess.TimeoutExpired:
                self._analysis.kill()
                return {}
        if self._analysis.returncode:
            return {}
        try:
            findings = json.loads(said).get("findings") or [{}]
        except (ValueError, AttributeError):
            return {}
        return findings[0] if isinstance(findings[0], dict) else {}


def _give_way(pid: int) -> None:
    """The lowest priority, where the system has one: training goes first."""
    if hasattr(os, "setpriority"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, 19)


def make_room(place: Place, *, keep: Path) -> None:
    """Remove this rank's oldest captures beyond the number kept; one that is pinned stays."""
    mine = sorted(place.folder.glob(f"*-rank{place.rank}{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    loose = [path for path in mine if path != keep and not _pinned(path)]
    for path in loose[: max(0, len(mine) - place.kept)]:
        path.unlink(missing_ok=True)
        record_of(path).unlink(missing_ok=True)


def record_of(path: Path) -> Path:
    """Where the record of a trace is."""
    return path.with_name(path.name.removesuffix(SUFFIX) + RECORD_SUFFIX)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a capture's record as a whole.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def _pinned(path: Path) -> bool:
    try:
        return bool(json.loads(record_of(path).read_text())["pinned"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _compress(plain: Path, packed: Path) -> bool:
    """Pack a trace; whether it has work of a device in it."""
    kernels, tail = False, b""
    with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=_LEVEL) as sink:
        while chunk := source.read(_CHUNK_BYTES):
            sink.write(chunk)
            kernels = kernels or any(mark in tail + chunk for mark in _DEVICE_EVENTS)
            tail = chunk[-32:]
    return kernels


def _show_in_tensorboard(path: Path, folder: Path, worker: str) -> None:
    """Under the name by which TensorBoard's profiler plugin finds traces."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, folder / f"{worker}.{path.stat().st_mtime_ns // 10**6}.pt.trace{SUFFIX}")
