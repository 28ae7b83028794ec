"""Trace files, their metadata, and retention."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train.files import make_ignored, replace_text
from otel_train.profiler.torch_profiler import STEP_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from otel_train.profiler.requests import Recorded
    from otel_train.profiler.torch_profiler import Profiler

SUFFIX = ".json.gz"
METADATA_SUFFIX = ".record.json"
TOP = 10
"""Entries of each list in the metadata; more operators and kernels if the analysis is asked for them."""

MOST_TOP = 100
"""Most operators and kernels: the upper bound of ``profiler_top``."""

_MOST = {"top_cpu_ops": MOST_TOP, "top_cuda_ops": MOST_TOP, "memory_peaks": TOP, "findings": TOP}


def metadata_path(path: Path) -> Path:
    """Returns the path of a trace's metadata."""
    return path.with_name(path.name.removesuffix(SUFFIX) + METADATA_SUFFIX)


def write_metadata(path: Path, record: Mapping[str, Any]) -> None:
    """Writes the metadata of a capture atomically.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(record, indent=1) + "\n")


def read_metadata(path: Path) -> dict[str, Any]:
    """Returns the metadata of a capture; empty if it is missing or unreadable."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def finding_summary(record: Mapping[str, Any]) -> str:
    """Returns the summary of a capture's leading finding; "" without one."""
    finding = record.get("finding")
    return str(finding.get("claim", "")) if isinstance(finding, dict) else ""


def note_analysis(trace: Path, document: Mapping[str, Any]) -> bool:
    """Adds the leading finding of a trace's analysis to its metadata, if that has none.

    Args:
        trace: the analysed file.
        document: result of ``otel_train.trace_analysis``.

    Returns:
        Whether it was added.
    """
    path = metadata_path(trace)
    record = read_metadata(path)
    if not record or record.get("finding"):
        return False
    leading: Mapping[str, Any] = next(iter(document["findings"]), {})
    try:
        tops = {key: document[key][:most] for key, most in _MOST.items()}
        write_metadata(
            path, {**record, "finding": leading, "stages": document["breakdown"]["stages"], **tops}
        )
    except OSError:
        return False  # a read-only directory: the finding is printed anyway
    return True


OF_A_RANK = re.compile(r"[-_.]?rank_?(\d+)")
_TRACES = (".json", ".json.gz")


def captures_of(run: Path) -> list[Path]:
    """Returns the captures of a run, oldest first."""
    folders = [run / "captures", *run.glob("rank*/captures")]
    found = [
        path
        for folder in folders
        for path in folder.glob("*")
        if path.name.endswith(_TRACES) and not path.name.endswith(METADATA_SUFFIX)
    ]
    return sorted(found, key=lambda path: (path.lstat().st_mtime_ns, path.name))


def together(captures: Sequence[Path], one: Path) -> list[Path]:
    """Returns the captures of all ranks taken together with one."""
    name = OF_A_RANK.sub("", one.name)
    return sorted(
        (path for path in captures if OF_A_RANK.sub("", path.name) == name), key=lambda path: path.name
    )


ANALYSIS_S = 300.0
"""Longest duration of an analysis. It runs in a process of its own at the lowest priority."""

_CHUNK_BYTES = 1 << 20
_LEVEL = 4
"""Of gzip: half the time of the default for a few per cent more bytes."""

_STEP = re.compile(rb'("name": ?"%b)(\d+)' % STEP_PREFIX.encode())
_DEVICE_EVENTS = (b'"cat": "kernel"', b'"cat":"kernel"')


ANALYZE = (sys.executable, "-m", "otel_train", "analyze")


class CaptureStore(NamedTuple):
    """Where captures go.

    Attributes:
        folder: captures of all ranks of the run.
        rank: rank of this process.
        max_bytes: largest file that is kept.
        kept: captures of this rank that are kept; the oldest is removed first.
        tensorboard: folder for TensorBoard's profiler plugin; "" for none.
        output: folder for an uncompressed copy ``epoch_N.json``; "" for none.
        analyze: command that analyses a trace and completes its metadata; empty for none.
    """

    folder: Path
    rank: int
    max_bytes: int
    kept: int
    tensorboard: str = ""
    output: str = ""
    analyze: tuple[str, ...] = ANALYZE


class CaptureOutcome(NamedTuple):
    """Result of writing a capture.

    Attributes:
        file: path of the trace; "" without a trace.
        bytes: its size.
        problem: what went wrong; "" if nothing.
        notes: what is missing.
    """

    file: str = ""
    bytes: int = 0
    problem: str = ""
    notes: tuple[str, ...] = ()


class CaptureWriter:
    """Writes one capture on a thread of its own.

    Args:
        recorded: the recording.
        name: of the file, without suffix.
        place: where to write.
        profiler: writes the trace.
        first_step: number of its first step.
        record: returns the metadata for the result of writing.
    """

    def __init__(
        self, recorded: Recorded, name: str, place: CaptureStore, profiler: Profiler, *,
        first_step: int, record: Callable[[CaptureOutcome], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.outcome = CaptureOutcome()
        self.metadata: dict[str, Any] = {}
        self._trace: Any = recorded.trace
        self._wants_device = any(activity != "cpu" for activity in recorded.plan.options.activities)
        self._missing = bool(recorded.notes)
        self._own_output = recorded.plan.output_dir
        self._name = name
        self._place = place
        self._profiler = profiler
        self._describe = record
        self._first_step = first_step
        self._written = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otel-train-capture", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def end(self, timeout_s: float) -> None:
        """Waits for the file. The analysis is a process of its own and continues."""
        self._written.wait(timeout_s)

    def _run(self) -> None:
        partial = self._place.folder / f".{self._name}.partial"
        try:
            self._place.folder.mkdir(parents=True, exist_ok=True)
            self._write(partial)
        except Exception as error:  # noqa: BLE001  # a full disk or a fault of the profiler: in the metadata
            self.outcome = self.outcome._replace(
                file="", problem=f"not written: {error}".splitlines()[0][:300]
            )
        finally:
            self._trace = None
            with suppress(OSError):
                partial.unlink(missing_ok=True)
                partial.with_suffix(".gz").unlink(missing_ok=True)
        self.metadata = self._describe(self.outcome)
        path = self._place.folder / (self._name + METADATA_SUFFIX)
        with suppress(OSError):  # event and log have the same information
            write_metadata(path, self.metadata)
        analysis = self._begin_analysis() if self.outcome.file and self._place.analyze else None
        self._written.set()
        if analysis is not None:
            self._await(analysis, path)

    def _write(self, partial: Path) -> None:
        self._profiler.save(self._trace, partial)
        self._trace = None
        packed = partial.with_suffix(".gz")
        kernels = _pack(partial, packed, first_step=self._first_step, plain=self._plain())
        size = packed.stat().st_size
        if size > self._place.max_bytes:
            self.outcome = CaptureOutcome(
                bytes=size,
                problem=f"too large: {size} bytes, of {self._place.max_bytes} allowed. Capture fewer steps",
            )
            return
        path = self._place.folder / (self._name + SUFFIX)
        packed.replace(path)
        notes: tuple[str, ...] = ()
        if self._wants_device and not kernels and not self._missing:
            notes = ("no device events: another tool may hold the counters, or they need a permission",)
        self.outcome = CaptureOutcome(str(path), size, notes=notes)
        if self._place.tensorboard:
            _show_in_tensorboard(path, Path(self._place.tensorboard), f"{self._name}.rank{self._place.rank}")
        make_room(self._place, keep=path)

    def _plain(self) -> Path | None:
        """Path of the uncompressed copy."""
        if self._own_output:
            return _plain_path(Path(self._own_output), self._name, self._place.rank, anew=True)
        output = self._place.output
        return _plain_path(Path(output), self._name, self._place.rank) if output else None

    def _begin_analysis(self) -> subprocess.Popen[bytes] | None:
        """Analyses the file in another process, which may outlive this one."""
        try:
            analysis = subprocess.Popen(  # noqa: S603  # our own command, and a path that we named
                [*self._place.analyze, self.outcome.file], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "OTEL_TRAIN_DISABLED": "true"},
            )  # fmt: skip
        except OSError:
            return None  # no memory for another process: 'otel-train analyze' can be called later
        if hasattr(os, "setpriority"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, analysis.pid, 19)
        return analysis

    def _await(self, analysis: subprocess.Popen[bytes], path: Path) -> None:
        try:
            analysis.wait(ANALYSIS_S)
        except subprocess.TimeoutExpired:
            analysis.kill()
            analysis.wait()
        self.metadata = read_metadata(path) or self.metadata


def make_room(place: CaptureStore, *, keep: Path) -> None:
    """Removes this rank's oldest captures beyond the number kept, except pinned ones."""
    mine = sorted(place.folder.glob(f"*-rank{place.rank}{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    loose = [path for path in mine if path != keep and not read_metadata(metadata_path(path)).get("pinned")]
    for path in loose[: max(0, len(mine) - place.kept)]:
        path.unlink(missing_ok=True)
        metadata_path(path).unlink(missing_ok=True)


def _pack(raw: Path, packed: Path, *, first_step: int, plain: Path | None) -> bool:
    """Compresses a trace and replaces its step numbers; returns whether it has device events.

    Args:
        raw: the profiler's file, with steps numbered from 0.
        packed: the compressed file.
        first_step: number of the first step.
        plain: path of an uncompressed copy.
    """

    def number(found: re.Match[bytes]) -> bytes:
        return found[1] + str(first_step + int(found[2])).encode()

    kernels, rest = False, b""
    with raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=_LEVEL) as sink, ExitStack() as more:
        sinks: list[Any] = [sink] if plain is None else [sink, more.enter_context(plain.open("wb"))]
        while chunk := source.read(_CHUNK_BYTES):
            text = rest + chunk
            kernels = kernels or any(mark in text for mark in _DEVICE_EVENTS)
            cut = max(text.rfind(b"{"), 0)  # no event's name is cut in two
            for each in sinks:
                each.write(_STEP.sub(number, text[:cut]))
            rest = text[cut:]
        for each in sinks:
            each.write(_STEP.sub(number, rest))
    return kernels


def _plain_path(folder: Path, name: str, rank: int, *, anew: bool = False) -> Path:
    """``epoch_N.json``; with the rank for other ranks, and with the step for a second one of that epoch unless ``anew``."""
    make_ignored(folder)
    full = name.removesuffix(f"-rank{rank}")
    end = f"-rank{rank}.json" if rank else ".json"
    path = folder / (full.partition("-")[0] + end)
    return folder / (full + end) if path.exists() and not anew else path


def _show_in_tensorboard(path: Path, folder: Path, worker: str) -> None:
    """Copies a trace to the name that TensorBoard's profiler plugin looks for."""
    make_ignored(folder)
    shutil.copyfile(path, folder / f"{worker}.{path.stat().st_mtime_ns // 10**6}.pt.trace{SUFFIX}")
