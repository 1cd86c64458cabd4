"""How much host memory there is, and how much of it this process may still ask for.

A container shows the machine's memory and kills whoever goes past its control group's limit, so both count.
Nothing here changes anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["GroupMemory", "cgroup_available", "cgroup_memory", "machine_available", "shared_memory_total"]

# Version 1 of control groups writes "no limit" as the largest whole number of pages in 63 bits.
_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The limit of a control group and what its processes use, in bytes."""

    limit: int
    used: int

    @property
    def available(self) -> int:
        """Bytes left under the limit."""
        return max(0, self.limit - self.used)


def machine_available() -> int:
    """Bytes that the machine can give without swapping (`MemAvailable`)."""
    return int(psutil.virtual_memory().available)


def cgroup_available() -> int | None:
    """Bytes left under the control group's limit; None where there is no limit."""
    group = cgroup_memory()
    return None if group is None else group.available


def cgroup_memory(root: Path = Path("/")) -> GroupMemory | None:
    """The control group that leaves this process least, itself or an ancestor; None without any limit.

    `root` stands in for the root of the file system in tests.
    """
    found = [group for folder in _group_folders(root) if (group := _read_group(folder)) is not None]
    return min(found, key=lambda group: group.available, default=None)


def shared_memory_total(mount: Path = Path("/dev/shm")) -> int | None:
    """Bytes of the shared-memory file system; None if there is none."""
    return shutil.disk_usage(mount).total if mount.is_dir() else None


def _group_folders(root: Path) -> Iterator[Path]:
    """The folders of every group that bounds this process, innermost first.

    A line of /proc/self/cgroup reads `0::/path` (version 2) or `5:memory:/path` (version 1). Inside a
    container the path may name a folder that is not mounted; its ancestors still are.
    """
    listing = root / "proc/self/cgroup"
    lines = listing.read_text().splitlines() if listing.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        folder = mount / path.lstrip("/")
        yield from (place for place in (folder, *folder.parents) if place.is_relative_to(mount))


def _read_group(folder: Path) -> GroupMemory | None:
    """One group's memory, from the files of either version; None if it sets no limit."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < _UNLIMITED:
            return GroupMemory(limit, used)
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return None
