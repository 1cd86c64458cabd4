"""Plain torch beside a sharded model, in the same process: what all ranks together would have computed.

A scenario that `assert_same_training` cannot tell (several models, several losses, edits in between) runs
on every rank both ways and compares there. With two ranks over shared memory nothing may differ by a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness.training import tolerance_of

__all__ = ["EVERYWHERE", "averaged_backward", "everywhere", "plain_copy", "same", "same_parameters"]

EVERYWHERE = [("shared", 2), ("collective", 2), ("shared", 3), ("collective", 3)]
everywhere = pytest.mark.parametrize(("transport", "world"), EVERYWHERE)


def averaged_backward(parameters: Iterable[nn.Parameter], loss_of: Callable[[int], Tensor]) -> None:
    """Add the average over ranks of the gradients of `loss_of(rank)` to each plain parameter's `.grad`."""
    parameters = list(dict.fromkeys(parameters))
    world = dist.get_world_size()
    for rank in range(world):
        sums = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        loss_of(rank).backward()
        for parameter, total in zip(parameters, sums, strict=True):
            if parameter.grad is not None:
                part = parameter.grad.to_dense() * (1 / world)
                parameter.grad = part if total is None else total + part
            else:
                parameter.grad = total


def plain_copy(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model built from `seed`, without a change of the random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def same(expected: Tensor, got: Tensor, what: str = "", *, exact: bool | None = None) -> None:
    """Assert that `got` (plain or paged) has the values `expected`: to the bit with at most two ranks in one memory."""
    value = zp.full(got)
    assert (value.shape, value.dtype) == (expected.shape, expected.dtype), what
    if exact is None:
        exact = dist.get_world_size() <= 2
    expected = expected.detach()
    if exact:
        assert torch.equal(value, expected), f"{what}: {value} is not {expected}"
    else:
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        error = float((value - expected).abs().max()) if expected.numel() else 0.0
        assert error <= tolerance_of(dist.get_world_size()) * scale, (
            f"{what}: off by {error:g} at values up to {scale:g}"
        )


def same_parameters(plain: nn.Module, sharded: nn.Module, *, exact: bool | None = None) -> None:
    """Assert equal names, values and trainability (all ranks: none lets go of its model while another one reads)."""
    expected, got = dict(plain.named_parameters()), dict(sharded.named_parameters())
    assert list(expected) == list(got)
    for name, parameter in expected.items():
        assert parameter.requires_grad == got[name].requires_grad, name
        same(parameter, got[name], name, exact=exact)
    dist.barrier()
