"""Lightning's precision plugins, for parameters that are paged.

Each is the plugin of that name with three differences: backward has ended before the optimizer's step begins, a norm is
taken of slices and not of gathered gradients, and the `true` ones cast parameters alone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.optim import LBFGS, Optimizer

from zeropage.edit import local
from zeropage.lightning.masters import Masters
from zeropage.tensor import PagedTensor

__all__ = ["ParameterPrecision", "for_pages"]


class _Paged(Precision):
    """What all of them do."""

    def optimizer_step(  # type: ignore[override]  # as Lightning's own do
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Forward and backward first, then the step: between ranks these are two phases.

        An optimizer that is not torch's own may want to call the closure itself, several times, and gets it.
        """
        if type(optimizer).__module__.split(".")[0] != "torch" or isinstance(optimizer, LBFGS):
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = list(self.main_params(optimizer))
        nn.utils.clip_grads_with_norm_(parameters, clip_val, _norm(parameters))


class PlainPrecision(_Paged):
    """32-true: parameters keep the dtypes that they were made with."""


class ParameterPrecision(_Paged, HalfPrecision):
    """bf16-true and 16-true.

    Lightning's own casts everything: a frozen fp16 teacher would become bf16, and rotary frequencies or running means
    would lose 16 bits. This one casts what is trained, and frozen parameters of 32 and 64 bits; inputs as Lightning's.
    """

    masters: Masters | None = None  # set while a model is trained on fp32 masters

    @property
    def name(self) -> str:
        """As settings of zeropage call it."""
        return "bf16" if self._desired_input_dtype == torch.bfloat16 else "fp16"

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.masters is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = self._wrap_closure(model, optimizer, closure)
        self.masters.step(optimizer)
        return result

    def convert_module(self, module: nn.Module) -> nn.Module:
        dtype = self._desired_input_dtype
        for parameter in module.parameters():
            if not parameter.dtype.is_floating_point or parameter.dtype == dtype:
                continue
            if parameter.requires_grad or parameter.dtype.itemsize > dtype.itemsize:
                parameter.data = parameter.data.to(dtype)
        self.tell_dtype(module)
        return module

    def tell_dtype(self, module: nn.Module) -> None:
        """`module.dtype` is what inputs are cast to."""
        _update_properties(module, dtype=self._desired_input_dtype)


class WideParameterPrecision(_Paged, DoublePrecision):
    """64-true."""


class AutocastPrecision(MixedPrecision, _Paged):
    """bf16-mixed, and 16-mixed, whose scaler takes the step after backward by itself."""


def for_pages(plugin: Precision) -> Precision:
    """The plugin that does the same for paged parameters; a plugin of the user's own stays."""
    if type(plugin) is Precision:
        return PlainPrecision()
    if type(plugin) is HalfPrecision:
        return ParameterPrecision(plugin.precision)
    if type(plugin) is DoublePrecision:
        return WideParameterPrecision()
    if type(plugin) is MixedPrecision:
        return AutocastPrecision(plugin.precision, plugin.device, plugin.scaler)  # type: ignore[arg-type]
    return plugin


def _norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of all gradients (all ranks together)."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = 0.0
    pager = None
    for gradient in gradients:
        if isinstance(gradient, PagedTensor):
            pager = gradient._node.page.pager
            squares += float(local(gradient).float().square().sum(dtype=torch.float64))
    if pager is not None:
        squares = sum(struct.unpack("d", part)[0] for part in pager.transport.meet("norm", struct.pack("d", squares)))
    squares += sum(float(g.square().sum(dtype=torch.float64)) for g in gradients if not isinstance(g, PagedTensor))
    device = gradients[0].device if gradients else torch.device("cpu")
    return torch.tensor(math.sqrt(squares), dtype=torch.float32, device=device)
