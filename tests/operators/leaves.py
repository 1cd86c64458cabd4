"""Paged leaves in great numbers, on one rank that behaves like many: every read fills a frame by messages.

    with paged_leaves() as leaves:
        p = leaves.make(tensor)          # an nn.Parameter over a page, equal to `tensor`

Frames are poisoned when they are evicted, and no byte of them may stay resident, so an operator that kept
a frame, or a rule that forgot to fault, shows up as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from zeropage.construct import Space, pagers_of, space_of
from zeropage.tensor import PagedTensor, page_in_place

__all__ = ["CONFIG", "Leaves", "group_of_one", "map_tensors", "paged_leaves"]

CONFIG = {"transport": "collective", "poison_frames": True, "resident_bytes": 0, "readahead": False}


class Leaves:
    """Makes leaves over pages of one pager."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self.pager = space.pager
        self._made = 0

    def make(self, tensor: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        """A paged parameter with the values, strides and `requires_grad` of `tensor`."""
        needed = tensor.requires_grad if requires_grad is None else requires_grad
        leaf = nn.Parameter(copy_of(tensor), requires_grad=needed)
        self._made += 1
        page_in_place(leaf, self.pager, f"leaf{self._made}", PagedTensor)
        return leaf

    def evict(self) -> None:
        """Poison and give back every frame that nobody holds."""
        self.pager.evict_all()

    def frames(self) -> list[Tensor]:
        """The memory of the frames that are filled now (1-D)."""
        return [frame.memory for frame in self.pager._frames.values()]


@contextmanager
def group_of_one() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def paged_leaves(**settings: Any) -> Iterator[Leaves]:
    """A pager whose pages are in frames, poisoned after use."""
    with group_of_one():
        model = zp.shard(nn.Linear(1, 1), CONFIG | settings)
        space = space_of(pagers_of(model)[0])
        yield Leaves(space)
        space.close()


def copy_of(tensor: Tensor) -> Tensor:
    """A plain copy with the same strides, without autograd."""
    return tensor.detach().clone(memory_format=torch.preserve_format)


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The tree with every tensor replaced; lists, tuples and dicts are walked, whatever else stays."""
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(item, change) for item in tree)
    if type(tree) is dict:
        return {key: map_tensors(item, change) for key, item in tree.items()}
    return tree
