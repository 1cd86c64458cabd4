"""The tensors of a module by name, and which names stand for the same tensor."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from zeropage.page import Page
from zeropage.tensor import PagedTensor
from zeropage.watch import storage_key

__all__ = [
    "extra_states_of",
    "first_names",
    "identity_of",
    "is_extra_state",
    "set_extra_states",
    "tensors_of",
    "whole_page",
]


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by the names of `state_dict`, in its order; the objects themselves."""
    named: dict[str, Any] = module.state_dict(keep_vars=True)
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def extra_states_of(module: nn.Module) -> dict[str, Any]:
    """What the modules' `get_extra_state` gives, of whatever type, by the names of `state_dict`."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if is_extra_state(name)}


def is_extra_state(name: str) -> bool:
    """Whether `state_dict` calls what `get_extra_state` gives so."""
    return name.rpartition(".")[2] == "_extra_state"  # nn.Module's own word


def set_extra_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Hand each value to its module's `set_extra_state`. Names that are no extra states of the model are ignored."""
    for name in extra_states_of(module).keys() & states.keys():
        module.get_submodule(name.rpartition(".")[0]).set_extra_state(states[name])


def whole_page(tensor: torch.Tensor) -> Page | None:
    """The page that `tensor` stands for; None for a plain tensor, or for a view or cast of a page."""
    node = tensor._node if isinstance(tensor, PagedTensor) else None
    return node if isinstance(node, Page) else None


def identity_of(tensor: torch.Tensor) -> Hashable:
    """Equal for tied tensors: those over one page, or the same view of one storage."""
    page = whole_page(tensor)
    if page is not None:
        return page
    return id(tensor) if isinstance(tensor, PagedTensor) else storage_key(tensor) or id(tensor)


def first_names(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """By name: the first name of the same tensor (itself, unless it is tied to an earlier one)."""
    first: dict[Hashable, str] = {}
    return {name: first.setdefault(identity_of(value), name) for name, value in named.items()}
