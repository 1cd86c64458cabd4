"""A sharded parameter always tells the truth about itself, and computing with it gives the full values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import VOCABULARY, WIDTH, build_lm, build_tied_lm
from tests.scenarios.beside import everywhere, plain_copy, same


def _metadata(transport: str) -> None:
    for build in (build_lm, build_tied_lm):
        plain = plain_copy(build)
        torch.manual_seed(0)
        with zp.init({"transport": transport}):
            model = build()
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert zp.is_paged(p), name
            assert isinstance(p, nn.Parameter), name
            assert isinstance(p, zp.PagedTensor), name
            for what in (
                "shape",
                "ndim",
                "dtype",
                "device",
                "layout",
                "requires_grad",
                "is_leaf",
                "itemsize",
                "nbytes",
            ):
                assert getattr(p, what) == getattr(q, what), (name, what)
            for what in (
                "size",
                "numel",
                "nelement",
                "element_size",
                "dim",
                "stride",
                "is_contiguous",
                "storage_offset",
            ):
                assert getattr(p, what)() == getattr(q, what)(), (name, what)
            assert len(p) == len(q)
            assert p.is_floating_point()
            assert p.untyped_storage().nbytes() == q.untyped_storage().nbytes()
        assert model.embedding.num_embeddings == model.embedding.weight.shape[0] == VOCABULARY
        assert str(model) == str(plain)
        same(plain.head.weight, model.head.weight, exact=True)
        dist.barrier()  # over collectives, a rank that lets go of its model serves nobody


@everywhere
def test_metadata(transport: str, world: int) -> None:
    run(world, _metadata, transport)


def _printing(transport: str) -> None:
    """A printout names the parameter and its true shape, on one rank alone, and moves nothing."""
    model = zp.shard(plain_copy(build_lm), {"transport": transport})
    if dist.get_rank() == 0:
        text = repr(model.head.weight)
        assert "head.weight" in text
        assert f"({VOCABULARY}, {WIDTH})" in text
        assert "torch.float32" in text
        assert f"{model.head.weight}" == text


@everywhere
def test_printing_on_one_rank(transport: str, world: int) -> None:
    run(world, _printing, transport)


def _values(transport: str) -> None:
    """Outside of any forward: arithmetic, indexing, iteration, comparison, numpy. Never a placeholder's values."""
    plain = plain_copy(build_lm)
    model = zp.shard(plain_copy(build_lm), {"transport": transport})
    w, v = plain.head.weight, model.head.weight
    with torch.no_grad():
        same(w * 2 + 1, v * 2 + 1, exact=True)
        same(w @ w.T, v @ v.T, exact=True)
        same(w[3], v[3], exact=True)
        same(w[1:4, ::2], v[1:4, ::2], exact=True)
        same(w[w > 0], v[v > 0], exact=True)
        same(torch.cat([w, w]), torch.cat([v, v]), exact=True)
        same(torch.stack(list(w)), torch.stack(list(v)), exact=True)
        same(w.norm(), v.norm(), exact=True)
        same(torch.linalg.svdvals(w), torch.linalg.svdvals(v), exact=False)
        same(w.to(torch.bfloat16), v.to(torch.bfloat16), exact=True)
        same(torch.zeros(3, WIDTH) + w[:3], torch.zeros(3, WIDTH) + v[:3], exact=True)
    assert torch.equal(v, w)
    assert torch.allclose(v, w)
    assert (v.detach().numpy() == w.detach().numpy()).all()
    assert v.tolist() == w.tolist()
    assert v[2, 3].item() == w[2, 3].item()
    assert v.sum().item() == w.sum().item()
    assert bool((v == v).all())
    assert [tuple(row.shape) for row in v] == [(WIDTH,)] * VOCABULARY
    assert torch.empty_like(v).shape == torch.zeros_like(v).shape == w.shape
    vector, wanted = (nn.utils.parameters_to_vector(m.parameters()) for m in (model, plain))
    same(wanted, vector, exact=True)
    dist.barrier()


@everywhere
def test_values_outside_of_forward(transport: str, world: int) -> None:
    run(world, _values, transport)
