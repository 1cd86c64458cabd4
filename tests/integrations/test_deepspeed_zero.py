"""`zero.Init`, `zero.GatheredParameters` and the `ds_*` attributes, as programs written for DeepSpeed use them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import MLP, build_mlp, mlp_batch
from tests.integrations.deepspeed_cases import Beside, config, engine_of, loss_of, rank
from tests.scenarios.beside import plain_copy, same, same_parameters
from zeropage.deepspeed import zero
from zeropage.deepspeed.generation import unwrap_model_for_generation
from zeropage.deepspeed.parameter_offload import DeepSpeedZeRoOffload
from zeropage.errors import ConfigError
from zeropage.tensor import ZeroParamStatus

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
}


# -- Init


class _WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("angles", torch.arange(0, 8, 2).float() / 3)
        self.narrow = nn.Parameter(torch.ones(4, dtype=torch.float16))


def _made_inside(given: Any, dtype: torch.dtype | None) -> None:
    torch.manual_seed(3)
    plain = _WithBuffers()
    torch.manual_seed(3)
    with zero.Init(config_dict_or_path=given, dtype=dtype):
        model = _WithBuffers()
    assert all(zp.is_paged(p) for p in model.parameters())
    for name, parameter in plain.named_parameters():
        wanted = parameter.dtype if dtype is None else dtype
        same(parameter.detach().to(wanted), model.get_parameter(name), name)
    for name, buffer in plain.named_buffers():  # neither dtype nor values change
        assert buffer.dtype == model.get_buffer(name).dtype and torch.equal(buffer, model.get_buffer(name))


@pytest.mark.parametrize("given", [None, config(), AUTO])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_parameters_made_inside(given: Any, dtype: torch.dtype | None) -> None:
    run(2, _made_inside, given, dtype)


def _other_ways() -> None:
    """As a converter, not at all, nested; and a training that begins inside."""
    plain = plain_copy(build_mlp)
    model = plain_copy(build_mlp)
    zero.Init(module=model, config_dict_or_path=config(), mem_efficient_linear=False, remote_device="cpu")
    same_parameters(plain, model)
    narrow = plain_copy(build_mlp)
    zero.Init(module=narrow, dtype=torch.bfloat16)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    with zero.Init(enabled=False, zero_quantized_weights=True):
        assert not zp.is_paged(nn.Linear(2, 2).weight)
    with zero.Init():
        outer = nn.Linear(2, 2)
        with zero.Init(config_dict_or_path=config()):
            inner = nn.Linear(2, 2)
        after = nn.Linear(2, 2)
    assert all(zp.is_paged(module.weight) for module in (outer, inner, after))
    assert not zp.is_paged(nn.Linear(2, 2).weight)
    for wrong in ({"zero_quantized_weights": True}, {"remote_device": "nvme"}):
        with contextlib.suppress(ConfigError):
            zero.Init(**wrong)
            raise AssertionError(wrong)


def test_other_ways_of_init() -> None:
    run(2, _other_ways)


def _train_what_was_made_inside() -> None:
    beside = Beside()
    with zero.Init(config_dict_or_path=AUTO | {"bf16": {"enabled": False}}):
        model = plain_copy(build_mlp)
    engine = engine_of(model, beside.make)
    for step in range(2):
        beside.step([(step, 0)])
        engine.backward(loss_of(engine, step, 0, rank()))
        engine.step()
    same_parameters(beside.plain, model)
    engine.destroy()


def test_training_what_was_made_inside() -> None:
    run(2, _train_what_was_made_inside)


# -- GatheredParameters


def _gathered() -> None:
    model = zp.shard(plain_copy(build_mlp))
    before = {name: zp.full(p) for name, p in model.named_parameters()}
    plain = nn.Parameter(torch.zeros(2))
    ways: list[Any] = [
        list(model.parameters()),
        (p for p in model.parameters()),
        [*model.parameters(), *model.parameters()],
        [plain, *model.parameters()],
        dict(model.named_parameters()).values(),
    ]
    for params in ways:
        with torch.no_grad(), zero.GatheredParameters(params, modifier_rank=0):
            if rank() == 0:  # the others do not even come near
                for parameter in model.parameters():
                    parameter.data.add_(1.0)
    for name, parameter in model.named_parameters():
        for _ in ways:
            before[name] += 1.0
        same(before[name], parameter, name, exact=True)
    for nothing in ([], (), [plain], iter(())):
        with zero.GatheredParameters(nothing, modifier_rank=0):
            plain.data.add_(1.0)
    assert plain.tolist() == [4.0, 4.0]
    with zero.GatheredParameters(model.first.weight, modifier_rank=0, fwd_module=model, enabled=False):
        assert zp.is_paged(model.first.weight)
    weight = model.first.weight
    with torch.no_grad(), zero.GatheredParameters([weight, model.first.bias], modifier_rank=0):
        with zero.GatheredParameters([weight, model.second.weight], modifier_rank=0):
            if rank() == 0:
                weight.mul_(2.0)
                model.second.weight.zero_()
        if rank() == 0:
            weight.add_(1.0)
    same(before["first.weight"] * 2 + 1, weight, exact=True)
    same(torch.zeros(17, 17), model.second.weight, exact=True)
    with torch.no_grad(), zero.GatheredParameters([weight]), zero.GatheredParameters([weight], modifier_rank=1):
        if rank() == 1:
            weight.fill_(3.0)
    same(torch.full((17, 7), 3.0), weight, exact=True)
    with contextlib.suppress(ConfigError):
        with zero.GatheredParameters([weight], modifier_rank=0), zero.GatheredParameters([weight], modifier_rank=1):
            raise AssertionError("the outer block would drop what rank 1 writes")
    same(torch.full((17, 7), 3.0), weight, exact=True)


def test_gathered_parameters() -> None:
    run(2, _gathered)


# -- attributes


def _attributes() -> None:
    model = zp.shard(plain_copy(build_mlp), {"transport": "collective"})
    weight = model.first.weight
    assert weight.ds_shape == weight.shape == (17, 7)
    assert weight.ds_numel == weight.numel() == 119
    assert len({p.ds_id for p in model.parameters()}) == 6
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    weight.all_gather()
    assert weight.ds_status is ZeroParamStatus.AVAILABLE
    weight.partition()
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert weight.all_gather(async_op=True).wait() is None
    assert weight.ds_tensor.numel() == weight.ds_tensor.ds_numel == weight.partition_numel()
    assert torch.equal(weight.ds_tensor, zp.full(weight).flatten()[rank() * 64 :][:64])
    assert weight.aligned_size() == weight.ds_numel + weight.padding_size()
    assert weight.ds_process_group is torch.distributed.group.WORLD
    assert weight.ds_summary()["ds_shape"] == (17, 7)
    assert not weight.ds_persist and not weight.is_external_param
    weight.ds_active_sub_modules.clear()
    late = nn.Parameter(torch.arange(3.0))
    model.register_parameter("late", late)
    assert late.ds_numel == 3
    apart = nn.Parameter(torch.arange(4.0))
    weight.convert_to_zero_parameters(param_list=[apart])
    assert zp.is_paged(apart) and apart.ds_numel == 4
    same(torch.arange(4.0), apart)


def test_attributes_of_parameters() -> None:
    run(2, _attributes)


class _UsesTheOthersWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        zero.register_external_parameter(self, self.inner.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight.t())


def _external() -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    beside = Beside(sgd, build=_UsesTheOthersWeight)
    engine = engine_of(beside.model, sgd)
    for step in range(2):
        beside.step([(step, 0)])
        engine.backward(loss_of(engine, step, 0, rank()))
        engine.step()
    same_parameters(beside.plain, beside.model)
    zero.unregister_external_parameter(beside.model, beside.model.inner.weight)
    with contextlib.suppress(RuntimeError):
        zero.register_external_parameter(beside.model, torch.ones(2))
        raise AssertionError("no parameter")
    engine.destroy()


def test_external_parameters() -> None:
    run(2, _external)


# -- what TRL reaches for


def _hooks(trained: bool) -> None:
    """TRL's way to generate between steps: hooks off, another number of forwards on each rank, hooks on."""
    beside = Beside()
    engine = engine_of(beside.model, beside.make if trained else None)
    offload = engine.optimizer.parameter_offload if trained else engine.optimizer
    assert isinstance(offload, DeepSpeedZeRoOffload)
    for step in range(2):
        with zero.GatheredParameters(engine.module.parameters()):
            for _, parameter in [
                *offload.module.named_parameters(recurse=True),
                *offload.module.ds_external_parameters(),
            ]:
                parameter.ds_active_sub_modules.clear()
            for hook in [*offload.forward_hooks, *offload.backward_hooks]:
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            with torch.no_grad():
                for turn in range(1 + 2 * rank()):
                    same(beside.plain(mlp_batch(step, turn, rank())), engine.module(mlp_batch(step, turn, rank())))
            if not offload.param_coordinator.is_invalid_trace():
                offload.param_coordinator._invalidate_trace()
            offload._register_deepspeed_module(offload.module)
        with unwrap_model_for_generation(engine) as module, torch.no_grad():
            assert module is beside.model
            module(mlp_batch(step, 9, rank()))
        if trained:
            beside.step([(step, 0)])
            engine.backward(loss_of(engine, step, 0, rank()))
            engine.step()
            same_parameters(beside.plain, beside.model)
    engine.destroy()


@pytest.mark.parametrize("trained", [True, False])
def test_hooks_that_are_taken_off(trained: bool) -> None:
    run(2, _hooks, trained)


def test_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's own numbers for one billion parameters on eight GPUs (from its documentation of the function)."""
    from zeropage.deepspeed.estimates import (
        estimate_zero2_model_states_mem_needs,
        estimate_zero3_model_states_mem_needs,
    )

    host, gpu, layer = estimate_zero3_model_states_mem_needs(2_851_000_000, 32_000_000, 8, 1)
    assert (round(host / 2**30, 2), round(gpu / 2**30, 2), layer) == (71.69, 0.12, 128_000_000)
    host, gpu, _ = estimate_zero3_model_states_mem_needs(2_851_000_000, 32_000_000, 8, 1, False, False, False)
    assert (round(host / 2**30, 2), round(gpu / 2**30, 2)) == (127.45, 6.09)
    host, gpu = estimate_zero2_model_states_mem_needs(2_851_000_000, 8, 1, False)
    assert (round(host / 2**30, 2), round(gpu / 2**30, 2)) == (127.45, 11.28)
    zero.estimate_zero3_model_states_mem_needs_all_live(MLP(), 2, 1)
    assert "offload_param=cpu" in capsys.readouterr().out
