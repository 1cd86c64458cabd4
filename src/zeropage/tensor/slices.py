"""The operands of an elementwise operator, cut to the slice that this rank owns."""

from __future__ import annotations

from typing import Any

import torch

from zeropage.page import CastNode, Node, Page
from zeropage.tensor.base import Paged
from zeropage.tensor.trees import plain

__all__ = ["can_slice", "cut", "cut_lists", "item_of", "same_cut"]


def can_slice(tensor: Any) -> bool:
    """Whether an elementwise operator on `tensor` may work on this rank's slice alone."""
    if not isinstance(tensor, Paged):
        return False
    node = tensor._node
    # a 0-d tensor takes part in type promotion differently from its 1-d slice
    return node.in_order and len(node.spec.shape) > 0 and not isinstance(node.root, CastNode)


def same_cut(one: Node, other: Node) -> bool:
    """Whether two nodes put the same elements at the same places of their pages' flat runs."""
    return (
        one.spec.shape == other.spec.shape
        and one.page.layout == other.page.layout
        and (one.spec.stride == other.spec.stride)
    )


def cut(tensor: torch.Tensor, like: Node) -> torch.Tensor:
    """The part of `tensor` that belongs to this rank's slice of `like` (1-D).

    Tensors without dimensions stay as they are. Pages that are cut alike give their own slice; other
    paged tensors are gathered.
    """
    if isinstance(tensor, Paged):
        if can_slice(tensor) and same_cut(tensor._node, like) and tensor._node.page.edits is None:
            _check_written(tensor._node.page)
            return tensor._node.page.own()
        tensor = plain(tensor)
    page = like.page
    if tensor.dim() == 0:
        return _at_home(tensor, page)
    if like is page:
        return _at_home(page.slice_of(tensor), page)
    low, high = page.bounds
    return _at_home(tensor.expand(like.spec.shape).reshape(-1)[low:high], page)


def _at_home(part: torch.Tensor, page: Page) -> torch.Tensor:
    """Where the slices of `page` are; a number on the host goes with tensors anywhere."""
    home = page.store.slice.device
    return part if part.device == home or (part.dim() == 0 and part.device.type == "cpu") else part.to(home)


def _check_written(page: Page) -> None:
    if not page.written:
        page.pager.fault(page)  # raises, naming the page


def cut_lists(args: Any, likes: list[Node]) -> Any:
    """Arguments of a `_foreach_` or `_fused_` operator: element i of every list is cut like target i."""

    def cut_one(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)) and len(argument) == len(likes):
            return [
                cut(item, like) if isinstance(item, torch.Tensor) else item
                for item, like in zip(argument, likes, strict=True)
            ]
        return plain(argument)

    if isinstance(args, dict):
        return {key: cut_one(value) for key, value in args.items()}
    return [cut_one(argument) for argument in args]


def item_of(args: Any, index: int, count: int) -> Any:
    """Arguments of an operator on lists of `count` items, for item `index` alone."""

    def pick(argument: Any) -> Any:
        is_list = isinstance(argument, (list, tuple)) and len(argument) == count
        return argument[index : index + 1] if is_list else argument

    if isinstance(args, dict):
        return {key: pick(value) for key, value in args.items()}
    return tuple(pick(argument) for argument in args)
