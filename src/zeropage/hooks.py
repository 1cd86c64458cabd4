"""Hooks in torch's global registries that do not keep their owner alive.

[Note: removal] torch iterates over its registries while hooks run, and Python may collect a dropped model at
any moment, also then. So a dead owner's hook stays, doing nothing, until the next hook of its kind is
registered; an owner that is closed removes its hooks at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

__all__ = ["WeakHook", "register"]


class WeakHook:
    """Calls a method of an object for as long as the object lives."""

    __slots__ = ("_method",)

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    @property
    def dead(self) -> bool:
        return self._method() is None

    def __call__(self, *args: Any) -> None:
        method = self._method()
        if method is not None:
            method(*args)


def register(registry: Callable[[Any], RemovableHandle], method: Callable[..., None]) -> RemovableHandle:
    """Register a bound method, held weakly, with one of torch's global registries."""
    handle = registry(WeakHook(method))
    hooks: Any = handle.hooks_dict_ref()
    for key, hook in list(hooks.items()):
        if isinstance(hook, WeakHook) and hook.dead:
            del hooks[key]
    return handle
