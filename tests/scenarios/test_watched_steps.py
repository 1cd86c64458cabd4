"""Hooks on `optimizer.step`, and a `step` that a program has put over it, find the parameters as the user made them."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same, same_parameters
from zeropage.gradients import DTYPES

Optimizer = torch.optim.Optimizer
Seen = list[dict[str, Tensor]]


def _loss(model: Callable[[Tensor], Tensor], step: int, rank: int) -> Tensor:
    return model(mlp_batch(step, 0, rank)).square().mean()


def _look(optimizer: Optimizer, seen: Seen) -> None:
    """Keep what a program may ask for in a step: norms of tensors, of a group, a value, a state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    seen.append(
        {
            "shapes": torch.tensor([n for parameter in parameters for n in parameter.shape]),
            "norms": torch.stack([zp.full(parameter.detach()).norm() for parameter in parameters]),
            "gradients": torch.stack([gradient.norm() for gradient in gradients if gradient is not None]),
            "powers": torch.stack(torch._foreach_powsum([parameter.detach() for parameter in parameters], 2)),
            "group": torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None]),
            "states": torch.tensor([len(optimizer.state[parameter]) for parameter in parameters]),
        }
    )


def _pre_hook(optimizer: Optimizer, seen: Seen) -> None:
    optimizer.register_step_pre_hook(lambda it, *_: _look(it, seen))


def _post_hook(optimizer: Optimizer, seen: Seen) -> None:
    optimizer.register_step_post_hook(lambda it, *_: _look(it, seen))


def _replaced(optimizer: Optimizer, seen: Seen) -> None:
    original = optimizer.step

    def step(*args: Any, **options: Any) -> Any:
        _look(optimizer, seen)
        return original(*args, **options)

    optimizer.step = step  # type: ignore[method-assign]


def _writing_hook(optimizer: Optimizer, seen: Seen) -> None:
    """A hook that writes."""

    def change(it: Optimizer, *_: object) -> None:
        for group in it.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)
                parameter.mul_(0.5)

    optimizer.register_step_pre_hook(torch.no_grad()(change))


WATCHES: dict[str, Callable[[Optimizer, Seen], None]] = {
    "pre-hook": _pre_hook, "post-hook": _post_hook, "replaced": _replaced, "writing": _writing_hook,
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
}


def _watched(transport: str, name: str) -> None:
    warnings.filterwarnings("ignore", ".* is not elementwise")  # the hooks look at whole matrices
    for watch in WATCHES.values():
        plain, model = plain_copy(build_mlp), plain_copy(build_mlp)
        reference, optimizer = (OPTIMIZERS[name](list(each.parameters())) for each in (plain, model))
        expected: Seen = []
        got: Seen = []
        engine = zp.Engine(model, optimizer, {"transport": transport})
        for step in range(4):
            if step == 1:
                watch(reference, expected)
                watch(optimizer, got)
            averaged_backward(plain.parameters(), lambda rank, p=plain, s=step: _loss(p, s, rank))
            reference.step()
            reference.zero_grad()
            engine.backward(_loss(engine, step, dist.get_rank()))
            engine.step()
        for one, other in zip(expected, got, strict=True):
            for key, value in one.items():
                same(value, zp.full(other[key]), key, exact=not value.is_floating_point())
        same_parameters(plain, model)
        engine.close()


@everywhere
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_training(transport: str, world: int, name: str) -> None:
    run(world, _watched, transport, name)


def _scheduled_and_watched(transport: str) -> None:
    """A scheduler puts a function of its own over a step that is replaced already."""
    plain, model = plain_copy(build_mlp), plain_copy(build_mlp)
    reference, optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    original = optimizer.step
    calls = []

    def step(*args: Any, **options: Any) -> Any:
        calls.append([tuple(p.shape) for group in optimizer.param_groups for p in group["params"]])
        return original(*args, **options)

    optimizer.step = step  # type: ignore[method-assign]
    engine = zp.Engine(model, optimizer, {"transport": transport})
    engine.backward(_loss(engine, 0, dist.get_rank()))
    engine.step()
    assert calls == [[tuple(parameter.shape) for parameter in plain.parameters()]]
    assert optimizer._opt_called
    averaged_backward(plain.parameters(), lambda rank: _loss(plain, 0, rank))
    reference.step()
    same_parameters(plain, model)
    engine.close()


@everywhere
def test_scheduled_and_watched(transport: str, world: int) -> None:
    run(world, _scheduled_and_watched, transport)


def _in_16_bits(transport: str, precision: str) -> None:
    """What is watched has the values of what is not."""
    warnings.filterwarnings("ignore", ".* is not elementwise")
    models = [plain_copy(build_mlp) for _ in range(2)]
    seen: Seen = []
    for model, watches in zip(models, (True, False), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if watches:
            _pre_hook(optimizer, seen)
        engine = zp.Engine(model, optimizer, {"transport": transport, "precision": precision, "clip_grad_norm": 1e-3})
        for step in range(3):
            batch = mlp_batch(step, 0, dist.get_rank()).to(DTYPES[precision])
            engine.backward(engine(batch).float().square().mean())
            engine.step()
        engine.close()
    norms = [float(each["group"]) for each in seen]
    assert norms == pytest.approx([1e-3] * 3, rel=1e-2), "gradients are clipped by then"
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        same(zp.full(one), other, exact=False)
    dist.barrier()


@everywhere
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits(transport: str, world: int, precision: str) -> None:
    run(world, _in_16_bits, transport, precision)


def _failed_and_gone(transport: str) -> None:
    """A step that a hook has ended keeps nothing of the model."""
    model = plain_copy(build_mlp)
    optimizer = torch.optim.AdamW(model.parameters())

    def fail(*_: object) -> None:
        raise ValueError("a hook of the user's")

    optimizer.register_step_pre_hook(fail)
    engine = zp.Engine(model, optimizer, {"transport": transport})
    engine.backward(_loss(engine, 0, dist.get_rank()))
    with pytest.raises(ValueError, match="a hook"):
        engine.step()
    engine.close()
    gone = weakref.ref(model.second.weight)
    del model, optimizer, engine
    gc.collect()
    assert gone() is None
    dist.barrier()


@everywhere
def test_failed_and_gone(transport: str, world: int) -> None:
    run(world, _failed_and_gone, transport)
