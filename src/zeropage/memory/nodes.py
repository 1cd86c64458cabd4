"""Which part of a host's memory is near a rank: hosts with several NUMA nodes, on Linux.

Pages of shared memory lie where they are first touched. Weights are first written by their owners, a sum of gradients
by whoever adds first. So an owner says beforehand where its slices should lie. It is a wish: a kernel that has no such
call, or a container that forbids it, places them as before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["home_node", "place"]

_MBIND = 237  # the number of the system call on x86-64, the processors on which ranks share memory
_MPOL_PREFERRED = 1  # <linux/mempolicy.h>
_WORD = 64  # bits


def home_node(cpus: Collection[int] | None = None, folder: Path = Path("/sys/devices/system/node")) -> int | None:
    """The memory node of `cpus` (those that this process may run on), or None if they are of several or there is one.

    Source: `Documentation/ABI/stable/sysfs-devices-node` of Linux.
    """
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    try:
        nodes = {int(path.parent.name[4:]): _numbers(path.read_text()) for path in folder.glob("node[0-9]*/cpulist")}
    except OSError:  # a container that hides it
        return None
    near = [node for node, its in nodes.items() if not its.isdisjoint(cpus)]
    return near[0] if len(nodes) > 1 and len(near) == 1 else None


def _numbers(text: str) -> set[int]:
    """Of a list such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def place(descriptor: int, start: int, stop: int, node: int) -> bool:
    """Wish for bytes `[start, stop)` of shared memory to lie on `node` once they are touched.

    Whole pages of the system only. It holds for all who map the memory, before or after. Source: mbind(2).

    Returns:
        Whether the kernel took it.
    """
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= end:
        return False
    words = (ctypes.c_ulong * (node // _WORD + 1))()
    words[node // _WORD] = 1 << node % _WORD
    # a mapping of its own, which goes at once: the wish stays with the memory, and would cut the mapping in three
    with mmap.mmap(descriptor, end - first, offset=first) as mapping:
        bits = len(words) * _WORD + 1
        return not _mbind(ctypes.c_char.from_buffer(mapping), end - first, words, bits)


def _mbind(start: ctypes.c_char, length: int, words: ctypes.Array[ctypes.c_ulong], bits: int) -> int:
    """The system call; 0 is success. Nothing of `start` is held afterwards, so that its mapping can be closed."""
    address, size, count = ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_ulong(length), ctypes.c_ulong(bits)
    return int(ctypes.CDLL(None).syscall(_MBIND, address, size, _MPOL_PREFERRED, words, count, 0))
