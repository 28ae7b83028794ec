"""What kind of file system a folder lies on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

REMOTE = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "ceph",
    "beegfs",
    "glusterfs",
    "9p",
    "afs",
    "fuse.",
    "wekafs",
)
"""File systems on which a page fault may be network I/O, by the beginning of their type."""


def file_system(folder: Path) -> str:
    """Type of the file system that holds ``folder``, such as ``ext4``; "" where it cannot be told."""
    import psutil

    best, kind = "", ""
    place = str(folder.resolve())
    for part in psutil.disk_partitions(all=True):
        mount = part.mountpoint.rstrip("/") + "/"
        if (place + "/").startswith(mount) and len(mount) >= len(best):
            best, kind = mount, part.fstype
    return kind
