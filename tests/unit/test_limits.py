"""Memory limits are read where control groups put them: in either version, of the group or of an ancestor."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeropage.memory.limits import GroupMemory, cgroup_memory, machine_available, shared_memory_total

GIB = 1 << 30


def lay(root: Path, listing: str, files: dict[str, str]) -> Path:
    """A file system with the given control groups; returns its root."""
    for name, text in {"proc/self/cgroup": listing, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_no_control_groups_means_no_limit(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path) is None


def test_version_2(tmp_path: Path) -> None:
    root = lay(
        tmp_path,
        "0::/job",
        {"sys/fs/cgroup/job/memory.max": str(4 * GIB), "sys/fs/cgroup/job/memory.current": str(GIB)},
    )
    assert cgroup_memory(root) == GroupMemory(4 * GIB, GIB)


def test_the_tightest_ancestor_counts(tmp_path: Path) -> None:
    root = lay(
        tmp_path,
        "0::/slice/job",
        {
            "sys/fs/cgroup/slice/memory.max": str(2 * GIB),
            "sys/fs/cgroup/slice/memory.current": str(GIB),
            "sys/fs/cgroup/slice/job/memory.max": "max",
            "sys/fs/cgroup/slice/job/memory.current": "0",
        },
    )
    assert cgroup_memory(root) == GroupMemory(2 * GIB, GIB)


def test_inside_a_container_the_group_is_the_mount_itself(tmp_path: Path) -> None:
    root = lay(
        tmp_path,
        "0::/somewhere/outside",
        {"sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": "0"},
    )
    assert cgroup_memory(root) == GroupMemory(GIB, 0)


@pytest.mark.parametrize(("limit", "expected"), [(3 * GIB, GroupMemory(3 * GIB, GIB)), (9223372036854771712, None)])
def test_version_1(tmp_path: Path, limit: int, expected: GroupMemory | None) -> None:
    folder = "sys/fs/cgroup/memory/job"
    files = {f"{folder}/memory.limit_in_bytes": str(limit), f"{folder}/memory.usage_in_bytes": str(GIB)}
    root = lay(tmp_path, "3:cpu,cpuacct:/\n4:memory:/job\n0::/", files)
    assert cgroup_memory(root) == expected


def test_a_group_past_its_limit_has_nothing_left() -> None:
    assert GroupMemory(limit=GIB, used=2 * GIB).available == 0


def test_this_machine(tmp_path: Path) -> None:
    assert machine_available() > 0
    assert shared_memory_total(tmp_path / "missing") is None
    assert shared_memory_total(tmp_path)
