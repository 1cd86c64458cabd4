"""What DeepSpeed 0.19.8 was seen to get wrong without a word, each as plain torch has it.

(Its engines that are not freed after destroy() are in test_deepspeed_engine, its default clipping is there too.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.integrations.deepspeed_cases import config, engine_of, rank
from tests.scenarios.beside import averaged_backward, plain_copy, same, same_parameters
from zeropage.deepspeed import zero
from zeropage.deepspeed.engine import DeepSpeedEngine
from zeropage.deepspeed.initialization import initialize
from zeropage.deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param


class _Branches(nn.Module):
    """Two branches, of which a forward takes one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(7, 5)
        self.other = nn.Linear(7, 5)

    def forward(self, x: Tensor, taken: str) -> Tensor:
        return sum(self.get_submodule(name)(x) for name in taken.split("+"))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class _Trained:
    """A plain model and a sharded one, trained alike on whatever branches."""

    def __init__(self, steps: int) -> None:
        self.plain, self.model = plain_copy(_Branches), plain_copy(_Branches)
        self.optimizer = _adamw(self.plain.parameters())
        self.engine: DeepSpeedEngine = engine_of(self.model, _adamw, gradient_accumulation_steps=steps)
        self.steps = steps

    def step(self, number: int, taken: list[str]) -> None:
        for micro, branch in enumerate(taken):

            def loss(model: Callable[..., Tensor], r: int, m: int = micro, b: str = branch) -> Tensor:
                return model(mlp_batch(number, m, r), b).square().mean()

            averaged_backward(self.plain.parameters(), lambda r, f=loss: f(self.plain, r) / self.steps)
            self.engine.backward(loss(self.engine, rank()))
            self.engine.step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        same_parameters(self.plain, self.model)


def _unused() -> None:
    trained = _Trained(1)
    trained.step(0, ["one+other"])
    for number in range(1, 4):
        before = zp.full(trained.model.other.weight)
        trained.step(number, ["one"])
        same(before, trained.model.other.weight, "not used in the step", exact=True)
    trained.step(4, ["other"])
    trained.engine.destroy()


def test_a_parameter_that_is_not_used_in_a_step_stays() -> None:
    run(2, _unused)


def _second_micro_batch() -> None:
    trained = _Trained(2)
    trained.step(0, ["one+other", "one+other"])
    for number in range(1, 4):
        trained.step(number, ["one", "one+other"])
    trained.engine.destroy()


def test_a_parameter_first_used_in_the_second_micro_batch() -> None:
    run(2, _second_micro_batch)


def _edits() -> None:
    model = zp.shard(plain_copy(build_mlp))
    before = zp.full(model.first.weight)
    with torch.no_grad(), zero.GatheredParameters(model.parameters(), modifier_rank=None):
        model.first.weight.data.mul_(2.0)
        model.second.bias.fill_(0.5)
    same(before * 2, model.first.weight, exact=True)
    same(torch.full((17,), 0.5), model.second.bias, exact=True)


def test_edits_without_a_modifier_rank_are_kept() -> None:
    run(2, _edits)


def _set_full() -> None:
    for precision, dtype in (({}, torch.float32), ({"bf16": {"enabled": True}}, torch.bfloat16)):
        plain, model = plain_copy(build_mlp), plain_copy(build_mlp)
        engine = engine_of(model, _adamw, **precision)
        plain.to(dtype)
        x = mlp_batch(0, 0, rank()).to(dtype)
        engine(x)
        for mine, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            value = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
            safe_set_full_fp32_param(parameter, value)
            mine.data.copy_(value)
            assert torch.equal(safe_get_full_fp32_param(parameter), value)
        with torch.no_grad():
            same(plain(x), engine(x), "the next forward")
        engine.destroy()


def test_a_value_that_was_set_is_seen_by_the_next_forward() -> None:
    run(2, _set_full)


def _unfrozen() -> None:
    plain, model = plain_copy(build_mlp), plain_copy(build_mlp)
    for each in (plain, model):
        each.first.requires_grad_(False)
    optimizer = _adamw(plain.parameters())
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}
    engine, *_ = initialize(model=model, config=config(optimizer=adamw))
    for step in range(4):
        if step == 2:
            for each in (plain, model):
                each.first.requires_grad_(True)
        averaged_backward(plain.parameters(), lambda r, s=step: plain(mlp_batch(s, 0, r)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(mlp_batch(step, 0, rank())).square().mean())
        engine.step()
        same_parameters(plain, model)
    engine.destroy()


def test_a_layer_that_is_unfrozen_later_trains() -> None:
    run(2, _unfrozen)


def _init_dtype() -> None:
    wanted = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    with zero.Init(config_dict_or_path=wanted, dtype=torch.float32):
        model = nn.Linear(3, 3)
    assert model.weight.dtype == torch.float32
    assert torch.zeros(1).dtype == torch.float32


def test_init_gives_the_dtype_that_is_asked_for() -> None:
    run(2, _init_dtype)


def _untouched() -> None:
    functions = nn.functional.linear, torch.empty, torch.zeros, torch.arange, nn.Module.__init__, nn.Module.apply
    with zero.Init():
        model = build_mlp()
        assert nn.functional.linear is functions[0]
    engine = engine_of(model, _adamw)
    engine.backward(engine(mlp_batch(0, 0, rank())).square().mean())
    engine.step()
    engine.destroy()
    now = nn.functional.linear, torch.empty, torch.zeros, torch.arange, nn.Module.__init__, nn.Module.apply
    assert all(one is other for one, other in zip(functions, now, strict=True))


def test_torch_stays_as_it_is() -> None:
    run(2, _untouched)
