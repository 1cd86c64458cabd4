"""One rank alone: the first gradient becomes the sum, as in plain torch, unless somebody else still looks at it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zeropage as zp
from zeropage.optim import record_of


def _layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 32, bias=False)


def _sum_of(layer: nn.Linear) -> Tensor:
    return record_of(layer.weight).own_gradient()


def test_its_memory_is_taken_over() -> None:
    layer = _layer()
    zp.shard(layer)
    made: list[int] = []
    layer.weight.register_hook(lambda gradient: made.append(gradient.data_ptr()))
    for value in (1.0, 2.0):
        layer(torch.full((3, 64), value)).sum().backward()
        assert _sum_of(layer).data_ptr() == made[-1]
        assert torch.equal(layer.weight.grad, torch.full((32, 64), 3 * value))
        layer.zero_grad()


KEEPERS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(-1),
    "a part": lambda gradient: gradient[:1],
}


@pytest.mark.parametrize("name", KEEPERS)
def test_what_a_hook_keeps_stays_what_it_was(name: str) -> None:
    layer, kept = _layer(), []
    zp.shard(layer)
    layer.weight.register_hook(lambda gradient: kept.append(KEEPERS[name](gradient)))
    for _ in range(3):
        layer(torch.ones(3, 64)).sum().backward()
    assert all(torch.equal(one, torch.full_like(one, 3)) for one in kept)
    assert torch.equal(layer.weight.grad, torch.full((32, 64), 9.0))


def test_a_part_of_a_larger_gradient_is_copied() -> None:
    """Of two parameters that are views of one computation, none keeps the memory of both."""
    torch.manual_seed(0)
    both = nn.ParameterList(torch.randn(32, 8) for _ in range(2))
    zp.shard(both)
    torch.cat(tuple(both)).square().sum().backward()
    for parameter in both:
        own = record_of(parameter).own_gradient()
        assert own.untyped_storage().nbytes() == own.nbytes
        assert torch.equal(parameter.grad, 2 * zp.full(parameter))
    both[0].grad.mul_(0)
    assert torch.equal(both[1].grad, 2 * zp.full(both[1]))
