"""The engine: one model, its optimizer, its precision, and the order of a training step.

The composition root. Everything else is given what it needs here. The rule it keeps: every decision that
all ranks must take alike (step or skip, clip, raise) is taken from numbers that all ranks have exchanged.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from zeropage.checkpoint import LoadResult, Save, Stateful, begin_save, end_save, load_checkpoint, opened
from zeropage.config import Config
from zeropage.construct import ConfigLike, pagers_of, shard, space_of
from zeropage.errors import ConfigError, NonFiniteError, OffloadError, ZeropageError
from zeropage.findings import Findings, Verdict, agree
from zeropage.gradients import Record
from zeropage.loss_scale import DynamicLossScale
from zeropage.offloaded import OffloadedOptimizer
from zeropage.optim import ShardedOptimizer, check_optimizer, record_of, records_of
from zeropage.pager import Pager
from zeropage.precision import keeps_exact, kept_dtype
from zeropage.reports import MemoryReport, StepResult
from zeropage.tensor import PagedTensor
from zeropage.threads import threads_that_fit

__all__ = ["Engine"]

_log = logging.getLogger(__name__)
_OF_A_STEP = {
    "precision",
    "cast_frozen",
    "loss_scale",
    "skip_nonfinite",
    "clip_grad_norm",
    "accumulate",
}  # settings of each engine
_BAD_STEPS = 10  # skipped in a row, with nothing that a lower loss scale could help, before training is given up


class Scheduler(Protocol):
    """A learning-rate scheduler: anything with these methods, like those of `torch.optim.lr_scheduler`."""

    def step(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Engine:
    """Trains `model` on sharded parameters.

    Args:
        model: any module; it is sharded in place if it is not yet (see `shard`).
        optimizer: a `torch.optim` optimizer over (some of) the model's parameters, made before or after
            sharding; None for inference.
        config: a `Config`, a mapping, a path to JSON. None: the settings that the model was sharded with.
        lr_scheduler: stepped after every applied step.
        group: as for `shard`.

    Raises:
        ConfigError: a wrong setting, or one that cannot take effect because the model is sharded already.
        OutOfMemoryError, AdoptionError: see `shard`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        config: ConfigLike = None,
        lr_scheduler: Scheduler | None = None,
        group: object = None,
    ) -> None:
        settings = Config.of(config)
        if optimizer is not None:
            check_optimizer(optimizer, model)
        shard(model, settings if not pagers_of(model) else None, group)
        self.module = model
        self._pagers = pagers_of(model)
        if not self._pagers:
            raise ConfigError("the model has no parameters to shard")
        self.config = self._pagers[0].config if config is None else settings
        _check_effect(self.config, self._pagers)
        self._spaces = [space_of(pager) for pager in self._pagers]
        self._closed = False
        self._saving: Save | None = None
        scale = self.config.loss_scale
        self._scaler = DynamicLossScale(
            scale=scale.initial,
            window=scale.window,
            hysteresis=scale.hysteresis,
            min=scale.min,
            dynamic=scale.dynamic,
        )
        self._sharded = self._sharded_optimizer_of(optimizer)
        if self._may_skip and self._sharded is not None:
            for space in self._spaces:
                space.gradients.skipping.add(self._sharded)
        self._claim()
        self.lr_scheduler = lr_scheduler
        self.global_step = 0
        self.skipped_steps = 0
        self.grad_norm: float | None = None
        self._clip_next: float | None = None
        self._micro_steps = 0
        self._bad_loss = False
        self._own_backwards = 0
        self._bad_in_a_row = 0
        self._convert_parameters()

    # -- forward and backward

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """The model's forward."""
        self._require_open()
        return self.module(*inputs, **options)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self(*inputs, **options)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backward of `loss / accumulate`, scaled in fp16. Gradients are averaged over ranks as they appear.

        `loss.backward()` is as good, fp16 and accumulation aside. Several engines may take gradients of one backward
        if they scale alike.

        Raises:
            GradientError: another engine steps a parameter that gets a gradient, and has another loss scale. (Not
                seen where that one is not in fp16, and its model was sharded by itself.)
        """
        self._require_open()
        if self._may_skip and not bool(torch.isfinite(loss.detach()).all()):
            self._bad_loss = True
        self._own_backwards += 1
        factor = self.loss_scale / self.config.accumulate
        for space in self._spaces:
            space.gradients.expect(1.0, loss_scale=self.loss_scale)
        scaled = loss if factor == 1.0 else loss * factor
        for pager in self._pagers:
            pager.transport.begin_backward(reentrant=False)  # also where no parameter gets a gradient
        try:
            scaled.backward(retain_graph=retain_graph)
        finally:
            for space in self._spaces:
                space.gradients.end_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accepted for programs that accumulate by hand; gradients are reduced as they appear all the same.

        Deferring the reduction would need a full gradient on every rank, which sharding exists to avoid. The
        numbers are the same.
        """
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients (all ranks together). `step` has done so already, but for what another engine steps."""
        self._require_open()
        self._bad_loss = False
        for record in records_of(self.module):
            record.drop_gradient()

    # -- step

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Let the next `step` scale the gradient down to this 2-norm, instead of `clip_grad_norm` of the config.

        As `torch.nn.utils.clip_grad_norm_`, over all parameters that the engine steps and without a pass over
        full gradients (all ranks together).

        Returns:
            The norm of the averaged, unscaled gradient before clipping.
        """
        self._require_open()
        optimizer = self._require_optimizer()
        with threads_that_fit(self._pagers[0].transport):
            self.grad_norm = self._norm(self._judge(optimizer))
        self._clip_next = max_norm
        return self.grad_norm

    def step(self) -> StepResult:
        """To be called after every micro-batch; steps at every `accumulate`-th one (all ranks together).

        All ranks step, or all skip. In fp16 a non-finite gradient skips the step and lowers the loss scale; with
        `skip_nonfinite` it skips the step in any precision. The scheduler does not advance then.

        Raises:
            ConfigError: the engine has no optimizer.
            CheckpointError: a save with `wait=False` has failed; the step was made all the same.
            OffloadError: the disk for offloaded states is full or fails, on any rank. The message says whether anything
                was changed; if not, room can be made and `step` called again.
            NonFiniteError: where steps are skipped: more than ten in a row, for a loss that is not finite itself
                or without a loss scale; or gradients still overflow at the smallest loss scale. Names the first bad
                parameter and rank.
            DivergenceError, PeerLostError: see `Transport.meet`.
        """
        self._require_open()
        optimizer = self._sharded
        if optimizer is None:
            raise ConfigError("this engine was made without an optimizer; give one to zp.Engine(model, optimizer)")
        self._micro_steps += 1
        if self._micro_steps < self.config.accumulate:
            return StepResult(False, None, self.loss_scale, reason="accumulating")
        self._micro_steps = 0
        check_optimizer(optimizer.optimizer, self.module)
        with threads_that_fit(self._pagers[0].transport):
            verdict = self._judge(optimizer)
            self.grad_norm = self._norm(verdict)
            result = self._skip(verdict) if verdict.reason else self._apply(optimizer)
        if verdict.save_failed:
            self._finish_save()  # raises on all ranks
        return result

    def _judge(self, optimizer: ShardedOptimizer) -> Verdict:
        """What all ranks conclude from the gradients, once every rank has ended its backward."""
        for pager in self._pagers:
            pager.end_backwards(f"step {self._attempt}")
        records = optimizer.records()
        own = set(records)
        bad = (record.name for space in self._spaces for record in space.gradients.nonfinite if record in own)
        mine = Findings.of(
            records,
            bad_parameter=next(bad, ""),
            bad_loss=self._bad_loss,
            backwards=self._own_backwards + sum(space.gradients.backwards for space in self._spaces),
            save_failed=self._saving is not None and bool(self._saving.problem),
        )
        return agree(mine, self._pagers[0].transport, self._attempt, may_skip=self._may_skip)

    def _norm(self, verdict: Verdict) -> float:
        return float(verdict.square_sum**0.5) / self.loss_scale

    @property
    def _may_skip(self) -> bool:
        return self.config.precision == "fp16" or self.config.skip_nonfinite

    @property
    def _attempt(self) -> int:
        """The number of the step that is due, skipped ones counted."""
        return self.global_step + self.skipped_steps + 1

    def _skip(self, verdict: Verdict) -> StepResult:
        """No step: drop the gradients; in fp16 lower the loss scale, unless the loss itself is bad."""
        scale, attempt, scaled = self.loss_scale, self._attempt, self.config.precision == "fp16"
        self.skipped_steps += 1
        self._bad_in_a_row += 1
        self._drop_gradients()
        if scaled and not verdict.bad_loss:
            self._scaler.update(True)
        told = f"; loss scale {scale:g} -> {self.loss_scale:g}" if scaled else ""
        _log.warning("step %d skipped: %s%s", attempt, verdict.reason, told)
        if scaled and self._scaler.exhausted and not verdict.bad_loss:
            raise NonFiniteError(
                f"{verdict.reason} at the smallest loss scale ({self.loss_scale:g}), at step {attempt}: scaling cannot "
                "help. Look at the data and the learning rate, or train in bf16."
            )
        if (verdict.bad_loss or not scaled) and self._bad_in_a_row > _BAD_STEPS:
            raise NonFiniteError(f"{verdict.reason}, for {self._bad_in_a_row} steps in a row; training cannot go on")
        return StepResult(False, self.grad_norm, scale, verdict.reason)

    def _apply(self, optimizer: ShardedOptimizer) -> StepResult:
        scale = self.loss_scale
        self._prepare(optimizer)
        for pager in self._pagers:
            pager.open_batch(f"apply step {self._attempt}")
        try:
            optimizer.step(self._clip_factor() / scale)
        finally:
            self._drop_gradients()
            for pager in self._pagers:
                pager.close_batch()
                pager.step.leave()  # torch's hook that does it is left out when the step raises
        self.global_step += 1
        self._bad_in_a_row = 0
        if self.config.precision == "fp16":
            self._scaler.update(False)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        return StepResult(True, self.grad_norm, scale)

    def _prepare(self, optimizer: ShardedOptimizer) -> None:
        """Whatever fails here has changed nothing: the step can be tried again."""
        try:
            optimizer.prepare()
        except OffloadError:
            self._micro_steps = self.config.accumulate - 1
            raise

    def _clip_factor(self) -> float:
        """As `torch.nn.utils.clip_grad_norm_`: never above one."""
        limit = self.config.clip_grad_norm if self._clip_next is None else self._clip_next
        if limit is None or self.grad_norm is None:
            return 1.0
        factor = limit / (self.grad_norm + 1e-6)
        return factor if math.isnan(factor) else min(1.0, factor)

    def _drop_gradients(self) -> None:
        self._bad_loss = False
        self._own_backwards = 0
        self._clip_next = None
        for space in self._spaces:
            space.gradients.forget_backwards()
        self._claim()
        for record in self._own_records():
            record.drop_gradient()

    def _claim(self) -> None:
        """Say that this engine steps its optimizer's parameters: another engine of the model leaves their gradients."""
        if self._sharded is not None:
            reference = weakref.ref(self._sharded)
            for record in self._sharded.records():
                record.stepped_by = reference

    # -- settings that change

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss: 1 unless precision is fp16."""
        return self._scaler.scale if self.config.precision == "fp16" else 1.0

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group (all: `engine.optimizer.param_groups`)."""
        return float(self._require_optimizer().optimizer.param_groups[0]["lr"])

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer given, the same object."""
        return None if self._sharded is None else self._sharded.optimizer

    # -- checkpoints

    def save(
        self,
        folder: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        wait: bool = True,
        *,
        keep: int | None = None,
        trainable_only: bool = False,
        leave_out: Collection[str] = (),
        latest: bool = True,
        data_loader: Stateful | None = None,
    ) -> str:
        """Save model, optimizer, scheduler, counters and `client_state` under `folder/tag` (all ranks together).

        The format is that of `torch.distributed.checkpoint`, by logical names: any number of ranks loads it, and so
        does plain torch. It is published by one rename when it is on the disk; a program that is killed before
        leaves the earlier checkpoints as they were.

        Args:
            tag: names the checkpoint; default `step<N>`. One of the same name is replaced.
            client_state: numbers, strings, tensors, lists and dicts of your own; `load` gives them back.
            wait: False returns as soon as the save has begun. It goes on beside training; the next change of
                the parameters waits until their values have been written out, not until they are on the disk. A
                failure is raised by the next `step`, `save`, `load` or `close`, on all ranks.
            keep: remove all but the newest `keep` checkpoints once this one is published.
            trainable_only: leave frozen parameters out; `load` then leaves those of the model as they are.
            leave_out: names of parameters and buffers to leave out besides; `load` leaves those as they are too.
            latest: False leaves the file `latest` as it is: `load` takes this checkpoint by its tag only.
            data_loader: anything with `state_dict()` and `load_state_dict()`; its position is kept for each rank.

        Returns:
            The tag.

        Raises:
            CheckpointError: the folder cannot be written (no room, no permission, another job saves there), or a
                value could not be loaded again. Raised on all ranks; training can go on.
        """
        self._require_open()
        self._finish_save()
        if self._sharded is not None:
            self._sharded.require_whole()
        self._saving = begin_save(
            self, Path(folder), tag, client_state,
            keep=keep, trainable_only=trainable_only, leave_out=leave_out, latest=latest, data_loader=data_loader,
        )  # fmt: skip
        for pager in self._pagers:
            pager.before_writes = self._saving.await_written
        tag = self._saving.tag
        if wait:
            self._finish_save()
        return tag

    def load(
        self,
        folder: str | Path,
        tag: str | None = None,
        weights_only: bool = False,
        *,
        strict: bool = True,
        data_loader: Stateful | None = None,
    ) -> LoadResult:
        """Load what `save` or DeepSpeed wrote, on any number of ranks (all ranks together). Default: the latest tag.

        A checkpoint of DeepSpeed is converted first, each time; see `zeropage import-deepspeed`.

        `strict=False` leaves parameters and buffers alone that only the checkpoint has, or only the model.

        Random generators and `data_loader` go on where they stood if as many ranks load as saved; otherwise they
        are left alone (`LoadResult.restored_ranks` tells), since their states belong to ranks.

        Raises:
            CheckpointError: nothing there, damaged (the file is named), or names, shapes or groups do not fit;
                nothing is changed then.
        """
        self._require_open()
        self._finish_save()
        with opened(self, Path(folder), tag) as found:
            return load_checkpoint(self, found, tag, weights_only=weights_only, strict=strict, data_loader=data_loader)

    def _finish_save(self) -> None:
        """Wait for a save under way (all ranks together)."""
        saving, self._saving = self._saving, None
        if saving is not None:
            end_save(self, saving)

    def progress(self) -> dict[str, Any]:
        """The engine's own counters, for a checkpoint."""
        return {
            "global_step": self.global_step,
            "skipped_steps": self.skipped_steps,
            "micro_steps": self._micro_steps,
            "loss_scale": self._scaler.state_dict(),
        }

    def restore_progress(self, state: Mapping[str, Any]) -> None:
        self.global_step = int(state["global_step"])
        self.skipped_steps = int(state["skipped_steps"])
        self._micro_steps = 0
        self._scaler.load_state_dict(state["loss_scale"])
        self._drop_gradients()

    @property
    def process_group(self) -> Any:
        """The `torch.distributed` group that the model is sharded over; None for one process by itself."""
        return self._spaces[0].group.handle

    @property
    def sharded_optimizer(self) -> ShardedOptimizer | None:
        return self._sharded

    @property
    def pagers(self) -> list[Pager]:
        return list(self._pagers)

    # -- memory and end

    def memory(self) -> MemoryReport:
        """What this engine holds on this rank, in bytes; "disk" is one of the devices."""
        optimizer = {} if self._sharded is None else self._sharded.nbytes()
        return MemoryReport.of(records_of(self.module), optimizer, self._pagers)

    def close(self) -> None:
        """End the engine (all ranks together): gradients, frames and the optimizer's slices are let go of.

        The model stays sharded and readable until it is dropped; another engine may take it over.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._finish_save()
            for pager in self._pagers:
                pager.close_batch()
                pager.transport.meet(f"close the engine after step {self._attempt - 1}")
        finally:
            self._release()

    def _release(self) -> None:
        for record in self._own_records():
            record.release()
        for pager in self._pagers:
            pager.evict_all()
        self._sharded = None
        self.lr_scheduler = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:  # the other ranks may be elsewhere: do not wait for them
            self._closed = True
            if self._saving is not None:
                self._saving.abort()
            self._release()

    # -- inside

    def _own_records(self) -> list[Record]:
        """Those of the model that no other engine steps."""
        found = []
        for record in records_of(self.module):
            stepped_by = None if record.stepped_by is None else record.stepped_by()
            if stepped_by is None or stepped_by is self._sharded:
                found.append(record)
        return found

    def _require_open(self) -> None:
        if self._closed:
            raise ZeropageError("this engine is closed; make a new one with zp.Engine(model, ...)")

    def _require_optimizer(self) -> ShardedOptimizer:
        if self._sharded is None:
            raise ConfigError("this engine was made without an optimizer")
        return self._sharded

    def _sharded_optimizer_of(self, optimizer: torch.optim.Optimizer | None) -> ShardedOptimizer | None:
        if optimizer is None:
            return None
        scaler = self._scaler if self.config.precision == "fp16" else None
        for pager in self._pagers:
            if pager.config.offload.optimizer == "disk":
                return OffloadedOptimizer(optimizer, pager, scaler)
        return ShardedOptimizer(optimizer, scaler)

    def _convert_parameters(self) -> None:
        """Cast trainable parameters to the engine's precision; what they were exactly stays as the master."""
        stepped = set() if self._sharded is None else set(self._sharded.records())
        for parameter in self.module.parameters():
            if not isinstance(parameter, PagedTensor) or parameter.dtype == kept_dtype(self.config, parameter):
                continue
            record = record_of(parameter)
            exact = record.page.own().float().clone() if keeps_exact(self.config, parameter) else None
            parameter.data = parameter.data.to(kept_dtype(self.config, parameter))
            if exact is not None and self._sharded is not None and record in stepped:
                self._sharded.keep_master(record, exact)


def _check_effect(config: Config, pagers: list[Pager]) -> None:
    """Some settings were fixed when the model was sharded: others than those cannot be asked for now."""
    for pager in pagers:
        for key in sorted(config.model_fields_set - _OF_A_STEP):
            wanted, fixed = getattr(config, key), getattr(pager.config, key)
            if wanted == fixed or (key == "transport" and wanted in ("auto", pager.transport.name)):
                continue
            fixed = pager.transport.name if key == "transport" else fixed
            raise ConfigError(
                f"{key}={wanted!r} cannot take effect: the model was sharded with {fixed!r}. Give the config to "
                "zp.init() or zp.shard()."
            )
