"""Lion, which torch does not have: the sign of an interpolated momentum is the step.

Chen et al., Symbolic Discovery of Optimization Algorithms, https://arxiv.org/abs/2302.06675, algorithm 2. All of it
is elementwise, so on pages it runs on each rank's own slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Lion"]


class Lion(torch.optim.Optimizer):
    """The optimizer with DeepSpeed's defaults (`FusedLion`, `DeepSpeedCPULion`).

    Args:
        betas: how much of the momentum goes into the step, and how much is kept.
        weight_decay: decoupled, times the learning rate.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)
        return loss

    def _step_one(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        gradient, momentum = parameter.grad, state["exp_avg"]
        assert gradient is not None
        beta1, beta2 = group["betas"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        step = momentum.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        parameter.add_(step, alpha=-group["lr"])
        momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)
