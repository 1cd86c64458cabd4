"""Accelerate on sharded models: `Accelerator`, which shards what it prepares instead of wrapping it in DDP.

    from zeropage.accelerate import Accelerator     # instead of: from accelerate import Accelerator

The rest of the program stays. Needs `accelerate`; knows nothing of DeepSpeed's configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn

from zeropage.config import Config
from zeropage.construct import ConfigLike, pagers_of, shard
from zeropage.deepspeed.consolidated import consolidated_state_dict
from zeropage.deepspeed.optimizer import ZeROOptimizer
from zeropage.engine import Engine
from zeropage.errors import ConfigError
from zeropage.tensor import PagedTensor
from zeropage.transport import find_group

__all__ = ["Accelerator"]

_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class _Prepared(AcceleratedOptimizer):
    """What `prepare` returns for an optimizer that an engine steps."""

    @property
    def step_was_skipped(self) -> bool:
        overflow: bool = self.optimizer.overflow
        return overflow


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` for models that zeropage shards.

    `prepare` shards every model that is not sharded yet and wraps none; each optimizer gets a `zeropage.Engine`,
    which steps it. `backward`, `clip_grad_norm_`, `accumulate`, `save_state`, `load_state` and `get_state_dict` do
    what they do elsewhere; gradients are averaged over ranks.

    Args:
        zeropage_config: settings for `zeropage`: a `Config`, a mapping, or a path to JSON. Accelerate's own
            accumulation counts, so `accumulate` stays 1; `precision="fp16"` has a loss scale.
        options: as for `accelerate.Accelerator`. `mixed_precision="bf16"` runs forwards under autocast. On a host
            without an accelerator `cpu` is true.

    Raises:
        ConfigError: another way of sharding is switched on, `mixed_precision="fp16"` (set `precision` in
            `zeropage_config`), or `accumulate`; Accelerate does not see the ranks that were started.
    """

    _models: list[Any]  # accelerate's own
    _optimizers: list[Any]

    def __init__(self, *, zeropage_config: ConfigLike = None, **options: Any) -> None:
        # with cpu=False Accelerate finds no backend there and takes every rank for a process by itself
        options.setdefault("cpu", not torch.accelerator.is_available())
        super().__init__(**options)
        self._zeropage_config = Config.of(zeropage_config)
        self._engines: list[Engine] = []
        self._known: list[nn.Module] = []  # sharded models that were given to `prepare`
        self._check()

    def _check(self) -> None:
        world = find_group(None, self._zeropage_config.timeout_s).world
        if world != self.num_processes:
            raise ConfigError(
                f"{world} ranks were started, and Accelerate takes itself for {self.num_processes}: every rank would "
                "train on all of the data. Without an accelerator write Accelerator(cpu=True), or "
                "TrainingArguments(use_cpu=True)"
            )
        if self.distributed_type in _OTHERS:
            raise ConfigError(
                f"zeropage.accelerate.Accelerator shards by itself, and {self.distributed_type.value} is switched on "
                "too; switch one of them off (`accelerate launch` without --use_deepspeed and --use_fsdp)"
            )
        if self.scaler is not None:
            raise ConfigError(
                "mixed_precision='fp16' scales the loss for plain parameters; use mixed_precision='no' with "
                "zeropage_config={'precision': 'fp16'}, or 'bf16'"
            )
        if self._zeropage_config.accumulate != 1:
            raise ConfigError("accumulate in zeropage_config: give gradient_accumulation_steps to Accelerator instead")

    @property
    def engines(self) -> list[Engine]:
        """The engines that `prepare` has made, in its order."""
        return list(self._engines)

    # -- preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As `accelerate.Accelerator.prepare`; models are sharded first, whatever the order of arguments."""
        for each in args:
            if isinstance(each, nn.Module):
                self._shard(each)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard it if it is not yet. For evaluation Accelerate wraps no model, which is what is wanted always."""
        self._shard(model)
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """An engine for the sharded model that it trains; other optimizers are prepared as they are elsewhere."""
        if isinstance(optimizer, AcceleratedOptimizer) or not _is_sharded(optimizer):
            return super().prepare_optimizer(optimizer, device_placement=device_placement)
        engine = Engine(self._model_of(optimizer), optimizer, self._settings())
        if self._engines and "fp16" in (engine.config.precision, self._engines[0].config.precision):
            raise ConfigError("one Accelerator has one loss scale: make another Accelerator for the second optimizer")
        self._engines.append(engine)
        prepared = _Prepared(ZeROOptimizer(engine, 3), device_placement=False, scaler=None)
        self._optimizers.append(prepared)
        return prepared

    def _shard(self, model: nn.Module) -> None:
        if any(True for _ in model.parameters()) and not pagers_of(model):
            if self.device_placement:
                model.to(self.device)
            shard(model, self._zeropage_config)
        if pagers_of(model) and not any(model is known for known in self._known):
            self._known.append(model)

    def _model_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in reversed(self._known):
            if wanted <= {id(parameter) for parameter in model.parameters()}:
                return model
        raise ConfigError("prepare the model of this optimizer together with it, or before it")

    def _settings(self) -> ConfigLike:
        """None are those that the model was sharded with."""
        return self._zeropage_config if self._zeropage_config.model_fields_set else None

    # -- a step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of the loss over the accumulation steps, and in fp16 times the loss scale."""
        if len(self._engines) == 1:
            self._engines[0].backward(loss / self.gradient_accumulation_steps, **kwargs)
        else:
            super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """The norm of the averaged gradient, which the next step scales down to `max_norm` (all ranks together)."""
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for engine in self._engines:
            if norm_type == 2 and _trained_by(engine) == {id(p) for p in chosen if p.requires_grad}:
                return torch.tensor(engine.clip_grad_norm_(max_norm))
        self._refuse_fp16("clip_grad_norm_ of some of the parameters, or of another norm")
        return super().clip_grad_norm_(chosen, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        self._refuse_fp16("clip_grad_value_")
        super().clip_grad_value_(parameters, clip_value)

    def _refuse_fp16(self, what: str) -> None:
        if any(engine.config.precision == "fp16" for engine in self._engines):
            raise ConfigError(f"{what} would see gradients times the loss scale; clip the norm of all parameters")

    @property
    def optimizer_step_was_skipped(self) -> bool:
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    # -- checkpoints

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """As `accelerate.Accelerator.save_state`; models and optimizers of engines go to `zeropage/` in the folder."""
        with self._without_engines():
            folder = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        self.save_engines(folder)
        return str(folder)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Load what `save_state` has saved, on any number of ranks."""
        if input_dir is None:
            raise ConfigError("load_state: name the folder that save_state returned")
        with self._without_engines():
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        self.load_engines(input_dir)

    def save_engines(self, folder: str | Path) -> None:
        """Save each engine under `folder/zeropage` (all ranks together)."""
        for number, engine in enumerate(self._engines):
            engine.save(Path(folder) / "zeropage", tag=f"engine{number}", latest=number == 0)

    def load_engines(self, folder: str | Path, *, weights_only: bool = False) -> None:
        """Load them again, on any number of ranks (all ranks together)."""
        for number, engine in enumerate(self._engines):
            engine.load(Path(folder) / "zeropage", tag=f"engine{number}", weights_only=weights_only)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Full plain tensors on the first rank, None on the others (all ranks together)."""
        if not pagers_of(model):
            return super().get_state_dict(model, unwrap)
        return consolidated_state_dict(model)

    @contextmanager
    def _without_engines(self) -> Iterator[None]:
        """Let Accelerate see what no engine saves."""
        models, optimizers = self._models, self._optimizers
        owned = {id(engine.module) for engine in self._engines}
        self._models = [model for model in models if id(model) not in owned]
        self._optimizers = [optimizer for optimizer in optimizers if not isinstance(optimizer, _Prepared)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    # -- end

    def free_memory(self, *objects: Any) -> Any:
        """Close the engines too (all ranks together)."""
        engines, self._engines = self._engines, []
        self._known = []
        for engine in engines:
            engine.close()
        return super().free_memory(*objects)


def _is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(p, PagedTensor) for group in optimizer.param_groups for p in group["params"])


def _trained_by(engine: Engine) -> set[int]:
    assert engine.optimizer is not None
    groups: Iterable[dict[str, Any]] = engine.optimizer.param_groups
    return {id(p) for group in groups for p in group["params"] if p.requires_grad}
