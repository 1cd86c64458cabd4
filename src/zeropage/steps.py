"""`torch.optim` optimizers that run directly on paged parameters, without an engine.

torch calls a hook before and after every `optimizer.step()`. Between them the step's writes are one batch,
and elementwise operators work on slices (see `tensor.stepping`). The optimizer itself notices nothing.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zeropage.errors import ConfigError
from zeropage.hooks import register
from zeropage.memory.disk import DiskSlice
from zeropage.page import Page, Spec
from zeropage.pager import Pager
from zeropage.tensor import PagedTensor, over
from zeropage.tensor.slices import same_cut
from zeropage.tensor.trees import plain

__all__ = ["StepHooks", "cut_state", "over_slice", "page_state", "shard_state"]

# Parameters without dimensions are gathered whatever the optimizer does: nothing to warn of.
_FEW_BYTES = 1024


class StepHooks:
    """Watches the steps of all optimizers; acts on those that hold parameters of its pager."""

    def __init__(self, pager: Pager) -> None:
        self._pager = weakref.ref(pager)
        self._moved = 0
        self._warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handles = [
            register(register_optimizer_step_pre_hook, self._before),
            register(register_optimizer_step_post_hook, self._after),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        pager = self._pager()
        if pager is None or not _holds(optimizer, pager):
            return
        if pager.config.offload.optimizer == "disk":
            raise ConfigError(
                f"offload.optimizer='disk' takes effect in an engine only, and {type(optimizer).__name__} is stepped "
                "without one: step through zp.Engine(model, optimizer), or set offload.optimizer='none'"
            )
        page_state(optimizer)
        intent = f"optimizer step ({type(optimizer).__name__})"
        pager.close_batch()
        self._moved = pager.counters.bytes_moved
        # this method <- WeakHook.__call__ <- the wrapper around step(), which stays on the stack
        pager.step.enter(sys._getframe(2), intent)
        pager.open_batch(intent)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        pager = self._pager()
        if pager is None or not pager.step.possible or not _holds(optimizer, pager):
            return
        pager.close_batch()
        pager.step.leave()
        moved = pager.counters.bytes_moved - self._moved
        if moved > _FEW_BYTES and optimizer not in self._warned:
            self._warned.add(optimizer)
            warn_whole(type(optimizer).__name__, moved)


def warn_whole(name: str, nbytes: int) -> None:
    warnings.warn(
        f"{name}, or a hook on it, is not elementwise: {nbytes:,} bytes of whole matrices were gathered on every rank "
        "in one step. The result is that of the unsharded optimizer.",
        UserWarning,
        stacklevel=4,
    )


def _holds(optimizer: torch.optim.Optimizer, pager: Pager) -> bool:
    return any(
        isinstance(p, PagedTensor) and p._node.page.pager is pager
        for group in optimizer.param_groups
        for p in group["params"]
    )


def page_state(optimizer: torch.optim.Optimizer) -> None:
    """`cut_state` of all paged parameters (collective)."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, PagedTensor) and isinstance(state, dict):
            cut_state(state, parameter._node.page)


def cut_state(state: dict[str, Any], page: Page) -> None:
    """Cut like `page` what has its shape and is not: plain state (made in a constructor, or loaded from a full state),
    and what is cut as the parameter was before its strides changed, say to `channels_last` (collective)."""
    for key, value in state.items():
        if isinstance(value, PagedTensor):
            node = value._node
            otherwise = not same_cut(node, page) and node.spec.shape == page.spec.shape
        else:
            otherwise = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == page.spec.shape
        if otherwise:
            state[key] = shard_state(plain(value), page, f"{page.name}.{key}")


def shard_state(value: torch.Tensor, page: Page, name: str) -> PagedTensor:
    """A paged tensor over this rank's slice of the full `value`, cut like `page`."""
    return over_slice(page.slice_of(value.detach()).clone(), page, name)


def over_slice(part: torch.Tensor | DiskSlice, page: Page, name: str) -> PagedTensor:
    """A paged tensor of `page`'s shape over this rank's slice of it, where the slices of `page` are."""
    home = page.store.slice.device
    if isinstance(part, torch.Tensor) and part.device != home:
        part = part.to(home)
    spec = Spec(page.spec.shape, page.spec.stride, 0, None, part.dtype, torch.strided, part.device)
    return over(page.pager.private_page(name, spec, part))
