"""Running a torch optimizer on some tensors at a time within one step of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import optim

__all__ = ["bare_step", "step_in_pieces"]


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
