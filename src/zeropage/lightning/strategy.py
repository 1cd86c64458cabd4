"""`ZeropageStrategy`: the model is sharded in place, and Lightning trains it as it trains any other.

Nothing is wrapped: `trainer.model` is the LightningModule itself, its parameters are paged, and the optimizers that
`configure_optimizers` makes of them step on slices.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from zeropage.checkpoint.named import extra_states_of
from zeropage.config import Config
from zeropage.construct import ConfigLike, init, pagers_of, shard
from zeropage.engine import Engine
from zeropage.errors import CheckpointError, ConfigError
from zeropage.lightning import checkpoints
from zeropage.lightning.joined import JoinedOptimizer
from zeropage.lightning.masters import Masters
from zeropage.lightning.precision import ParameterPrecision, for_pages
from zeropage.optim import record_of
from zeropage.tensor import PagedTensor

__all__ = ["ZeropageStrategy"]

_TRAINER_DECIDES = {
    "accumulate": "Trainer(accumulate_grad_batches=...)",
    "clip_grad_norm": "Trainer(gradient_clip_val=...)",
    "precision": "Trainer(precision=...)",
    "cast_frozen": "Trainer(precision=...)",
    "loss_scale": "Trainer(precision='16-mixed')",
    "skip_nonfinite": "Trainer(detect_anomaly=True), or check gradients in on_before_optimizer_step",
}


class ZeropageStrategy(DDPStrategy):
    """ZeRO stage 3 for Lightning: parameters, gradients and optimizer states are cut over the ranks.

    Args:
        config: a `zp.Config`, a mapping, or a path to JSON. Accumulation, clipping and precision are the Trainer's.
        fp32_masters: with precision "bf16-true" or "16-true", optimizers step on fp32 values of what they train, and
            the parameters are these in 16 bits. Lightning's other strategies step the 16-bit values themselves, in
            which small updates vanish; DeepSpeed has masters.
        process_group_backend: as for `DDPStrategy`.
        timeout: as for `DDPStrategy`.
        accelerator: set by the Trainer, like the next three.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer.
        precision_plugin: set by the Trainer.

    Raises:
        ConfigError: a wrong setting, or one that the Trainer decides.
    """

    strategy_name = "zeropage"

    def __init__(
        self,
        config: ConfigLike = None,
        *,
        fp32_masters: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._config = Config.of(config)
        for key in sorted(_TRAINER_DECIDES.keys() & self._config.model_fields_set):
            raise ConfigError(f"{key} is the Trainer's to decide here: use {_TRAINER_DECIDES[key]}")
        self._fp32_masters = fp32_masters
        self._masters: Masters | None = None
        self._from_file = False

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(
            cls.strategy_name, cls, description="ZeRO stage 3 on demand-paged parameters (zeropage)"
        )

    # -- set up

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else for_pages(plugin)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """What `configure_model` makes is paged as it is made."""
        with init(self._config):
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        precision = self._precision_of_masters() if fitting else None
        if precision is None:
            self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        shard(self.model, None if pagers_of(self.model) else self._config)
        self._engine(None)  # says whether every setting can take effect
        self._send_buffers()
        if fitting:
            self.setup_optimizers(trainer)
        if precision is not None:
            self._make_masters(precision)
        self.setup_precision_plugin()

    def _precision_of_masters(self) -> ParameterPrecision | None:
        if not self._fp32_masters:
            return None
        if not isinstance(self.precision_plugin, ParameterPrecision):
            raise ConfigError(
                f"fp32_masters cannot take effect with precision={self.precision_plugin.precision!r}, whose parameters "
                "are not cast; use precision='bf16-true', or remove it"
            )
        return self.precision_plugin

    def _make_masters(self, precision: ParameterPrecision) -> None:
        """Cast the parameters; what they were exactly is what the optimizers step."""
        assert self.lightning_module is not None
        settings = {"precision": precision.name, "cast_frozen": "wide"}
        config = Config.of(self._config.model_dump(exclude_unset=True) | settings)
        masters = Masters(Engine(self.lightning_module, self._joined(), config), self._plain_optimizers())
        if self._masters is not None:
            masters.take_over(self._masters)
        self._masters = masters
        precision.masters = self._masters
        precision.tell_dtype(self.lightning_module)

    def _engine(self, optimizer: torch.optim.Optimizer | None) -> Engine:
        """Lightning trains; engines are made for what they check, save and load."""
        assert self.lightning_module is not None
        return Engine(self.lightning_module, optimizer, self._config)

    def _plain_optimizers(self) -> list[torch.optim.Optimizer]:
        return [o._optimizer if isinstance(o, LightningOptimizer) else o for o in self.optimizers]

    def _training_engine(self) -> Engine:
        """With all optimizers, and their masters if there are any."""
        return self._engine(self._joined()) if self._masters is None else self._masters.engine

    def _joined(self) -> torch.optim.Optimizer:
        """The one optimizer, or all of them seen as one."""
        found = self._plain_optimizers()
        return found[0] if len(found) == 1 else JoinedOptimizer(found)

    # -- buffers: each rank has its own while it trains, and the first rank's are those that count

    def _send_buffers(self) -> None:
        assert self.lightning_module is not None
        buffers = dict(self.lightning_module.named_buffers())
        if self.world_size == 1 or not buffers:
            return
        values = self.broadcast({name: value.cpu() for name, value in buffers.items()})
        with torch.no_grad():
            for name, value in buffers.items():
                value.copy_(values[name])

    def on_validation_start(self) -> None:
        self._send_buffers()

    def on_test_start(self) -> None:
        self._send_buffers()

    def on_predict_start(self) -> None:
        self._send_buffers()

    # -- checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Reads plain checkpoint files; zeropage's own folders do not pass through it."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise ConfigError(
            f"{type(io).__name__} cannot take effect: with strategy='zeropage' every rank writes its own part of a "
            "checkpoint. Remove it from plugins."
        )

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return self._from_file

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None) -> None:
        """Write a folder at `filepath` (all ranks together).

        Raises:
            CheckpointError: see `Engine.save`; or a hook has put tensors into `state_dict` that the model lacks.
        """
        if storage_options is not None:
            raise TypeError("storage_options cannot take effect: checkpoints do not pass through a CheckpointIO here")
        path = Path(self.broadcast(filepath))
        if self.is_global_zero and path.is_file():
            path.unlink()
        engine = self._training_engine() if "optimizer_states" in checkpoint else self._engine(None)
        engine.global_step = checkpoint["global_step"]
        checkpoints.save(engine, path, checkpoint, self._left_out(checkpoint["state_dict"]))

    def _left_out(self, state: dict[str, Any]) -> list[str]:
        """The tensors that a hook, or a `state_dict` of the module's own, leaves out."""
        assert self.lightning_module is not None
        named = self.lightning_module.state_dict(keep_vars=True)
        made = extra_states_of(self.lightning_module)  # anew at every call: no tensors that the model has
        tensors = {n: value for n, value in state.items() if isinstance(value, torch.Tensor) and n not in made}
        odd = sorted(name for name, value in tensors.items() if not _is_of(value, named.get(name)))
        if odd:
            raise CheckpointError(
                f"checkpoint['state_dict'] holds tensors that are not the model's: {', '.join(odd[:8])}. Put them "
                "beside it (checkpoint['mine'] = ...), or register them as buffers."
            )
        return sorted(name for name, value in named.items() if isinstance(value, torch.Tensor) and name not in state)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder, on any number of ranks; or a file that Lightning wrote under another strategy.

        Raises:
            CheckpointError: see `Engine.load`. Nothing is changed then.
        """
        assert self.lightning_module is not None
        path = Path(self.broadcast(checkpoint_path))
        self._from_file = path.is_file()
        if self._from_file:
            return super().load_checkpoint(path, weights_only=weights_only)
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        engine = self._training_engine() if fitting else self._engine(None)
        strict = self.lightning_module.strict_loading
        return checkpoints.load(engine, path, weights=not fitting, strict=strict, safe=weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if self._from_file:
            super().load_model_state_dict(checkpoint, strict)

    # -- the end

    def teardown(self) -> None:
        """Let go of gathered parameters and of gradients. The model stays sharded, and may be used again."""
        module = self.lightning_module
        if module is not None:
            for pager in pagers_of(module):
                pager.close_batch()
                pager.evict_all()
            for parameter in module.parameters():
                if isinstance(parameter, PagedTensor):
                    record_of(parameter).release()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _is_of(value: torch.Tensor, owner: object) -> bool:
    """Whether `value` is what `state_dict` shows of `owner`."""
    if isinstance(owner, PagedTensor):
        return isinstance(value, PagedTensor) and value._node.page is owner._node.page
    return isinstance(owner, torch.Tensor) and value.shape == owner.shape and value.data_ptr() == owner.data_ptr()
