"""`deepspeed.runtime.zero.partition_parameters`: what `zero` has, and two names that transformers patches.

`zero.Init` here changes no constructor, so there is nothing that a patch of those names could alter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeropage.deepspeed.accelerator import get_accelerator
from zeropage.deepspeed.zero import (
    DeepSpeedTensorOverride,
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    restore_init_context,
    shutdown_init_context,
    unregister_external_parameter,
)

__all__ = [
    "DeepSpeedTensorOverride", "GatheredParameters", "Init", "ZeroParamStatus", "ZeroParamType", "get_accelerator",
    "register_external_parameter", "restore_init_context", "shutdown_init_context", "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]  # fmt: skip

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype, target_device: Any = None
) -> Callable[..., torch.Tensor]:
    """`fn` as it is: tensors made inside `zero.Init` keep the dtype that they ask for."""
    return fn
