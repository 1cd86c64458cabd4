"""The backing store of a page as one rank sees it, and plain memory for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeropage.layout import Layout
from zeropage.memory.limits import cgroup_available, machine_available

__all__ = ["Store", "allocate", "available_bytes", "holders"]


@dataclass(eq=False)
class Store:
    """The memory behind a page.

    `shard` is this rank's slice (1-D, `layout.length(rank)` elements). `whole` is the full flat run
    (1-D, `layout.numel` elements) where this rank can address it without copying, else None.
    `owner` keeps alive what the tensors are views of.
    """

    uid: int
    check: int
    layout: Layout
    shard: torch.Tensor
    whole: torch.Tensor | None = None
    owner: object = None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's slice."""
        return self.shard.numel() * self.shard.element_size()


def allocate(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`count` uninitialised elements that any later code may write.

    [Note: frames outside inference mode] A tensor allocated under `inference_mode` can never be written
    outside of it again, and shards and frames outlive the mode. So both are always made with it off.
    """
    with torch.inference_mode(False):
        return torch.empty(count, dtype=dtype, device=device)


def available_bytes() -> int:
    """Bytes that this process may still take: the smaller of what the machine and its cgroup leave."""
    limits = [machine_available(), cgroup_available()]
    return min(limit for limit in limits if limit is not None)


def holders(memory: torch.Tensor) -> int:
    """How many tensors share the storage of `memory`, itself among them."""
    storage = memory.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
