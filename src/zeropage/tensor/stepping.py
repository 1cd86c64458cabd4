"""Inside an optimizer's step, elementwise operators on pages give pages.

Elsewhere they give plain full tensors, because ranks may go on to write different things into them. In a
step all ranks run the same program, so results stay sharded and optimizers need no gather.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from zeropage.page import Node, Page, Spec
from zeropage.tensor.base import Paged, wrap
from zeropage.tensor.rules import careful, is_pointwise
from zeropage.tensor.slices import can_slice, cut, cut_lists
from zeropage.tensor.trees import paged_in, plain, rebuild, tensors_in

__all__ = ["applies", "on_slices", "read"]


def applies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this operator runs inside an optimizer step over its pages."""
    paged = paged_in(args) or paged_in(kwargs)
    return bool(paged) and paged[0]._node.page.pager.step.active()


def read(cls: type[Paged], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that only reads, while an optimizer's step may be running."""
    if applies(args, kwargs):
        made = on_slices(cls, func, args, kwargs)
        if made is not NotImplemented:
            return made
    return careful(func)(*plain(args), **plain(kwargs))


def on_slices(cls: type[Paged], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a functional operator on this rank's slices; NotImplemented if it needs more than them."""
    if not isinstance(func, OpOverload) or not is_pointwise(func):
        return NotImplemented
    if func._schema.name.startswith("aten::_foreach_"):
        return _foreach_on_slices(cls, func, args, kwargs)
    leader = _leader(args, kwargs)
    if leader is None:
        return NotImplemented
    node = leader._node
    options = {k: v for k, v in kwargs.items() if k != "memory_format"}
    made = func(*rebuild(args, lambda tensor: cut(tensor, node)), **rebuild(options, lambda tensor: cut(tensor, node)))
    return _page_like(cls, node, made) if isinstance(made, torch.Tensor) else NotImplemented


def _leader(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Paged | None:
    """The paged operand whose shape the result has; None if broadcasting makes it larger than every page."""
    paged = [tensor for tensor in paged_in([args, kwargs]) if can_slice(tensor)]
    if not paged:
        return None
    leader = max(paged, key=lambda tensor: tensor._node.page.layout.numel)
    if not leader._node.page.written:
        return None
    shapes = [tensor.shape for tensor in tensors_in([args, kwargs])]
    return leader if torch.broadcast_shapes(*shapes) == leader.shape else None


def _foreach_on_slices(cls: type[Paged], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0]
    if not all(can_slice(tensor) for tensor in first):
        return NotImplemented
    nodes = [tensor._node for tensor in first]
    made = func(*cut_lists(args, nodes), **cut_lists(kwargs, nodes))
    return [_page_like(cls, node, part) for node, part in zip(nodes, made, strict=True)]


def _page_like(cls: type[Paged], node: Node, shard: torch.Tensor) -> Paged:
    spec = Spec(node.spec.shape, node.spec.stride, 0, None, shard.dtype, torch.strided, shard.device)
    page: Page = node.page.pager.private_page(f"a result inside {node.page.name}'s optimizer step", spec, shard)
    return wrap(cls, page)
