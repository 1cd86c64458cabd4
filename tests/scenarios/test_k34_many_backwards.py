"""Several backwards a step in every form that torch has; all of them add up as in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.scenarios.beside import everywhere, plain_copy, same, same_parameters

Call = Callable[..., Tensor]
Way = Callable[[Call, list[nn.Parameter], Tensor], None]


def _retained(call: Call, parameters: list[nn.Parameter], x: Tensor) -> None:
    loss = call(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def _two_losses(call: Call, parameters: list[nn.Parameter], x: Tensor) -> None:
    out = call(x)
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def _interleaved(call: Call, parameters: list[nn.Parameter], x: Tensor) -> None:
    one, other = call(x).square().mean(), call(x + 1).abs().mean()
    other.backward()
    one.backward()


def _not_scalar(call: Call, parameters: list[nn.Parameter], x: Tensor) -> None:
    out = call(x)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))


def _functional(call: Call, parameters: list[nn.Parameter], x: Tensor) -> None:
    """`torch.autograd.backward` over two roots at once."""
    torch.autograd.backward([call(x).square().mean(), call(2 * x).abs().mean()])


def _asked_for(call: Call, parameters: list[nn.Parameter], x: Tensor) -> None:
    """`torch.autograd.grad` gives this rank's own gradient and adds nothing; a penalty on it is differentiated."""
    (slope,) = torch.autograd.grad(call(x).square().mean(), parameters[:1], create_graph=True)
    slope.square().sum().backward()


def _some_inputs(call: Call, parameters: list[nn.Parameter], x: Tensor) -> None:
    """Only the parameters named get a gradient."""
    call(x).square().mean().backward(inputs=parameters[2:4])


WAYS: dict[str, Way] = {
    "retained": _retained,
    "two losses": _two_losses,
    "interleaved": _interleaved,
    "not scalar": _not_scalar,
    "functional": _functional,
    "asked for": _asked_for,
    "some inputs": _some_inputs,
}


def _reference(way: Way, plain: nn.Module, step: int) -> None:
    """Ranks one after the other. Each backward of a rank is an addition of its own to the sum."""
    parameters, world = list(plain.parameters()), dist.get_world_size()
    for rank in range(world):
        sums = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        way(plain, parameters, mlp_batch(step, 0, rank))
        for p, total in zip(parameters, sums, strict=True):
            mine = None if p.grad is None else p.grad / world
            p.grad = mine if total is None else total if mine is None else total + mine


def _scenario(transport: str) -> None:
    for name, way in WAYS.items():
        plain, model = plain_copy(build_mlp), plain_copy(build_mlp)
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), {"transport": transport})
        for step in range(2):
            _reference(way, plain, step)
            way(engine, list(model.parameters()), mlp_batch(step, 0, dist.get_rank()))
            for (label, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), (name, label)
                if q.grad is not None:
                    same(q.grad, p.grad, f"{name}: gradient of {label}", exact=False)
            reference.step()
            reference.zero_grad()
            engine.step()
        for (label, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            error = (zp.full(p) - q.detach()).abs().max()
            assert error <= 1e-5, f"{name}: {label} off by {error}"  # an Adam magnifies last bits
        engine.close()


@everywhere
def test_every_form(transport: str, world: int) -> None:
    run(world, _scenario, transport)


def _mixed(transport: str) -> None:
    """engine.backward and loss.backward in one step: the engine's also divides by `accumulate`."""
    plain, model, rank = plain_copy(build_mlp), plain_copy(build_mlp), dist.get_rank()
    config = {"transport": transport, "accumulate": 2}
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    world = dist.get_world_size()
    sums: list[Tensor] = [torch.zeros_like(p) for p in plain.parameters()]
    for micro in range(2):
        for other in range(world):
            loss = plain(mlp_batch(0, micro, other)).square().mean()
            for total, part in zip(sums, torch.autograd.grad(loss / 2, list(plain.parameters())), strict=True):
                total += part * (1 / world)
    for p, total in zip(plain.parameters(), sums, strict=True):
        p.grad = total
    reference.step()
    engine.backward(engine(mlp_batch(0, 0, rank)).square().mean())
    assert not engine.step().applied
    (engine(mlp_batch(0, 1, rank)).square().mean() / 2).backward()
    assert engine.step().applied
    same_parameters(plain, model)
    engine.close()


@everywhere
def test_engine_and_tensor_backward_mix(transport: str, world: int) -> None:
    run(world, _mixed, transport)


def _no_graph(transport: str) -> None:
    """Mistakes are torch's own errors."""
    model = zp.shard(plain_copy(build_mlp), {"transport": transport})
    x = mlp_batch(0, 0, dist.get_rank())
    loss = model(x).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    with torch.no_grad():
        unconnected = model(x).square().mean()
    with pytest.raises(RuntimeError, match="does not require grad"):
        unconnected.backward()
    loss = model(x).square().mean()
    with torch.no_grad():
        model.third.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@everywhere
def test_mistakes(transport: str, world: int) -> None:
    run(world, _no_graph, transport)
