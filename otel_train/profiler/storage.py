"""Trace files, their metadata, and retention."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from otel_train.config.settings import MOST_TOP
from otel_train.datamodel import CAPTURES_FOLDER
from otel_train.errors import RunDirectoryError
from otel_train.files import (
    OF_A_RANK,
    changed_ns,
    make_gitignored_folder,
    names_in,
    rank_folders,
    read_json,
    replace_text,
)
from otel_train.profiler.torch_profiler import STEP_PREFIX, Profiler
from otel_train.safety import DaemonThread, interpreter, signals_unblocked

SUFFIX = ".json.gz"
METADATA_SUFFIX = ".record.json"
TOP = 10
"""Entries of each list in the metadata; more operators and kernels if the analysis is asked for them."""

_MOST = {"top_cpu_ops": MOST_TOP, "top_cuda_ops": MOST_TOP, "memory_peaks": TOP, "findings": TOP}


def metadata_path(path: Path) -> Path:
    """Returns the path of a trace's metadata."""
    return path.with_name(path.name.removesuffix(".gz").removesuffix(".json") + METADATA_SUFFIX)


def write_metadata(path: Path, record: Mapping[str, Any]) -> None:
    """Writes the metadata of a capture atomically; raises OSError if it cannot be written."""
    replace_text(path, json.dumps(record, indent=1) + "\n")


def read_metadata(path: Path) -> dict[str, Any]:
    """Returns the metadata of a capture; empty if it is missing or unreadable."""
    try:
        return read_json(path)
    except RunDirectoryError:
        return {}


def finding_summary(record: Mapping[str, Any]) -> str:
    """Returns the summary of a capture's leading finding; "" without one."""
    finding = record.get("finding")
    return str(finding.get("summary", "")) if isinstance(finding, dict) else ""


def note_analysis(trace: Path, document: Mapping[str, Any]) -> None:
    """Adds the leading finding of ``otel_train.trace_analysis`` to a trace's metadata if that has none."""
    path = metadata_path(trace)
    record = read_metadata(path)
    if not record or record.get("finding"):
        return
    leading: Mapping[str, Any] = next(iter(document["findings"]), {})
    tops = {key: document[key][:most] for key, most in _MOST.items()}
    with suppress(OSError):  # a read-only directory: the finding is printed anyway
        stages = document["breakdown"]["stages"]
        write_metadata(path, {**record, "finding": leading, "stages": stages, **tops})


def is_trace(name: str) -> bool:
    """Returns whether a file in a folder of captures is a trace, by its name."""
    return name.endswith((".json", SUFFIX)) and not name.endswith(METADATA_SUFFIX)


def captures_of(run: Path, *ranks: Path) -> list[Path]:
    """Returns the captures of a run, oldest first. ``ranks`` are folders of ranks to search; all if none are given."""
    folders = [folder / CAPTURES_FOLDER for folder in (run, *(ranks or rank_folders(run).values()))]
    found = [folder / name for folder in folders for name in filter(is_trace, names_in(folder))]
    return sorted(found, key=lambda path: (changed_ns(path), path.name))


def taken_together(captures: Sequence[Path], one: Path) -> list[Path]:
    """Returns the captures of all ranks taken together with one."""
    name = OF_A_RANK.sub("", one.name)
    found = [path for path in captures if OF_A_RANK.sub("", path.name) == name]
    return sorted(found, key=lambda path: path.name)


ANALYSIS_S = 300.0
"""Longest duration of an analysis. It runs in a process of its own at the lowest priority."""

_CHUNK_BYTES = 1 << 20
_LEVEL = 4
"""Of gzip: takes half the time of the default level for a few per cent more bytes."""

_STEP = re.compile(rb'("name": ?")(%b)(\d+)' % STEP_PREFIX.encode())
_DEVICE_EVENTS = (b'"cat": "kernel"', b'"cat":"kernel"')


ANALYZE = (interpreter(), "-m", "otel_train", "analyze")


class CaptureStore(NamedTuple):
    """Where captures are stored, how they are limited, and how they are analysed."""

    folder: Path
    rank: int
    max_bytes: int  # of a file
    kept: int  # captures of this rank; the oldest is removed first
    tensorboard: str = ""  # folder for TensorBoard's profiler plugin
    output: str = ""  # folder for an uncompressed copy ``epoch_N.json``
    analyze: tuple[str, ...] = ANALYZE  # command that analyses a trace and completes its metadata


class CaptureOutcome(NamedTuple):
    """Result of writing a capture."""

    file: str = ""
    bytes: int = 0
    problem: str = ""
    missing: tuple[str, ...] = ()  # what is not in the trace, and why


class CaptureJob(NamedTuple):
    """A capture to write. Plain data, because it is passed to another process."""

    place: CaptureStore
    name: str  # of the file, without rank and suffix; a number is added if it exists
    record: dict[str, Any]  # the metadata, without the result of writing
    first_step: int
    made_s: float  # when the metadata was made, on the monotonic clock of the system
    wants_device: bool = False  # device events must be in the trace, or a note says that they are missing
    output: str = ""  # folder of an uncompressed copy of this capture, which is overwritten
    problem: str = ""  # why there is no trace, if writing it has failed

    def as_text(self) -> str:
        """Returns the job as JSON."""
        return json.dumps({**self._asdict(), "place": self.place._asdict()}, default=str)

    @classmethod
    def of_text(cls, text: str) -> CaptureJob:
        """Returns the job of that JSON."""
        fields = json.loads(text)
        place = CaptureStore(**fields.pop("place"))
        return cls(place._replace(folder=Path(place.folder), analyze=tuple(place.analyze)), **fields)


Stored = tuple[CaptureOutcome, dict[str, Any]]
"""Result of writing and metadata of a capture: yielded when it is written, and again when it is analysed."""


class CaptureWriter:
    """Writes one capture in a separate process and waits for it on a thread. This process opens no file of the run.

    torch writes a trace to a path only, so the path is a link to a file in memory, whose descriptor the other process gets.
    If no process can be started, the thread writes.
    """

    def __init__(self, job: CaptureJob, trace: Any, profiler: Profiler) -> None:
        self.outcome = CaptureOutcome()
        self.metadata = _metadata(job, self.outcome)
        self._job = job
        self._trace = trace
        self._has_trace = trace is not None
        self._profiler = profiler
        self._written = threading.Event()
        self._thread = DaemonThread(target=self._run, name="otel-train-capture", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def end(self, timeout_s: float) -> None:
        """Waits for the files, at most ``timeout_s``. After that, the process that writes them continues."""
        if not self._written.wait(timeout_s) and self._has_trace:
            self._fail(f"not written within {timeout_s:.1f} s")

    def _run(self) -> None:
        job, trace = self._job, None
        try:
            trace = self._saved()
        except Exception as error:  # noqa: BLE001  # no memory is left, or a fault of the profiler: in the metadata
            job = job._replace(problem=_not_written(error))
        try:
            for stored in _in_a_process(job, trace):
                self.outcome, self.metadata = stored
                self._written.set()
        except Exception as error:  # noqa: BLE001  # a process that was killed
            if not self._written.is_set():
                self._fail(_not_written(error))
        finally:
            self._written.set()
            if trace is not None:
                trace.close()

    def _fail(self, problem: str) -> None:
        self.outcome = CaptureOutcome(problem=problem)
        self.metadata = _metadata(self._job, self.outcome)

    def _saved(self) -> BinaryIO | None:
        """Returns the trace as an open file in memory; None without a trace."""
        trace, self._trace = self._trace, None
        if trace is None:
            return None
        shared = "/dev/shm"  # noqa: S108  # links alone lie there: the folder is this user's, with a name that is new
        place = shared if os.access(shared, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="otel_train-", dir=place) as folder:
            path = Path(folder) / "trace.json"
            if not hasattr(os, "memfd_create"):
                self._profiler.save(trace, path)
                return path.open("rb")  # which can be read after the folder is removed
            memory_file = os.fdopen(os.memfd_create("otel_train_trace", os.MFD_CLOEXEC), "rb")
            # torch writes to the second path and renames it to the first.
            for link in (path, path.with_name(path.name + ".tmp")):
                link.symlink_to(f"/proc/{os.getpid()}/fd/{memory_file.fileno()}")
            try:
                self._profiler.save(trace, path)
            except BaseException:
                memory_file.close()
                raise
            return memory_file


def _not_written(error: Exception) -> str:
    return f"not written: {error}".splitlines()[0][:300]


def _in_a_process(job: CaptureJob, trace: BinaryIO | None) -> Iterator[Stored]:
    """Yields the output of the writing process; raises RuntimeError if that fails."""
    command = (interpreter(), "-m", __name__, job.as_text())
    try:
        process = _start(command, stdin=trace or subprocess.DEVNULL, stdout=subprocess.PIPE)
    except OSError:  # no process can be started
        yield from store(job, trace)
        return
    with process:
        for line in process.stdout or ():
            outcome, metadata = json.loads(line)
            file, size, problem, missing = outcome
            yield CaptureOutcome(file, size, problem, tuple(missing)), metadata
    if process.returncode:
        raise RuntimeError(f"the process that writes it ended with {process.returncode}")


def _start(
    command: Sequence[str], *, stdin: BinaryIO | int = subprocess.DEVNULL, stdout: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Starts a process that may outlive this one, and that otel_train does not instrument."""
    with signals_unblocked():
        return subprocess.Popen(  # noqa: S603  # our own commands, and paths that we named
            command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "OTEL_TRAIN_DISABLED": "true"},
        )  # fmt: skip


def _metadata(job: CaptureJob, outcome: CaptureOutcome) -> dict[str, Any]:
    """Returns the metadata with the result of writing."""
    record = job.record
    return {
        **record, "file": Path(outcome.file).name, "bytes": outcome.bytes,
        "problem": outcome.problem or record["problem"], "warnings": [*record["warnings"], *outcome.missing],
        "seconds": record["seconds"] + time.monotonic() - job.made_s,
    }  # fmt: skip


def store(job: CaptureJob, trace: BinaryIO | None) -> Iterator[Stored]:
    """Writes a capture: trace, metadata and copies; then analyses it in another process."""
    place, outcome = job.place, CaptureOutcome(problem=job.problem)
    name = f"{job.name}-rank{place.rank}"
    try:
        place.folder.mkdir(parents=True, exist_ok=True)
        name = _free_name(place, job.name)
        if trace is not None:
            outcome = _write_trace(job, name, trace)
    except Exception as error:  # noqa: BLE001  # a full disk, for example: in the metadata
        outcome = CaptureOutcome(problem=_not_written(error))
    metadata = _metadata(job, outcome)
    path = place.folder / (name + METADATA_SUFFIX)
    with suppress(OSError):  # event and log have the same information
        write_metadata(path, metadata)
    with suppress(OSError):
        remove_oldest(place, keep=path)
    analysis = _begin_analysis(place, outcome.file) if outcome.file and place.analyze else None
    yield outcome, metadata
    if analysis is not None:
        try:
            analysis.wait(ANALYSIS_S)
        except subprocess.TimeoutExpired:
            analysis.kill()
            analysis.wait()
        yield outcome, read_metadata(path) or metadata


def _free_name(place: CaptureStore, wanted: str) -> str:
    name, number = f"{wanted}-rank{place.rank}", 1
    while (place.folder / (name + METADATA_SUFFIX)).exists():
        number += 1
        name = f"{wanted}-{number}-rank{place.rank}"
    return name


def _write_trace(job: CaptureJob, name: str, trace: BinaryIO) -> CaptureOutcome:
    place = job.place
    if not os.fstat(trace.fileno()).st_size:
        return CaptureOutcome(
            problem="not written: the profiler wrote an empty file. Check that /proc is mounted and memory is free"
        )
    path, plain = place.folder / (name + SUFFIX), _plain(job, name)
    paths = [path] if plain is None else [plain, path]
    partials = [each.with_name(f".{each.name}.partial") for each in paths]
    try:
        kernels = _pack(job, trace, partials[-1], plain=None if plain is None else partials[0])
        size = partials[-1].stat().st_size
        if size > place.max_bytes:
            problem = f"too large: {size} bytes, of {place.max_bytes} allowed. Capture fewer steps"
            return CaptureOutcome(bytes=size, problem=problem)
        for partial, each in zip(partials, paths, strict=True):
            partial.replace(each)
    finally:
        for partial in partials:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    if place.tensorboard:
        _show_in_tensorboard(path, Path(place.tensorboard), f"{name}.rank{place.rank}")
    absent = job.wants_device and not kernels
    note = "no device events: another tool may hold the counters, or they need a permission"
    return CaptureOutcome(str(path), size, missing=(note,) if absent else ())


def _plain(job: CaptureJob, name: str) -> Path | None:
    """Returns the path of the uncompressed copy: ``epoch_N.json``, with the rank for other ranks.

    If the configured folder has that file, the step is added to the name; ``job.output`` is overwritten.
    """
    output, rank = job.output or job.place.output, job.place.rank
    if not output:
        return None
    folder = Path(output)
    make_gitignored_folder(folder)
    full = name.removesuffix(f"-rank{rank}")
    end = f"-rank{rank}.json" if rank else ".json"
    path = folder / (full.partition("-")[0] + end)
    return folder / (full + end) if path.exists() and not job.output else path


def _begin_analysis(place: CaptureStore, file: str) -> subprocess.Popen[bytes] | None:
    """Analyses the file in a process of the lowest priority."""
    try:
        analysis = _start((*place.analyze, file))
    except OSError:
        return None  # no memory for another process: 'otel-train analyze' can be called later
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, analysis.pid, 19)
    return analysis


def remove_oldest(place: CaptureStore, *, keep: Path) -> None:
    """Removes this rank's oldest captures beyond the number kept, except pinned ones; likewise metadata without a trace.

    ``keep`` is the path of the metadata of a capture that is kept.
    """
    mine = f"-rank{place.rank}"
    traces = [(path, metadata_path(path)) for path in place.folder.glob(f"*{mine}{SUFFIX}")]
    described = {record for _, record in traces}
    records = set(place.folder.glob(f"*{mine}{METADATA_SUFFIX}"))
    for found in (traces, [(record, record) for record in records - described]):
        found.sort(key=lambda files: changed_ns(files[0]))
        loose = [files for files in found if files[1] != keep and not read_metadata(files[1]).get("pinned")]
        for path in chain.from_iterable(loose[: max(0, len(found) - place.kept)]):
            path.unlink(missing_ok=True)


def _pack(job: CaptureJob, raw: BinaryIO, packed: Path, *, plain: Path | None) -> bool:
    """Compresses a trace and numbers its steps from the job's first, not 0; returns whether it has device events.

    The range of a step that the end of the recording cut off gets another name, so that it does not count as a step.
    """

    def number(found: re.Match[bytes]) -> bytes:
        step = int(found[3])
        cut = b"" if step < job.record["steps_recorded"] else b"incomplete "
        return found[1] + cut + found[2] + str(job.first_step + step).encode()

    kernels, rest = False, b""
    with gzip.open(packed, "wb", compresslevel=_LEVEL) as sink, ExitStack() as more:
        sinks: list[Any] = [sink] if plain is None else [sink, more.enter_context(plain.open("wb"))]
        while chunk := raw.read(_CHUNK_BYTES):
            text = rest + chunk
            kernels = kernels or any(mark in text for mark in _DEVICE_EVENTS)
            cut = max(text.rfind(b"{"), 0)  # so that no name of an event is cut in two
            for each in sinks:
                each.write(_STEP.sub(number, text[:cut]))
            rest = text[cut:]
        for each in sinks:
            each.write(_STEP.sub(number, rest))
    return kernels


def _show_in_tensorboard(path: Path, folder: Path, worker: str) -> None:
    """Copies a trace under the name that TensorBoard's profiler plugin expects."""
    make_gitignored_folder(folder)
    shutil.copyfile(path, folder / f"{worker}.{path.stat().st_mtime_ns // 10**6}.pt.trace{SUFFIX}")


def main() -> None:
    """Writes the capture that the only argument describes; its trace is the standard input."""
    trace = sys.stdin.buffer if stat.S_ISREG(os.fstat(0).st_mode) else None
    for stored in store(CaptureJob.of_text(sys.argv[1]), trace):
        with suppress(OSError):  # the training process has ended; the capture is still written
            sys.stdout.write(json.dumps(stored) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
