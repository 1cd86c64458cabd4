"""Running a torch optimizer on some tensors at a time within one step of it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim

__all__ = ["bare_step", "is_cut_like", "states_to_be", "step_in_pieces"]

_PROBE = 64  # elements of the parameter that tells which states there will be


def step_in_pieces(optimizer: optim.Optimizer, run: Callable[[], None]) -> None:
    """One step of `optimizer`, whose arithmetic is done by `run`: it puts tensors into the groups and steps them.

    [Note: hooks and pieces] What torch, schedulers and programs have hung on `step` is to happen once a step. So it is
    called once, with empty groups; the pieces are stepped without all that (`bare_step`), when the first hooks have
    been called.
    """
    with _bare_groups(optimizer):
        handle = optimizer.register_step_pre_hook(lambda *_: run())
        try:
            optimizer.step()
        finally:
            handle.remove()


def bare_step(optimizer: optim.Optimizer) -> None:
    """The optimizer's own arithmetic, without the hooks that torch calls around it."""
    bare: Any = type(optimizer).step
    bare.__wrapped__(optimizer)


def states_to_be(optimizer: optim.Optimizer, index: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The elementwise states that a step makes of a parameter of group `index` without any, by name."""
    small = torch.zeros(_PROBE, dtype=dtype, device="cpu")
    small.grad = torch.zeros_like(small)
    probe = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    probe.param_groups = [{**optimizer.param_groups[index], "params": [small]}]
    bare_step(probe)
    return {key: value.dtype for key, value in probe.state[small].items() if is_cut_like(value, small)}


def is_cut_like(value: object, tensor: torch.Tensor) -> bool:
    """Whether a state has a number for each element of `tensor` (1-D)."""
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape == tensor.shape


@contextmanager
def _bare_groups(optimizer: optim.Optimizer) -> Iterator[None]:
    """Inside, the optimizer has no parameters but those of a piece."""
    groups = optimizer.param_groups
    kept = [group["params"] for group in groups]
    for group in groups:
        group["params"] = []
    try:
        yield
    finally:
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = parameters
