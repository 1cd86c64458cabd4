"""Several optimizers of one model, seen as one."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch

from zeropage.errors import ConfigError

__all__ = ["JoinedOptimizer"]

_State = MutableMapping[Any, Any]


class JoinedOptimizer(torch.optim.Optimizer):
    """All groups and all states of `optimizers`, which stay who they are. It is never stepped.

    Raises:
        ConfigError: on the first look at groups or states: two optimizers train one parameter.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # not the base class's: groups and states belong to the optimizers
        self._optimizers = tuple(optimizers)
        self.defaults = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> _State:  # type: ignore[override]
        return _JoinedState(self._optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError("each optimizer is stepped by itself")


class _JoinedState(MutableMapping[Any, Any]):
    """By parameter: what its optimizer keeps of it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._owners: dict[Any, torch.optim.Optimizer] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if self._owners.setdefault(parameter, optimizer) is not optimizer:
                        raise ConfigError(
                            f"a parameter of shape {tuple(parameter.shape)} belongs to two optimizers; a checkpoint "
                            "keeps one state for each parameter: give it to one of them"
                        )

    def __getitem__(self, parameter: Any) -> Any:
        return self._owners[parameter].state[parameter]

    def __setitem__(self, parameter: Any, value: Any) -> None:
        self._owners[parameter].state[parameter] = value

    def __delitem__(self, parameter: Any) -> None:
        del self._owners[parameter].state[parameter]

    def __iter__(self) -> Iterator[Any]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)
