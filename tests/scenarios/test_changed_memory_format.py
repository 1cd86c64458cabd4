"""A parameter's memory format may change at any time: gradient and optimizer state keep their logical places."""

from __future__ import annotations

import copy
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


def _loss_in_16_bits(model: Callable[[Tensor], Tensor], step: int, rank: int) -> Tensor:
    return model(_batch(step, rank).bfloat16()).float().square().mean()


def _in_16_bits(transport: str) -> None:
    """Masters go on from the weights as they stand when their order changes; the optimizer's state stays."""
    exact, plain, model = plain_copy(_build), plain_copy(_build).bfloat16(), plain_copy(_build)
    reference, optimizer = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (exact, model))
    engine = zp.Engine(model, optimizer, {"transport": transport, "precision": "bf16"})
    world = dist.get_world_size()
    for step in range(4):
        if step == 2:
            for change in CHANGES.values():
                change(plain)
                change(model)
            for name in ("0.weight", "2.weight"):
                exact.get_parameter(name).data.copy_(plain.get_parameter(name))
        exact.zero_grad()
        for rank in range(world):
            plain.zero_grad()
            _loss_in_16_bits(plain, step, rank).backward()
            for master, parameter in zip(exact.parameters(), plain.parameters(), strict=True):
                assert parameter.grad is not None
                part = parameter.grad.float() * (1 / world)
                master.grad = part if master.grad is None else master.grad + part
        engine.backward(_loss_in_16_bits(engine, step, dist.get_rank()))
        reference.step()
        engine.step()
        plain.load_state_dict(exact.state_dict())
        for name, parameter in model.named_parameters():
            state = reference.state[exact.get_parameter(name)]
            for key in ("exp_avg", "exp_avg_sq"):
                same(state[key], optimizer.state[parameter][key], f"{key} of {name}")
    same_parameters(plain, model)
    engine.close()


@everywhere
def test_in_16_bits(transport: str, world: int) -> None:
    run(world, _in_16_bits, transport)


def _saved_and_changed(transport: str, folder: Path) -> None:
    """A checkpoint is of logical tensors: models of another order load it, whether it changed before or after."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = plain_copy(_build)
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(engine: zp.Engine, step: int) -> None:
        engine.backward(engine(_batch(step, dist.get_rank())).square().mean())
        engine.step()

    def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        averaged_backward(model.parameters(), lambda rank: model(_batch(step, rank)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    plain = made()
    (changed, _), (built, _) = sharded = [made() for _ in range(2)]
    first, second = (zp.Engine(*one, {"transport": transport}) for one in sharded)
    for step in range(2):
        train_plain(*plain, step)
        train(first, step)
    also_changed = copy.deepcopy(plain)
    first.save(folder, tag="as built")
    for change in CHANGES.values():
        change(changed)
        change(also_changed[0])
    first.save(folder, tag="changed")
    train(first, 7)  # to be undone
    first.load(folder, tag="as built")
    second.load(folder, tag="changed")
    for engine, (model, optimizer), beside in ((first, sharded[0], also_changed), (second, sharded[1], plain)):
        train_plain(*beside, 2)
        train(engine, 2)
        same_parameters(beside[0], model)
        for name, parameter in model.named_parameters():
            state = beside[1].state[beside[0].get_parameter(name)]
            for key in ("exp_avg", "exp_avg_sq"):
                same(state[key], optimizer.state[parameter][key], f"{key} of {name}")
    assert [model.get_parameter("0.weight").is_contiguous() for model in (changed, built)] == [False, True]
    first.close()
    second.close()


@everywhere
def test_a_checkpoint_knows_no_order(transport: str, world: int, tmp_path: Path) -> None:
    run(world, _saved_and_changed, transport, tmp_path)
