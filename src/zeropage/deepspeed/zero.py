"""`deepspeed.zero`: `Init` and `GatheredParameters` on `zp.init` and `zp.gather`, and what needs no doing here."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from enum import Enum
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # in no __all__

from zeropage.config import Config
from zeropage.construct import init, shard
from zeropage.deepspeed import comm
from zeropage.deepspeed.accelerator import get_accelerator
from zeropage.deepspeed.estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zeropage.deepspeed.generation import unwrap_model_for_generation
from zeropage.deepspeed.settings import read_settings
from zeropage.deepspeed.sources import load_config
from zeropage.deepspeed.transformers_loading import keep_loading_flags
from zeropage.edit import gather
from zeropage.errors import ConfigError
from zeropage.tensor import PagedTensor, ZeroParamStatus, ZeroParamType

__all__ = [
    "DeepSpeedTensorOverride", "GatheredParameters", "Init", "ZeroParamStatus", "ZeroParamType",
    "estimate_zero2_model_states_mem_needs_all_cold", "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold", "estimate_zero3_model_states_mem_needs_all_live",
    "register_external_parameter", "restore_init_context", "shutdown_init_context", "unregister_external_parameter",
    "unwrap_model_for_generation",
]  # fmt: skip

_BATCH_SIZES = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"})


class DeepSpeedTensorOverride(Enum):
    """What DeepSpeed's `Init` overrides in tensors made inside; here it is the dtype, and of parameters alone."""

    dtype = 1
    device = 2


class Init:
    """Parameters made inside are sharded as they are made; or those of `module` are, in place (all ranks together).

    Args:
        module: shard this model now instead.
        data_parallel_group, sequence_data_parallel_group: the ranks to shard over; default: all.
        config_dict_or_path: a DeepSpeed configuration; "auto" values in it do not matter here.
        dtype: floating-point parameters made inside get this dtype; buffers keep theirs. None: each keeps its own.
            (DeepSpeed makes everything inside 16-bit where the configuration enables fp16 or bf16; here the engine
            casts what is trained, and keeps the exact values as masters.)
        enabled: False does nothing.
        mem_efficient_linear, pin_memory, tensor_overrides: nothing to do here.
        remote_device: "cpu" or the accelerator; where parameters live follows from the configuration.

    Raises:
        ConfigError: an option that changes what is computed and is not there (quantised weights), or that names
            the disk without a folder ("nvme").
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        self.enabled = enabled
        self._dtype = dtype
        self._inside = ExitStack()
        if not enabled:
            return
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise ConfigError("zero.Init: quantised weights are not available; leave zero_quantized_weights out")
        if remote_device == "nvme" or param_swapper is not None:
            raise ConfigError(
                "zero.Init: remote_device='nvme' names no folder; give the configuration, whose offload_param says it"
            )
        comm.init_distributed(verbose=False)
        group = data_parallel_group if data_parallel_group is not None else sequence_data_parallel_group
        if group is None and mpu is not None:
            group = mpu.get_data_parallel_group()
        self._group = group
        self._config = _sharding(config_dict_or_path if config_dict_or_path is not None else config)
        if module is not None:
            if dtype is not None:
                for parameter in module.parameters():
                    _cast(parameter, dtype)
            shard(module, self._config, self._group)

    def __enter__(self) -> Init:
        if self.enabled:
            keep_loading_flags()
            if self._dtype is not None:
                # before the hook of zp.init, which pages what it sees
                self._inside.callback(register_module_parameter_registration_hook(self._casting_hook()).remove)
            if torch.cuda.is_available():
                self._inside.enter_context(get_accelerator().device(get_accelerator().current_device()))
            self._inside.enter_context(init(self._config, self._group))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.__exit__(kind, error, trace)

    def _casting_hook(self) -> Any:
        thread, dtype = threading.get_ident(), self._dtype

        def cast(module: nn.Module, name: str, parameter: Any) -> None:
            if threading.get_ident() == thread and dtype is not None:
                _cast(parameter, dtype)

        return cast


def _cast(parameter: Any, dtype: torch.dtype) -> None:
    plain = isinstance(parameter, nn.Parameter) and not isinstance(parameter, (PagedTensor, UninitializedTensorMixin))
    if plain and parameter.is_floating_point():
        parameter.data = parameter.data.to(dtype)


def _sharding(config: Any) -> Config:
    """What a DeepSpeed configuration says about sharding; the libraries have not put numbers for "auto" yet."""
    if config is None:
        return Config()
    raw = config if isinstance(config, Mapping) else load_config(config)
    known = {key: value for key, value in raw.items() if value != "auto" and key not in _BATCH_SIZES}
    return read_settings({**known, "train_micro_batch_size_per_gpu": 1}, comm.get_world_size()).config


class GatheredParameters:
    """Full values of `params` inside; what rank `modifier_rank` changes is kept, on all ranks.

    Without `modifier_rank`, changes inside are ordinary ones that all ranks make alike, and are kept too (DeepSpeed
    loses them), and what is touched stays in memory until the end. Blocks may be nested and overlap. See `zp.gather`.

    Args:
        params: any iterable of parameters (a generator, with duplicates, empty), or one; plain ones and None
            are left alone.
        fwd_module: nothing to do: any module may use any parameter.
        enabled: False does nothing.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        self.enabled = enabled
        chosen = _without_none(params)
        self._block = gather(chosen, writer=modifier_rank, keep=modifier_rank is None) if enabled else None

    def __enter__(self) -> None:
        if self._block is not None:
            self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._block is not None:
            self._block.__exit__(kind, error, trace)


def _without_none(params: Any) -> Any:
    """Programs hand over the bias of a layer that has none, as DeepSpeed lets them."""
    if isinstance(params, (torch.Tensor, nn.Module)) or not isinstance(params, Iterable):
        return params
    if isinstance(params, Mapping):
        params = params.values()
    return [parameter for parameter in params if parameter is not None]


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: an operator in any module finds the parameter that it touches."""
    _check_external(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do, as for `register_external_parameter`."""
    _check_external(module, parameter)


def _check_external(module: object, parameter: object) -> None:
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise RuntimeError(
            f"Parameter is not a torch.nn.Parameter: expected a module and a parameter, got {type(module).__name__} "
            f"and {type(parameter).__name__}"
        )


def shutdown_init_context() -> None:
    """Nothing to do: no constructor is patched while an `Init` is open."""


def restore_init_context() -> None:
    """Nothing to do, as for `shutdown_init_context`."""
