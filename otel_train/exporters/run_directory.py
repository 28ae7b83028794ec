"""Writes the run directory of a rank."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from otel_train.datamodel import (
    CAPTURES_FOLDER,
    EVENTS_FILE,
    FLIGHT_FILE,
    METRICS_FILE,
    NS_PER_S,
    RUN_FILE,
    SPANS_FILE,
    SUMMARY_FILE,
)
from otel_train.errors import RunDirectoryError
from otel_train.exporters.otlp_json import OtlpLines
from otel_train.files import (
    BoundedLines,
    changed_ns,
    check_run_folder,
    dump_json,
    folders_in,
    is_folder,
    make_folder,
    make_gitignored_folder,
    mark_of,
    open_to_write,
    rank_folders,
    read_json,
    read_word,
    remove_abandoned,
    replace_json,
    replace_text,
)
from otel_train.recording.flight_recorder import read_flight
from otel_train.resource import process_mark
from otel_train.safety import free_in_forks

if TYPE_CHECKING:
    from otel_train.datamodel import ExportBatch

_log = logging.getLogger("otel_train")

DEFAULT_MAX_BYTES = 256 << 20
"""A day of snapshots every ten seconds, with spans at their cap."""

FLIGHTS_KEPT = 3
"""Flight files of earlier attempts to keep: enough to compare the last crashes."""

RESTARTS_FILE = "restarts.json"

TRAINING = "training-"
"""Beginning of the folder name of an earlier training; its number follows."""

_MOST_TRAININGS = 10**9  # numbers of trainings have at most nine digits

_MOST_AT_ONCE = 4096  # most live processes with one run id and rank; each gets a number behind the id

_SHARES = {EVENTS_FILE: 1 / 8, METRICS_FILE: 5 / 8, SPANS_FILE: 2 / 8}


class RunDirectory:
    """The folder ``<root>/<run id>/rank<r>`` of one process.

    No call raises for a failed write: it is counted, and the first is logged.
    """

    def __init__(
        self, path: Path, rank: int, max_bytes: int = DEFAULT_MAX_BYTES, *, run_id: str = "", owner: int = 0
    ) -> None:
        self.path = path
        self.rank = rank
        self.rank_path = path / f"rank{rank}"
        self.run_id = run_id  # followed by a number if another live process has this rank of the run
        self.training = 1  # from 1; increased after each finished training of this rank in the run
        self.attempt = 0  # from 0; increased at each restart of this training
        self.previous_attempt = -1  # attempt whose flight file was renamed; -1 for none
        self.writable = False  # whether the folder was created and is leased
        self.faults = 0  # writes that failed
        self._lease: RankLease | None = None
        self._lock_path = path / f"rank{rank}.lock"
        self._owner = owner
        self._pid = os.getpid()
        self._lines = OtlpLines({})
        self._run: Mapping[str, object] = {}
        self._files = {
            name: BoundedLines(self.rank_path / name, max_bytes=int(max_bytes * share), on_error=self.note)
            for name, share in _SHARES.items()
        }

    @classmethod
    def open(  # noqa: PLR0913  # all but two by keyword
        cls, root: Path, run_id: str, *, rank: int, run: Mapping[str, object] | None = None,
        attempt: int | None = None, restarts: int = 0, max_bytes: int = DEFAULT_MAX_BYTES, owner: int = 0,
    ) -> RunDirectory:  # fmt: skip
        """Creates or reopens the folder of one rank.

        Args:
            root: parent of all runs. If this call creates it, it adds a ``.gitignore``.
            run_id: the run's id; characters that no folder should have are replaced.
            rank: rank of the process.
            run: content of ``run.json``: identity, host, versions, settings.
            attempt: number of this attempt, if it is known; else attempts are counted.
            restarts: how often the launcher has restarted the job: the attempt is at least this.
            max_bytes: bound on events, metrics and spans of this rank together.
            owner: process id of the training process; 0 for this process.
        """
        known = restarts if attempt is None else attempt
        directory = cls(root / folder_name(run_id), rank, max_bytes, run_id=run_id, owner=owner)
        try:
            make_gitignored_folder(root)
            for number in range(2, _MOST_AT_ONCE):
                if directory._take(known):
                    break
                name = f"{run_id}-{number}"
                directory = cls(root / folder_name(name), rank, max_bytes, run_id=name, owner=owner)
            previous = directory._previous_attempt()
            if previous >= 0 and directory._lease is not None and directory._lease.abandoned_here:
                # An agent of this process that was killed has counted this start, and renamed the flight file.
                previous -= 1
            else:
                directory._archive_flight(previous)
            directory.previous_attempt = previous
            directory.attempt = max(previous + 1, restarts) if attempt is None else attempt
            directory._run = {**(run or {}), "run_id": directory.run_id, "training": directory.training}
            directory._identify()
            directory.writable = True
        except OSError as error:
            directory.attempt = max(directory.attempt, known)
            directory._release_lease()
            directory.note(error)
        return directory

    def _identify(self, *, again: bool = False) -> None:
        """Writes the attempt number and ``run.json``; ``again``: those that have been removed since, and the lease."""
        attempt, run = self.rank_path / "attempt", self.path / RUN_FILE
        if not again or not attempt.exists():
            replace_text(attempt, f"{self.attempt}\n")
        # ``run.json`` is that of rank 0; until rank 0 has written it, that of the rank that started first.
        if (self.rank == 0 and not again) or not run.exists():
            replace_json(run, self._run)
        if not self._lock_path.exists() and (lease := RankLease.acquire(self._lock_path, self._owner)):
            self._release_lease()
            self._lease = lease

    def _take(self, known: int) -> bool:
        """Takes the folder of the rank for this process, unless another live process writes to it; returns whether it did.

        ``known``: number of this attempt by the launcher or the program. If that is higher than the previous attempt, this one
        continues the training in the folder; else a training that has ended there is archived first.
        """
        make_folder(self.path)
        check_run_folder(self.path, self.rank_path)
        self._lease = RankLease.acquire(self._lock_path, self._owner)
        if self._lease is None:
            return False
        state, over = state_in_summary(self.rank_path), self._lease.closed_here
        if known <= self._previous_attempt() and (state == "finished" or (state and over)):
            self._archive_training()
        self.training = self._training_number()
        make_folder(self.rank_path)
        shared = (self.path, self.path / CAPTURES_FOLDER) if self.rank == 0 else ()
        for folder in (self.rank_path, *shared):
            remove_abandoned(folder)
        return True

    def _training_number(self) -> int:
        """Returns the number of the training in the folder of the rank: the one in its summary, above those of earlier ones."""
        earlier = [_number_of(path) for path in earlier_trainings(self.path, self.rank)]
        stated = _summary_in(self.rank_path).get("training")
        return max(
            [
                stated if isinstance(stated, int) and stated < _MOST_TRAININGS else 1,
                1 + max(earlier, default=0),
            ]
        )

    def _archive_training(self) -> None:
        """Moves what this rank wrote in the previous training to ``training-<n>``."""
        before = earlier_trainings(self.path, self.rank)
        number = self._training_number()
        while os.path.lexists(
            self.path / f"{TRAINING}{number}" / self.rank_path.name
        ):  # below a link, or no folder
            number += 1
        home = self.path / f"{TRAINING}{number}"
        make_folder(home)
        self.rank_path.rename(home / self.rank_path.name)
        make_folder(self.rank_path)
        with suppress(FileNotFoundError):  # stays: the new training sends what was not sent
            (home / self.rank_path.name / "spool").rename(self.rank_path / "spool")
        if not (home / RUN_FILE).exists():
            with suppress(RunDirectoryError):
                replace_json(home / RUN_FILE, read_json(self.path / RUN_FILE))
        captures = list((self.path / "captures").glob(f"*-rank{self.rank}.*"))
        for path in captures:
            make_folder(home / "captures")
            path.rename(home / "captures" / path.name)
        if self.rank == 0:
            for name in ("artifacts", "report.html"):
                with suppress(FileNotFoundError):
                    (self.path / name).rename(home / name)
        for old in before[: 2 - FLIGHTS_KEPT]:  # the newest of them and ``home`` keep their flight files
            for path in (old / self.rank_path.name).glob("flight*.bin"):
                path.unlink(missing_ok=True)

    @classmethod
    def again(
        cls, path: Path, rank: int, *, attempt: int, max_bytes: int = DEFAULT_MAX_BYTES, owner: int = 0
    ) -> RunDirectory:
        """Returns the folder of ``rank`` in the run at ``path``, to continue where an earlier agent stopped.

        It is not writable if the folder does not exist, or another process has it by now.
        """
        directory = cls(path, rank, max_bytes, owner=owner)
        directory.attempt = attempt
        if is_folder(directory.rank_path):
            with suppress(OSError):
                directory._lease = RankLease.acquire(directory._lock_path, owner)
        directory.writable = directory._lease is not None
        return directory

    @property
    def flight_path(self) -> Path:
        """Path of ``flight.bin`` of this attempt."""
        return self.rank_path / FLIGHT_FILE

    def describe(self, lines: OtlpLines) -> None:
        """Sets the encoder of metrics and spans, which has the resource attributes."""
        self._lines = lines

    def export(self, batch: ExportBatch) -> None:
        """Appends the events, the snapshot and the spans of one batch."""
        if not self.writable or os.getpid() != self._pid:
            return
        for event in batch.events:
            value = {
                "time_unix_ns": event.time_unix_ns, "name": event.name,
                "attempt": self.attempt, "rank": self.rank, "attributes": dict(event.attributes),
            }  # fmt: skip
            self._files[EVENTS_FILE].append(dump_json(value))
        if batch.snapshot is not None:
            self._files[METRICS_FILE].append(self._lines.metrics(batch.snapshot))
        if batch.spans:
            self._files[SPANS_FILE].append(self._lines.spans(batch.spans))

    def write_summary(self, text: str) -> None:
        """Replaces ``summary.json`` as a whole; a reader never sees half of one."""
        if not self.writable or os.getpid() != self._pid:
            return
        try:
            replace_text(self.rank_path / SUMMARY_FILE, text + "\n")
            if self._run:
                self._identify(again=True)
        except OSError as error:
            self.note(error)

    def close(self, timeout_s: float = 0.0) -> None:
        """Closes the files, and releases the lease on the folder."""
        del timeout_s
        if os.getpid() == self._pid:
            for file in self._files.values():
                file.close()
            self._release_lease()

    def _release_lease(self) -> None:
        if self._lease is not None:
            self._lease.release()
        self._lease = None

    def note(self, error: OSError) -> None:
        """Counts a failed write; the first is logged."""
        self.faults += 1
        if self.faults == 1:
            _log.warning(
                "Run directory %s: %s. What cannot be written is dropped and counted; training is not affected. "
                "OTEL_TRAIN_RUN_DIR names another folder",
                self.rank_path, error.strerror or error,
            )  # fmt: skip

    def _previous_attempt(self) -> int:
        try:
            text = read_word(self.rank_path / "attempt")
        except OSError:  # a file of another user, which is not read
            return -1
        return int(text) if re.fullmatch("[0-9]{1,9}", text) else -1

    def _archive_flight(self, previous: int) -> None:
        if self.flight_path.exists():
            self.flight_path.replace(self.rank_path / f"flight-{previous}.bin")
        old = sorted(self.rank_path.glob("flight-*.bin"), key=changed_ns)
        for path in old[:-FLIGHTS_KEPT]:
            path.unlink(missing_ok=True)


def folder_name(run_id: str) -> str:
    """Returns a run id as the name of one folder: never empty, never a path, never the same for two ids."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", run_id).lstrip(".")[:96]
    if name and name == run_id:
        return name
    suffix = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{name or 'run'}-{suffix}"


def find_run(run: str | Path | None, root: Path) -> Path:
    """Finds a run directory by its path, the folder of one of its ranks, or a run id below ``root``; None: the newest.

    Raises a RunDirectoryError, with a remedy, if there is none.
    """
    if run is None:
        runs = [root / name for name in folders_in(root) if mark_of(root / name / RUN_FILE) is not None]
        if runs:
            return max(runs, key=lambda home: max(map(changed_ns, (home, *rank_folders(home).values()))))
        raise RunDirectoryError(
            f"No run below {root}. Give a run directory, or name the folder of your runs with --run-dir or OTEL_TRAIN_RUN_DIR."
        )
    for path in (Path(run), root / folder_name(str(run))):
        if mark_of(path / RUN_FILE) is not None or rank_folders(path):
            return path
        if path.name.startswith("rank") and mark_of(path.parent / RUN_FILE) is not None:
            return path.parent
    try:
        Path(run, RUN_FILE).stat()
    except PermissionError as error:
        raise RunDirectoryError(f"{run}: cannot be read: {error.strerror}") from error
    except (OSError, ValueError):
        pass
    raise RunDirectoryError(
        f"{str(run)!r} is neither a run directory nor the id of a run below {root}. "
        "Give the folder that holds run.json, or name the folder of your runs with --run-dir or OTEL_TRAIN_RUN_DIR."
    )


def earlier_trainings(run: Path, rank: int | None = None) -> list[Path]:
    """Returns the run directories of earlier trainings, or only of those that ``rank`` took part in, oldest first."""
    names = [name for name in folders_in(run) if re.fullmatch(f"{TRAINING}[1-9][0-9]{{0,8}}", name)]
    found = sorted((run / name for name in names), key=_number_of)
    return [path for path in found if rank is None or is_folder(path / f"rank{rank}")]


def _number_of(training: Path) -> int:
    return int(training.name.removeprefix(TRAINING))


def state_in_summary(rank_dir: Path) -> str:
    """Returns the end state in a rank's ``summary.json``; "" if there is none."""
    return str(_summary_in(rank_dir).get("state") or "")


def _summary_in(rank_dir: Path) -> Mapping[str, object]:
    try:
        return read_json(rank_dir / SUMMARY_FILE)
    except RunDirectoryError:
        return {}


def down_s(rank_dir: Path, previous: int, started_unix_ns: int) -> float | None:
    """Returns the seconds from the last event of the ``previous`` attempt, by its renamed flight file, to this start.

    None if ``previous`` is negative, if that attempt had finished (then no time was lost), or if the file has no events.
    """
    if previous < 0 or state_in_summary(rank_dir) == "finished":
        return None
    try:
        flight = read_flight(rank_dir / f"flight-{previous}.bin")
    except RunDirectoryError:
        return None
    edges = [int(thread.times[-1]) for thread in flight.threads if len(thread.times)]
    if not edges:
        return None
    last_unix_ns = flight.anchor_unix_ns + max(edges) - flight.anchor_clock_ns
    return max(0, started_unix_ns - last_unix_ns) / NS_PER_S


def total_down_s(rank_dir: Path, attempt: int, down_s: float | None) -> float:
    """Adds ``down_s``, the seconds before this attempt, to those before earlier ones, in ``restarts.json``; returns the sum.

    An agent that continues the attempt of one before it finds the sum there: it does not add to it again.
    """
    path = rank_dir / RESTARTS_FILE
    try:
        counted, before_s, total_s = (
            read_json(path)[name] for name in ("attempt", "before_seconds", "seconds")
        )
        before_s, total_s = max(0.0, float(before_s)), max(0.0, float(total_s))
    except (RunDirectoryError, KeyError, TypeError, ValueError):
        counted, before_s, total_s = -1, 0.0, 0.0
    if down_s is None:
        return total_s
    before_s = before_s if counted == attempt else total_s
    with suppress(OSError):
        replace_json(path, {"attempt": attempt, "before_seconds": before_s, "seconds": before_s + down_s})
    return before_s + down_s


# --- the lease on the folder of a rank ---------------------------------------------------------------

_LEASE_BYTES = 200
_CLOSED = "closed"
_TAKEN = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}

_lock = free_in_forks(threading.Lock())
_held: dict[tuple[int, int], RankLease] = {}
"""By device and inode. Closing any descriptor of the file drops a POSIX lock, so each file is opened once."""


class RankLease:
    """A POSIX lock on a file that contains the process that holds the lock, and the training process that it is held for.

    A forked child (a DataLoader worker) does not inherit the lock, so a worker that outlives its parent does not keep it.
    On a network file system it also excludes other hosts. One process may acquire it several times.

    Attributes:
        closed_here: the previous holder held it for the same process and released it.
        abandoned_here: the previous holder held it for the same process and was killed.
    """

    def __init__(self, descriptor: int, key: tuple[int, int], owner: str, content: str) -> None:
        self.closed_here = content == f"{owner} {_CLOSED}"
        self.abandoned_here = content.endswith(f" {owner}")
        self._owner = owner
        self._descriptor = descriptor
        self._key = key
        self._pid = os.getpid()
        self._times = 1

    @classmethod
    def acquire(cls, path: Path, owner: int = 0) -> RankLease | None:
        """Returns the lease; None while another living process holds it.

        Args:
            path: file to lock; created if missing.
            owner: process id of the training process that the lease is for; 0 for this process.

        Raises:
            OSError: the file cannot be opened.
        """
        with _lock:
            held, holder = _held_here(path), process_mark(owner or os.getpid())
            if held is not None:
                return held.reacquired(holder)
            descriptor = open_to_write(path, append=True)
            status = os.fstat(descriptor)
            content = os.pread(descriptor, _LEASE_BYTES, 0).decode("ascii", "replace").strip()
            if not _locked(descriptor, content):
                os.close(descriptor)
                return None
            key = status.st_dev, status.st_ino
            lease = cls(descriptor, key, holder, content)
            lease._write(f"{process_mark(os.getpid())} {holder}")
            _held[key] = lease
            return lease

    def reacquired(self, owner: str) -> RankLease | None:
        """Returns the lease again, for one more session; None while it is held for another live process."""
        if owner != self._owner and _lives(self._owner):
            return None
        self._owner = owner
        self._times += 1
        self.closed_here = self.abandoned_here = False
        return self

    def release(self) -> None:
        """Releases the lease after as many calls as it was acquired. Does nothing in a forked child."""
        with _lock:
            self._times -= 1
            if self._times or self._pid != os.getpid():
                return
            _held.pop(self._key, None)
            self._write(f"{self._owner} {_CLOSED}")
            os.close(self._descriptor)

    def _write(self, text: str) -> None:
        with suppress(OSError):  # on a full disk the lock is held without the text
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{text}\n".encode())


def _held_here(path: Path) -> RankLease | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    lease = _held.get((status.st_dev, status.st_ino))
    return lease if lease is not None and lease._pid == os.getpid() else None  # noqa: SLF001  # of this module


def _locked(descriptor: int, content: str) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        # The file system has no locks: the process named in the file holds the lease while it lives, on this host only.
        holder, _, state = content.partition(" ")
        return state == _CLOSED or not _lives(holder) or holder == process_mark(os.getpid())
    return True


def _lives(mark: str) -> bool:
    pid = re.fullmatch("[^/]+/([0-9]{1,9})/[0-9]+", mark)
    return pid is not None and mark == process_mark(int(pid[1]))
