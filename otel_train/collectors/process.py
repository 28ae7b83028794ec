"""Memory, CPU and files of a process, read from the operating system."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_train import catalog as c

if TYPE_CHECKING:
    from otel_train.aggregation.metrics import MetricBuilder

_CGROUP = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Limit, usage and details under version 2 and version 1 of control groups."""


class _Group(NamedTuple):
    limit: Path
    usage: Path
    stat: Path


class ProcessReader:
    """Reads what psutil and the control group say.

    Args:
        cgroup: root of the control group file system.
        pid: of the process; this one when None.
    """

    def __init__(self, cgroup: Path = _CGROUP, *, pid: int | None = None) -> None:
        import psutil

        self._psutil: Any = psutil
        self._process: Any = None
        with suppress(psutil.NoSuchProcess):  # another process may have ended by now
            self._process = psutil.Process(pid)
        groups = [_Group(*(cgroup / name for name in names)) for names in _FILES]
        limits = [_number(group.limit) for group in groups]
        machine_bytes = self._psutil.virtual_memory().total
        limited = [g for g, limit in zip(groups, limits, strict=True) if limit and limit < machine_bytes]
        self._group = limited[0] if limited else None
        self._limit = next((limit for limit in limits if limit and limit < machine_bytes), machine_bytes)

    def write(self, builder: MetricBuilder) -> None:
        """Put the present readings; of a process that is gone, those of the machine alone."""
        if self._process is not None:
            with suppress(self._psutil.Error), self._process.oneshot():
                self._write_process(builder)
        used, limit = self.host_memory()
        builder.put(c.HOST_MEMORY_USAGE, used)
        builder.put(c.HOST_MEMORY_LIMIT, limit)

    def _write_process(self, builder: MetricBuilder) -> None:
        builder.put(c.PROCESS_MEMORY_USAGE, self._process.memory_info().rss)
        times = self._process.cpu_times()
        builder.put(c.PROCESS_CPU_TIME, times.user, "user")
        builder.put(c.PROCESS_CPU_TIME, times.system, "system")
        builder.put(c.PROCESS_THREAD_COUNT, self._process.num_threads())
        builder.put(c.PROCESS_UNIX_FILE_DESCRIPTOR_COUNT, self._process.num_fds())

    def rss_of(self, pid: int) -> int:
        """Resident bytes of another process; 0 when it is gone."""
        try:
            return int(self._psutil.Process(pid).memory_info().rss)
        except self._psutil.Error:
            return 0

    def host_memory(self) -> tuple[int, int]:
        """(used, limit) in bytes: of the control group where it has a limit, else of the machine."""
        machine = self._psutil.virtual_memory()
        if self._group is None:
            return machine.total - machine.available, machine.total
        used = _number(self._group.usage) or 0
        return max(0, used - self._inactive_files(self._group.stat)), min(self._limit, machine.total)

    @staticmethod
    def _inactive_files(stat: Path) -> int:
        """Bytes of file cache that the kernel would give back: not what the processes need."""
        try:
            lines = stat.read_text().splitlines()
        except OSError:
            return 0
        found = [
            line.split() for line in lines if line.startswith(("inactive_file ", "total_inactive_file "))
        ]
        return int(found[-1][1]) if found else 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
