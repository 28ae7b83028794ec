"""Description of the machine of a measurement, without host or user name."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

_BUSY_LOAD = 1.0
"""1-minute load above which values are not quoted: on two cores a program had one, and loop and export loop shared the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where and when it was measured.

    Attributes:
        date: ISO 8601, UTC.
        cpu: model as the kernel names it.
        cores: usable by this process.
        system: operating system, its kernel's release, architecture.
        python: version.
        torch: version, or "" without it.
        device: name of the accelerator, or "" where none was used.
        load_1min: 1-minute load average before the start.
    """

    date: str
    cpu: str
    cores: int
    system: str
    python: str
    torch: str
    device: str = ""
    load_1min: float = 0.0

    @property
    def kind(self) -> str:
        """Short name for files: ``linux-x86_64-2cores``."""
        words = [platform.system(), platform.machine(), f"{self.cores}cores", self.device]
        return re.sub(r"[^a-z0-9_]+", "-", "-".join(word for word in words if word).lower()).strip("-")

    def sentence(self) -> str:
        """Returns machine and date for the page."""
        device = f", {self.device}" if self.device else ""
        return (
            f"Measured {self.date[:10]} on {self.cpu}{device}, {self.cores} cores, {self.system},"
            f" Python {self.python}, torch {self.torch or 'absent'};"
            f" load before the start {self.load_1min:.1f}{', too busy to quote' if self.busy else ''}."
        )

    @property
    def busy(self) -> bool:
        """Whether other programs were running, which then dominate the values."""
        return self.load_1min > _BUSY_LOAD

    def as_json(self) -> dict[str, object]:
        """Returns everything, as it is stored in the results file."""
        return asdict(self)


def this_machine(*, device: str = "cpu") -> Machine:
    """Reads the facts of this machine."""
    return Machine(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        system=f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        python=platform.python_version(),
        torch=_version("torch"),
        device=_accelerator() if device == "cuda" else "",
        load_1min=os.getloadavg()[0],
    )


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown processor"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _accelerator() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""
