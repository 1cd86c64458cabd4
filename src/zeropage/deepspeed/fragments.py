"""`deepspeed.utils.safe_get_*` and `safe_set_*`: masters, gradients and optimizer state, in full or this rank's slice.

All ranks call together, with equal full values. What is set is what the next forward and the next step use: a 16-bit
parameter and its fp32 master change as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zeropage.edit import full, local
from zeropage.errors import ConfigError
from zeropage.gradients import Record
from zeropage.optim import NARROW, ShardedOptimizer, record_of
from zeropage.steps import over_slice
from zeropage.tensor import PagedTensor
from zeropage.tensor.agreement import agreed

__all__ = [
    "master_of", "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param",
    "safe_set_full_grad", "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad",
    "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized",
]  # fmt: skip


# -- full values


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """The fp32 values that the optimizer works on, in the parameter's shape (a copy)."""
    return full(_exact(param)).float()


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient averaged over ranks, in the precision of the sum (a copy); None where there is none.

    In fp16 it is multiplied by the loss scale, as in DeepSpeed.
    """
    gradient = _gradient(param)
    return None if gradient is None else full(gradient)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """The optimizer's state `optim_state_key` ("exp_avg", ...) of the parameter (a copy); None before a step."""
    state = _state(param).get(optim_state_key)
    return full(state) if isinstance(state, torch.Tensor) else state


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set parameter and master to `value`, of the parameter's shape."""
    _check(param, value)
    with torch.no_grad():
        if not isinstance(param, PagedTensor):
            param.copy_(value)
            return
        record = record_of(param)
        with agreed([record.page], f"set the values of {record.name}", [value]):
            _put(record, record.page.slice_of(value.detach()))
        _follow(param, record, record.page.slice_of(value.detach()))


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the gradient that the next step takes."""
    _check(param, value)
    param.grad = value


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Set the state `optim_state_key` to `value`, of the parameter's shape.

    Raises:
        ConfigError: there is no such state yet; an optimizer makes it in its first step.
    """
    _check(param, value)
    state = _state_to_set(param, optim_state_key)
    with torch.no_grad():
        state.copy_(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Replace each gradient by `update_func(gradient, parameter)`; parameters without one are left out."""
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


# -- this rank's slice (1-D)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor:
    return local(_exact(param)).float().clone()


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    gradient = _gradient(param)
    return None if gradient is None else local(gradient).clone()


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    state = _state(param).get(optim_state_key)
    return local(state).clone() if isinstance(state, torch.Tensor) else state


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set this rank's slice of parameter and master; the other ranks set theirs in the same call."""
    paged = _paged(param)
    record = record_of(paged)
    value = _fitting(record, value)
    with torch.no_grad(), record.pager.writing([record.page], f"set the slices of {record.name}"):
        _put(record, value)
    _follow(paged, record, value)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set this rank's slice of a gradient that is there; the other ranks set theirs in the same call."""
    paged = _paged(param)
    record = record_of(paged)
    value = _fitting(record, value)
    if _gradient(paged) is None:
        raise ConfigError(f"{record.name!r} has no gradient to set a slice of; use safe_set_full_grad on all ranks")
    page = record.gradient_page
    assert page is not None
    with torch.no_grad(), record.pager.writing([], f"set the slices of {page.name}"):
        record.own_gradient().copy_(value)
        page.grown()


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's slice of a state that is there; the other ranks set theirs in the same call."""
    paged = _paged(param)
    value = _fitting(record_of(paged), value)
    state = _paged(_state_to_set(paged, optim_state_key))
    page = state._node.page
    with torch.no_grad(), page.pager.writing([page], f"set the slices of {page.name}"):
        page.own().copy_(value)


# -- inside


def master_of(record: Record) -> torch.Tensor | None:
    """This rank's slice of the fp32 values behind a 16-bit parameter, if an optimizer has made them."""
    sharded = _stepped_by(record)
    master = None if sharded is None else sharded.masters.get(record)
    return master.values if master is not None and master.agrees_with(record.page) else None


def _exact(param: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, PagedTensor):
        return param
    record = record_of(param)
    master = master_of(record)
    return param if master is None else over_slice(master, record.page, f"{record.name} in fp32")


def _gradient(param: torch.Tensor) -> torch.Tensor | None:
    """In the precision of the sum; `.grad` is rounded to the parameter's dtype."""
    if param.grad is None or not isinstance(param, PagedTensor):
        return param.grad
    record = record_of(param)
    return over_slice(record.own_gradient(), record.page, f"{record.name}.grad in full precision")


def _state(param: torch.Tensor) -> dict[str, Any]:
    sharded = _stepped_by(record_of(param)) if isinstance(param, PagedTensor) else None
    if sharded is None or param not in sharded.optimizer.state:
        return {}
    return dict(sharded.optimizer.state[param])


def _state_to_set(param: torch.Tensor, key: str) -> torch.Tensor:
    state = _state(param).get(key)
    if not isinstance(state, torch.Tensor):
        known = ", ".join(_state(param)) or "none: the optimizer makes its states in the first step"
        raise ConfigError(f"the optimizer has no state {key!r} of this parameter to set (states are: {known})")
    return state


def _stepped_by(record: Record) -> ShardedOptimizer | None:
    found = None if record.stepped_by is None else record.stepped_by()
    assert found is None or isinstance(found, ShardedOptimizer)
    return found


def _put(record: Record, part: torch.Tensor) -> None:
    record.page.own().copy_(part)


def _follow(param: PagedTensor, record: Record, part: torch.Tensor) -> None:
    """After the write: the master takes the exact values, and graphs that saved the parameter notice."""
    sharded = _stepped_by(record)
    if sharded is not None and record.page.dtype in NARROW:
        sharded.keep_master(record, part.float().clone())
    torch.autograd.graph.increment_version(param)


def _check(param: torch.Tensor, value: torch.Tensor) -> None:
    if value.shape != param.shape:
        raise ConfigError(f"the value has shape {tuple(value.shape)}, it must be {tuple(param.shape)}")


def _fitting(record: Record, value: torch.Tensor) -> torch.Tensor:
    low, high = record.page.bounds
    if value.numel() != high - low:
        raise ConfigError(f"this rank owns {high - low} elements of {record.name!r}, and {value.numel()} were given")
    return value.detach().reshape(-1)


def _paged(tensor: torch.Tensor) -> PagedTensor:
    if not isinstance(tensor, PagedTensor):
        raise ConfigError("only a sharded parameter has a slice of each rank; use the safe_set_full_* functions")
    return tensor
