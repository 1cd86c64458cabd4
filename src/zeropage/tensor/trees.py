"""Walking over the arguments of an operator: tensors stand alone, in lists, and in lists of lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from zeropage.tensor.base import Paged

__all__ = ["any_paged", "numbers_in", "paged_in", "plain", "rebuild", "tensors_in"]


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def numbers_in(tree: Any) -> Iterator[complex]:
    if isinstance(tree, (bool, int, float, complex)):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from numbers_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from numbers_in(item)


def paged_in(tree: Any) -> list[Paged]:
    return [tensor for tensor in tensors_in(tree) if isinstance(tensor, Paged)]


def any_paged(tree: Any) -> bool:
    return any(isinstance(tensor, Paged) for tensor in tensors_in(tree))


def rebuild(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same tree with every tensor replaced."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    kind = tree.__class__
    if kind is list or kind is tuple:
        return kind(rebuild(item, change) for item in tree)
    if kind is dict:
        return {key: rebuild(item, change) for key, item in tree.items()}
    return tree


def plain(tree: Any) -> Any:
    """The same tree with every paged tensor replaced by its full value."""
    return rebuild(tree, _plain_tensor)


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, Paged):
        return tensor
    return tensor._node.value()
