"""A frozen base in a Parameter subclass of its own (packed bytes, scales as attributes) is sharded as it is."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeropage as zp
from tests.harness import assert_same_training, run
from tests.harness.models import mlp_batch
from tests.scenarios.beside import everywhere, plain_copy, same


class Quantised(nn.Parameter):
    """Rows of bytes, each with a scale; `F.linear` takes the weight apart, like bitsandbytes' own classes."""

    scale: Tensor

    def __new__(cls, values: Tensor) -> Quantised:
        scale = values.abs().amax(1, keepdim=True) / 127
        self = torch.Tensor._make_subclass(cls, ((values / scale).round() + 128).to(torch.uint8), False)
        self.scale = scale
        return self

    def values(self) -> Tensor:
        return (self.to(torch.float32) - 128) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.values(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 17, bias=False)
        self.base.weight = Quantised(self.base.weight.detach())
        self.down = nn.Linear(7, 3, bias=False)
        self.up = nn.Linear(3, 17, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _adapters(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


@everywhere
def test_training_adapters(transport: str, world: int) -> None:
    for init in (False, True):
        assert_same_training(
            _Adapted, mlp_batch, optimizer=_adapters, world=world, transport=transport, steps=3, init=init
        )


def _attributes(transport: str) -> None:
    plain, model = plain_copy(_Adapted), zp.shard(plain_copy(_Adapted), {"transport": transport})
    weight = model.base.weight
    for _ in range(2):
        assert zp.is_paged(weight)
        assert isinstance(weight, Quantised)
        assert weight.dtype == torch.uint8
        assert not weight.requires_grad
        assert weight.grad is None
        same(plain.base.weight.scale, weight.scale, exact=True)
        same(plain.base.weight.values(), weight.values(), exact=True)
        assert zp.local(weight).numel() < weight.numel()
        with torch.no_grad(), zp.gather(model, writer=0):
            model.up.weight.zero_()
    twin = copy.deepcopy(weight)
    assert isinstance(twin, Quantised)
    same(plain.base.weight.values(), twin.values(), exact=True)


@everywhere
def test_attributes_survive(transport: str, world: int) -> None:
    run(world, _attributes, transport)
