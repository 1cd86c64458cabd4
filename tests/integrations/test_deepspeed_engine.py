"""`DeepSpeedEngine` trains as plain torch does, with the boundary rules of each program that calls it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import logging.handlers
import queue
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import MLP, build_mlp, mlp_batch
from tests.integrations.deepspeed_cases import Beside, config, engine_of, loss_of, rank
from tests.scenarios.beside import plain_copy, same, same_parameters
from zeropage.deepspeed.engine import DeepSpeedEngine
from zeropage.deepspeed.initialization import initialize
from zeropage.deepspeed.optimizer import DeepSpeedOptimizer
from zeropage.deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from zeropage.errors import ConfigError, GradientError

ACCUMULATE = 3
ONE_STEP = [(0, micro) for micro in range(ACCUMULATE)]


# -- who decides when a step is due


def _counted(engine: DeepSpeedEngine, step: int) -> None:
    """As plain programs and Lightning: backward and step for every micro-batch."""
    for micro in range(ACCUMULATE):
        assert engine.is_gradient_accumulation_boundary() == (micro == ACCUMULATE - 1)
        engine.backward(loss_of(engine, step, micro, rank()))
        engine.step()
        assert engine.was_step_applied() == (micro == ACCUMULATE - 1)


def _told(engine: DeepSpeedEngine, step: int) -> None:
    """As Accelerate and the Trainer: they divide the loss, say where the boundary is, and step only there."""
    for micro in range(ACCUMULATE):
        last = micro == ACCUMULATE - 1
        engine.set_gradient_accumulation_boundary(is_boundary=last)
        engine.backward(loss_of(engine, step, micro, rank()) / ACCUMULATE, scale_wrt_gas=False)
        if last:
            engine.step()


def _by_torch(engine: DeepSpeedEngine, step: int) -> None:
    """`loss.backward()` counts as one of the micro-batches too."""
    for micro in range(ACCUMULATE):
        loss_of(engine, step, micro, rank()).backward()
        engine.step()


def _in_one_block(engine: DeepSpeedEngine, step: int) -> None:
    engine.set_gradient_accumulation_boundary(True)
    with engine.coalesce_grad_reduction():
        for micro in range(ACCUMULATE):
            engine.backward(loss_of(engine, step, micro, rank()))
        with contextlib.suppress(RuntimeError):
            engine.step()
            raise AssertionError("a step inside of the block")
    engine.step()


def _without_sync(engine: DeepSpeedEngine, step: int) -> None:
    for micro in range(ACCUMULATE):
        with engine.no_sync() if micro < ACCUMULATE - 1 else contextlib.nullcontext():
            engine.backward(loss_of(engine, step, micro, rank()))
        engine.step()


STYLES = {"counted": _counted, "told": _told, "torch": _by_torch, "block": _in_one_block, "no_sync": _without_sync}


def _boundaries(style: str) -> None:
    beside = Beside()
    engine = engine_of(beside.model, beside.make, gradient_accumulation_steps=ACCUMULATE)
    for step in range(3):
        norm = beside.step([(step, micro) for micro in range(ACCUMULATE)])
        STYLES[style](engine, step)
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
        # thirds are no powers of two: dividing the loss and the gradient round differently
        same_parameters(beside.plain, beside.model, exact=False)
    assert engine.global_steps == 3
    assert engine.skipped_steps == 0
    engine.destroy()


@pytest.mark.parametrize("style", STYLES)
def test_boundaries(style: str) -> None:
    run(2, _boundaries, style)


def _unmanaged() -> None:
    """managed_gradient_accumulation=false: every step() applies what has come."""
    beside = Beside()
    engine = engine_of(beside.model, beside.make, managed_gradient_accumulation=False)
    beside.step([(0, 0)])
    engine.backward(loss_of(engine, 0, 0, rank()))
    engine.step()
    same_parameters(beside.plain, beside.model)
    with contextlib.suppress(ConfigError):
        engine.set_gradient_accumulation_boundary(True)
        raise AssertionError("it has no effect")
    engine.destroy()


def test_unmanaged_accumulation() -> None:
    run(2, _unmanaged)


def _batch_sizes() -> None:
    beside = Beside()
    engine = engine_of(beside.model, beside.make, gradient_accumulation_steps=2)
    assert engine.get_batch_info() == (12, 3, 2)
    with contextlib.suppress(ValueError):
        engine.set_train_batch_size(13)
        raise AssertionError("no multiple")
    engine.set_train_batch_size(6)
    assert engine.gradient_accumulation_steps() == 1
    beside.step([(0, 0)])
    loss_of(engine, 0, 0, rank()).backward()
    engine.step()
    same_parameters(beside.plain, beside.model)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (10, 5, 1)
    assert engine.global_samples == 6
    engine.destroy()


def test_batch_sizes_that_change() -> None:
    run(2, _batch_sizes)


# -- what initialize takes


def _forms(form: str, folder: str) -> None:
    """Optimizer and scheduler as objects, as functions, or named in the configuration: the same training."""
    beside = Beside()
    reference = torch.optim.lr_scheduler.StepLR(beside.optimizer, 1, gamma=0.5)
    settings = config()
    given: dict[str, Any] = {}
    if form == "objects":
        given["optimizer"] = beside.make(beside.model.parameters())
        given["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(given["optimizer"], 1, gamma=0.5)
        given["config"] = settings
    elif form == "functions":
        given["optimizer"] = beside.make
        given["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        given["model_parameters"] = (p for p in beside.model.parameters())
        given["config_params"] = settings
    else:
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}
        settings["scheduler"] = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
        path = Path(folder) / f"ds{rank()}.json"
        path.write_text(json.dumps(settings))
        given["args"] = argparse.Namespace(deepspeed_config=str(path), local_rank=0)
        given["model_parameters"] = []
    engine, optimizer, loader, scheduler = initialize(model=beside.model, **given)
    assert engine.optimizer is optimizer
    assert isinstance(optimizer, DeepSpeedOptimizer)
    assert loader is None
    assert engine.lr_scheduler is scheduler
    for step in range(3):
        beside.step([(step, 0)])
        reference.step()
        engine.backward(loss_of(engine, step, 0, rank()))
        engine.step()
        assert engine.get_lr() == [group["lr"] for group in beside.optimizer.param_groups]
    same_parameters(beside.plain, beside.model)
    engine.destroy()


@pytest.mark.parametrize("form", ["objects", "functions", "configuration"])
def test_what_initialize_takes(form: str, tmp_path: Path) -> None:
    run(2, _forms, form, str(tmp_path))


def _refused() -> None:
    with pytest.raises(ConfigError, match="requires a model"):
        initialize(config=config())
    with pytest.raises(ConfigError, match="deepspeed_config"):
        initialize(model=build_mlp())
    both = argparse.Namespace(deepspeed_config="ds.json")
    with pytest.raises(ConfigError, match="keep one"):
        initialize(args=both, model=build_mlp(), config=config())
    with pytest.raises(ConfigError, match="no optimizer"):
        initialize(model=build_mlp(), config=config(), lr_scheduler=lambda optimizer: None)


def test_what_initialize_refuses() -> None:
    run(1, _refused)


def _training_data() -> list[list[int]]:
    data = [torch.tensor([number]) for number in range(12)]
    engine, _, loader, _ = initialize(model=build_mlp(), config=config(), training_data=data)
    seen = [batch.flatten().tolist() for batch in loader]
    assert [len(batch) for batch in seen] == [3, 3]
    kept = engine.deepspeed_io(data, route="eval", batch_size=2)
    assert next(iter(kept)).flatten().tolist() == [rank(), 2 + rank()]
    engine.destroy()
    return seen


def test_every_rank_gets_its_share_of_the_data() -> None:
    shares = run(2, _training_data)
    numbers = [number for share in shares for batch in share for number in batch]
    assert sorted(numbers) == list(range(12))
    assert numbers != sorted(numbers)  # shuffled


# -- the disk


def _nvme(folder: str) -> None:
    block = {"device": "nvme", "nvme_path": folder}
    beside = Beside()
    engine = engine_of(
        beside.model, beside.make, zero_optimization={"stage": 3, "offload_param": block, "offload_optimizer": block}
    )
    for step in range(2):
        beside.step([(step, 0)])
        engine.backward(loss_of(engine, step, 0, rank()))
        engine.step()
    same_parameters(beside.plain, beside.model)
    assert list(Path(folder).glob("zeropage-*")), "this rank's file is there"
    engine.destroy()


def test_nvme(tmp_path: Path) -> None:
    run(2, _nvme, str(tmp_path))


# -- clipping, precision, overflow


def _clipping(given: dict[str, Any], limit: float | None) -> None:
    settings = config(**given)
    if not given:
        del settings["gradient_clipping"]
    beside = Beside(lambda p: torch.optim.SGD(p, lr=1.0), clip=limit)
    engine, *_ = initialize(model=beside.model, optimizer=beside.make, config=settings)
    for step in range(2):
        norm = beside.step([(step, 0)])
        engine.backward(loss_of(engine, step, 0, rank()))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    same_parameters(beside.plain, beside.model, exact=False)
    engine.destroy()


@pytest.mark.parametrize(("given", "limit"), [({}, 1.0), ({"gradient_clipping": 0.01}, 0.01)])
def test_clipping_with_its_default_of_one(given: dict[str, Any], limit: float) -> None:
    run(2, _clipping, given, limit)


def _fp16() -> None:
    """The scale is applied once, an overflow skips a step, and nobody forgets to scale without being told."""
    model = plain_copy(build_mlp)
    block = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine = engine_of(model, lambda p: torch.optim.SGD(p, lr=0.1), fp16=block, gradient_accumulation_steps=2)
    optimizer = engine.optimizer
    assert optimizer.loss_scale == optimizer.cur_scale == optimizer.loss_scaler.cur_scale == 256.0
    assert optimizer.dynamic_loss_scale and engine.dynamic_loss_scale()
    assert engine.fp16_enabled() and model.first.weight.dtype == torch.float16

    def loss(micro: int) -> torch.Tensor:
        return engine(mlp_batch(0, micro, rank()).half()).float().square().mean()

    start = [safe_get_full_fp32_param(p) for p in model.parameters()]
    for micro in range(2):
        engine.backward(loss(micro))
        engine.step()
    by_engine = [safe_get_full_fp32_param(p) for p in model.parameters()]
    assert not optimizer.overflow and engine.was_step_applied()
    for parameter, value in zip(model.parameters(), start, strict=True):
        safe_set_full_fp32_param(parameter, value)
    for micro in range(2):
        engine.scale(loss(micro)).backward()
        engine.step()
    for parameter, value in zip(model.parameters(), by_engine, strict=True):
        assert torch.equal(safe_get_full_fp32_param(parameter), value)
    with contextlib.suppress(GradientError):
        loss(0).backward()
        raise AssertionError("the loss was not scaled")
    engine.zero_grad()
    for micro in range(2):
        engine.backward(loss(micro) * 1e6)
        engine.step()
    assert optimizer.overflow and engine.overflow and not engine.was_step_applied()
    assert engine.skipped_steps == 1
    assert optimizer.loss_scale == 128.0
    for parameter, value in zip(model.parameters(), by_engine, strict=True):
        assert torch.equal(safe_get_full_fp32_param(parameter), value)
    engine.destroy()


def test_fp16() -> None:
    run(2, _fp16)


class _Teacher(nn.Module):
    """A frozen fp16 part and a frozen fp32 one beside what trains, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(7, 5).half().requires_grad_(False)
        self.base = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 5)
        self.register_buffer("shift", torch.full((5,), 1 / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = self.teacher(x.half()).float() + self.shift
        return self.head(self.base(x)).float() - wanted


def _frozen_parts() -> None:
    """bf16 casts what trains and frozen fp32 weights, so that they fit together; nothing else changes."""
    plain, model = plain_copy(_Teacher), plain_copy(_Teacher)
    engine = engine_of(model, lambda p: torch.optim.SGD(p, lr=0.1), bf16={"enabled": True})
    assert {name: p.dtype for name, p in model.named_parameters() if name.endswith("weight")} == {
        "teacher.weight": torch.float16,
        "base.weight": torch.bfloat16,
        "head.weight": torch.bfloat16,
    }
    same(plain.teacher.weight, model.teacher.weight, exact=True)
    assert torch.equal(plain.shift, model.shift) and model.shift.dtype == torch.float32
    plain.base.bfloat16()
    plain.head.bfloat16()
    batch = mlp_batch(0, 0, rank()).bfloat16()
    with torch.no_grad():
        same(plain(batch), engine(batch))
    engine.backward(engine(batch).square().mean())
    engine.step()
    assert engine.was_step_applied()
    same(plain.base.weight, model.base.weight, exact=True)
    engine.destroy()


def test_frozen_parts_of_other_dtypes() -> None:
    run(2, _frozen_parts)


def _nonfinite() -> None:
    """As in DeepSpeed, stage 3 skips a step whose gradient is not finite, in fp32 too."""
    beside = Beside()
    engine = engine_of(beside.model, beside.make)
    for step in range(3):
        bad = step == 1
        if not bad:
            beside.step([(step, 0)])
        loss = loss_of(engine, step, 0, rank())
        engine.backward(loss * float("inf") if bad and rank() == 1 else loss)
        engine.step()
        assert engine.optimizer.overflow == bad
    assert (engine.global_steps, engine.skipped_steps) == (3, 1)
    same_parameters(beside.plain, beside.model)
    engine.destroy()


def test_a_step_that_is_not_finite_is_skipped() -> None:
    run(2, _nonfinite)


def _autocast() -> None:
    model = plain_copy(build_mlp)
    engine = engine_of(model, lambda p: torch.optim.SGD(p, lr=0.1), torch_autocast={"enabled": True})
    out = engine(mlp_batch(0, 0, rank()))
    assert out.dtype == torch.bfloat16
    assert model.first.weight.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(model(mlp_batch(0, 0, rank())), out)
    engine.destroy()


def test_torch_autocast() -> None:
    run(2, _autocast)


# -- a module that stands for another


def _pass_through() -> None:
    model = plain_copy(build_mlp)
    model.generate = lambda n: n + 1
    model.config = {"of": "the model"}
    engine = engine_of(model, lambda p: torch.optim.SGD(p, lr=0.1))
    assert isinstance(engine, nn.Module) and engine.module is model
    assert engine.generate(1) == 2
    assert engine.first is model.first
    assert engine.config == config(), "the engine's own, the raw configuration"
    with contextlib.suppress(AttributeError):
        _ = engine.absent
        raise AssertionError("nobody has it")
    assert not {"param_groups", "defaults", "state"} & set(dir(engine))
    assert [name for name, _ in engine.named_parameters()] == [f"module.{n}" for n, _ in model.named_parameters()]
    assert engine.eval() is engine and not model.training
    assert engine.train().training and model.training
    assert engine.zero_optimization_stage() == 3
    assert engine.zero_reduce_bucket_size() == 500_000_000
    assert engine.zero_optimization_partition_weights()
    assert engine.gradient_clipping() == 0.0
    assert engine.optimizer_name() == "SGD" and engine.get_mom() == [0]
    assert engine.get_data_types() == (torch.float32, torch.float32)
    engine.destroy()


def test_a_module_that_stands_for_the_model() -> None:
    run(2, _pass_through)


def _compiled() -> None:
    beside = Beside()
    engine = engine_of(beside.model, beside.make)
    engine.compile(backend="eager")
    assert engine.is_compiled
    beside.step([(0, 0)])
    engine.backward(loss_of(engine, 0, 0, rank()))
    engine.step()
    same_parameters(beside.plain, beside.model)
    engine.destroy()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compile() -> None:
    run(2, _compiled)


# -- the optimizer


def _schedulers_of_torch() -> None:
    """A scheduler over the returned optimizer, stepped by the program."""
    beside = Beside()
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(beside.optimizer, 10)
    engine = engine_of(beside.model, beside.make)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, 10)
    for step in range(3):
        beside.step([(step, 0)])
        reference.step()
        engine.backward(loss_of(engine, step, 0, rank()))
        engine.step()
        scheduler.step()  # (warnings are errors: torch sees that a step came before)
        assert scheduler.get_last_lr() == reference.get_last_lr()
    same_parameters(beside.plain, beside.model)
    assert engine.optimizer.param_groups is engine.basic_optimizer.param_groups
    assert engine.optimizer.optimizer is engine.basic_optimizer
    engine.destroy()


def test_schedulers_of_torch() -> None:
    run(2, _schedulers_of_torch)


def _optimizer_state(precision: str) -> None:
    """A state dict goes into the optimizer of another engine, and training goes on to the bit."""
    block = {} if precision == "fp32" else {precision: {"enabled": True}}
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    def train(engine: DeepSpeedEngine, steps: range) -> None:
        for step in steps:
            engine.backward(engine(mlp_batch(step, 0, rank()).to(dtype)).square().mean())
            engine.step()

    first, second = plain_copy(build_mlp), plain_copy(build_mlp)
    one, other = engine_of(first, adamw, **block), engine_of(second, adamw, **block)
    train(one, range(2))
    state = one.optimizer.state_dict()
    assert state["zero_stage"] == 3
    with torch.no_grad():
        for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
            mine.copy_(theirs)
    other.optimizer.load_state_dict(state)
    train(one, range(2, 4))
    train(other, range(2, 4))
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(zp.full(mine), zp.full(theirs))
    for mine, theirs in zip(
        one.optimizer.fp32_partitioned_groups_flat, other.optimizer.fp32_partitioned_groups_flat, strict=True
    ):
        assert mine.dtype == torch.float32 and torch.equal(mine, theirs)
    one.destroy()
    other.destroy()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_optimizers_state(precision: str) -> None:
    run(2, _optimizer_state, precision)


# -- many engines


def _evaluate_first() -> None:
    """The Trainer's evaluate() before train(): an engine without optimizer, then one with, on the same module."""
    beside = Beside()
    inference = engine_of(beside.model)
    assert inference.optimizer is not None  # TRL counts on it
    with torch.no_grad():
        same(beside.plain(mlp_batch(9, 0, rank())), inference.eval()(mlp_batch(9, 0, rank())))
    engine = engine_of(beside.model, beside.make, gradient_accumulation_steps=2)
    engine.train()
    for step in range(2):
        beside.step([(step, 0), (step, 1)])
        for micro in range(2):
            engine.backward(loss_of(engine, step, micro, rank()))
            engine.step()
    same_parameters(beside.plain, beside.model)
    for module in beside.model.modules():  # what Lightning does before trainer.test()
        module._backward_hooks.clear()
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    again = engine_of(beside.model)
    with torch.no_grad():
        same(beside.plain(mlp_batch(9, 0, rank())), again.eval()(mlp_batch(9, 0, rank())))
    engine.train()
    beside.step([(2, 0), (2, 1)])
    loss_of(engine, 2, 0, rank()).backward()
    engine.step()
    inference.destroy()  # an engine that steps nothing takes no gradient and no setting along
    again.destroy()
    loss_of(engine, 2, 1, rank()).backward()
    engine.step()
    same_parameters(beside.plain, beside.model)
    engine.destroy()


def test_two_engines_on_one_module() -> None:
    run(2, _evaluate_first)


def _two_models() -> None:
    """Two models with an engine each, backward and step in turns (and a teacher for both)."""
    one, other = Beside(), Beside(lambda p: torch.optim.SGD(p, lr=0.1))
    teacher = engine_of(plain_copy(build_mlp, seed=5), fp16={"enabled": False})
    teacher.eval()
    first, second = engine_of(one.model, one.make), engine_of(other.model, other.make)
    for step in range(3):
        with torch.no_grad():
            teacher(mlp_batch(step, 0, rank()))
        one.step([(step, 0)])
        other.step([(step, 1)])
        losses = loss_of(first, step, 0, rank()), loss_of(second, step, 1, rank())
        second.backward(losses[1])
        first.backward(losses[0])
        first.step()
        second.step()
    same_parameters(one.plain, one.model)
    same_parameters(other.plain, other.model)
    for engine in (first, second, teacher):
        engine.destroy()


def test_engines_of_several_models() -> None:
    run(2, _two_models)


def _freed() -> None:
    """After destroy() engine, model and optimizer go with their last reference, without a collection."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # a process's first optimizer stays until a collection
    gc.collect()
    gc.disable()
    try:
        model = plain_copy(lambda: MLP(wide=64))
        engine = engine_of(model, lambda p: torch.optim.AdamW(p, lr=1e-2))
        engine.backward(loss_of(engine, 0, 0, rank()))
        engine.step()
        kept = [weakref.ref(thing) for thing in (engine, model, engine.optimizer, engine.basic_optimizer)]
        engine.destroy()
        assert engine.zeropage_engine.memory().optimizer == 0
        assert kept[-1]() is None, "the engine keeps nothing of the optimizer's state"
        assert engine.optimizer.param_groups == []
        del engine, model
        assert [reference() for reference in kept] == [None] * 4
    finally:
        gc.enable()


def test_nothing_is_left_after_destroy() -> None:
    run(2, _freed)


def _destroyed() -> None:
    """Forward runs, as in DeepSpeed; training says what happened."""
    beside = Beside()
    engine = engine_of(beside.model, beside.make)
    engine.destroy()
    engine.destroy()
    loss = loss_of(engine, 0, 0, rank())
    same(loss_of(beside.plain, 0, 0, rank()), loss)
    for call in (engine.zero_grad, engine.step, lambda: engine.backward(loss)):
        try:
            call()
        except zp.errors.ZeropageError as error:
            assert "destroyed" in str(error)
        else:
            raise AssertionError("a destroyed engine trained")


def test_a_destroyed_engine() -> None:
    run(2, _destroyed)


def _monitored(folder: Path) -> list[str]:
    model = plain_copy(build_mlp)
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    engine = engine_of(
        model, lambda p: torch.optim.SGD(p, lr=0.5), csv_monitor=monitor, steps_per_print=2, wall_clock_breakdown=True
    )
    told: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger, handler = logging.getLogger("zeropage.deepspeed"), logging.handlers.QueueHandler(told)
    logger.addHandler(handler)
    logger.setLevel("INFO")
    for step in range(4):
        engine.backward(loss_of(engine, step, 0, 0))
        engine.step()
    engine.destroy()
    logger.removeHandler(handler)
    return [told.get().message for _ in range(told.qsize())]


def test_monitors_and_progress(tmp_path: Path) -> None:
    """A line every two steps, and a CSV file for each number."""
    [messages] = run(1, _monitored, tmp_path)
    lines = [message for message in messages if "samples/s" in message]
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4"]
    assert all(f"{phase}=" in lines[0] for phase in ("forward", "backward", "step"))
    rows = (tmp_path / "job" / "Train_Samples_lr.csv").read_text().splitlines()
    assert rows[1:] == ["3,0.5", "6,0.5", "9,0.5", "12,0.5"]
    assert (tmp_path / "job" / "Train_Samples_train_loss.csv").exists()
