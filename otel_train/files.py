"""Opens files below a run directory, which is untrusted; no other module opens them.

A run directory is untrusted: others may have put links, pipes, devices and endless files there. A path is divided into
the run directory, which the user named and up to which links are followed, and the part below it, which has folders of
our own layout (``rank<r>``, ``captures``, ``training-<n>``, ...). Below it every folder and file is opened relative to
the descriptor of the one above, no link is followed, a pipe does not block, and only regular files and folders of
trusted owners are opened: of this process' user and of root. Also of whoever owns the run directory where this process is
root's, or where a network file system may show other owners than those who wrote.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, cast

from otel_train.errors import RunDirectoryError

if TYPE_CHECKING:
    from pathlib import Path

REMOTE = (
    "nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "9p", "afs", "fuse.", "wekafs",
)  # fmt: skip
"""File systems on which a page fault may be network I/O, by the beginning of their type."""


def absolute(path: Path) -> Path:
    """Returns an absolute path; a relative one as it is where the working directory is gone."""
    try:
        return path.absolute()
    except FileNotFoundError:
        return path


def file_system(folder: Path) -> str:
    """Returns the type of the file system of ``folder``, such as ``ext4``; "" if unknown."""
    import psutil

    best, kind = "", ""
    place = str(folder.resolve())
    try:
        parts = psutil.disk_partitions(all=True)
    except OSError:  # there is no /proc
        return ""
    for part in parts:
        mount = part.mountpoint.rstrip("/") + "/"
        if (place + "/").startswith(mount) and len(mount) >= len(best):
            best, kind = mount, part.fstype
    return kind


FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
"""What we write says what is trained, where and how: it is its owner's alone."""

MOST_JSON_BYTES: Final = 16 << 20
"""A summary of 64 loaders has some 200 kB."""

MOST_CACHED: Final = 4096

MOST_BYTES: Final = 16 << 30
"""Of any file: captures are the largest. One of holes costs a reader seconds, and no memory."""

MOST_DEPTH: Final = 64
"""Nesting of a JSON document. Ours have 8 levels; Python's own limit ends in a RecursionError somewhere later."""

MOST_LINE_BYTES: Final = 8 << 20
"""Longer than a line of metrics is at the widest profile."""

_CHUNK_BYTES: Final = 1 << 20

_MOST_DIGITS: Final = 20
"""Of an integer: 64 bits and a sign. Larger ones overflow whatever computes with them."""

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_FOLDER: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_OURS: Final = re.compile(r"rank\d+|training-\d+|captures|artifacts|spool|rejected|tensorboard|launches")
"""Folders of a run directory."""


class Mark(NamedTuple):
    """Identifies a version of a file."""

    inode: int
    size_bytes: int
    changed_ns: int


# --- opening ----------------------------------------------------------------------------------------


class _Owners(NamedTuple):
    """Trusted owners of files below the run directory ``home``, which belongs to user ``uid``."""

    home: Path
    uid: int

    def check(self, status: os.stat_result) -> None:
        """Refuses what belongs to another user, by an OSError."""
        mine = os.geteuid()
        if status.st_uid in {mine, 0}:
            return
        if status.st_uid == self.uid and (mine == 0 or file_system(self.home).startswith(REMOTE)):
            return
        raise OSError(
            errno.EACCES,
            f"owned by user {status.st_uid}, which is neither ours ({mine}) nor root. "
            "Run as that user, or name another folder",
        )


@contextmanager
def _folder_of(path: Path, root: Path | None) -> Iterator[tuple[int, str, _Owners]]:
    """Opens the folder of ``path``; gives its descriptor, the name in it, and its trusted owners."""
    outer, below = divided(path, root)
    at = os.open(outer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        owners = _Owners(outer, os.fstat(at).st_uid)
        for name in below[:-1]:
            inner = _opened(name, _FOLDER, at)
            os.close(at)
            at = inner
            owners.check(os.fstat(at))
        yield at, below[-1], owners
    finally:
        os.close(at)


def divided(path: Path, root: Path | None = None) -> tuple[Path, tuple[str, ...]]:
    """Returns the folder up to which links are followed, and the names below it.

    That folder is ``root``; where None the last one above the folders of a run directory's own layout.
    """
    if root is not None:
        below = path.relative_to(root).parts
    else:
        parts, count = path.parts, 1
        while count < len(parts) and _OURS.fullmatch(parts[-count - 1]):
            count += 1
        root, below = path.parents[count - 1], parts[-count:]
    if not below or ".." in below:
        raise OSError(errno.EINVAL, "no path below a run directory")
    return root, below


def _opened(name: str, flags: int, at: int) -> int:
    try:
        return os.open(name, flags, FILE_MODE, dir_fd=at)
    except OSError as error:
        # A folder that is a link fails with ENOTDIR, a file with ELOOP; a socket with ENXIO.
        if error.errno in {errno.ELOOP, errno.ENOTDIR, errno.ENXIO}:
            kind = _kind(name, at)
            raise OSError(error.errno, f"{kind}: only regular files are opened") from error
        raise


def _kind(name: str, at: int) -> str:
    try:
        mode = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
    except OSError:
        return "no regular file"
    return "a link" if stat.S_ISLNK(mode) else "a socket" if stat.S_ISSOCK(mode) else "no folder"


def _checked(descriptor: int, owners: _Owners) -> int:
    """Returns the descriptor, if it is of a regular file with a trusted owner."""
    try:
        _check_file(os.fstat(descriptor), owners)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_file(status: os.stat_result, owners: _Owners) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise OSError(errno.EINVAL, f"{kind}: only regular files are opened")
    owners.check(status)


def open_below(path: Path, *, root: Path | None = None) -> int:
    """Opens a file for reading; for ``root`` see ``divided``.

    Raises:
        OSError: there is none: it is gone, a link, a pipe, a device, of another user, or may not be read.
    """
    with _folder_of(path, root) as (at, name, owners):
        return _checked(_opened(name, _READ, at), owners)


def open_binary(path: Path, *, root: Path | None = None) -> BinaryIO:
    """Returns a file of at most ``MOST_BYTES`` to read from its beginning; see ``open_below``."""
    descriptor = open_below(path, root=root)
    if os.fstat(descriptor).st_size > MOST_BYTES:
        os.close(descriptor)
        raise OSError(errno.EFBIG, f"has more than {MOST_BYTES >> 30} GiB, more than otel_train writes")
    return os.fdopen(descriptor, "rb")


def open_given(path: Path) -> BinaryIO:
    """Opens a file that the user named: links are followed, unless it is in a folder of a run directory."""
    if len(divided(path)[1]) > 1:
        return open_binary(path)
    return os.fdopen(_named(path), "rb")


def problem_of(path: Path, *, root: Path | None = None) -> str:
    """Returns why a file cannot be read; "" if it can."""
    try:
        os.close(open_below(path, root=root))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def open_to_write(path: Path, *, append: bool = False, new: bool = False) -> int:
    """Returns a descriptor of a file to write and to read, made where it is missing; see ``open_below``.

    With ``new`` it must be missing: a FileExistsError else.
    """
    flags = _WRITE | os.O_APPEND * append | os.O_EXCL * new
    with _folder_of(path, None) as (at, name, owners):
        return _checked(_opened(name, flags, at), owners)


def create(path: Path | str, at: int | None = None) -> int:
    """Creates a file for writing, below the folder ``at``; fails if anything has that name, even a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, FILE_MODE, dir_fd=at)


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it, for our user alone. One that is there stays as it is."""
    if path.is_dir():
        return
    make_folder(path.parent)  # mkdir(parents=True) would make these with the mode of the umask
    try:
        path.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        return
    with suppress(OSError):  # a file system without modes, as of a bucket, refuses it
        path.chmod(FOLDER_MODE)  # a umask may take from its owner the right to enter it


def check_run_folder(run: Path, rank: Path) -> None:
    """Raises OSError for a run directory, or a link to one, of another user; and for one whose folder ``rank`` is a link."""
    status = run.stat()
    owners = _Owners(run, status.st_uid)
    owners.check(status)
    owners.check(run.lstat())
    if not os.path.lexists(rank):
        return
    status = rank.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, f"{rank.name} is a link: nothing is written where it leads")
    owners.check(status)


# --- looking ----------------------------------------------------------------------------------------


def mark_of(path: Path) -> Mark | None:
    """Returns the current version of a regular file; None if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return Mark(status.st_ino, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def is_folder(path: Path) -> bool:
    """Returns whether it is a folder of its own; a link to one is not."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def folders_in(path: Path) -> list[str]:
    """Names of the folders in a folder, without links; none if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def names_in(path: Path) -> list[str]:
    """Returns the names of all that is in a folder, sorted; none if it cannot be read."""
    try:
        return sorted(os.listdir(path))  # noqa: PTH208 - names are asked for, no paths
    except OSError:
        return []


def changed_ns(path: Path) -> int:
    """Returns when a file or a folder was last written to; 0 where it was removed since it was listed."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def rank_folders(run: Path) -> dict[int, Path]:
    """Returns the folder of each rank of a run, by rank."""
    found = {
        int(name[4:]): run / name
        for name in folders_in(run)
        if re.fullmatch(r"rank(0|[1-9][0-9]{0,8})", name)
    }
    return dict(sorted(found.items()))


# --- reading ----------------------------------------------------------------------------------------


def read_part(path: Path, start: int, most_bytes: int) -> bytes:
    """Returns the bytes of a file; from its end where ``start`` is negative."""
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(start if start >= 0 else max(0, size + start))
        return file.read(most_bytes)


def read_bytes(path: Path, most_bytes: int, *, root: Path | None = None) -> bytes:
    """Returns a file as a whole; an OSError where it has more than ``most_bytes``."""
    return _bounded(open_below(path, root=root), most_bytes)


def read_word(path: Path) -> str:
    """Returns the text of a file with one short line, without its end; "" if there is none."""
    try:
        return read_bytes(path, 4096).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""


def read_named(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Reads a regular file that the user named; links are followed."""
    return _bounded(_named(path), most_bytes, "the most that is read of it")


def _named(path: str | os.PathLike[str]) -> int:
    descriptor = os.open(path, _READ & ~os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file")
    return descriptor


def _bounded(descriptor: int, most_bytes: int, rule: str = "more than otel_train writes") -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size <= most_bytes:
            data = file.read(most_bytes + 1)
            size = len(data)
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes:,} bytes, {rule}")
    return data


def lines_of(file: BinaryIO, most_bytes: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """Yields the lines of a file with their ends; a longer line is cut, without an end."""
    while line := file.readline(most_bytes):
        yield line
        if len(line) == most_bytes and not line.endswith(b"\n"):
            skip_line(file)


def skip_line(file: BinaryIO) -> bool:
    """Moves behind the end of the line; to the end of the file, and False, where it has none."""
    for chunk in _chunks(file):
        if (end := chunk.find(b"\n")) >= 0:
            file.seek(end + 1 - len(chunk), os.SEEK_CUR)
            return True
    return False


def unzipped(file: BinaryIO) -> Iterator[bytes]:
    """Yields the text of gzip data, in parts of at most 1 MiB. Zeros behind them, of which there may be gigabytes, are skipped.

    Raises:
        EOFError: they end early.
        zlib.error: they are damaged.
    """
    data = b""
    while True:
        stream = zlib.decompressobj(wbits=31)  # with the head and the checksum of gzip
        while not stream.eof:
            data = data or file.read(_CHUNK_BYTES)
            text = stream.decompress(data, _CHUNK_BYTES)
            if not data and not text:
                raise EOFError
            data = stream.unconsumed_tail
            if text:
                yield text
        left = chain((stream.unused_data,), _chunks(file))
        data = next(filter(None, (chunk.lstrip(b"\0") for chunk in left)), b"")
        if not data:
            return


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yields what is left of a file without its holes, which are zeros: one of gigabytes takes no time."""
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk
        try:
            file.seek(file.tell(), os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there is no data behind
                file.seek(0, os.SEEK_END)


# --- JSON -------------------------------------------------------------------------------------------


def read_json(path: Path, *, root: Path | None = None) -> dict[str, Any]:
    """Returns a JSON object in a file of its own; see ``parse_json``.

    Raises:
        RunDirectoryError: it is not there, not regular, too large, too deep, or no such object.
    """
    try:
        value = parse_json(read_bytes(path, MOST_JSON_BYTES, root=root))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunDirectoryError(f"{path.name} cannot be read: {why}.") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path.name} is not a JSON object.")
    return value


class JsonFileCache:
    """At most ``most`` JSON objects by path, read again only when their file has changed; of each what ``part`` returns."""

    def __init__(
        self, part: Callable[[dict[str, Any]], dict[str, Any]] | None = None, *, most: int = MOST_CACHED
    ) -> None:
        self._part, self._most = part, most
        self._kept: dict[Path, tuple[Mark, dict[str, Any]]] = {}
        self._guard = threading.Lock()

    def get(self, path: Path) -> dict[str, Any]:
        """Returns the content of the file; raises as ``read_json``."""
        mark = mark_of(path)
        kept = self._kept.get(path)
        if mark is not None and kept is not None and kept[0] == mark:
            return kept[1]
        value = read_json(path) if self._part is None else self._part(read_json(path))
        if mark is not None:
            with self._guard:
                self._kept.pop(path, None)
                while len(self._kept) >= self._most:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[path] = (mark, value)
        return value

    def get_or_empty(self, path: Path, warnings: list[str]) -> dict[str, Any]:
        """Does what ``get`` does; what cannot be read is empty, with a warning unless it does not exist."""
        try:
            return self.get(path)
        except RunDirectoryError as error:
            if os.path.lexists(path):
                warnings.append(str(error))
            return {}


def parse_json(text: bytes | str) -> object:
    """Returns a JSON value; a ValueError for what is no JSON, or nested deeper than ``MOST_DEPTH``.

    NaN, Infinity, what overflows a float and integers beyond 64 bits become None: we write null for them, and one wrong
    number must not hide the rest of a document.
    """
    try:
        value = _decoder.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError(f"nested deeper than {MOST_DEPTH} levels") from None
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [child for each in level for child in _children(each)]
        if not level:
            return value
    raise ValueError(f"nested deeper than {MOST_DEPTH} levels")


def _children(value: object) -> list[object]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in inner if isinstance(each, (dict, list))]


def _float(text: str) -> float | None:
    value = float(text)
    return value if value - value == 0 else None  # infinity less itself is not a number


_decoder: Final = json.JSONDecoder(
    parse_float=cast("Callable[[str], float]", _float),
    parse_int=cast("Callable[[str], int]", lambda text: int(text) if len(text) <= _MOST_DIGITS else None),
    parse_constant=lambda _: None,
)


# --- replacing --------------------------------------------------------------------------------------


def make_gitignored_folder(folder: Path) -> None:
    """Makes a missing folder, for this user alone, and lets git ignore it. One that is there stays as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_dir():
        return
    make_folder(folder)
    replace_text(folder / ".gitignore", "*\n")


def replace_json(path: Path, value: object) -> None:
    """Replaces a file with a JSON document as a whole; as ``replace_text``."""
    replace_text(path, dump_json(value, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replaces a file as a whole; only our user may read it. After an OSError the old file is as it was."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "replace"))


def replace_named(path: Path, text: str) -> None:
    """Does what ``replace_text`` does at a path that a user named: a device, a pipe or a socket there stays, also behind a link."""
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError(errno.EINVAL, "a pipe, a socket or a device, which no file replaces. Name a file")
    replace_text(path, text)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of ``path`` once it is whole; only our user may read it."""
    fresh = f".{path.name}.{os.getpid()}.{threading.get_ident()}"
    with _folder_of(path, None) as (at, name, _):
        try:
            _remove(fresh, at)  # of a process with our number that was killed here
            with os.fdopen(create(fresh, at), "wb") as file:
                yield file
            os.replace(fresh, name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            with suppress(OSError):
                _remove(fresh, at)
            raise


def _remove(name: str, at: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)


def dump_json(value: object, indent: int | None = None, *, ascii_only: bool = False) -> str:
    """Returns JSON that every parser takes: NaN and infinities become null, foreign objects their text."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=str, ensure_ascii=ascii_only)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, default=str, ensure_ascii=ascii_only)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


# --- JSON lines -------------------------------------------------------------------------------------

_TAIL_BYTES = 1 << 16
"""How much is read at once when looking for the last newline."""


class BoundedLines:
    """An append-only file of lines, limited to ``max_bytes`` together with its predecessor.

    When half of the bound is full the file becomes ``<name>.1``, and the ``.1`` before it is dropped with
    its lines counted. Nothing is created before the first line. A line is whole or not there at all: what
    a crash or a full disk tore off is cut away. After an ``OSError``, which ``on_error`` gets, writing goes on trying with
    the next line.
    """

    def __init__(self, path: Path, *, max_bytes: int, on_error: Callable[[OSError], None]) -> None:
        self.path = path
        self.dropped_lines = 0
        self._max_bytes = max_bytes
        self._on_error = on_error
        self._fd = -1
        self._size_bytes = 0

    def append(self, line: str) -> bool:
        """Writes one line (without newline). False when it could not be written."""
        data = line.encode("utf-8", "replace") + b"\n"
        if len(data) > self._max_bytes // 2:
            self.dropped_lines += 1
            return False
        try:
            self._open()
            if self._size_bytes + len(data) > self._max_bytes // 2:
                self._rotate()
            append_whole(self._fd, data, self._size_bytes)
            self._size_bytes += len(data)
        except OSError as error:
            self.close()
            self._on_error(error)
            return False
        return True

    def close(self) -> None:
        """Lets go of the file. A later line opens it again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError as error:
                self._on_error(error)

    def _open(self) -> None:
        if self._fd >= 0 and not self._was_removed():
            return
        self.close()
        make_folder(self.path.parent)
        self._fd = open_to_write(self.path, append=True)
        self._size_bytes = os.fstat(self._fd).st_size
        if self._size_bytes <= self._max_bytes // 2:  # a larger one, of another bound, is rotated as it is
            self._size_bytes = _without_torn_line(self._fd)

    def _was_removed(self) -> bool:
        # It was removed or rotated: what follows belongs into a new one.
        try:
            return self.path.stat().st_ino != os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return True

    def _rotate(self) -> None:
        old = predecessor(self.path)
        if old.exists():
            with open_binary(old) as file:
                self.dropped_lines += sum(chunk.count(b"\n") for chunk in _chunks(file))
        self.path.replace(old)
        self.close()
        self._open()


def append_whole(fd: int, data: bytes, size_bytes: int) -> None:
    """Writes data behind the ``size_bytes`` of a file; after an error, the file has that size again."""
    written = 0
    try:
        while written < len(data):
            written += os.write(fd, data[written:])
    except OSError:
        if written:
            os.ftruncate(fd, size_bytes)
        raise


def predecessor(path: Path) -> Path:
    """Returns the path of the older half of a bounded file."""
    return path.with_name(path.name + ".1")


def last_metrics(path: Path) -> dict[str, Any]:
    """Returns the last whole line of OTLP metrics, else raises RunDirectoryError. What a crash tore off is skipped."""
    try:
        lines = read_part(path, -MOST_LINE_BYTES, MOST_LINE_BYTES).splitlines(keepends=True)
    except OSError as error:
        hint = " Has training begun?" if isinstance(error, FileNotFoundError) else ""
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}.{hint}") from error
    for line in reversed(lines):
        value = parse_line(line)
        if value is not None and "resourceMetrics" in value:
            return value
    raise RunDirectoryError(f"{path}: has no line of metrics that can be read. Has training begun?")


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Returns the object on one line, or None for a torn or foreign one."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _without_torn_line(fd: int) -> int:
    size = end = os.fstat(fd).st_size
    newline = -1
    while end > 0 and newline < 0:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        end = start + newline + 1 if newline >= 0 else start
    if end < size:
        os.ftruncate(fd, end)
    return end
