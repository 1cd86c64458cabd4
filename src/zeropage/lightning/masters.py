"""fp32 values behind parameters of 16 bits, under Lightning's loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeropage.engine import Engine
from zeropage.errors import ConfigError
from zeropage.optim import ShardedOptimizer

__all__ = ["Masters"]


class Masters:
    """Steps each of `optimizers` on the masters of `engine`, which has cast the parameters and checkpoints both.

    Gradients stay until Lightning drops them.
    """

    def __init__(self, engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        assert engine.sharded_optimizer is not None
        if any(pager.config.offload.optimizer == "disk" for pager in engine.pagers):
            raise ConfigError(
                "offload.optimizer='disk' cannot take effect with fp32_masters under Lightning's loops; remove one"
            )
        self.engine = engine
        self._values = engine.sharded_optimizer.masters
        self._sharded = [(optimizer, ShardedOptimizer(optimizer)) for optimizer in optimizers]
        for _, sharded in self._sharded:
            sharded.masters = self._values

    def take_over(self, earlier: Masters) -> None:
        """Another fit of the same module begins from the values that the last one ended with."""
        self._values.update(earlier._values)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of one of the optimizers (all ranks together)."""
        (sharded,) = (sharded for one, sharded in self._sharded if one is optimizer)
        intent = f"optimizer step ({type(optimizer).__name__})"
        for pager in self.engine.pagers:
            pager.end_backwards(intent)
        for pager in self.engine.pagers:
            pager.open_batch(intent)
        try:
            sharded.step(1.0)
        finally:
            for pager in self.engine.pagers:
                pager.close_batch()
