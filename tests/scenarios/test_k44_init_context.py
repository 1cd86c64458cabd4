"""`zp.init` nested, repeated, failing, left early, in two threads: torch is as it was, nothing is paged by mistake."""

from __future__ import annotations

import threading

import torch
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import MLP, build_mlp, mlp_batch
from tests.scenarios.beside import everywhere, plain_copy, same_parameters

ORIGINALS = {
    "nn.Module.__init__": lambda: nn.Module.__init__,
    "nn.Module.__setattr__": lambda: nn.Module.__setattr__,
    "nn.Module.register_parameter": lambda: nn.Module.register_parameter,
    "nn.Module.__call__": lambda: nn.Module.__call__,
    "nn.Module.state_dict": lambda: nn.Module.state_dict,
    "nn.Linear.__init__": lambda: nn.Linear.__init__,
    "nn.Linear.forward": lambda: nn.Linear.forward,
    "nn.Parameter": lambda: nn.Parameter,
    "nn.Parameter.__new__": lambda: nn.Parameter.__new__,
    "torch.empty": lambda: torch.empty,
    "torch.zeros": lambda: torch.zeros,
    "torch.nn.functional.linear": lambda: nn.functional.linear,
    "torch.Tensor.backward": lambda: torch.Tensor.backward,
    "torch.Tensor.grad": lambda: torch.Tensor.__dict__.get("grad"),
}


def _snapshot() -> dict[str, object]:
    return {name: get() for name, get in ORIGINALS.items()}


def _paged(module: nn.Module) -> set[bool]:
    return {zp.is_paged(p) for p in module.parameters()}


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        raise KeyError("in the constructor")


def _nothing_is_patched(transport: str) -> None:
    before = _snapshot()
    with zp.init({"transport": transport}):
        assert _snapshot() == before, "inside"
        model = MLP()
    assert _snapshot() == before
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    engine.backward(engine(mlp_batch(0, 0, 0)).square().mean())
    engine.step()
    assert _snapshot() == before, "with an engine at work"
    engine.close()


def _failing_constructor(transport: str) -> None:
    before = _snapshot()
    for _ in range(2):
        try:
            with zp.init({"transport": transport}):
                _Fails()
        except KeyError:
            pass
        assert _paged(nn.Linear(3, 3)) == {False}
    assert _snapshot() == before
    plain = plain_copy(build_mlp)
    torch.manual_seed(0)
    with zp.init({"transport": transport}):
        model = MLP()
    same_parameters(plain, model, exact=True)


def _nested(transport: str) -> None:
    """Nested and repeated contexts, a class defined inside, a sub-model from another context, shard() inside."""
    config = {"transport": transport}
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 17), MLP(), nn.Linear(7, 3))
    torch.manual_seed(0)
    with zp.init(config):

        class Inside(nn.Sequential):
            pass

        first = nn.Linear(7, 17)
        with zp.init(config):
            middle = MLP()
        last = nn.Linear(7, 3)
        model = Inside(first, middle, last)
        zp.shard(model)
        engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert _paged(model) == {True}
    same_parameters(plain, model, exact=True)
    assert _paged(nn.Linear(3, 3)) == {False}
    assert zp.shard(model) is model
    assert zp.shard(model, config) is model
    identities = [id(p) for p in model.parameters()]
    zp.shard(model)
    assert [id(p) for p in model.parameters()] == identities
    engine.backward(model[2](model[1](mlp_batch(0, 0, 0))).square().mean())
    engine.step()
    engine.close()

    with zp.init(config):
        unsharded_inside = [nn.Linear(7, 7) for _ in range(2)]
    outer = nn.ModuleList(unsharded_inside)
    outer.append(nn.Linear(7, 7))
    assert [zp.is_paged(layer.weight) for layer in outer] == [True, True, False], "outer was built outside"
    zp.shard(outer, config)
    assert _paged(outer) == {True}


def _plain_parts(transport: str) -> None:
    """Built before, put into a model that is built inside: paged with it. Temporary modules leave no trace."""
    torch.manual_seed(0)
    part = nn.Linear(7, 7)
    values = part.weight.detach().clone()
    with zp.init({"transport": transport}):
        nn.Linear(3, 3)  # dropped at once
        model = nn.Sequential(part, nn.Linear(7, 7))
    assert _paged(model) == {True}
    assert torch.equal(zp.full(model[0].weight), values)


def _threads(transport: str) -> None:
    """Another thread builds a model meanwhile: it stays plain."""
    go, done = threading.Event(), threading.Event()
    found: list[set[bool]] = []

    def other() -> None:
        go.wait(20)
        found.append(_paged(MLP()))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with zp.init({"transport": transport}):
        go.set()
        assert done.wait(20)
        model = MLP()
    thread.join()
    assert found == [{False}]
    assert _paged(model) == {True}


def _every(transport: str) -> None:
    for scenario in (_nothing_is_patched, _failing_constructor, _nested, _plain_parts, _threads):
        scenario(transport)


@everywhere
def test_contexts(transport: str, world: int) -> None:
    run(world, _every, transport)
