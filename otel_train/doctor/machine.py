"""Whether this machine lets a run write, map, load and listen as it wants to."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from otel_train.config.validation import MIB, address_of
from otel_train.doctor.checks import NOTE, OK, PROBLEM, WARNING, Finding
from otel_train.errors import RunDirectoryError
from otel_train.exporters.run_directory import rank_directories
from otel_train.files import file_system, folders_in, mark_of, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from otel_train.config import Config

RUNS, MACHINE = "run directory", "machine"
LEAST_SHM_BYTES = 1024 * MIB
"""Loader workers hand batches over in shared memory. Docker's default of 64 MiB is less than one batch of images."""

LOOKED_AT = 20
"""Run directories whose version is compared, the newest."""


class Disk(NamedTuple):
    """What is known of a file system.

    Attributes:
        kind: its type, such as ``ext4``; "" where it cannot be told.
        free_bytes: what is left for us.
    """

    kind: str
    free_bytes: int


def disk(folder: Path) -> Disk:
    """The file system that holds a folder."""
    return Disk(file_system(folder), shutil.disk_usage(folder).free)


def look_at_runs(
    config: Config, *, version: str | None, ask_disk: Callable[[Path], Disk] = disk
) -> Iterator[Finding]:
    """Say whether run directories can be written and read.

    Args:
        config: where they go, and how much each may take.
        version: ours, None when unknown.
        ask_disk: looks at a file system.
    """
    root = Path(config.run_dir).absolute()
    above = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if not above.is_dir():
        kind = "a link that leads nowhere" if above.is_symlink() and not above.exists() else "a file"
        yield Finding(
            area=RUNS,
            state=PROBLEM,
            what=f"{root} cannot be made: {above} is {kind}",
            remedy="set OTEL_TRAIN_RUN_DIR to a folder, or move what lies there",
        )
        return
    folder = next(path for path in (root, *root.parents) if path.is_dir())
    denied = _denied(folder)
    if denied:
        yield Finding(
            area=RUNS,
            state=PROBLEM,
            what=f"{root} cannot be written: {denied}",
            remedy="set OTEL_TRAIN_RUN_DIR to a folder of yours; without one nothing is left of a run that crashes",
        )
        return
    yield Finding(
        area=RUNS,
        state=OK,
        what=f"{root} can be written{'' if folder == root else ', and is made by the first run'}",
    )
    found = ask_disk(folder)
    free_mib, wanted_mib = found.free_bytes // MIB, config.max_run_dir_bytes // MIB
    low = free_mib < wanted_mib
    yield Finding(
        area=RUNS,
        state=WARNING if low else OK,
        what=f"{free_mib} MiB are free on {found.kind or 'its file system'}; a rank may take {wanted_mib} MiB (max_run_dir_bytes)",
        remedy="free some, or set OTEL_TRAIN_RUN_DIR or OTEL_TRAIN_MAX_RUN_DIR_BYTES" if low else "",
    )
    yield from _versions(root, version)


def _denied(folder: Path) -> str:
    """Why nothing can be written there; "" when it can. The only test that counts is to write."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".otel-train-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _versions(root: Path, version: str | None) -> Iterator[Finding]:
    named = [root / name / "run.json" for name in folders_in(root)]
    paths = sorted(filter(mark_of, named), key=_changed_ns, reverse=True)[:LOOKED_AT]
    if not paths:
        return
    others = {found for path in paths if (found := _written_by(path)) and version and found != version}
    ranks = sum(len(rank_directories(path.parent)) for path in paths)
    if others:
        yield Finding(
            area=RUNS,
            state=WARNING,
            what=f"some runs were written by otel-train {', '.join(sorted(others))}; this is {version}",
            remedy="read those with the version that wrote them if summary, report or postmortem refuse",
        )
    else:
        yield Finding(area=RUNS, state=OK, what=f"{len(paths)} runs with {ranks} ranks, all of this version")


def _written_by(path: Path) -> str:
    try:
        return str(read_json(path).get("version", ""))
    except RunDirectoryError:
        return ""


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def look_at_machine(
    config: Config,
    environ: Mapping[str, str],
    *,
    shm: Path = Path("/dev", "shm"),
    ask_disk: Callable[[Path], Disk] = disk,
) -> Iterator[Finding]:
    """Say whether loaders, ``/metrics`` and a fork beside gRPC will be happy."""
    if shm.is_dir():
        free = ask_disk(shm).free_bytes
        low = free < LEAST_SHM_BYTES
        yield Finding(
            area=MACHINE,
            state=WARNING if low else OK,
            what=f"{free // MIB} MiB of shared memory are free for loader workers ({shm})",
            remedy="in a container: docker run --shm-size=8g, or mount a memory volume there; else fewer workers"
            if low
            else "",
        )
    if config.prometheus:
        yield _port(*address_of(config.prometheus_address))
    if any(name.endswith("_PROTOCOL") and value == "grpc" for name, value in environ.items()):
        yield Finding(
            area=MACHINE,
            state=NOTE,
            what="gRPC has threads of its own, and loader workers that are forked while they run can hang",
            remedy="prefer OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf, or multiprocessing_context='forkserver' in loaders",
        )
    yield Finding(
        area=MACHINE,
        state=OK,
        what=f"user {os.getuid()}; no ptrace, performance counters or other privileges are needed",
    )


def _port(host: str, port: int) -> Finding:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return Finding(
            area=MACHINE,
            state=NOTE if taken else PROBLEM,
            what=f"/metrics: {host}:{port} {'is taken' if taken else f'cannot be listened on ({error.strerror})'}",
            remedy="a run takes the next free port and says which; if no run of yours is there, set "
            "OTEL_TRAIN_PROMETHEUS_ADDRESS"
            if taken
            else "set OTEL_TRAIN_PROMETHEUS_ADDRESS to an address of this machine, with a port above 1023",
        )
    return Finding(area=MACHINE, state=OK, what=f"/metrics: {host}:{port} is free")
