"""Checks packages, settings, run directory and machine."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from otel_train.config.settings import ENVIRONMENT, ResolvedConfig
from otel_train.config.sources import resolve
from otel_train.config.validation import MIB, address_of, text_of, variable_of
from otel_train.console.summary import undelivered
from otel_train.console.text import plural
from otel_train.datamodel import RUN_FILE
from otel_train.doctor.checks import NOTE, OK, PROBLEM, WARNING, CheckResult
from otel_train.errors import RunDirectoryError, shown
from otel_train.exporters.otlp_settings import otlp_configured, switched_off
from otel_train.exporters.plugins import GROUP
from otel_train.exporters.run_directory import folder_name
from otel_train.exporters.spool import MOST_BYTES, requests_left
from otel_train.files import (
    absolute,
    check_run_folder,
    file_system,
    folders_in,
    mark_of,
    rank_folders,
    read_json,
)
from otel_train.resource import wrong_resource
from otel_train.trackers.manager import without_unusable

if TYPE_CHECKING:
    from otel_train.config import Config

RUNS, MACHINE = "run directory", "machine"
LEAST_SHM_BYTES = 1024 * MIB
"""Least free shared memory: DataLoader workers pass batches through it. Docker's 64 MiB are less than a batch of images."""

LOOKED_AT = 20
"""Number of run directories, the newest ones, whose version and spool are checked."""


class FileSystem(NamedTuple):
    """Type and free space of a file system."""

    kind: str
    free_bytes: int


def _disk(folder: Path) -> FileSystem:
    """Returns the file system of a folder."""
    return FileSystem(file_system(folder), shutil.disk_usage(folder).free)


def installed_version(package: str) -> str | None:
    """Returns the version of a package; None if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _has_extension() -> bool:
    """Returns whether the C extension can be imported: it may have been built for another interpreter."""
    try:
        import_module("otel_train._edges")
    except ImportError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the checks read from this machine. Tests replace it."""

    python: tuple[int, ...] = sys.version_info[:3]
    installed: Callable[[str], str | None] = installed_version
    exporters: Callable[[], Iterable[EntryPoint]] = lambda: entry_points(group=GROUP)
    native: Callable[[], bool] = _has_extension
    nvidia: Path = Path("/dev/nvidiactl")
    """Exists if there is an NVIDIA driver."""
    shm: Path = Path("/dev", "shm")
    file_system: Callable[[Path], FileSystem] = _disk


def check_run_directory(config: Config, machine: Machine) -> Iterator[CheckResult]:
    """Checks whether run directories can be written and read."""
    root = absolute(Path(config.run_dir))
    if not root.is_absolute():
        remedy = "change to a folder that exists, or set OTEL_TRAIN_RUN_DIR to an absolute path"
        yield CheckResult(PROBLEM, f"{root} cannot be made: the working directory is gone", remedy)
        return
    existing = next(path for path in (root, *root.parents) if os.path.lexists(path))
    if not existing.is_dir():
        kind = "a link that leads nowhere" if existing.is_symlink() and not existing.exists() else "a file"
        remedy = "set OTEL_TRAIN_RUN_DIR to a folder, or move what lies there"
        yield CheckResult(PROBLEM, f"{root} cannot be made: {existing} is {kind}", remedy)
        return
    if denied := _denied(existing):
        remedy = (
            "set OTEL_TRAIN_RUN_DIR to a folder of yours; without one nothing is left of a run that crashes"
        )
        yield CheckResult(PROBLEM, f"{root} cannot be written: {denied}", remedy)
        return
    if problem := _taken(root, config.run_id):
        remedy = "give the run another run_id, or set OTEL_TRAIN_RUN_DIR to a folder of yours"
        yield CheckResult(
            PROBLEM, f"run_id {shown(config.run_id)}: {root} has a folder of it: {problem}", remedy
        )
    made = "" if existing == root else ", and is made by the first run"
    yield CheckResult(OK, f"{root} can be written{made}")
    found = machine.file_system(existing)
    free_mib, lines_mib, spool_mib = (
        size // MIB for size in (found.free_bytes, config.max_run_dir_bytes, MOST_BYTES)
    )
    free = f"{free_mib} MiB are free on {found.kind or 'its file system'}"
    remedy = "free some, or set OTEL_TRAIN_RUN_DIR or OTEL_TRAIN_MAX_RUN_DIR_BYTES"
    may = f"a rank may take {lines_mib} MiB (max_run_dir_bytes), {spool_mib} MiB for its spool, and its flight files and captures"
    yield _warn_if_low(f"{free}; {may}", remedy, low=free_mib < lines_mib + spool_mib)
    newest = _newest(root)
    yield from _versions(newest, machine.installed("otel-train"))
    yield from _spools(newest)


def _warn_if_low(what: str, remedy: str, *, low: bool) -> CheckResult:
    return CheckResult(WARNING, what, remedy) if low else CheckResult(OK, what)


def _denied(folder: Path) -> str:
    """Returns why the folder is not writable; "" if it is. It is tested by writing: permission bits do not suffice."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".otel-train-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _taken(root: Path, run_id: str) -> str:
    """Returns why the run cannot use its folder below ``root``, such as another owner; "" if it can, or has no id yet."""
    folder = root / folder_name(run_id)
    if not run_id or not folder.exists():
        return ""
    try:
        check_run_folder(folder, folder / "rank0")
    except OSError as error:
        return error.strerror or str(error)
    return _denied(folder)


def _newest(root: Path) -> list[Path]:
    """Returns ``run.json`` of the newest runs below a folder."""
    named = [root / name / RUN_FILE for name in folders_in(root)]
    marks = {path: mark for path in named if (mark := mark_of(path)) is not None}
    return sorted(marks, key=lambda path: marks[path].changed_ns, reverse=True)[:LOOKED_AT]


def _spools(paths: Iterable[Path]) -> Iterator[CheckResult]:
    for run in (path.parent for path in paths):
        facts, command = undelivered(requests_left(run)) or ("", "")
        if facts:
            yield CheckResult(WARNING, f"{run}: {facts}", f"{command} sends them to the Collector")


def _versions(paths: Sequence[Path], version: str | None) -> Iterator[CheckResult]:
    if not paths:
        return
    others = {found for path in paths if (found := _written_by(path)) and version and found != version}
    ranks = sum(len(rank_folders(path.parent)) for path in paths)
    if others:
        what = f"some runs were written by otel-train {', '.join(sorted(others))}; this is {version}"
        remedy = "read those with the version that wrote them if summary, report or postmortem refuse"
        yield CheckResult(WARNING, what, remedy)
    else:
        newest = "the newest " * (len(paths) == LOOKED_AT)
        what = f"{newest}{plural(len(paths), 'run')} with {plural(ranks, 'rank')}, all of this version"
        yield CheckResult(OK, what)


def _written_by(path: Path) -> str:
    try:
        return str(read_json(path).get("version", ""))
    except RunDirectoryError:
        return ""


def check_machine(config: Config, environ: Mapping[str, str], machine: Machine) -> Iterator[CheckResult]:
    """Checks shared memory, the port of ``/metrics``, and forks together with gRPC."""
    if machine.shm.is_dir():
        free = machine.file_system(machine.shm).free_bytes
        what = f"{free // MIB} MiB of shared memory are free for loader workers ({machine.shm})"
        remedy = (
            "in a container: docker run --shm-size=8g, or mount a memory volume there; else fewer workers"
        )
        yield _warn_if_low(what, remedy, low=free < LEAST_SHM_BYTES)
    if config.prometheus:
        yield _port(*address_of(config.prometheus_address))
    if any(name.endswith("_PROTOCOL") and value == "grpc" for name, value in environ.items()):
        what = "gRPC has threads of its own, and loader workers that are forked while they run can hang"
        other = "multiprocessing_context='forkserver' in loaders"
        yield CheckResult(NOTE, what, f"prefer OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf, or {other}")
    yield CheckResult(
        OK, f"user {os.getuid()}; no ptrace, performance counters or other privileges are needed"
    )


def _port(host: str, port: int) -> CheckResult:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = "a run takes the next free port and says which; if no run of yours is there, set"
            return CheckResult(
                NOTE, f"/metrics: {host}:{port} is taken", f"{remedy} OTEL_TRAIN_PROMETHEUS_ADDRESS"
            )
        what = f"/metrics: {host}:{port} cannot be listened on ({error.strerror})"
        remedy = "set OTEL_TRAIN_PROMETHEUS_ADDRESS to an address of this machine, with a port above 1023"
        return CheckResult(PROBLEM, what, remedy)
    return CheckResult(OK, f"/metrics: {host}:{port} is free")


PACKAGES = "installed"
LEAST_PYTHON, LEAST_TORCH = (3, 10), (2, 4)
EXTRAS = {
    "nvml": ("nvidia-ml-py", "utilisation, power and temperature of NVIDIA GPUs"),
    "yaml": ("PyYAML", "settings in a YAML file"),
    "analyze": ("msgspec", "traces are read five times as fast"),
}
"""Package and purpose of each extra."""

_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?P<rest>[^;]*)(?:;(?P<marker>.*))?$")
_BELOW = re.compile(r"""python_version\s*<\s*["'](?P<number>[\d.]+)""")
_BOUND = re.compile(r"(?P<sign>>=|<)(?P<number>\d[\w.]*)")


def check_packages(machine: Machine) -> Iterator[CheckResult]:
    """Checks the installed packages.

    Only exporters of other packages are imported, so that a torch that cannot be imported is still reported.
    """
    installed = machine.installed
    yield _python(machine.python)
    own_version = installed("otel-train")
    yield CheckResult(OK, f"otel-train {own_version or '(from its sources, not installed)'}")
    yield _event_writer(native=machine.native())
    yield _torch(installed("torch"))
    yield from _requirements(installed, machine.python)
    for extra, (package, good_for) in EXTRAS.items():
        found = installed(package)
        if found:
            yield CheckResult(OK, f"extra {extra}: {package} {found}")
        else:
            state = WARNING if extra == "nvml" and machine.nvidia.exists() else NOTE
            what = f"extra {extra} is not installed ({good_for})"
            yield CheckResult(state, what, f"pip install 'otel-train[{extra}]'")
    yield from _exporters(machine.exporters())


def _event_writer(*, native: bool) -> CheckResult:
    if native:
        return CheckResult(OK, "events of the training thread are written in C")
    what = "events of the training thread are written in Python: some 4 us per step more than in C"
    return CheckResult(NOTE, what, "install again where there is a C compiler (Linux, Python 3.11 or later)")


def _exporters(points: Iterable[EntryPoint]) -> Iterator[CheckResult]:
    for point in points:
        what = f"exporter {point.name} ({point.value})"
        try:
            point.load()
        except (ImportError, AttributeError) as error:
            remedy = "correct or uninstall its package, or set OTEL_TRAIN_EXPORTERS=off"
            yield CheckResult(WARNING, f"{what} cannot be loaded: {error}", remedy)
        else:
            yield CheckResult(OK, what)


def _python(python: tuple[int, ...]) -> CheckResult:
    name = ".".join(map(str, python))
    if python < LEAST_PYTHON:
        remedy = f"use Python {'.'.join(map(str, LEAST_PYTHON))} or later"
        return CheckResult(PROBLEM, f"Python {name} is too old", remedy)
    return CheckResult(OK, f"Python {name}, {platform.system()} {platform.machine()}, {sys.executable}")


def _torch(found: str | None) -> CheckResult:
    if found is None:
        what = "torch is not installed for this Python: nothing can be observed here"
        remedy = "run otel-train in the environment of your training, or pip install 'otel-train[torch]'"
        return CheckResult(WARNING, what, remedy)
    if _numbers(found)[:2] < LEAST_TORCH:
        remedy = f"install torch {'.'.join(map(str, LEAST_TORCH))} or later"
        return CheckResult(PROBLEM, f"torch {found} is older than what is supported", remedy)
    return CheckResult(OK, f"torch {found}")


def _requirements(of: Callable[[str], str | None], python: tuple[int, ...]) -> Iterator[CheckResult]:
    try:
        wanted = requires("otel-train") or []
    except PackageNotFoundError:
        return
    satisfied = []
    for requirement in wanted:
        parts = _REQUIREMENT.match(requirement)
        if parts is None or "extra" in (parts["marker"] or ""):
            continue
        below = _BELOW.search(parts["marker"] or "")
        if below and python >= _numbers(below["number"]):
            continue
        name, found, bounds = parts["name"], of(parts["name"]), parts["rest"].strip()
        if found is None or not _satisfies(found, bounds):
            what = f"{name} {found or 'is missing'}: expected {bounds}"
            yield CheckResult(PROBLEM, what, f"pip install '{name}{bounds}'")
        else:
            satisfied.append(f"{name} {found}")
    yield CheckResult(OK, ", ".join(satisfied))


def _satisfies(found: str, bounds: str) -> bool:
    has = _numbers(found)
    for bound in _BOUND.finditer(bounds):
        limit = _numbers(bound["number"])
        if (bound["sign"] == ">=" and has < limit) or (bound["sign"] == "<" and has >= limit):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    """Converts ``2.13.0+cpu`` to (2, 13, 0). Parsing ends at a letter, so a pre-release counts as its release."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


SETTINGS = "settings"
SECRET = ("HEADERS", "TOKEN", "PASSWORD", "KEY")
"""Words in the names of variables whose values are not shown."""

_LOGIN = re.compile(r"//[^/@\s]*@")
"""User name and password in an address."""


def check_settings(environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Reports the settings from environment and files. Arguments of ``instrument`` are unknown here."""
    resolved = without_unusable(resolve(environ=environ))
    ignored = (*resolved.origins.ignored, *wrong_resource(environ))
    for wrong in ignored:
        remedy = "correct or remove it: a variable is OTEL_TRAIN_ and the name of the setting in capitals"
        yield CheckResult(PROBLEM, str(wrong), remedy)
    yield from _switched_off(resolved, environ)
    for name, (value, origin) in {**_given_settings(resolved), **_standard(environ)}.items():
        secret = any(word in name.upper() for word in SECRET)
        text = "(set, not shown)" if secret else _LOGIN.sub("//***@", value)
        yield CheckResult(OK, f"{name}={text} ({origin})")
    counts = Counter(resolved.origins.values())
    origins = [f"{number} from {'the ' * (place == ENVIRONMENT)}{place}" for place, number in counts.items()]
    origins += [f"{len(ignored)} ignored (see above)"] if ignored else []
    total = ", ".join(origins) or "none from the environment or a file"
    yield CheckResult(
        NOTE, f"settings of otel_train: {total}; the rest are defaults unless the program sets them"
    )


def _given_settings(resolved: ResolvedConfig) -> dict[str, tuple[str, str]]:
    """Returns value and origin of the settings that are set, by their name at that origin."""
    found = {}
    for name, origin in resolved.origins.items():
        value = resolved.given.get(name, getattr(resolved.config, name))
        found[variable_of(name) if origin == ENVIRONMENT else name] = (text_of(value), origin)
    return found


def _switched_off(resolved: ResolvedConfig, environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Yields settings that disable recording or sending."""
    config = resolved.config
    if config.disabled:
        name, where = _name_at_origin("disabled", resolved)
        yield CheckResult(PROBLEM, f"{name} switches everything off", f"unset {name}{where}")
    for name, signal in switched_off(environ).items():
        what = f"{name}={environ[name]} switches OTLP off{f' for {signal}' if signal else ''}"
        yield CheckResult(WARNING, what, f"unset {name}")
    if config.otlp == "off" and otlp_configured(environ):
        name, where = _name_at_origin("otlp", resolved)
        what = f"an OTLP endpoint is set, and {name}=off: nothing is sent there"
        yield CheckResult(WARNING, what, f"unset {name}{where}")


def _name_at_origin(name: str, resolved: ResolvedConfig) -> tuple[str, str]:
    origin = resolved.origins[name]
    return (variable_of(name), "") if origin == ENVIRONMENT else (name, f" in {origin}")


def _standard(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {
        name: (value, ENVIRONMENT)
        for name, value in sorted(environ.items())
        if name.startswith("OTEL_") and not name.startswith("OTEL_TRAIN_") and value
    }
