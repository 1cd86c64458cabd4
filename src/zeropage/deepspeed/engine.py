"""`DeepSpeedEngine`: a `zeropage.Engine` with DeepSpeed's methods, and its rules of when a step is due.

The boundary of gradient accumulation is decided here: by counting `step()` calls (plain programs, Lightning), by
what `set_gradient_accumulation_boundary` says (Accelerate, the Trainer), or by the program alone
(`managed_gradient_accumulation` false). The engine inside always takes one step when it is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from zeropage.construct import space_of
from zeropage.deepspeed.answers import EngineAnswers
from zeropage.deepspeed.consolidated import consolidated_state_dict, save_consolidated
from zeropage.deepspeed.flops import FlopsProfiler
from zeropage.deepspeed.loaders import data_loader
from zeropage.deepspeed.logs import log_dist, logger
from zeropage.deepspeed.monitor import MonitorMaster
from zeropage.deepspeed.offload_states import offload_states
from zeropage.deepspeed.optimizer import ZeROOptimizer, optimizer_for
from zeropage.deepspeed.own_settings import own_settings
from zeropage.deepspeed.parameter_offload import DeepSpeedZeRoOffload
from zeropage.deepspeed.progress import Progress
from zeropage.deepspeed.saving import check_no_loader, load_checkpoint, save_checkpoint
from zeropage.deepspeed.settings import Settings
from zeropage.engine import Engine
from zeropage.errors import ConfigError, ZeropageError

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(EngineAnswers, nn.Module):
    """Trains or runs `model`, which is sharded in place; made by `initialize`.

    Attributes that it does not have are those of the model.

    Args:
        model: any module.
        settings: the configuration.
        optimizer: a torch optimizer over the model's parameters; None for inference.
        lr_scheduler: stepped after every applied step.
        training_data: a dataset, for `training_dataloader`.
        collate_fn: for data loaders.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        training_data: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        self.__dict__["module"] = model  # found without nn.Module's search through its dicts
        self.config: dict[str, Any] = settings.raw
        self._config = settings
        self._batch = [settings.train_micro_batch_size_per_gpu, settings.gradient_accumulation_steps]
        self.zeropage_engine = Engine(model, optimizer, own_settings(settings, model), lr_scheduler)
        self.basic_optimizer = optimizer
        self.optimizer: ZeROOptimizer | DeepSpeedZeRoOffload | None = None
        if optimizer is not None:
            self.optimizer = optimizer_for(self.zeropage_engine, settings.stage)
        elif settings.stage == 3:
            self.optimizer = DeepSpeedZeRoOffload(model)
        self.micro_steps = 0
        self.global_samples = 0
        self._boundary: bool | None = None
        self._step_applied = False
        self._coalescing = False
        self._compiled = False
        self._destroyed = False
        self.monitor = MonitorMaster(settings.monitors, self.global_rank)
        self._progress = Progress(settings, self.global_rank)
        profile = settings.flops_profiler
        self.flops_profiler = None if profile is None else FlopsProfiler(profile, model, self.global_rank)
        self._losses: list[torch.Tensor] = []  # of this step, for monitors
        self._gradients = [space_of(pager).gradients for pager in self.zeropage_engine.pagers]
        self._weigh_direct_backwards()
        self.collate_fn = collate_fn
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)

    def __getattr__(self, name: str) -> Any:
        """What the engine lacks, the model may have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__:
                raise
            try:
                return getattr(self.__dict__["module"], name)
            except AttributeError:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    # -- forward and backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward; under `torch.autocast`, or with inputs cast to fp16, where the configuration says so."""
        with ExitStack() as around:
            self._watch(around, "forward")
            if self._config.autocast is not None:
                around.enter_context(torch.autocast(self.device.type, dtype=self._config.autocast))
            if self._config.cast_inputs:
                inputs, kwargs = _cast(inputs, torch.float16), _cast(kwargs, torch.float16)
            return self.module(*inputs, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of the loss, divided by the accumulation steps unless `scale_wrt_gas` is False; returns that.

        In fp16 the loss scale is applied on top. `loss.backward()` is as good in the other precisions, and
        `engine.scale(loss).backward()` in all.
        """
        self._require_alive()
        if loss.numel() != 1:
            raise ConfigError(
                f"loss must be a scalar tensor, this one has shape {tuple(loss.shape)}; to pass output gradients call "
                "tensor.backward(gradient)"
            )
        steps = self.gradient_accumulation_steps()
        share = loss / steps if scale_wrt_gas and steps > 1 else loss
        if self.monitor.enabled:
            self._losses.append(loss.detach())
        with ExitStack() as around:
            self._watch(around, "backward")
            self.zeropage_engine.backward(share, retain_graph=retain_graph)
        return share

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a `.backward()` of one's own."""
        scaled = loss * self.zeropage_engine.loss_scale
        if scaled.requires_grad:
            scaled.register_hook(self._mark_scaled)
        return scaled

    def _mark_scaled(self, gradient: torch.Tensor) -> None:
        for gradients in self._gradients:
            gradients.expect(1.0 / self.gradient_accumulation_steps(), loss_scale=self.zeropage_engine.loss_scale)

    def _weigh_direct_backwards(self) -> None:
        """What gradients of `loss.backward()` count: a share of the accumulation; in fp16 the loss must be scaled."""
        if self.basic_optimizer is None:
            return
        factor = None if self._config.precision == "fp16" else 1.0 / self.gradient_accumulation_steps()
        for gradients in self._gradients:
            gradients.weigh_others(factor)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accepted for programs that accumulate by hand; gradients are reduced as they appear all the same."""
        yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards for one step. Gradients are reduced as they appear; the numbers are the same.

        Raises:
            RuntimeError: `step()` is called inside.
        """
        if not self.managed_gradient_accumulation():
            raise ConfigError("coalesce_grad_reduction needs managed_gradient_accumulation=true")
        if self._coalescing:
            raise RuntimeError("coalesce_grad_reduction cannot be nested")
        self._coalescing = True
        try:
            yield
        finally:
            self._coalescing = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those accumulated so far (all ranks together). `step` does so by itself."""
        self._require_alive()
        self.zeropage_engine.zero_grad()

    # -- step, and what is told of it

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` applies the gradients."""
        if self._boundary is not None:
            return self._boundary
        if not self.managed_gradient_accumulation():
            return True
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say it from outside, before each backward, instead of counting; None counts again."""
        if not self.managed_gradient_accumulation():
            raise ConfigError(
                "set_gradient_accumulation_boundary() has no effect with managed_gradient_accumulation=false, where "
                "every step() is a boundary; remove one of the two"
            )
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """After every micro-batch (or, with a boundary set from outside, when one is due): step or skip if it is time.

        Args:
            lr_kwargs: for the scheduler's `step`.
        """
        self._require_alive()
        if self._coalescing:
            raise RuntimeError("step() inside coalesce_grad_reduction(): leave the block first")
        if not isinstance(self.optimizer, ZeROOptimizer):
            raise ConfigError(
                "this engine has no optimizer: give one to initialize(), or name one in the configuration"
            )
        due = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._step_applied = False
        if not due:
            return
        self.optimizer._opt_called = True
        with ExitStack() as around:
            self._watch(around, "step")
            around.enter_context(self._scheduler_given(lr_kwargs))
            result = self.zeropage_engine.step()
        self.optimizer.take_note(result)
        self._step_applied = result.applied
        self.global_samples += self.train_batch_size()
        self._report()

    def _watch(self, around: ExitStack, phase: str) -> None:
        """Time what follows, and count its operations, where the configuration asks for it."""
        around.enter_context(self._progress.phase(phase))
        if self.flops_profiler is not None:
            around.enter_context(self.flops_profiler.counting(self.global_steps + 1))

    def _report(self) -> None:
        """A boundary has passed."""
        self._progress.step_done(self.global_steps, self.skipped_steps, self.get_lr(), self.get_mom())
        if self.flops_profiler is not None:
            self.flops_profiler.step_done(self.global_steps)
        if self.monitor.enabled:
            self._write_events()

    def _write_events(self) -> None:
        events = [("Train/Samples/lr", float(self.get_lr()[0]), self.global_samples)]
        if self._losses:
            loss = float(torch.stack(self._losses).float().mean())
            events.append(("Train/Samples/train_loss", loss, self.global_samples))
            self._losses.clear()
        if self.fp16_enabled():
            events.append(("Train/Samples/loss_scale", self.zeropage_engine.loss_scale, self.global_samples))
        self.monitor.write_events(events)

    @contextmanager
    def _scheduler_given(self, lr_kwargs: Mapping[str, Any] | None) -> Iterator[None]:
        """Let the scheduler step with arguments."""
        scheduler = self.lr_scheduler
        if not lr_kwargs or scheduler is None:
            yield
            return
        before = self.zeropage_engine.global_step
        self.lr_scheduler = None
        try:
            yield
        finally:
            self.lr_scheduler = scheduler
        if self.zeropage_engine.global_step > before:
            scheduler.step(**lr_kwargs)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches of a step so that a step has this many samples.

        Raises:
            ValueError: it is no multiple of the samples that all ranks take in one micro-batch.
        """
        each = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size % each:
            raise ValueError(
                f"Train batch size must be divisible by micro-batch data parallelism: {train_batch_size} is no "
                f"multiple of {each}"
            )
        self._batch[1] = train_batch_size // each
        self._weigh_direct_backwards()

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of the whole gradient at the last boundary, before clipping; None before the first."""
        return self.zeropage_engine.grad_norm

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped for a gradient that was not finite."""
        return isinstance(self.optimizer, ZeROOptimizer) and self.optimizer.overflow

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that `step` steps; set it to None to step one yourself."""
        return self.zeropage_engine.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, value: Any) -> None:
        self.zeropage_engine.lr_scheduler = value

    def dump_state(self) -> None:
        """Log the configuration."""
        log_dist(f"configuration: {self.config}", ranks=[0])

    # -- data

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of this rank's share of `dataset`, in micro-batches; shuffled for `route` "train" only."""
        return data_loader(
            dataset,
            self.train_micro_batch_size_per_gpu() if batch_size is None else batch_size,
            shuffle=route == "train",
            sampler=data_sampler,
            collate_fn=self.collate_fn if collate_fn is None else collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=self._config.dataloader_drop_last,
        )

    # -- checkpoints

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save under `save_dir/tag` (default `global_step<N>`), all ranks together; see `zeropage.Engine.save`.

        Each rank's `client_state` is kept. Objects of your own classes in it are pickled, as in DeepSpeed.

        Raises:
            CheckpointError: the folder cannot be written, or a value cannot be pickled. On all ranks.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        save_checkpoint(
            self,
            Path(save_dir),
            tag,
            dict(client_state or {}),
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint`, `zeropage.Engine.save` or DeepSpeed saved, on any number of ranks.

        Returns:
            A path in the checkpoint, and the client state; (None, None), after a warning, where there is none.

        Raises:
            CheckpointError: it is damaged, or does not fit; nothing is changed then.
        """
        check_no_loader(custom_load_fn)
        return load_checkpoint(
            self,
            Path(load_dir),
            None if tag is None else str(tag),
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
        )

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the full state dict, in the dtypes that parameters have, as one file (all ranks together).

        Returns:
            False, and nothing is saved, in stage 3 without `stage3_gather_16bit_weights_on_model_save`.
        """
        path = Path(save_dir) / save_filename
        if self.zero_optimization_partition_weights() and not self.zero_gather_16bit_weights_on_model_save():
            logger.warning("%s is not saved because stage3_gather_16bit_weights_on_model_save is false", path)
            return False
        save_consolidated(self.module, path, exclude_frozen_parameters=exclude_frozen_parameters)
        return True

    def save_fp16_model(self, save_dir: Any, save_filename: str = "pytorch_model.bin") -> bool:
        return self.save_16bit_model(save_dir, save_filename)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """The full state dict on rank 0, None on the others (all ranks together)."""
        return consolidated_state_dict(self.module, exclude_frozen_parameters=exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's own state dict: sharded tensors of full shape, which become full when they are pickled."""
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None, **options: Any
    ) -> None:
        """Load `checkpoint["module"]`, full values or sharded ones, on all ranks together."""
        if custom_load_fn is not None:
            custom_load_fn(src=checkpoint["module"], dst=self.module)
        else:
            self.module.load_state_dict(checkpoint["module"], strict=strict)

    # -- memory, compilation, end

    def offload_states(self, include: Any = None, device: str = "cpu", pin_memory: bool = True, **_: Any) -> None:
        """Make room: drop gathered values. Slices in host memory are where they should go.

        Args:
            include: names of `OffloadStateTypeEnum`; default: all.
            device: "cpu".

        Raises:
            ConfigError: an unknown name or device; the shards are on a GPU, where they cannot be moved.
        """
        offload_states(self.zeropage_engine, include, device)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Nothing to do: `offload_states` has moved no slice, and values are gathered when they are touched."""

    def empty_partition_cache(self) -> None:
        """Drop all gathered values on this rank."""
        for pager in self.zeropage_engine.pagers:
            pager.evict_all()

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """`torch.compile` of the model, in place."""
        self.module.compile(backend=backend, **dict(compile_kwargs or {}))
        self._compiled = True

    @property
    def is_compiled(self) -> bool:
        return self._compiled

    def destroy(self) -> None:
        """End the engine (all ranks together). The model stays sharded, and forward runs, until it is dropped."""
        self._destroyed = True
        if self.basic_optimizer is not None:
            for gradients in self._gradients:
                gradients.weigh_others(1.0)
        self.zeropage_engine.close()
        self.basic_optimizer = None

    def _require_alive(self) -> None:
        if self._destroyed:
            raise ZeropageError(
                "this engine was destroyed and does not train any more; make another one with initialize(). "
                "(Accelerate's free_memory() destroys its engine. The Trainer calls it in train(), and goes on with "
                "the engine of an evaluate() or train() before: make another Trainer of trainer.model, with "
                "TrainingArguments of its own.)"
            )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in `value` (in tuples, lists and dicts too) as `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(each, dtype) for each in value)
    if isinstance(value, dict):
        return {key: _cast(each, dtype) for key, each in value.items()}
    return value
