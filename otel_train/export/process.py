"""Memory, CPU and files of this process, read from the operating system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_train import catalog as c

if TYPE_CHECKING:
    from otel_train.aggregate.sheet import Sheet

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""A limit above this is none: version 1 control groups say 2**63 rounded down to a page."""


class ProcessReader:
    """Reads what psutil and the control group say.

    Args:
        cgroup: root of the control group file system.
    """

    def __init__(self, cgroup: Path = _CGROUP) -> None:
        import psutil

        self._psutil: Any = psutil
        self._process: Any = psutil.Process()
        self._cgroup = cgroup

    def write(self, sheet: Sheet) -> None:
        """Put the present readings."""
        with self._process.oneshot():
            sheet.put(c.PROCESS_MEMORY_USAGE, self._process.memory_info().rss)
            times = self._process.cpu_times()
            sheet.put(c.PROCESS_CPU_TIME, times.user, "user")
            sheet.put(c.PROCESS_CPU_TIME, times.system, "system")
            sheet.put(c.PROCESS_THREAD_COUNT, self._process.num_threads())
            sheet.put(c.PROCESS_UNIX_FILE_DESCRIPTOR_COUNT, self._process.num_fds())
        used, limit = self.host_memory()
        sheet.put(c.HOST_MEMORY_USAGE, used)
        sheet.put(c.HOST_MEMORY_LIMIT, limit)

    def rss_of(self, pid: int) -> int:
        """Resident bytes of another process; 0 when it is gone."""
        try:
            return int(self._psutil.Process(pid).memory_info().rss)
        except self._psutil.Error:
            return 0

    def host_memory(self) -> tuple[int, int]:
        """(used, limit) in bytes: of the control group where it has a limit, else of the machine."""
        machine = self._psutil.virtual_memory()
        limit = _number(self._cgroup / "memory.max", self._cgroup / "memory/memory.limit_in_bytes")
        used = _number(self._cgroup / "memory.current", self._cgroup / "memory/memory.usage_in_bytes")
        if limit is None or used is None or limit > min(_UNLIMITED, machine.total):
            return machine.total - machine.available, machine.total
        return max(0, used - self._inactive_files()), limit

    def _inactive_files(self) -> int:
        """Bytes of file cache that the kernel would give back: not what the processes need."""
        for path in (self._cgroup / "memory.stat", self._cgroup / "memory/memory.stat"):
            try:
                lines = path.read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                name, _, value = line.partition(" ")
                if name in ("inactive_file", "total_inactive_file"):
                    return int(value)
        return 0


def _number(*paths: Path) -> int | None:
    for path in paths:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None
