"""The learning-rate schedules that a configuration names, with the formulas of DeepSpeed 0.19.8.

Each counts the steps it was told of: at -1 it has not begun, and the groups of the optimizer have the first rates
already. tests/fixtures/deepspeed_schedules.json holds what DeepSpeed's own classes give.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from zeropage.deepspeed.settings import Settings
from zeropage.errors import ConfigError

__all__ = [
    "LR_RANGE_TEST",
    "ONE_CYCLE",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LR",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "make_scheduler",
]

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

_log = logging.getLogger("zeropage.deepspeed")


class HasGroups(Protocol):
    """What a schedule needs of an optimizer."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]


class Schedule:
    """Counts steps and writes the rates of each into the groups of `optimizer`."""

    def __init__(self, optimizer: HasGroups, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] | None = None

    def get_lr(self) -> list[Any]:
        """The rates of the groups at the present step."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """The rates that were written last."""
        if self._last_lr is None:
            raise ConfigError("the schedule has not begun; call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next step, or to the one given."""
        following = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = following
        self._write(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_batch_iteration = state_dict["last_batch_iteration"]

    def _write(self, rates: Sequence[Any]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _for_each_group(self, value: Any, name: str) -> list[Any]:
        """`value` for every group, or its own value for each."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [value] * groups
        if len(value) != groups:
            raise ConfigError(f"{name} has {len(value)} values, and the optimizer has {groups} parameter groups")
        return list(value)


class LRRangeTest(Schedule):
    """Rates that grow from `lr_range_test_min_lr`, every step or in stairs, to see where training diverges.

    Smith, A disciplined approach to neural network hyper-parameters, https://arxiv.org/abs/1803.09820.
    """

    def __init__(
        self,
        optimizer: HasGroups,
        lr_range_test_min_lr: float | list[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _require_count(lr_range_test_step_size, "lr_range_test_step_size")
        self.min_lr = self._for_each_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._write(self.min_lr)

    def get_lr(self) -> list[Any]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        grown = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * grown for rate in self.min_lr]


class OneCycle(Schedule):
    """Rates that go up and down once, and decay then; momentum (`betas[0]`) goes the other way.

    Smith, https://arxiv.org/abs/1803.09820. Sizes are in steps. `decay_step_size` 0 means no decay.
    """

    def __init__(
        self,
        optimizer: HasGroups,
        cycle_min_lr: float | list[float],
        cycle_max_lr: float | list[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | list[float] = 0.8,
        cycle_max_mom: float | list[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        if first <= 0 or second < 0:
            raise ConfigError(
                f"OneCycle needs cycle_first_step_size above 0 and cycle_second_step_size of at least 0, got {first:g} "
                f"and {second:g}"
            )
        self.first_step_size, self.second_step_size, self.total_size = first, second, first + second
        self.step_ratio = first / self.total_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self._for_each_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._for_each_group(cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = cycle_momentum and self._has_betas()
        self.min_moms = self._for_each_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._for_each_group(cycle_max_mom, "cycle_max_mom")
        if last_batch_iteration == -1:
            self._write(self.min_lrs)
            self._write_momenta(self.min_moms)

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / self._decay(self.decay_lr_rate) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """`betas` of each group at the present step; None where momentum is left alone."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            moms = [high - (high - low) * scale for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        else:
            moms = [high * self._decay(self.decay_mom_rate) for high in self.max_moms]
        return [(mom, 0.99) for mom in moms]

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or [], strict=False):
            group["betas"] = betas

    def _has_betas(self) -> bool:
        if "betas" not in self.optimizer.defaults:
            _log.warning("OneCycle leaves momentum alone: the optimizer has no betas; set cycle_momentum to false")
            return False
        return True

    def _write_momenta(self, momenta: Sequence[float]) -> None:
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, 0.99)

    def _scale(self) -> float:
        """Where the cycle stands: 0 at its ends, 1 at the top."""
        done = self.last_batch_iteration + 1
        x = 1.0 + done / self.total_size - math.floor(1 + done / self.total_size)
        rising = x <= self.step_ratio
        scale = x / self.step_ratio if rising else (x - 1) / (self.step_ratio - 1)
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs <= 0:
            return scale
        inside = done % self.total_size
        if inside <= self.first_step_size:
            position = inside * stairs / self.first_step_size
        else:
            position = (self.total_size - inside) * stairs / self.second_step_size
        return math.floor(position) / stairs

    def _decay(self, rate: float) -> float:
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size


class WarmupLR(Schedule):
    """Rates from `warmup_min_lr` up to `warmup_max_lr` (default: the optimizer's) in `warmup_num_steps`, then constant.

    `warmup_type` is "log" or "linear".
    """

    def __init__(
        self,
        optimizer: HasGroups,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _require_count(warmup_num_steps, "warmup_num_steps")
        highest = [group["lr"] for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = self._for_each_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._for_each_group(highest, "warmup_max_lr")
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        if last_batch_iteration == -1:
            self._write(self.get_lr())

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        gamma = self._gamma()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _gamma(self) -> float:
        """How far from the lowest to the highest rate."""
        if self.last_batch_iteration < self.warmup_num_steps:
            return _warmed(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        return self._after_warmup()

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, and then down to `warmup_min_lr` in a line that ends at `total_num_steps`."""

    def __init__(
        self,
        optimizer: HasGroups,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_of_short_training(total_num_steps, self.warmup_num_steps)

    def _after_warmup(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(Schedule):
    """The optimizer's own rates times a factor: from `warmup_min_ratio` up, then along a cosine to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: HasGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _require_count(warmup_num_steps, "warmup_num_steps")
        self.total_num_steps, self.warmup_num_steps = total_num_steps, max(2, warmup_num_steps)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_type = _warmup_type(warmup_type)
        self.org_lrs = [
            rate.clone() if isinstance(rate, torch.Tensor) else rate
            for rate in (group["lr"] for group in optimizer.param_groups)
        ]
        _warn_of_short_training(total_num_steps, self.warmup_num_steps)
        if last_batch_iteration == -1:
            self._write(self.get_lr())

    def get_lr(self) -> list[Any]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """The factor at the present step."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            warmed = _warmed(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + warmed * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


_KINDS = {kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def make_scheduler(settings: Settings, optimizer: Any) -> Any:
    """The schedule that `settings.scheduler` names: one of DeepSpeed's, or a class of `torch.optim.lr_scheduler`.

    Raises:
        ConfigError: none is named; there is none of that name; an argument is wrong, missing, or still "auto".
    """
    wanted = settings.scheduler
    if wanted is None:
        raise ConfigError("config has no 'scheduler' block; name one there, or pass a scheduler object")
    left = [key for key, value in wanted.params.items() if isinstance(value, str) and value == "auto"]
    if left:
        raise ConfigError(
            f"config key 'scheduler.params.{left[0]}' is 'auto': only the Hugging Face Trainer and Accelerate put a "
            "number there. Write the number."
        )
    kind = _KINDS.get(wanted.type) or vars(torch.optim.lr_scheduler).get(wanted.type)
    if not isinstance(kind, type):
        raise ConfigError(
            f"config key 'scheduler.type' = {wanted.type!r}: there is {', '.join(_KINDS)}, and the classes of "
            "torch.optim.lr_scheduler"
        )
    try:
        return kind(optimizer, **wanted.params)
    except TypeError as error:
        raise ConfigError(f"config key 'scheduler.params': {error}") from error


def _warmed(step: int, steps: int, warmup_type: str) -> float:
    if warmup_type == "log":
        return 1.0 / math.log(steps) * math.log(step + 1)
    return step / steps


def _warmup_type(given: str) -> str:
    if given not in ("log", "linear"):
        raise ConfigError(f"warmup_type must be 'log' or 'linear', got {given!r}")
    return given


def _require_count(value: object, name: str) -> None:
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name} must be a whole number above 0, got {value!r}")


def _warn_of_short_training(total: int, warmup: int) -> None:
    if total < warmup:
        _log.warning("total_num_steps %d is less than warmup_num_steps %d", total, warmup)
