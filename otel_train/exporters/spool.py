"""The queue of unsent OTLP requests: lines of OTLP/JSON on disk, or in memory without a disk.

Every request is appended to a segment, a file of whole lines. Requests are sent from the oldest segment on, and a
segment is removed when all of it is sent. ``<name>.offset`` has the segment and offset up to which requests are done. A
sender holds a file lock on it: the running process, the next start of the run or ``otel-train replay``, one at a time, and
each continues where the one before it stopped. An appender holds a lock on its own segment during a write, so that the
segment is not removed then. No call waits for a file lock. A segment that cannot be read stays, and later ones are sent.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_train.exporters.otlp_json import records_in
from otel_train.files import (
    BoundedLines,
    append_whole,
    dump_json,
    lines_of,
    make_folder,
    open_below,
    open_binary,
    open_to_write,
    parse_json,
    predecessor,
    rank_folders,
    replace_text,
    skip_line,
)
from otel_train.safety import free_in_forks

if TYPE_CHECKING:
    from pathlib import Path

    from otel_train.exporters.otlp_response import ExportResponse

FOLDER: Final = "spool"
REJECTED: Final = "rejected"
NAMES: Final = {"metrics": "metrics", "traces": "spans"}
"""Beginning of the file names of a signal, as in the run directory."""

DEFAULT_MAX_BYTES: Final = 64 << 20
"""Hours of snapshots at the default interval, and little enough for any scratch disk."""

MEMORY_BYTES: Final = 4 << 20
"""Most bytes per signal that wait in memory if the disk cannot be written."""

MOST_LINE_BYTES: Final = 16 << 20
"""Longest line that is read; a request has about a hundredth of that."""

_SEGMENTS: Final = 8
"""Segments of a full queue: one of them, an eighth, is dropped at once."""

_REJECTED_BYTES: Final = 16 << 20

MOST_BYTES: Final = DEFAULT_MAX_BYTES + len(NAMES) * _REJECTED_BYTES
"""Most bytes of the spool of a rank, with its rejected requests."""

_SUFFIX: Final = ".otlp.jsonl"
_STATE_BYTES: Final = 24
_STATE: Final = re.compile(rb"(0[0-9]{9}) ([0-9]{12})\n")

_held: set[int] = set()
"""Descriptors with a lock. A forked child closes its copies, which would keep the lock after the death of the parent."""


def _release_in_child() -> None:
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


class SpooledRequest(NamedTuple):
    """The oldest request of a queue."""

    line: bytes  # without the newline
    segment: int = -1  # its number; -1 in memory
    end: int = 0  # offset behind it
    problem: str = ""  # why it cannot be sent at all


class SpoolQueue:
    """The unsent requests of one signal. ``append`` may be called from any thread, the rest from the sending thread.

    No call raises: requests that the disk does not take wait in memory, bounded, and are written when that is possible again.

    Args:
        directory: the folder of the rank; None keeps everything in memory.
        signal: ``metrics`` or ``traces``.
        max_bytes: bound on the segments; the oldest segment is dropped for a line that does not fit.
        on_loss: called with how many records were dropped, and why (a value of ``train.telemetry.drop.reason``).
        on_error: called with every ``OSError``.
    """

    def __init__(
        self,
        directory: Path | None,
        signal: str,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES // 2,
        on_loss: Callable[[int, str], None] = lambda _records, _reason: None,
        on_error: Callable[[OSError], None] = lambda _error: None,
    ) -> None:
        self.folder = directory / FOLDER if directory is not None else None
        self.torn = 0  # incomplete lines, left by a crash, that were removed
        self._name = NAMES[signal]
        self._pattern = re.compile(rf"{self._name}-(0[0-9]{{9}}){re.escape(_SUFFIX)}")
        self._max_bytes = max_bytes
        self._on_loss = on_loss
        self._on_error = on_error
        self._guard = free_in_forks(threading.Lock())
        self._memory: deque[bytes] = deque()
        self._memory_sent = False  # whether the first of them is being sent
        self._fd = -1
        self._number = 0  # number of the segment being written
        self._state_fd = -1
        self._done = (0, 0)  # segment and offset that could not be written to the offset file

    # -- the appending side ------------------------------------------------------------------------

    def append(self, line: bytes) -> None:
        """Adds a request, on disk where that is possible."""
        with self._guard:
            self._memory.append(line)
            while self._memory and not self._memory_sent and self._written(self._memory[0]):
                self._memory.popleft()
            first = int(self._memory_sent)
            while len(self._memory) > first + 1 and sum(map(len, self._memory)) > MEMORY_BYTES:
                lost = self._memory[first]
                del self._memory[first]
                self._on_loss(records_in(lost), "queue_full")

    def _written(self, line: bytes) -> bool:
        """Returns whether a line is on disk now, or cannot be written at all."""
        if self.folder is None:
            return False
        data = line + b"\n"
        if len(data) > self._max_bytes:
            self._on_loss(records_in(line), "queue_full")
            return True
        try:
            self._write(data)
        except OSError as error:
            self._close_segment()
            self._on_error(error)
            return False
        return True

    def _write(self, data: bytes) -> None:
        size = self._own_segment()
        if size is None or (size and size + len(data) > self._max_bytes // _SEGMENTS):
            self._new_segment()
            size = 0
        try:
            self._trim(len(data))
            append_whole(self._fd, data, size)
        except OSError:
            if not size:  # else every try on a full disk would leave an empty segment
                with suppress(OSError):
                    self._segment(self._number).unlink()
            raise
        finally:
            if self._fd >= 0:
                _unlock(self._fd)

    def _own_segment(self) -> int | None:
        """Returns the size of the segment being written, with its lock held; None if there is none to continue."""
        if self._fd < 0:
            return None
        if _locked(self._fd):
            status = os.fstat(self._fd)
            if status.st_nlink:
                return status.st_size
        self._close_segment()  # it was removed because all of it is sent, or the sender holds its lock
        return None

    def _new_segment(self) -> None:
        assert self.folder is not None
        self._close_segment()
        make_folder(self.folder)
        # The offset file is created before anything is appended: it needs no more space when the disk is full later.
        state = self._open_state()
        try:
            number = max([self._sent_until(state)[0], *self._numbers()])
        finally:
            os.close(state)
        while True:
            number += 1
            with suppress(FileExistsError):
                self._fd = open_to_write(self._segment(number), append=True, new=True)
                self._number = number
                # Until it is locked it is an empty segment, which a sender may remove.
                if _locked(self._fd) and os.fstat(self._fd).st_nlink:
                    return
                self._close_segment()

    def _close_segment(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _unlock(fd)
            with suppress(OSError):
                os.close(fd)

    def _trim(self, needed_bytes: int) -> None:
        """Drops the oldest segments until there is enough space. Requests being sent from one may count as dropped, too."""
        found: dict[int, os.stat_result] = {}
        for number in self._numbers():
            with suppress(FileNotFoundError):  # removed meanwhile, because all of it was sent
                found[number] = self._segment(number).stat()
        total = sum(status.st_size for status in found.values()) + needed_bytes
        own = os.fstat(self._fd).st_ino
        for number, status in found.items():
            if total <= self._max_bytes:
                return
            with suppress(FileNotFoundError):
                if status.st_ino != own:
                    lost = 0
                    with self._passing_over(number):  # what cannot be read cannot be counted
                        for line in self._waiting(number):
                            lost += records_in(line)
                    self._segment(number).unlink()
                    self._on_loss(lost, "queue_full")
                    total -= status.st_size

    # -- the sending side --------------------------------------------------------------------------

    @contextmanager
    def sending(self) -> Iterator[bool]:
        """Locks this queue against sending by other threads and processes for the block. Yields False if it is locked already."""
        try:
            self._state_fd = self._take_state()
        except BlockingIOError:
            yield False
            return
        except OSError as error:  # without the disk, requests in memory can be sent
            self._on_error(error)
        try:
            yield True
        finally:
            fd, self._state_fd = self._state_fd, -1
            self._memory_sent = False
            if fd >= 0:
                _release(fd)

    def head(self) -> SpooledRequest | None:
        """Returns the oldest request that can be read; None when there is none. Inside ``sending`` only."""
        for number in self._numbers() if self._state_fd >= 0 else ():
            with self._passing_over(number):
                head = self._read(number)
                if head is not None:
                    return head
                if not self._finished(number, torn=True):
                    return None
        with self._guard:
            if not self._memory:
                return None
            self._memory_sent = True
            return SpooledRequest(self._memory[0])

    def after(self, head: SpooledRequest) -> SpooledRequest | None:
        """Returns the request behind ``head``, if both are on disk, else None. Inside ``sending`` only."""
        if head.segment < 0:
            return None
        with suppress(OSError):
            behind = self._read(head.segment, head.end)
            later = [number for number in self._numbers() if number > head.segment]
            return self._read(later[0], 0) if behind is None and later else behind
        return None

    def remove(self, head: SpooledRequest) -> None:
        """Removes a request. The offset is written at once, without fsync: it survives if this process is killed."""
        if head.segment < 0:
            with self._guard:
                if self._memory_sent and self._memory:
                    self._memory.popleft()
                self._memory_sent = False
            return
        try:
            os.pwrite(self._state_fd, _state(head.segment, head.end), 0)
        except OSError as error:
            self._done = (head.segment, head.end)
            self._on_error(error)
        with suppress(OSError):
            self._finished(head.segment)

    def reject(self, head: SpooledRequest, reason: str) -> None:
        """Moves a request that will never be accepted to ``spool/rejected/``, with the reason.

        If there is not enough space, the oldest ones there are dropped, or this one. The caller counts each request as rejected, so
        that this is no further loss.
        """
        if self.rejected_file is not None:
            lines = BoundedLines(self.rejected_file, max_bytes=_REJECTED_BYTES, on_error=self._on_error)
            lines.append(_rejected_line(reason, head.line))
            lines.close()
        self.remove(head)

    @property
    def unsaved(self) -> int:
        """Number of requests that are in memory only, without one that is being written at this moment."""
        being_written = self._guard.locked()  # held as long as a disk hangs
        return max(0, len(self._memory) - being_written)

    @property
    def rejected_file(self) -> Path | None:
        """File of the requests that were rejected for good, each with its reason; None without a directory."""
        return None if self.folder is None else self.folder / REJECTED / f"{self._name}.jsonl"

    def waiting(self) -> Iterator[bytes]:
        """Yields every request that waits on disk and can be read, oldest first. Takes no lock: others may send meanwhile."""
        for number in self._numbers():
            with self._passing_over(number):
                yield from self._waiting(number)

    def close(self) -> None:
        """Closes the files and removes empty ones. Requests in memory are dropped and counted."""
        with self._guard:
            while self._memory and self._written(self._memory[0]):
                self._memory.popleft()
            self._close_segment()
            for line in self._memory:
                self._on_loss(records_in(line), "shutdown")
            self._memory.clear()
        if self.folder is None:
            return
        with suppress(OSError), self.sending() as mine:
            if mine and self._state_fd >= 0 and self.head() is None and not self._numbers():
                self._state_path.unlink(missing_ok=True)
                self._done = (0, 0)
                self.folder.rmdir()  # fails if the other signal has files there

    def _take_state(self) -> int:
        """Returns the descriptor of the offset file, locked; -1 without one. BlockingIOError: another process holds the lock."""
        if self.folder is None or not self.folder.is_dir():
            return -1
        while True:
            fd = self._open_state()
            _held.add(fd)
            if not _locked(fd):
                _release(fd)
                raise BlockingIOError
            with suppress(FileNotFoundError):
                if self._state_path.stat().st_ino == os.fstat(fd).st_ino:
                    return fd
            _release(fd)  # the process that held the lock before has removed the file

    @property
    def _state_path(self) -> Path:
        assert self.folder is not None
        return self.folder / f"{self._name}.offset"

    def _open_state(self) -> int:
        try:
            fd = open_to_write(self._state_path)
        except OSError:
            if self._state_path.is_file() and not self._state_path.is_symlink():
                raise
            self._clear_state_path()
            fd = open_to_write(self._state_path)
        try:
            if os.fstat(fd).st_size < _STATE_BYTES:
                os.pwrite(fd, _state(0, 0), 0)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _clear_state_path(self) -> None:
        """Removes a pipe, link or folder in place of the offset file, which then counts as damaged."""
        if self._state_path.is_dir() and not self._state_path.is_symlink():
            self._state_path.rmdir()
        else:
            self._state_path.unlink(missing_ok=True)

    def _sent_until(self, fd: int) -> tuple[int, int]:  # number of a segment, offset up to which it is done
        found = _STATE.fullmatch(os.pread(fd, _STATE_BYTES, 0))  # a damaged file counts as nothing sent
        return max((int(found[1]), int(found[2])) if found else (0, 0), self._done)

    def _offset(self, number: int, state: int, fd: int) -> int:
        """Returns up to where a segment, open as ``fd``, is sent; 0 if that is no end of a line: the offset is of another file."""
        segment, offset = self._sent_until(state)
        return offset if segment == number and offset and os.pread(fd, 1, offset - 1) == b"\n" else 0

    def _read(self, number: int, offset: int | None = None) -> SpooledRequest | None:
        """Returns the request at ``offset`` of a segment (None: the first that is not sent), if it is a whole line."""
        with open_binary(self._segment(number)) as file:
            file.seek(self._offset(number, self._state_fd, file.fileno()) if offset is None else offset)
            line = file.readline(MOST_LINE_BYTES)
            if line.endswith(b"\n"):
                return SpooledRequest(line[:-1], number, file.tell())
            if len(line) < MOST_LINE_BYTES:
                return None
            if not skip_line(file):
                return None
            problem = f"is not asked: the line has more than {MOST_LINE_BYTES} bytes"
            return SpooledRequest(line[:1024], number, file.tell(), problem)

    def _finished(self, number: int, *, torn: bool = False) -> bool:
        """Removes a segment if all of it is sent. Returns whether it was removed.

        ``torn``: there is no further whole line, so that the rest was left incomplete by a crash.
        """
        path = self._segment(number)
        fd = open_below(path)
        try:
            if not _locked(fd):
                return False  # another process is appending
            offset = self._offset(number, self._state_fd, fd)
            rest = os.fstat(fd).st_size - offset
            if rest > 0:
                if not torn or b"\n" in os.pread(fd, MOST_LINE_BYTES, offset):
                    return False
                self.torn += 1  # this thread has the lock, so no appender is about to complete the line
            path.unlink(missing_ok=True)
        finally:
            os.close(fd)
        return True

    @contextmanager
    def _passing_over(self, number: int) -> Iterator[None]:
        """Ends the block if a segment cannot be read. If it can be read later, its requests may be sent twice."""
        try:
            yield
        except FileNotFoundError:  # it was dropped meanwhile, for lack of space
            pass
        except OSError as error:
            error.filename = error.filename or str(self._segment(number))
            self._on_error(error)

    def _waiting(self, number: int) -> Iterator[bytes]:
        with open_binary(self._segment(number)) as file:
            with suppress(OSError), open_binary(self._state_path) as state:
                file.seek(self._offset(number, state.fileno(), file.fileno()))
            yield from (line[:-1] for line in lines_of(file, MOST_LINE_BYTES) if line.endswith(b"\n"))

    def _numbers(self) -> list[int]:
        if self.folder is None:
            return []
        try:
            with os.scandir(self.folder) as entries:
                # A folder, a pipe or a link in place of a segment must not hold up those behind it.
                names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            self._on_error(error)
            return []
        return sorted(int(match[1]) for match in map(self._pattern.fullmatch, names) if match)

    def _segment(self, number: int) -> Path:
        return self._state_path.with_name(f"{self._name}-{number:010d}{_SUFFIX}")


def _state(segment: int, offset: int) -> bytes:
    return f"{segment:010d} {offset:012d}\n".encode()


def _locked(fd: int) -> bool:
    """Locks a file; returns False if it is locked already. On a file system without locks every call returns True."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _unlock(fd: int) -> None:
    """Unlocks a file, also if a forked child has a copy of the descriptor."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def _release(fd: int) -> None:
    _held.discard(fd)
    _unlock(fd)
    os.close(fd)


class RejectedRequest(NamedTuple):
    """A line of the file of rejected requests, and its request; None if the line cannot be read."""

    stored: str
    request: bytes | None


def parts_of(path: Path) -> list[Path]:
    """Returns a bounded file and its older half, oldest first."""
    return [part for part in (predecessor(path), path) if os.path.lexists(part)]


def rejected_in(path: Path) -> list[RejectedRequest]:
    """Returns the requests of one signal that were rejected, oldest first."""
    found = []
    for part in parts_of(path):
        with open_binary(part) as file:
            found += [
                _read(line.rstrip(b"\n")) for line in lines_of(file, 2 * _REJECTED_BYTES) if line.strip()
            ]
    return found


def send_again(path: Path, send: Callable[[bytes], ExportResponse | None]) -> list[ExportResponse]:
    """Sends every rejected request again, and removes those that are accepted; returns the responses.

    The caller holds the lock of the queue. ``send`` returns None as soon as the Collector does not respond.
    """
    waiting = rejected_in(path)
    answers: list[ExportResponse] = []
    left: list[str] = []
    try:
        while waiting:
            entry = waiting[0]
            if entry.request is None:
                left.append(entry.stored)
            elif (answer := send(entry.request)) is None:
                break
            else:
                answers.append(answer)
                if not answer.accepted:
                    left.append(_rejected_line(answer.reason, entry.request))
            waiting.pop(0)
    finally:  # also on Ctrl-C, so that accepted requests are not sent again
        _keep(path, [*left, *(entry.stored for entry in waiting)])
    return answers


def _keep(path: Path, stored: list[str]) -> None:
    if stored:
        replace_text(path, "".join(f"{line}\n" for line in stored))
    predecessor(path).unlink(missing_ok=True)
    if not stored:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # the other signal may have a file there
            path.parent.rmdir()


def requests_left(run: Path) -> dict[str, Any]:
    """Counts the requests of a run that the Collector has not accepted, for ``console.summary.undelivered``.

    Files that cannot be read are not counted. No locks are taken.
    """
    waiting = rejected = 0
    for rank, signal in product(rank_folders(run).values(), NAMES):
        queue = SpoolQueue(rank, signal)
        waiting += sum(1 for _ in queue.waiting())
        if queue.rejected_file is not None:
            with suppress(OSError):
                rejected += len(rejected_in(queue.rejected_file))
    return {"waiting": waiting, "rejected": rejected, "run": str(run)}


def _rejected_line(reason: str, request: bytes) -> str:
    return dump_json({"reason": reason, "line": request.decode("utf-8", "replace")})


def _read(line: bytes) -> RejectedRequest:
    try:
        value = parse_json(line)
    except ValueError:
        value = None
    request = value.get("line") if isinstance(value, dict) else None
    known = request.encode("utf-8", "replace") if isinstance(request, str) else None
    return RejectedRequest(line.decode("utf-8", "replace"), known)
