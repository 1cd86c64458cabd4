"""The backing store of a page as one rank sees it, and plain memory for it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from zeropage.layout import Layout
from zeropage.memory.disk import DiskSlice
from zeropage.memory.limits import cgroup_available, machine_available

__all__ = ["Slack", "Store", "allocate", "available_bytes", "holders"]

_SLACK = 64 << 20  # bytes that may have been freed before they are given back to the system


@dataclass(eq=False)
class Store:
    """The memory behind a page.

    `slice` is where this rank's part lies (1-D, `layout.length(rank)` elements): in memory or on disk. `whole` is the
    full flat run (1-D, `layout.numel` elements) where this rank can address it without copying, else None. `parts` are
    the slices of all ranks, on disk, where this rank can read them all, else None. `owner` keeps alive what the
    tensors are views of.
    """

    uid: int
    check: int
    layout: Layout
    slice: torch.Tensor | DiskSlice
    whole: torch.Tensor | None = None
    owner: object = None
    parts: Sequence[DiskSlice] | None = None

    @property
    def shard(self) -> torch.Tensor:
        """This rank's slice: what is written to it is kept."""
        return self.slice if isinstance(self.slice, torch.Tensor) else self.slice.mapped()

    @property
    def dtype(self) -> torch.dtype:
        return self.slice.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's slice."""
        return self.slice.nbytes

    def values(self) -> torch.Tensor:
        """This rank's slice in memory, to be read."""
        if isinstance(self.slice, torch.Tensor):
            return self.slice
        found = allocate(self.slice.numel, self.slice.dtype, self.slice.device)
        self.slice.read(found)
        return found

    def read_parts(self, frame: torch.Tensor) -> None:
        """Fill `frame` (1-D, `layout.numel` elements) from the slices of all ranks."""
        assert self.parts is not None
        for rank, part in enumerate(self.parts):
            low, high = self.layout.bounds(rank)
            part.read(frame[low:high])


def allocate(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`count` uninitialised elements that any later code may write.

    [Note: frames outside inference mode] A tensor allocated under `inference_mode` can never be written
    outside of it again, and shards and frames outlive the mode. So both are always made with it off.
    """
    with torch.inference_mode(False):
        return torch.empty(count, dtype=dtype, device=device)


class Slack:
    """What was freed, and is kept by the C library until it is told to give it back.

    [Note: freed blocks] glibc keeps freed blocks of up to 32 MB, and torch asks for aligned ones, into which a freed
    block of the same size does not fit. So of a model whose parameters are made and freed one by one, two thirds would
    stay behind in every rank.
    """

    def __init__(self) -> None:
        self._freed = 0

    def freed(self, nbytes: int) -> None:
        """So many bytes are free, or will be at the next call."""
        self._freed += nbytes
        if self._freed > _SLACK and sys.platform == "linux":
            self._freed = 0
            with suppress(OSError):  # another C library, which knows no such call
                ctypes.CDLL("libc.so.6").malloc_trim(0)


def available_bytes() -> int:
    """Bytes that this process may still take: the smaller of what the machine and its cgroup leave."""
    limits = [machine_available(), cgroup_available()]
    return min(limit for limit in limits if limit is not None)


def holders(memory: torch.Tensor) -> int:
    """How many tensors share the storage of `memory`, itself among them."""
    storage = memory.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
