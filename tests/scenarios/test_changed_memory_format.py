"""A parameter's memory format may change at any time: gradient and optimizer state keep their logical places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import zeropage as zp
from tests.harness import run
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same, same_parameters

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "SGD, watched": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def _build() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 10, 3), nn.Flatten(), nn.Linear(40, 40, bias=False), nn.Linear(40, 2))


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def _data(model: nn.Module) -> None:
    weight = model[0].weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def _transposed(model: nn.Module) -> None:
    weight = model[2].weight
    weight.data = weight.data.t().contiguous().t()


CHANGES = {"to": _to_channels_last, "data": _data, "transposed": _transposed}


def _same_training(transport: str, name: str, folder: Path, offload: str) -> None:
    for change in CHANGES.values():
        for between in (False, True):  # steps, or backward and step
            plain, model = plain_copy(_build), plain_copy(_build)
            reference, optimizer = (OPTIMIZERS[name](list(each.parameters())) for each in (plain, model))
            settings: dict[str, object] = {"transport": transport}
            if offload == "disk":
                settings["offload"] = {"optimizer": "disk", "folder": str(folder)}
            engine = zp.Engine(model, optimizer, settings)
            seen: list[float] = []
            if name == "SGD, watched":
                optimizer.register_step_pre_hook(lambda *_, kept=seen: kept.append(1.0))
            for step in range(4):
                averaged_backward(plain.parameters(), lambda rank, p=plain, s=step: p(_batch(s, rank)).square().mean())
                engine.backward(engine(_batch(step, dist.get_rank())).square().mean())
                if step == 2 and between:
                    change(plain)
                    change(model)
                    for key, parameter in model.named_parameters():
                        same(plain.get_parameter(key).grad, parameter.grad, f"gradient of {key}")
                reference.step()
                reference.zero_grad()
                engine.step()
                if step == 1 and not between:
                    change(plain)
                    change(model)
            same_parameters(plain, model)
            for key, parameter in model.named_parameters():
                for kind, value in reference.state[plain.get_parameter(key)].items():
                    if value is not None and value.dim() > 0:
                        same(value, optimizer.state[parameter][kind], f"{kind} of {key}")
            engine.close()


@everywhere
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_training(transport: str, world: int, name: str, tmp_path: Path) -> None:
    run(world, _same_training, transport, name, tmp_path, "none")


@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_states_on_disk(transport: str, tmp_path: Path) -> None:
    run(2, _same_training, transport, "Adam", tmp_path, "disk")


def _states_in_another_order(transport: str) -> None:
    source, plain, model = (plain_copy(_build) for _ in range(3))
    first, reference, optimizer = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (source, plain, model))
    before = zp.Engine(source, first, {"transport": transport})
    before.backward(before(_batch(0, dist.get_rank())).square().mean())
    before.step()
    plain.to(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    saved = first.state_dict()
    reference.load_state_dict(tree_map_only(Tensor, lambda value: zp.full(value).clone(), saved))
    engine = zp.Engine(model, optimizer, {"transport": transport})
    optimizer.load_state_dict(saved)
    averaged_backward(plain.parameters(), lambda rank: plain(_batch(1, rank)).square().mean())
    engine.backward(engine(_batch(1, dist.get_rank())).square().mean())
    reference.step()
    engine.step()
    same_parameters(plain, model)
    engine.close()
    before.close()


@everywhere
def test_states_of_another_order_are_loaded(transport: str, world: int) -> None:
    run(world, _states_in_another_order, transport)
