"""Lightning's `bf16-true` and `16-true`, which cast parameters alone."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn

__all__ = ["ParameterPrecision", "cast_parameters"]


class ParameterPrecision(HalfPrecision):
    """`HalfPrecision` that keeps what was made in 16 bits on purpose, and buffers.

    Lightning's own casts everything: a frozen fp16 teacher would become bf16, and rotary frequencies or running
    means would lose 16 bits. Inputs are cast as by Lightning's.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        cast_parameters(module, self._desired_input_dtype)
        return module


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast what is trained, and frozen parameters of 32 and 64 bits, to `dtype`; one parameter at a time."""
    for parameter in module.parameters():
        if not parameter.dtype.is_floating_point or parameter.dtype == dtype:
            continue
        if parameter.requires_grad or parameter.dtype.itemsize > dtype.itemsize:
            parameter.data = parameter.data.to(dtype)
