"""The trace file, its metadata, and how much is kept."""

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
RECORD_SUFFIX = ".record.json"
TOP = 10
"""Entries of each list in a record; of operators and kernels, those that the analysis was asked for."""

MOST_TOP = 100
"""Of operators and kernels, too: the largest ``capture_top``."""

_MOST = {"top_cpu_ops": MOST_TOP, "top_cuda_ops": MOST_TOP, "memory_peaks": TOP, "findings": TOP}


def record_of(path: Path) -> Path:
    """Where the record of a trace is."""
    return path.with_name(path.name.removesuffix(SUFFIX) + RECORD_SUFFIX)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a capture's record as a whole.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(record, indent=1) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """A record; empty where there is none that can be read."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def claim_of(record: Mapping[str, Any]) -> str:
    """What the leading finding of a capture says; "" while there is none."""
    finding = record.get("finding")
    return str(finding.get("claim", "")) if isinstance(finding, dict) else ""


def records_of(captures: Path) -> list[dict[str, Any]]:
    """The records in a folder of captures, the oldest first; one that cannot be read is left out."""
    found = [record for path in captures.glob(f"*{RECORD_SUFFIX}") if (record := read_record(path))]
    return sorted(found, key=lambda record: (record.get("ended_unix_ns") or 0, record.get("rank") or 0))


def note_analysis(trace: Path, document: Mapping[str, Any]) -> bool:
    """Put the leading finding of a trace's analysis into its record, if it has one without a finding.

    Args:
        trace: the file that was analysed.
        document: what ``otel_train.trace_analysis`` found.

    Returns:
        Whether it was put there.
    """
    path = record_of(trace)
    record = read_record(path)
    if not record or record.get("finding"):
        return False
    leading: Mapping[str, Any] = next(iter(document["findings"]), {})
    try:
        tops = {key: document[key][:most] for key, most in _MOST.items()}
        write_record(path, {**record, "finding": leading, "stages": document["breakdown"]["stages"], **tops})
    except OSError:
        return False  # somebody else's directory, read only: the finding is printed all the same
    return True


OF_A_RANK = re.compile(r"[-_.]?rank_?(\d+)")
_TRACES = (".json", ".json.gz")


def captures_of(run: Path) -> list[Path]:
    """The captures of a run, the oldest first."""
    folders = [run / "captures", *run.glob("rank*/captures")]
    found = [
        path
        for folder in folders
        for path in folder.glob("*")
        if path.name.endswith(_TRACES) and not path.name.endswith(RECORD_SUFFIX)
    ]
    return sorted(found, key=lambda path: (path.lstat().st_mtime_ns, path.name))


def together(captures: Sequence[Path], one: Path) -> list[Path]:
    """The captures of all ranks that were taken with one."""
    name = OF_A_RANK.sub("", one.name)
    return sorted(
        (path for path in captures if OF_A_RANK.sub("", path.name) == name), key=lambda path: path.name
    )


ANALYSIS_S = 300.0
"""Longest an analysis may take; it runs in a process of its own, at the lowest priority."""

_CHUNK_BYTES = 1 << 20
_LEVEL = 4
"""Of gzip: half the time of the default for a few per cent more bytes."""

_STEP = re.compile(rb'("name": ?"%b)(\d+)' % STEP_PREFIX.encode())
_DEVICE_EVENTS = (b'"cat": "kernel"', b'"cat":"kernel"')


ANALYZE = (sys.executable, "-m", "otel_train", "analyze")


class Place(NamedTuple):
    """Where captures go.

    Attributes:
        folder: of all captures of the run, this rank's and others'.
        rank: this process.
        max_bytes: largest file that is kept.
        kept: captures of this rank that are kept; the oldest goes first.
        tensorboard: folder for TensorBoard's profiler plugin; "" for none.
        output: folder that gets each trace as plain ``epoch_N.json`` as well; "" for none.
        analyze: the command that finds something in a trace, and puts it into the record; empty for none.
    """

    folder: Path
    rank: int
    max_bytes: int
    kept: int
    tensorboard: str = ""
    output: str = ""
    analyze: tuple[str, ...] = ANALYZE


class CaptureOutcome(NamedTuple):
    """What came of writing.

    Attributes:
        file: path of the trace; "" where there is none.
        bytes: its size.
        problem: what went wrong; "" if nothing.
        notes: what is missing.
    """

    file: str = ""
    bytes: int = 0
    problem: str = ""
    notes: tuple[str, ...] = ()


class Writing:
    """One capture on its way to the disk, in a thread of its own.

    Args:
        recorded: what the training thread recorded.
        name: of the file, without suffix.
        place: where to.
        profiler: turns the trace into a file.
        first_step: number of the first step in it.
        record: what is known of the capture, with what came of writing.
    """

    def __init__(
        self, recorded: Recorded, name: str, place: Place, profiler: Profiler, *,
        first_step: int, record: Callable[[CaptureOutcome], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.outcome = CaptureOutcome()
        self.record: dict[str, Any] = {}
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
        """Whether everything has been done that will be."""
        return not self._thread.is_alive()

    def end(self, timeout_s: float) -> None:
        """Wait for the file. What looks into it is a process of its own, and goes on."""
        self._written.wait(timeout_s)

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
            with suppress(OSError):
                partial.unlink(missing_ok=True)
                partial.with_suffix(".gz").unlink(missing_ok=True)
        self.record = self._describe(self.outcome)
        path = self._place.folder / (self._name + RECORD_SUFFIX)
        with suppress(OSError):  # where it cannot be written, the event and the log still say it
            write_record(path, self.record)
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
        """Where the trace goes unpacked as well."""
        if self._own_output:
            return _plain_path(Path(self._own_output), self._name, self._place.rank, anew=True)
        return (
            _plain_path(Path(self._place.output), self._name, self._place.rank)
            if self._place.output
            else None
        )

    def _begin_analysis(self) -> subprocess.Popen[bytes] | None:
        """Another process looks into the file: this one has a model to train, and may end before that does."""
        try:
            analysis = subprocess.Popen(  # noqa: S603  # our own command, and a path that we named
                [*self._place.analyze, self.outcome.file], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "OTEL_TRAIN_DISABLED": "true"},
            )  # fmt: skip
        except OSError:
            return None  # no memory for one more process: 'otel-train analyze' can be called later
        _give_way(analysis.pid)
        return analysis

    def _await(self, analysis: subprocess.Popen[bytes], path: Path) -> None:
        try:
            analysis.wait(ANALYSIS_S)
        except subprocess.TimeoutExpired:
            analysis.kill()
            analysis.wait()
        self.record = read_record(path) or self.record


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


def _pinned(path: Path) -> bool:
    return bool(read_record(record_of(path)).get("pinned"))


def _pack(raw: Path, packed: Path, *, first_step: int, plain: Path | None) -> bool:
    """Pack a trace, its steps under the run's own numbers; whether it has work of a device in it.

    Args:
        raw: what the profiler wrote, its steps numbered from 0.
        packed: where to.
        first_step: number of the first.
        plain: where to write it unpacked as well.
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
    """``epoch_N.json``; other ranks', and unless it is to be written anew a second one of that epoch, say so."""
    make_ignored(folder)
    full = name.removesuffix(f"-rank{rank}")
    end = f"-rank{rank}.json" if rank else ".json"
    path = folder / (full.partition("-")[0] + end)
    return folder / (full + end) if path.exists() and not anew else path


def _show_in_tensorboard(path: Path, folder: Path, worker: str) -> None:
    """Under the name by which TensorBoard's profiler plugin finds traces."""
    make_ignored(folder)
    shutil.copyfile(path, folder / f"{worker}.{path.stat().st_mtime_ns // 10**6}.pt.trace{SUFFIX}")
