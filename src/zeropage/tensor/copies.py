"""Private full copies of pages, for operators that cannot work on a slice: applied there, the own slice kept."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeropage.memory.host import allocate
from zeropage.page import CastNode, Page
from zeropage.tensor.base import Paged
from zeropage.tensor.trees import plain

__all__ = ["keep_own", "private_copy", "stand_in"]


def private_copy(page: Page, *, gathers: bool) -> torch.Tensor:
    """A full-size copy (1-D) of this rank's own: with all values, or with the own slice's only."""
    copy = allocate(page.layout.numel, page.dtype, page.spec.device)
    if gathers and page.written:
        copy.copy_(page.flat(page.value()))
    elif page.written:
        low, high = page.bounds
        copy[low:high].copy_(page.own())
    return copy


def stand_in(tensor: torch.Tensor, copies: Mapping[Page, torch.Tensor]) -> torch.Tensor:
    """The plain tensor that an operator gets for `tensor`: a view of its page's copy, if there is one."""
    if not isinstance(tensor, Paged):
        return tensor
    node = tensor._node
    copy = copies.get(node.page)
    if copy is None or isinstance(node.root, CastNode):
        return plain(tensor)  # type: ignore[no-any-return]
    return node.apply(node.page.shaped(copy))


def keep_own(copies: Mapping[Page, torch.Tensor]) -> None:
    """Write the own slice of each copy to its page (inside a write batch)."""
    for page, copy in copies.items():
        low, high = page.bounds
        page.own().copy_(copy[low:high])
