"""Opens files below a run directory, which is untrusted; no other module opens them.

Other users may have put links, pipes, devices and endless files there. A path is divided into the run directory, which the
user named and up to which links are followed, and the part below it, which has folders of otel_train's layout (``rank<r>``,
``captures``, ``training-<n>``, ...). Below it every folder and file is opened relative to the descriptor of the one above,
no link is followed, a pipe does not block, and only regular files and folders of trusted owners are opened: of this process'
user and of root. If this process runs as root, or on a network file system, which may show another owner than the writer,
also those of the owner of the run directory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, cast

from otel_train.errors import RunDirectoryError

if TYPE_CHECKING:
    from pathlib import Path

REMOTE = (
    "nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "9p", "afs", "fuse.", "wekafs",
)  # fmt: skip
"""Beginnings of the types of file systems on which a page fault may need the network."""


def absolute(path: Path) -> Path:
    """Returns the path made absolute; unchanged if the working directory no longer exists."""
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
"""Modes of files and folders that otel_train creates: only their owner may read what is trained, where and how."""

MOST_JSON_BYTES: Final = 16 << 20
"""Largest JSON document that is read. A summary of 64 loaders has some 200 kB."""

MOST_CACHED: Final = 4096

MOST_BYTES: Final = 16 << 30
"""Largest file that is read; captures are the largest. To read a sparse file of this size takes seconds, and no memory."""

MOST_DEPTH: Final = 64
"""Deepest nesting of a JSON document. Those of otel_train have 8 levels; code that walks a deeper one may hit RecursionError."""

MOST_LINE_BYTES: Final = 8 << 20
"""Longest line that is read. A line of metrics is shorter, also under the export profile ``full``."""

_CHUNK_BYTES: Final = 1 << 20

_MOST_DIGITS: Final = 20
"""Most characters of an integer in JSON, as 64 bits and a sign have. Computing with a larger one may overflow."""

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_FOLDER: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_LAYOUT: Final = re.compile(r"rank\d+|training-\d+|captures|artifacts|spool|rejected|tensorboard|launches")
"""Folders of a run directory."""

OF_A_RANK: Final = re.compile(r"[-_.]?rank_?(\d+)")
"""The rank in the name of a trace."""


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
        """Raises an OSError for a file or folder of an untrusted owner."""
        user = os.geteuid()
        if status.st_uid in {user, 0}:
            return
        if status.st_uid == self.uid and (user == 0 or file_system(self.home).startswith(REMOTE)):
            return
        raise OSError(
            errno.EACCES,
            f"owned by user {status.st_uid}, which is neither ours ({user}) nor root. "
            "Run as that user, or name another folder",
        )


@contextmanager
def _folder_of(path: Path, root: Path | None) -> Iterator[tuple[int, str, _Owners]]:
    """Opens the folder of ``path``; yields its descriptor, the name of the file in it, and the trusted owners."""
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

    That folder is ``root``; if None, the parent of the folders at the end of ``path`` whose names are of otel_train's layout.
    """
    if root is not None:
        below = path.relative_to(root).parts
    elif not path.name:  # "." or "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    else:
        parts, count = path.parts, 1
        while count < len(parts) and _LAYOUT.fullmatch(parts[-count - 1]):
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
    """Returns the descriptor if it is one of a regular file with a trusted owner; else closes it and raises OSError."""
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
    """Opens a file for reading; returns its descriptor. For ``root`` see ``divided``.

    Raises:
        OSError: the file is missing, a link, a pipe or a device, has another owner, or may not be read.
    """
    with _folder_of(path, root) as (at, name, owners):
        return _checked(_opened(name, _READ, at), owners)


def open_binary(path: Path, *, root: Path | None = None) -> BinaryIO:
    """Opens a file of at most ``MOST_BYTES`` for reading; see ``open_below``."""
    descriptor = open_below(path, root=root)
    if os.fstat(descriptor).st_size > MOST_BYTES:
        os.close(descriptor)
        raise OSError(errno.EFBIG, f"has more than {MOST_BYTES >> 30} GiB, more than otel_train writes")
    return os.fdopen(descriptor, "rb")


def open_given(path: Path) -> BinaryIO:
    """Opens a file that the user named: links are followed, unless it is in a folder of a run directory."""
    if len(divided(path)[1]) > 1:
        return open_binary(path)
    return os.fdopen(_open_named(path), "rb")


def problem_of(path: Path, *, root: Path | None = None) -> str:
    """Returns why a file cannot be read; "" if it can."""
    try:
        os.close(open_below(path, root=root))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def folder_problem(path: Path, *, links: bool = False) -> str:
    """Returns why an existing folder, or a file in it, cannot be opened; "" if it can, or if there is none. ``links``: one is followed."""
    try:
        with _folder_of(path / "file", path if links else path.parent) as (at, _, _):
            os.stat(".", dir_fd=at)  # fails if the folder may be listed and not entered
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def open_to_write(path: Path, *, append: bool = False, new: bool = False) -> int:
    """Opens a file for writing and reading; creates it if it is missing; returns its descriptor. See ``open_below``.

    With ``new``, a FileExistsError is raised if it exists.
    """
    flags = _WRITE | os.O_APPEND * append | os.O_EXCL * new
    with _folder_of(path, None) as (at, name, owners):
        return _checked(_opened(name, flags, at), owners)


def create(path: Path | str, at: int | None = None) -> int:
    """Creates a file for writing, relative to the folder descriptor ``at``; fails if the name exists, also as a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, FILE_MODE, dir_fd=at)


def make_folder(path: Path) -> None:
    """Makes a folder and its missing parents, accessible to the current user only. An existing folder is not changed."""
    if path.is_dir():
        return
    make_folder(path.parent)  # mkdir(parents=True) would make the parents with the mode of the umask
    try:
        path.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        return
    with suppress(OSError):  # a file system without modes, such as a mounted bucket, refuses it
        path.chmod(FOLDER_MODE)  # the umask may have removed permissions of the owner


def check_run_folder(run: Path, rank: Path) -> None:
    """Raises OSError if the run directory, or a link to it, has an untrusted owner, or its folder ``rank`` is a link."""
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


# --- status and listing -----------------------------------------------------------------------------


def mark_of(path: Path) -> Mark | None:
    """Returns the current version of a regular file; None if there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return Mark(status.st_ino, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def is_folder(path: Path) -> bool:
    """Returns whether the path is a folder; False for a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def folders_in(path: Path) -> list[str]:
    """Returns the names of the folders in a folder, without links; none if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def names_in(path: Path) -> list[str]:
    """Returns the sorted names of all entries of a folder; none if it cannot be read."""
    try:
        return sorted(os.listdir(path))  # noqa: PTH208 - names are asked for, no paths
    except OSError:
        return []


def changed_ns(path: Path) -> int:
    """Returns the modification time of a file or a folder, in Unix nanoseconds; 0 if it no longer exists."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def rank_folders(run: Path) -> dict[int, Path]:
    """Returns the folder of each rank of a run, by rank."""
    return _ranks_among(run, folders_in(run))


def rank_problems(run: Path) -> dict[int, str]:
    """Returns why the folder of a rank cannot be read, by rank: a link, a file, or no permission."""
    found = {rank: folder_problem(path) for rank, path in _ranks_among(run, names_in(run)).items()}
    return {rank: problem for rank, problem in found.items() if problem}


def _ranks_among(run: Path, names: Iterable[str]) -> dict[int, Path]:
    found = {int(name[4:]): run / name for name in names if re.fullmatch(r"rank(0|[1-9][0-9]{0,8})", name)}
    return dict(sorted(found.items()))


# --- reading ----------------------------------------------------------------------------------------


def read_part(path: Path, start: int, most_bytes: int) -> bytes:
    """Returns at most ``most_bytes`` of a file from offset ``start``; a negative ``start`` counts from the end."""
    with open_binary(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(start if start >= 0 else max(0, size + start))
        return file.read(most_bytes)


def read_bytes(path: Path, most_bytes: int, *, root: Path | None = None) -> bytes:
    """Returns a whole file; raises OSError if it has more than ``most_bytes``."""
    return _read_bounded(open_below(path, root=root), most_bytes)


def read_word(path: Path) -> str:
    """Returns the text of a file with one short line, stripped; "" if the file does not exist."""
    try:
        return read_bytes(path, 4096).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""


def read_named(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Reads a regular file that the user named; links are followed."""
    return _read_bounded(_open_named(path), most_bytes, "the most that is read of it")


def _open_named(path: str | os.PathLike[str]) -> int:
    descriptor = os.open(path, _READ & ~os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file")
    return descriptor


def _read_bounded(descriptor: int, most_bytes: int, rule: str = "more than otel_train writes") -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size <= most_bytes:
            data = file.read(most_bytes + 1)
            size = len(data)
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes:,} bytes, {rule}")
    return data


def lines_of(file: BinaryIO, most_bytes: int = MOST_LINE_BYTES) -> Iterator[bytes]:
    """Yields the lines of a file with their newlines; a line of more than ``most_bytes`` is cut, and has no newline."""
    while line := file.readline(most_bytes):
        yield line
        if len(line) == most_bytes and not line.endswith(b"\n"):
            skip_line(file)


def skip_line(file: BinaryIO) -> bool:
    """Moves to the start of the next line; returns False if there is no newline, at the end of the file then."""
    for chunk in _chunks(file):
        if (end := chunk.find(b"\n")) >= 0:
            file.seek(end + 1 - len(chunk), os.SEEK_CUR)
            return True
    return False


def unzipped(file: BinaryIO) -> Iterator[bytes]:
    """Yields decompressed gzip data, in parts of at most 1 MiB. Trailing zeros, possibly gigabytes of them, are skipped.

    Raises:
        EOFError: the data end early.
        zlib.error: the data are damaged.
    """
    data = b""
    while True:
        stream = zlib.decompressobj(wbits=31)  # with the header and the checksum of gzip
        while not stream.eof:
            data = data or file.read(_CHUNK_BYTES)
            text = stream.decompress(data, _CHUNK_BYTES)
            if not data and not text:
                raise EOFError
            data = stream.unconsumed_tail
            if text:
                yield text
        rest = chain((stream.unused_data,), _chunks(file))
        data = next(filter(None, (chunk.lstrip(b"\0") for chunk in rest)), b"")
        if not data:
            return


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yields the rest of a file in chunks, and skips holes: a sparse file of gigabytes takes no time."""
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk
        try:
            file.seek(file.tell(), os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole follows
                file.seek(0, os.SEEK_END)


# --- JSON -------------------------------------------------------------------------------------------


def read_json(path: Path, *, root: Path | None = None) -> dict[str, Any]:
    """Returns the JSON object in a file; see ``parse_json``.

    Raises:
        RunDirectoryError: the file is missing, not regular, too large, nested too deeply, or has no JSON object.
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
    """Cache of up to ``most`` JSON files, read again when a file has changed; holds what ``part`` returns for each object."""

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
        """Returns the content of the file; {} if it cannot be read, with a warning unless it does not exist."""
        try:
            return self.get(path)
        except RunDirectoryError as error:
            if os.path.lexists(path):
                warnings.append(str(error))
            return {}


def parse_json(text: bytes | str) -> object:
    """Returns a JSON value; raises ValueError for text that is no JSON, or nested deeper than ``MOST_DEPTH``.

    NaN, Infinity, floats out of range and integers of more than 20 characters become None, as ``dump_json`` writes null for NaN: one
    wrong number must not hide the rest of a document.
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
    return value if value - value == 0 else None  # inf - inf is nan


_decoder: Final = json.JSONDecoder(
    parse_float=cast("Callable[[str], float]", _float),
    parse_int=cast("Callable[[str], int]", lambda text: int(text) if len(text) <= _MOST_DIGITS else None),
    parse_constant=lambda _: None,
)


# --- replacing --------------------------------------------------------------------------------------


def make_gitignored_folder(folder: Path) -> None:
    """Makes a missing folder with a ``.gitignore``, accessible to the current user only. An existing folder is not changed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_dir():
        return
    make_folder(folder)
    replace_text(folder / ".gitignore", "*\n")


def replace_json(path: Path, value: object) -> None:
    """Replaces a file atomically with a JSON document; see ``replace_text``."""
    replace_text(path, dump_json(value, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replaces a file atomically; only the current user may read it. After an OSError the old file is unchanged."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "replace"))


def replace_named(path: Path, text: str) -> None:
    """Replaces a file that the user named, as ``replace_text``; raises OSError if it is, or links to, a device, a pipe or a socket."""
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError(errno.EINVAL, "a pipe, a socket or a device, which no file replaces. Name a file")
    replace_text(path, text)


ABANDONED_S: Final = 3600.0
"""Age of a temporary file that no process writes any more."""

_TEMPORARY: Final = re.compile(r"\..+\.\d+\.\d+")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that is renamed to ``path`` at the end of the block; only the current user may read it."""
    temporary = f".{path.name}.{os.getpid()}.{threading.get_ident()}"
    with _folder_of(path, None) as (at, name, _):
        try:
            _remove(temporary, at)  # left by a killed process that had the same pid
            with os.fdopen(create(temporary, at), "wb") as file:
                yield file
            os.replace(temporary, name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            with suppress(OSError):
                _remove(temporary, at)
            raise


def remove_abandoned(folder: Path) -> None:
    """Removes the temporary files of ``replacing`` that killed processes have left in a folder ``ABANDONED_S`` ago or earlier."""
    for name in filter(_TEMPORARY.fullmatch, names_in(folder)):
        written_ns = changed_ns(folder / name)
        if time.time() - written_ns / 1e9 > ABANDONED_S:
            with suppress(OSError):
                (folder / name).unlink()


def _remove(name: str, at: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)


def dump_json(value: object, indent: int | None = None, *, ascii_only: bool = False) -> str:
    """Returns standard JSON: NaN and infinities become null, objects of other types their ``str``."""
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
"""Bytes per read when searching for the last newline."""


class BoundedLines:
    """An append-only file of lines, limited to ``max_bytes`` together with its predecessor.

    When the file has half of ``max_bytes`` it is renamed to ``<name>.1``; the previous ``.1`` is dropped. Nothing is
    created before the first line. A line is complete or absent: the part of a line that a crash or a full disk left is removed.
    After an ``OSError``, which ``on_error`` receives, the next line is tried again.
    """

    def __init__(self, path: Path, *, max_bytes: int, on_error: Callable[[OSError], None]) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._on_error = on_error
        self._fd = -1
        self._size_bytes = 0

    def append(self, line: str) -> bool:
        """Writes one line, given without newline. Returns False if it could not be written."""
        data = line.encode("utf-8", "replace") + b"\n"
        if len(data) > self._max_bytes // 2:
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
        """Closes the file. A later line opens it again."""
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
        if self._size_bytes <= self._max_bytes // 2:  # else it is rotated below: it had another bound
            self._size_bytes = _without_torn_line(self._fd)

    def _was_removed(self) -> bool:
        try:
            return self.path.stat().st_ino != os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return True

    def _rotate(self) -> None:
        self.path.replace(predecessor(self.path))
        self.close()
        self._open()


def append_whole(fd: int, data: bytes, size_bytes: int) -> None:
    """Appends data to a file of ``size_bytes``; after an error, truncates it to that size and raises."""
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
    """Returns the last complete line of OTLP metrics, else raises RunDirectoryError. A torn line at the end is skipped."""
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
    """Returns the JSON object on a line; None for a line without newline or without an object."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _without_torn_line(fd: int) -> int:
    """Truncates a file after its last newline; returns its size."""
    size = end = os.fstat(fd).st_size
    newline = -1
    while end > 0 and newline < 0:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        end = start + newline + 1 if newline >= 0 else start
    if end < size:
        os.ftruncate(fd, end)
    return end
