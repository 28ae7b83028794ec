"""Control groups that limit the memory of a process: where their files are."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

GROUPS: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")


class MemoryGroup(NamedTuple):
    """The control group of a process in one hierarchy.

    Attributes:
        version: version of control groups: 1 or 2.
        mount: folder in which the hierarchy is mounted.
        path: path of the group below it.
    """

    version: int
    mount: Path
    path: PurePosixPath

    @property
    def folders(self) -> list[Path]:
        """Folders of the group and of all groups around it, the outermost last."""
        return [self.mount / each for each in (self.path, *self.path.parents)]


def memory_groups(pid: int | None = None, groups: Path = GROUPS, proc: Path = _PROC) -> list[MemoryGroup]:
    """Returns the memory groups of a process, of version 2 (cgroup-v2.rst) and version 1 (memory.rst).

    In a container without a cgroup namespace the path is that of the host, but the group is mounted as the root.

    Args:
        pid: process; None for this one.
        groups: folder in which control groups are mounted.
        proc: folder of the processes.
    """
    try:
        text = (proc / str(pid or "self") / "cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for row in text.splitlines():
        _, controllers, path = row.split(":", 2)
        group = PurePosixPath(path.lstrip("/"))
        if not controllers:
            found += [MemoryGroup(2, mount, group) for mount in (groups, groups / "unified")]
        elif "memory" in controllers.split(","):
            found.append(MemoryGroup(1, groups / "memory", group))
    return found
