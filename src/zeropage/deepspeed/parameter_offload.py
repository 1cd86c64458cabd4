"""What programs reach for below DeepSpeed's stage-3 optimizer: hooks and their coordinator, of which there are none.

TRL takes the hooks of a model off before it generates, and puts them on again. Pages are found by operators and
not by hooks, so there is nothing to take off; a model generates as it is, inside a gather block or outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["DeepSpeedZeRoOffload", "ModuleView", "ParameterCoordinator"]


class ParameterCoordinator:
    """DeepSpeed's record of the order of parameters. Order is a hint here (`zeropage.trace`), never a rule."""

    def is_invalid_trace(self) -> bool:
        return True

    def is_complete_trace(self) -> bool:
        return False

    def is_record_trace(self) -> bool:
        return False

    def _invalidate_trace(self) -> None:
        """Nothing to forget."""

    def reset_step(self) -> None:
        """Nothing to begin anew."""


class ModuleView:
    """The model as it shows to who looks for its parameters, with DeepSpeed's question for those of other modules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """None: a parameter that another module uses is not registered anywhere."""
        return iter(())


class DeepSpeedZeRoOffload:
    """Stands where DeepSpeed keeps its hooks; `engine.optimizer` of an engine without an optimizer, in stage 3."""

    def __init__(self, module: nn.Module) -> None:
        self.module = ModuleView(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = ParameterCoordinator()

    def get_param_coordinator(self, training: bool = True) -> ParameterCoordinator:
        return self.param_coordinator

    def setup_zero_stage3_hooks(self) -> None:
        """Nothing to hook."""

    def _register_deepspeed_module(self, module: Any, count: list[int] | None = None) -> None:
        """Nothing to hook, however often."""

    def _remove_module_hooks(self) -> None:
        """Nothing is hooked."""

    def partition_all_parameters(self) -> None:
        """Let go of all gathered values of this model on this rank."""
        for parameter in self.module.parameters():
            parameter.partition()

    def empty_partition_cache(self) -> None:
        self.partition_all_parameters()
