"""Engines come and go, on new models and on the same one: nothing is left behind but the model."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import MLP, build_mlp, mlp_batch
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same, same_parameters


def _mapped() -> int:
    """Bytes of this process's mappings of anonymous files (shards over shared memory)."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:zeropage" in line:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            total += high - low
    return total


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _hooks() -> int:
    modules = torch.nn.modules.module
    return len(modules._global_parameter_registration_hooks) + len(modules._global_module_registration_hooks)


def _big() -> nn.Module:
    return MLP(wide=512)


def _train(engine: zp.Engine, steps: range) -> None:
    for step in steps:
        engine.backward(engine(mlp_batch(step, 0, dist.get_rank())).square().mean())
        assert engine.step().applied


def _new_models(transport: str) -> None:
    """Five models one after the other, without the garbage collector: mappings, descriptors, hooks stay flat."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # a process's first optimizer stays until a collection
    gc.collect()
    gc.disable()
    try:
        seen = []
        for number in range(5):
            model = plain_copy(_big)
            model_gone = weakref.ref(model.second.weight)
            engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), {"transport": transport})
            _train(engine, range(2))
            engine.close()
            engine_gone = weakref.ref(engine)
            del engine
            assert engine_gone() is None, "the engine needs the garbage collector"
            del model
            assert model_gone() is None, "the model needs the garbage collector"
            seen.append((_mapped(), _descriptors(), _hooks()))
            assert dist.is_initialized(), number
        assert seen[1:] == seen[:1] * 4, seen
        if transport == "shared":
            assert seen[-1][0] == 0
    finally:
        gc.enable()
    dist.barrier()


@everywhere
def test_new_models(transport: str, world: int) -> None:
    run(world, _new_models, transport)


def _same_model(transport: str) -> None:
    """Five engines on one model; in between it is sharded, readable, and without hooks of theirs."""
    plain, model = plain_copy(build_mlp), plain_copy(build_mlp)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    kept = model.second.weight
    for number in range(5):
        engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), {"transport": transport})
        for step in range(2):
            averaged_backward(
                plain.parameters(), lambda r, step=step, n=number: plain(mlp_batch(2 * n + step, 0, r)).square().mean()
            )
            reference.step()
            reference.zero_grad()
        _train(engine, range(2 * number, 2 * number + 2))
        engine.close()
        engine.close()  # harmless
        assert engine.memory().optimizer == engine.memory().frames == 0
        try:
            engine(mlp_batch(0, 0, 0))
        except zp.errors.ZeropageError as error:
            assert "closed" in str(error)
        else:
            raise AssertionError("a closed engine ran")
        assert model.second.weight is kept
        assert all(p.grad is None for p in model.parameters())
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
        same_parameters(plain, model)
        batch = mlp_batch(9, 0, dist.get_rank())
        with torch.no_grad():
            same(plain(batch), model(batch), "the model without an engine")
    unsharded = MLP()
    unsharded.load_state_dict({name: zp.full(p) for name, p in model.state_dict().items()})
    same_parameters(plain, unsharded)


@everywhere
def test_engines_on_one_model(transport: str, world: int) -> None:
    run(world, _same_model, transport)


def _as_context(transport: str) -> None:
    """As a context manager it closes itself, and does not wait for anybody after an exception."""
    model = plain_copy(build_mlp)
    with zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), {"transport": transport}) as engine:
        _train(engine, range(1))
    try:
        with zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1)) as engine:
            _train(engine, range(1))
            raise KeyError("in the body")
    except KeyError:
        pass
    try:
        engine.step()
    except zp.errors.ZeropageError as error:
        assert "closed" in str(error)
    else:
        raise AssertionError("a closed engine stepped")


@everywhere
def test_as_a_context(transport: str, world: int) -> None:
    run(world, _as_context, transport)
