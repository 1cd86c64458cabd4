"""Where shared memory is to lie on hosts with several memory nodes."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from zeropage.memory.nodes import home_node, place
from zeropage.memory.shared import SharedBlock, create

PREFERRED = 1
PAGE = mmap.PAGESIZE


def _policy(address: int) -> tuple[int, int]:
    """The kernel's policy for the page there, and the mask of nodes (get_mempolicy with MPOL_F_ADDR)."""
    mode, nodes = ctypes.c_int(-1), ctypes.c_ulong(0)
    call = ctypes.CDLL(None).syscall
    assert not call(239, ctypes.byref(mode), ctypes.byref(nodes), ctypes.c_ulong(64), ctypes.c_void_p(address), 2)
    return mode.value, nodes.value


def _kernel_takes_policies() -> bool:
    """Containers may forbid it. Asks with the default policy for no page at all."""
    return not ctypes.CDLL(None).syscall(237, ctypes.c_void_p(0), ctypes.c_ulong(0), 0, None, ctypes.c_ulong(0), 0)


needs_policies = pytest.mark.skipif(not _kernel_takes_policies(), reason="mbind is not allowed here")


def _host(folder: Path, *lists: str) -> Path:
    for node, cpus in enumerate(lists):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    return folder


@pytest.mark.parametrize(("cpus", "node"), [({0}, 0), ({9, 8}, 0), ({4, 5, 6, 7}, 1), ({3, 4}, None), ({99}, None)])
def test_home_is_the_one_node_of_all_processors(tmp_path: Path, cpus: set[int], node: int | None) -> None:
    assert home_node(cpus, _host(tmp_path, "0-3,8-9", "4-7", "")) == node


def test_a_host_that_hides_its_nodes_has_no_home(tmp_path: Path) -> None:
    (tmp_path / "node0" / "cpulist").mkdir(parents=True)
    assert home_node({0}, tmp_path) is None


def test_a_host_of_one_node_and_one_that_tells_nothing_have_no_home(tmp_path: Path) -> None:
    assert home_node({0}, tmp_path) is None
    assert home_node({0}, _host(tmp_path, "0-3")) is None


@needs_policies
def test_whole_pages_of_a_range_are_placed_for_all_who_map_them() -> None:
    descriptor = create(6 * PAGE)
    blocks = [SharedBlock(descriptor, 6 * PAGE)]
    assert place(descriptor, PAGE + 1, 5 * PAGE - 1, 0)
    blocks.append(SharedBlock(descriptor, 6 * PAGE))
    for block in blocks:
        start = block.storage.data_ptr()
        placed = [_policy(start + page * PAGE) == (PREFERRED, 1) for page in range(6)]
        assert placed == [False, False, True, True, False, False]
    inode = f" {os.fstat(descriptor).st_ino} "
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if inode in line]
    assert len(mapped) == len(blocks), "wishes do not cut mappings"


@needs_policies
@pytest.mark.parametrize(("stop", "node"), [(PAGE + 1, 0), (3 * PAGE, 1000)], ids=["no whole page", "unknown node"])
def test_what_cannot_be_is_left(stop: int, node: int) -> None:
    descriptor = create(3 * PAGE)
    block = SharedBlock(descriptor, 3 * PAGE)
    assert not place(descriptor, 1, stop, node)
    assert all(_policy(block.storage.data_ptr() + page * PAGE)[0] != PREFERRED for page in range(3))


def _own_slices(node: int | None) -> list[tuple[int, int]]:
    """Policies in the middle of this rank's slice of a weight, and of its gradient's sum, before anybody adds."""
    with mock.patch("zeropage.transport.shared.home_node", lambda: node):
        engine = zp.Engine(nn.Linear(1024, 1024, bias=False), None, {"transport": "shared"})
    (weight,) = engine.module.parameters()
    record = weight.__dict__["_record"]
    shards = record.page.store.shard, record.accumulator.store.shard
    found = [_policy(shard.data_ptr() + shard.nbytes // 2) for shard in shards]
    dist.barrier()
    engine.close()
    return found


@needs_policies
def test_owners_wish_for_their_slices() -> None:
    assert run(2, _own_slices, 0) == [[(PREFERRED, 1), (PREFERRED, 1)]] * 2
    assert all(policy != (PREFERRED, 1) for found in run(2, _own_slices, None) for policy in found)
