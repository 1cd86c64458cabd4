"""`engine.optimizer`: the optimizer that was given, as DeepSpeed shows it.

It owns nothing but what the last step told; groups, state and masters are the engine's. It is a
`torch.optim.Optimizer`, so torch's learning-rate schedulers take it (they check the class).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from zeropage.deepspeed.fragments import master_of
from zeropage.deepspeed.parameter_offload import DeepSpeedZeRoOffload
from zeropage.edit import full
from zeropage.engine import Engine
from zeropage.errors import ConfigError
from zeropage.optim import NARROW, ShardedOptimizer, record_of
from zeropage.reports import StepResult
from zeropage.steps import over_slice, shard_state
from zeropage.tensor import PagedTensor

__all__ = [
    "DeepSpeedOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "LossScaler", "ZeROOptimizer",
    "optimizer_for",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LossScaler:
    """How the loss is scaled at this moment."""

    cur_scale: float
    dynamic: bool

    @property
    def loss_scale(self) -> float:
        return self.cur_scale


class DeepSpeedOptimizer(optim.Optimizer):
    """The base of all optimizers that an engine shows."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """An optimizer whose parameters are sharded.

    Args:
        engine: steps it.
        stage: the ZeRO stage that the configuration names.
    """

    def __init__(self, engine: Engine, stage: int) -> None:  # not torch's, which would make groups of its own
        self._engine = engine
        self.zero_stage = stage
        self.overflow = False
        self.custom_loss_scaler = False
        self._opt_called = False  # a scheduler of torch looks whether a step came before its own

    @property
    def optimizer(self) -> optim.Optimizer:
        """The torch optimizer inside."""
        return self._sharded.optimizer

    @property
    def _sharded(self) -> ShardedOptimizer:
        sharded = self._engine.sharded_optimizer
        if sharded is None:
            raise ConfigError("the engine of this optimizer was destroyed; make a new one with initialize()")
        return sharded

    # -- what a torch optimizer has

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch has an attribute
        """The groups of the optimizer inside, the same objects; none once the engine was destroyed."""
        return [] if self._engine.sharded_optimizer is None else self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {} if self._engine.sharded_optimizer is None else self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients now, whatever the accumulation boundary; programs call `engine.step()`."""
        if closure is not None:
            raise ConfigError("a closure is not supported: call engine.backward(loss), then engine.step()")
        self.take_note(self._engine.step())

    def take_note(self, result: StepResult) -> None:
        """The engine has stepped or skipped."""
        self._opt_called = True
        self.overflow = not result.applied

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """Torch's, with exact masters and the loss scale beside. Tensors are sharded ones; pickling makes them full."""
        masters = {}
        for index, parameter in enumerate(self._sharded.parameters()):
            record = record_of(parameter)
            master = master_of(record)
            if master is not None:
                masters[index] = over_slice(master, record.page, f"{record.name} in fp32")
        return {
            **self.optimizer.state_dict(),
            "fp32_masters": masters,
            "loss_scale": self.loss_scale,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "zero_stage": self.zero_stage,
        }

    def load_state_dict(self, state_dict: dict[str, Any], *_: Any, **__: Any) -> None:
        """Take what `state_dict` gave, on all ranks; in the dtypes that it has (torch would round to 16 bits)."""
        optimizer, parameters = self.optimizer, self._sharded.parameters()
        groups = state_dict["param_groups"]
        here = [len(group["params"]) for group in optimizer.param_groups]
        there = [len(group["params"]) for group in groups]
        if here != there:
            raise ConfigError(f"the state has groups of {there} parameters, this optimizer has groups of {here}")
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for index, values in state_dict["state"].items():
            parameter = parameters[index]
            optimizer.state[parameter] = {key: _sharded_like(value, parameter) for key, value in values.items()}
        for index, master in state_dict.get("fp32_masters", {}).items():
            record = record_of(parameters[index])
            if record.page.dtype in NARROW:
                self._sharded.keep_master(record, record.page.slice_of(full(master)).clone())

    # -- what DeepSpeed adds

    @property
    def loss_scale(self) -> float:
        return self._engine.loss_scale

    @property
    def cur_scale(self) -> float:
        return self._engine.loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.needs_scaler() and self._engine.config.loss_scale.dynamic

    @property
    def loss_scaler(self) -> LossScaler:
        return LossScaler(self.loss_scale, self.dynamic_loss_scale)

    def needs_scaler(self) -> bool:
        return self._engine.config.precision == "fp16"

    def scale_if_loss(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.loss_scale if self.needs_scaler() else value

    @property
    def _global_grad_norm(self) -> float | None:
        return self._engine.grad_norm

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        """This rank's slice of every gradient, by group and place in the group."""
        return {
            number: {
                place: record_of(parameter).own_gradient()
                for place, parameter in enumerate(group["params"])
                if parameter.grad is not None
            }
            for number, group in enumerate(self.param_groups)
        }

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """By group: this rank's slices in fp32, one after the other (a copy)."""
        return [
            torch.cat([_exact_slice(p) for p in group["params"]] or [torch.empty(0)]) for group in self.param_groups
        ]

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        return [list(group["params"]) for group in self.param_groups]


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """What an engine shows for stages 0, 1 and 2."""

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        return self.fp32_partitioned_groups_flat

    @property
    def bit16_groups(self) -> list[list[torch.Tensor]]:
        return self.fp16_groups


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """What an engine shows for stage 3."""

    def __init__(self, engine: Engine, stage: int = 3) -> None:
        super().__init__(engine, stage)
        self.parameter_offload = DeepSpeedZeRoOffload(engine.module)

    @property
    def module(self) -> Any:
        return self.parameter_offload.module


def optimizer_for(engine: Engine, stage: int) -> ZeROOptimizer:
    return DeepSpeedZeroOptimizer_Stage3(engine) if stage == 3 else DeepSpeedZeroOptimizer(engine, stage)


def _sharded_like(value: Any, parameter: PagedTensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    page = parameter._node.page
    whole = full(value)
    same = whole.dim() > 0 and whole.shape == page.spec.shape
    return shard_state(whole, page, f"{page.name}'s state") if same else whole


def _exact_slice(parameter: PagedTensor) -> torch.Tensor:
    record = record_of(parameter)
    master = master_of(record)
    return (record.page.own().float() if master is None else master).detach().clone()
