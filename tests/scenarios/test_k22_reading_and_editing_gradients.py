"""`p.grad` is the gradient reduced over ranks and summed over micro-batches: read on one rank, edited on all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_lm, lm_batch, next_token
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same, same_parameters


def _scenario(transport: str) -> None:
    rank = dist.get_rank()
    plain, model = plain_copy(build_lm), plain_copy(build_lm)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), {"transport": transport, "accumulate": 2})
    assert all(p.grad is None for p in model.parameters())
    for micro in range(2):
        averaged_backward(plain.parameters(), lambda r, micro=micro: next_token(plain, lm_batch(0, micro, r)) / 2)
        engine.backward(next_token(engine, lm_batch(0, micro, rank)))
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            # also in the middle of the accumulation: reduced, over the micro-batches so far
            same(q.grad, p.grad, f"gradient of {name} after micro-batch {micro}")
            assert p.grad.shape == p.shape
            assert zp.is_paged(p.grad)
            piece = zp.local(p.grad)
            low = _before(piece.numel())
            same(q.grad.flatten()[low : low + piece.numel()], piece, f"local gradient of {name}")
        dist.barrier()  # all have read before anybody adds more
        if micro == 0:
            engine.step()

    head, norm, bias = model.head.weight, model.norm.weight, model.norm.bias
    with torch.no_grad():
        head.grad.mul_(0.5)
        plain.head.weight.grad.mul_(0.5)
        norm.grad[2] = 7.0
        plain.norm.weight.grad[2] = 7.0
        bias.grad = torch.arange(6.0)
        plain.norm.bias.grad = torch.arange(6.0)
        model.embedding.weight.grad = None
        plain.embedding.weight.grad = None
        model.blocks[0].up.bias.grad.zero_()
        plain.blocks[0].up.bias.grad.zero_()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    reference.step()
    result = engine.step()
    assert result.applied
    assert abs(result.grad_norm - wanted.item()) <= 1e-6 * wanted.item(), "the norm is that of the edited gradients"
    same_parameters(plain, model)
    assert all(p.grad is None for p in model.parameters()), "nothing stale is left for the next step"
    engine.close()


def _before(numel: int) -> int:
    """Where this rank's slice begins: behind those of the lower ranks."""
    sizes = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, numel)
    return sum(sizes[: dist.get_rank()])


@everywhere
def test_read_and_edit(transport: str, world: int) -> None:
    run(world, _scenario, transport)


def _inside(transport: str) -> None:
    """Inside a backward sums are not complete: `p.grad` says so, a tensor hook sees this rank's own part."""
    model = zp.shard(plain_copy(build_lm), {"transport": transport})
    plain = plain_copy(build_lm)
    batch = lm_batch(0, 0, dist.get_rank())
    seen, told = [], []

    def look(gradient: torch.Tensor) -> None:
        seen.append(gradient.clone())
        try:
            model.head.weight.grad  # noqa: B018
        except zp.errors.GradientError as error:
            told.append(str(error))

    model.norm.weight.register_hook(look)
    next_token(plain, batch).backward()
    next_token(model, batch).backward()
    same(plain.norm.weight.grad, seen[0], "this rank's own part")
    assert "'head.weight' was asked for inside a backward pass" in told[0]
    with pytest.raises(zp.errors.GradientError, match=r"'norm\.weight' has shape \(5,\), it must be \(6,\)"):
        model.norm.weight.grad = torch.zeros(5)
    dist.barrier()  # the others may still be sending this rank its part


@everywhere
def test_inside_a_backward(transport: str, world: int) -> None:
    run(world, _inside, transport)


def _halved_by_hook(transport: str) -> None:
    """A hook that changes the gradient takes effect, as in torch."""
    plain, model = plain_copy(build_lm), zp.shard(plain_copy(build_lm), {"transport": transport})
    for one in (plain, model):
        one.head.weight.register_hook(lambda gradient: gradient * 0.5)
    averaged_backward(plain.parameters(), lambda r: next_token(plain, lm_batch(0, 0, r)))
    next_token(model, lm_batch(0, 0, dist.get_rank())).backward()
    same(plain.head.weight.grad, model.head.weight.grad)


@everywhere
def test_tensor_hooks(transport: str, world: int) -> None:
    run(world, _halved_by_hook, transport)


def _late(transport: str) -> str:
    """The first rank adds its second micro-batch before the others have looked at the first."""
    plain, model = plain_copy(build_lm), zp.shard(plain_copy(build_lm), {"transport": transport})
    rank, told = dist.get_rank(), ""
    averaged_backward(plain.parameters(), lambda r: next_token(plain, lm_batch(0, 0, r)))
    next_token(model, lm_batch(0, 0, rank)).backward()
    if rank == 0:
        next_token(model, lm_batch(0, 1, rank)).backward()
    if transport == "shared":  # messages need all ranks to take part: there the others look while it adds
        dist.barrier()
    if rank != 0:
        try:
            same(plain.head.weight.grad, model.head.weight.grad, "of the first micro-batch alone")
        except zp.errors.GradientError as error:
            told = str(error)
        next_token(model, lm_batch(0, 1, rank)).backward()
    averaged_backward(plain.parameters(), lambda r: next_token(plain, lm_batch(0, 1, r)))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    same_parameters(plain, model, exact=False)
    return told


@everywhere
def test_a_late_look_is_right_or_an_error(transport: str, world: int) -> None:
    for told in run(world, _late, transport)[1:]:
        if told or transport == "shared":
            assert "'head.weight' was read after another rank had gone on" in told
