"""Which packages and extras are installed, in which version."""

from __future__ import annotations

import platform
import re
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from otel_train.doctor.checks import NOTE, OK, PROBLEM, WARNING, Finding
from otel_train.exporters.plugins import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from importlib.metadata import EntryPoint

AREA = "installed"
LEAST_PYTHON, LEAST_TORCH = (3, 10), (2, 4)
EXTRAS = {
    "nvml": ("nvidia-ml-py", "utilisation, power and temperature of NVIDIA GPUs"),
    "yaml": ("PyYAML", "settings in a YAML file"),
    "analyze": ("msgspec", "traces are read five times as fast"),
}
"""Extra to its package, and what that is good for."""

DEVICE = Path("/dev/nvidiactl")
"""There is an NVIDIA driver where this is."""

_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?P<rest>[^;]*)(?:;(?P<marker>.*))?$")
_BELOW = re.compile(r"""python_version\s*<\s*["'](?P<number>[\d.]+)""")
_BOUND = re.compile(r"(?P<sign>>=|<)(?P<number>\d[\w.]*)")


def look(
    *,
    installed: Callable[[str], str | None] | None = None,
    python: tuple[int, ...] = sys.version_info[:3],
    device: Path = DEVICE,
    exporters: Iterable[EntryPoint] | None = None,
    native: bool | None = None,
) -> Iterator[Finding]:
    """Say what is installed.

    Only exporters of other packages are imported for it: a torch that cannot be imported is still found.

    Args:
        installed: version of a package, None when it is not there.
        python: version of the interpreter.
        device: file of the NVIDIA driver.
        exporters: entry points of exporters; those of what is installed when None.
        native: the writer of edges in C was built; None to look.
    """
    of = installed or _installed
    yield from _python(python)
    ours = of("otel-train")
    yield Finding(area=AREA, state=OK, what=f"otel-train {ours or '(from its sources, not installed)'}")
    yield _edges(native=_loads("otel_train._edges") if native is None else native)
    yield _torch(of("torch"))
    yield from _requirements(of, python)
    for extra, (package, good_for) in EXTRAS.items():
        found = of(package)
        if found:
            yield Finding(area=AREA, state=OK, what=f"extra {extra}: {package} {found}")
        else:
            wanted = extra == "nvml" and device.exists()
            yield Finding(
                area=AREA,
                state=WARNING if wanted else NOTE,
                what=f"extra {extra} is not installed ({good_for})",
                remedy=f"pip install 'otel-train[{extra}]'",
            )
    yield from _exporters(entry_points(group=GROUP) if exporters is None else exporters)


def _loads(extension: str) -> bool:
    """Whether it can be imported: one that is there may be of another interpreter."""
    try:
        import_module(extension)
    except ImportError:
        return False
    return True


def _edges(*, native: bool) -> Finding:
    if native:
        return Finding(area=AREA, state=OK, what="edges of the training thread are written in C")
    return Finding(
        area=AREA,
        state=NOTE,
        what="edges of the training thread are written in Python: some 4 us per step more than in C",
        remedy="install again where there is a C compiler (Linux, Python 3.11 or later)",
    )


def _exporters(points: Iterable[EntryPoint]) -> Iterator[Finding]:
    """What other packages bring."""
    for point in points:
        what = f"exporter {point.name} ({point.value})"
        try:
            point.load()
        except (ImportError, AttributeError) as error:
            yield Finding(
                area=AREA,
                state=WARNING,
                what=f"{what} cannot be had: {error}",
                remedy="correct or uninstall its package, or set OTEL_TRAIN_EXPORTERS=off",
            )
        else:
            yield Finding(area=AREA, state=OK, what=what)


def _python(python: tuple[int, ...]) -> Iterator[Finding]:
    name = ".".join(map(str, python))
    system = f"{platform.system()} {platform.machine()}"
    if python < LEAST_PYTHON:
        yield Finding(
            area=AREA,
            state=PROBLEM,
            what=f"Python {name} is too old",
            remedy=f"use Python {'.'.join(map(str, LEAST_PYTHON))} or later",
        )
    else:
        yield Finding(area=AREA, state=OK, what=f"Python {name}, {system}, {sys.executable}")


def _torch(found: str | None) -> Finding:
    if found is None:
        return Finding(
            area=AREA,
            state=WARNING,
            what="torch is not installed for this Python: nothing can be observed here",
            remedy="run otel-train in the environment of your training, or pip install 'otel-train[torch]'",
        )
    if _numbers(found)[:2] < LEAST_TORCH:
        return Finding(
            area=AREA,
            state=PROBLEM,
            what=f"torch {found} is older than what is supported",
            remedy=f"install torch {'.'.join(map(str, LEAST_TORCH))} or later",
        )
    return Finding(area=AREA, state=OK, what=f"torch {found}")


def _requirements(of: Callable[[str], str | None], python: tuple[int, ...]) -> Iterator[Finding]:
    """What we cannot do without, as our own package says."""
    try:
        wanted = requires("otel-train") or []
    except PackageNotFoundError:
        return
    good = []
    for requirement in wanted:
        parts = _REQUIREMENT.match(requirement)
        if parts is None or "extra" in (parts["marker"] or ""):
            continue
        below = _BELOW.search(parts["marker"] or "")
        if below and python >= _numbers(below["number"]):
            continue
        name, found = parts["name"], of(parts["name"])
        if found is None or not _within(found, parts["rest"]):
            yield Finding(
                area=AREA,
                state=PROBLEM,
                what=f"{name} {found or 'is missing'}: expected {parts['rest'].strip()}",
                remedy=f"pip install '{name}{parts['rest'].strip()}'",
            )
        else:
            good.append(f"{name} {found}")
    yield Finding(area=AREA, state=OK, what=", ".join(good))


def _within(found: str, bounds: str) -> bool:
    has = _numbers(found)
    for bound in _BOUND.finditer(bounds):
        limit = _numbers(bound["number"])
        if (bound["sign"] == ">=" and has < limit) or (bound["sign"] == "<" and has >= limit):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` to (2, 13, 0). A letter ends it, so a pre-release counts as its release."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
