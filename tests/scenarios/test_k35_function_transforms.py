"""torch.func over a sharded model: grad, vjp, jvp, jacobians, vmap, functional_call, with plain torch's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jacfwd, jacrev, jvp, vjp, vmap

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.scenarios.beside import EVERYWHERE, plain_copy, same


def _loss(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(model, parameters, (x,)).square().mean()


def _transforms(model: nn.Module, x: Tensor) -> dict[str, Any]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    live = dict(model.named_parameters())
    direction = {name: torch.ones(p.shape) for name, p in live.items()}
    cotangent = torch.linspace(-1, 1, 35).view(5, 7)

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return _loss(model, p, x)

    def forward(p: dict[str, Tensor]) -> Tensor:
        return functional_call(model, p, (x,))

    found: dict[str, Any] = {}
    found["functional_call"] = functional_call(model, parameters, (x,))
    found["functional_call with other values"] = functional_call(
        model, {name: torch.full(p.shape, 0.01) for name, p in parameters.items()}, (x,)
    )
    found["grad"] = grad(loss)(parameters, x)
    found["grad of live ones"] = grad(loss)(live, x)
    found["grad_and_value"] = grad_and_value(loss)(parameters, x)
    found["per sample"] = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    output, pull = vjp(forward, parameters)
    found["vjp"] = output, pull(cotangent)
    found["jvp"] = jvp(forward, (parameters,), (direction,))
    found["jacrev"] = jacrev(lambda x: model(x).sum(0))(x)
    found["jacfwd"] = jacfwd(lambda x: model(x).sum(0))(x)
    found["hessian"] = jacfwd(jacrev(lambda bias: _loss(model, {**parameters, "third.bias": bias}, x)))(
        parameters["third.bias"]
    )
    found["vmap over inputs"] = vmap(model)(x)
    found["vmap over weights"] = vmap(lambda w: (w * x[0]).sum())(model.first.weight)
    return found


def _flatten(value: Any) -> list[Tensor]:
    return [t.detach() for t in torch.utils._pytree.tree_leaves(value)]


def _scenario(transport: str) -> None:
    plain = plain_copy(build_mlp)
    model = zp.shard(plain_copy(build_mlp), {"transport": transport})
    x = mlp_batch(0, 0, dist.get_rank())
    wanted, got = _transforms(plain, x), _transforms(model, x)
    assert list(wanted) == list(got)
    for name, value in wanted.items():
        for one, other in zip(_flatten(value), _flatten(got[name]), strict=True):
            same(one, other, name, exact=True)
    dist.barrier()
    assert all(p.grad is None for p in model.parameters()), "transforms are functional: nothing is accumulated"
    dist.barrier()
    model(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(("transport", "world"), [("local", 1), *EVERYWHERE])
def test_transforms(transport: str, world: int) -> None:
    run(world, _scenario, transport)


def _double_backward(transport: str) -> None:
    """A gradient penalty: the second derivative reaches the sharded sums."""
    plain = plain_copy(build_mlp)
    model = zp.shard(plain_copy(build_mlp), {"transport": transport})
    x = mlp_batch(0, 0, 0)  # the same on all ranks: the average is each one's own
    for one in (plain, model):
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(one(inputs).square().mean(), inputs, create_graph=True)
        (slope.norm() - 1).square().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            same(q.grad, p.grad, name)


@pytest.mark.parametrize(("transport", "world"), EVERYWHERE)
def test_gradient_penalty(transport: str, world: int) -> None:
    run(world, _double_backward, transport)
