"""`zp.gather` takes parameters in any shape; edits come from the named rank, or all ranks are told why not."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same, same_parameters


def _sharded(transport: str) -> nn.Module:
    return zp.shard(plain_copy(build_mlp), {"transport": transport})


def _any_iterable(transport: str) -> None:
    """Whatever holds the parameters, all of them are gathered and what the writer adds is kept."""
    model, rank = _sharded(transport), dist.get_rank()
    values = {name: p.detach().clone() for name, p in plain_copy(build_mlp).named_parameters()}
    unsharded = nn.Parameter(torch.zeros(3))
    ways = [
        list(model.parameters()),
        model.parameters(),
        dict(model.named_parameters()),
        dict(model.named_parameters()).values(),
        (p for p in model.parameters()),
        {p for p in model.parameters()},
        model,
        [*model.parameters(), *model.parameters()],
        [unsharded, *model.parameters(), unsharded],
    ]
    for number, params in enumerate(ways):
        writer = number % dist.get_world_size()
        with torch.no_grad(), zp.gather(params, writer=writer):
            for name, parameter in model.named_parameters():
                if rank == writer:  # the others may see it as it was or as it will be
                    same(values[name], parameter, f"{name} inside of {number}", exact=True)
                parameter.add_(number + 1 if rank == writer else 1000.0)
        for name, parameter in model.named_parameters():
            values[name] += number + 1
            same(values[name], parameter, f"{name} after {number}", exact=True)
    single = model.second.weight
    with torch.no_grad(), zp.gather(single, writer=0):
        single[3, 4:6] = 9.0
        single.t()[0].zero_()
    values["second.weight"][3, 4:6] = 9.0
    values["second.weight"].t()[0].zero_()
    for nothing in ([], (), {}, nn.Identity(), unsharded, [unsharded]):
        with zp.gather(nothing, writer=0):
            pass
    for name, parameter in model.named_parameters():
        same(values[name], parameter, name, exact=True)


@everywhere
def test_any_iterable(transport: str, world: int) -> None:
    run(world, _any_iterable, transport)


def _only_the_writer(transport: str) -> None:
    """One rank alone touches anything; it sees its own edits, the others what was there or what came."""
    model, rank = _sharded(transport), dist.get_rank()
    before = zp.full(model.first.weight)
    writer = dist.get_world_size() - 1
    with torch.no_grad(), zp.gather(model, writer=writer):
        if rank == writer:
            for parameter in model.parameters():
                parameter.mul_(2.0)
            assert torch.equal(model.first.weight.detach() + 0, before * 2), "edits are seen by later reads"
            model.first.weight.copy_(model.first.weight + 1)
            nn.init.constant_(model.third.bias, 0.25)
    same(before * 2 + 1, model.first.weight, exact=True)
    same(torch.full((7,), 0.25), model.third.bias, exact=True)


@everywhere
def test_one_rank_edits_alone(transport: str, world: int) -> None:
    run(world, _only_the_writer, transport)


def _without_writer(transport: str) -> None:
    """writer=None: equal edits are kept, different ones raise on all ranks and change nothing."""
    model, rank = _sharded(transport), dist.get_rank()
    before = zp.full(model.second.weight)
    with torch.no_grad(), zp.gather(model.parameters()):
        model.second.weight.add_(torch.ones(17))
    same(before + 1, model.second.weight, exact=True)
    told = ""
    with torch.no_grad(), zp.gather(model.parameters()):
        try:
            model.second.weight.add_(torch.full((17,), float(rank)))
        except zp.errors.DivergenceError as error:
            told = str(error)
    assert "different values to add_ on second.weight" in told
    assert "zp.gather(params, writer=rank)" in told
    same(before + 1, model.second.weight, exact=True)


@everywhere
def test_without_a_writer(transport: str, world: int) -> None:
    run(world, _without_writer, transport)


def _exception(transport: str) -> None:
    """After an exception in the body the model is sharded as before, reads, and trains."""
    plain, model = plain_copy(build_mlp), _sharded(transport)
    for writer in (None, 0):
        try:
            with torch.no_grad(), zp.gather(model, writer=writer):
                model.first.bias.fill_(0.5)
                raise KeyError("in the body")
        except KeyError:
            pass
        with torch.no_grad():
            plain.first.bias.fill_(0.5)
    assert all(zp.is_paged(p) for p in model.parameters())
    same_parameters(plain, model, exact=True)
    for wrong in (dist.get_world_size(), -1):
        try:
            zp.gather(model, writer=wrong)
        except zp.errors.ConfigError as error:
            assert f"writer={wrong}" in str(error)
        else:
            raise AssertionError("a writer that does not exist")
    for wrong in (3, ["first.weight"]):
        try:
            with zp.gather(wrong, writer=0):
                raise AssertionError("not a parameter")
        except zp.errors.ConfigError as error:
            assert "gather takes parameters" in str(error)
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    averaged_backward(plain.parameters(), lambda rank: plain(mlp_batch(0, 0, rank)).square().mean())
    reference.step()
    engine.backward(engine(mlp_batch(0, 0, dist.get_rank())).square().mean())
    engine.step()
    same_parameters(plain, model)
    engine.close()


@everywhere
def test_after_an_exception(transport: str, world: int) -> None:
    run(world, _exception, transport)


def _nested(transport: str) -> None:
    model = _sharded(transport)
    before = zp.full(model.first.weight)
    with torch.no_grad(), zp.gather(model, writer=0):
        model.first.weight.add_(1.0)
        with zp.gather(model.first, writer=0):
            model.first.weight.add_(1.0)
        model.first.weight.add_(1.0)
    same(before + 1 + 1 + 1, model.first.weight, exact=True)
    with torch.no_grad(), zp.gather(model.first, writer=0):
        model.first.weight.add_(1.0)
        told = ""
        try:
            with zp.gather(model, writer=1):
                raise AssertionError("what rank 1 writes would be dropped")
        except zp.errors.ConfigError as error:
            told = str(error)
        assert "'first.weight' is edited by rank 0 in the block around" in told
    same(before + 1 + 1 + 1 + 1, model.first.weight, exact=True)


@everywhere
def test_nested(transport: str, world: int) -> None:
    run(world, _nested, transport)


def _kept() -> None:
    """With keep=True two passes move every page once, whatever the budget is; afterwards the budget holds again."""
    model = zp.shard(plain_copy(build_mlp), {"transport": "collective", "resident_bytes": 64, "readahead": False})
    pager = model.first.weight._node.page.pager
    batch = mlp_batch(0, 0, dist.get_rank())
    with torch.no_grad():
        for keep, factor in ((False, 2), (True, 1)):
            pager.evict_all()
            before = pager.counters.bytes_moved
            with zp.gather(model, keep=keep):
                model(batch)
                model(batch)
            whole = sum(p.numel() * p.element_size() for p in model.parameters())
            assert pager.counters.bytes_moved - before == factor * whole
            assert pager.resident_bytes <= max(p.numel() * p.element_size() for p in model.parameters())
    try:
        zp.gather(model, writer=0, keep=True)
    except zp.errors.ConfigError as error:
        assert "keep=True" in str(error)
    else:
        raise AssertionError("a writer holds one at a time")


def test_kept_until_the_end() -> None:
    run(2, _kept)
