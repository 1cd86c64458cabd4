"""`deepspeed.checkpointing`: activation checkpointing, done by `torch.utils.checkpoint`.

torch keeps and restores the random state of CPU and GPU, so dropout is the same in the recomputation. What DeepSpeed
does beside (cutting kept activations over model-parallel ranks, one contiguous buffer) saves memory in ways that
have no counterpart here; the settings are accepted, and change no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zeropage.deepspeed.accelerator import get_accelerator
from zeropage.deepspeed.sources import load_config

__all__ = [
    "CheckpointFunction", "CudaRNGStatesTracker", "checkpoint", "configure", "get_cuda_rng_tracker", "is_configured",
    "model_parallel_cuda_manual_seed", "non_reentrant_checkpoint", "partition_activations_in_checkpoint", "reset",
    "set_num_layers",
]  # fmt: skip

_OPTIONS = {  # by the name of the argument of `configure`: the key of the configuration
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}


class CudaRNGStatesTracker:
    """Named random states, apart from the usual one: Megatron's tracker, for one model-parallel rank."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin the state `name` from `seed`.

        Raises:
            Exception: name or seed are in use (DeepSpeed raises this class).
        """
        if seed in self.seeds_ or name in self.states_:
            raise Exception(f"seed {seed} or state {name} already exists")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        self.seeds_.add(seed)
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Inside, random numbers come from the state `name`, which goes on from there the next time."""
        if name not in self.states_:
            raise Exception(f"cuda rng state {name} is not added")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


@dataclass(slots=True)
class _Chosen:
    """What `configure` was told. DeepSpeed's functions take no object that could hold it."""

    configured: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    num_layers: int | None = None
    tracker: CudaRNGStatesTracker = field(default_factory=CudaRNGStatesTracker)


_chosen = _Chosen()


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
    **options: Any,
) -> None:
    """Accept the settings, from a configuration or one by one (these win)."""
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    block: Mapping[str, Any] = {}
    if deepspeed_config is not None:
        block = load_config(deepspeed_config).get("activation_checkpointing") or {}
    for name, key in _OPTIONS.items():
        value = given[name] if given[name] is not None else block.get(key)
        if value is not None:
            _chosen.options[name] = value
    _chosen.configured = True


def is_configured() -> bool:
    return _chosen.configured


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function(*args)` and keep its inputs only; backward runs it again.

    Parameters get their gradients also where no input needs one. With `checkpoint_in_cpu` the inputs wait in host
    memory.
    """
    if _chosen.options.get("checkpoint_in_cpu"):
        function, args = _kept_on_host(function, args)
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def _kept_on_host(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of copies in host memory, which it brings back before it runs, and those copies."""
    devices = [arg.device if isinstance(arg, torch.Tensor) else None for arg in args]

    def run(*copies: Any, **options: Any) -> Any:
        back = [copy if to is None else copy.to(to) for copy, to in zip(copies, devices, strict=True)]
        return function(*back, **options)

    return run, tuple(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args)


class CheckpointFunction:
    """The class that Megatron calls: `CheckpointFunction.apply(function, all_outputs, *args)`."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> None:
        """Add what `run_function(*args)` returns to `all_outputs`."""
        made = checkpoint(run_function, *args)
        all_outputs.extend(made if isinstance(made, tuple) else (made,))


def reset() -> None:
    """Nothing is kept from one iteration to the next."""


def set_num_layers(nlayers: int) -> None:
    _chosen.num_layers = nlayers


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    _chosen.options["partition_activations"] = partition_activation


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    return _chosen.tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device, and the tracker's state for the (only) model-parallel rank."""
    _chosen.tracker.reset()
    get_accelerator().manual_seed(seed)
    _chosen.tracker.add("model-parallel-rng", seed + 2718)  # Megatron's offset
