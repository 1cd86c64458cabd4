"""A sharded model runs without an engine, beside one, before one, and as often as each rank likes."""

from __future__ import annotations

import torch
import torch.distributed as dist

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_lm, lm_batch, next_token
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same, same_parameters


def _beside(transport: str) -> None:
    """Two models under init, one of them given to an engine."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain, plain_reference = build_lm(), build_lm()
    torch.manual_seed(0)
    with zp.init({"transport": transport}):
        model, reference = build_lm(), build_lm()
    batch = lm_batch(0, 0, rank)
    same(plain(batch), model(batch), "before the engine", exact=True)
    for _ in range(rank + 1):  # ranks differ in how often they look
        with torch.no_grad():
            same(plain_reference(batch), reference(batch), "the other model", exact=True)
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        averaged_backward(plain.parameters(), lambda r, step=step: next_token(plain, lm_batch(step, 0, r)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            same(plain_reference(batch), reference(batch), "the other model", exact=True)
        engine.backward(next_token(engine, lm_batch(step, 0, rank)))
        engine.step()
    same_parameters(plain, model)
    same_parameters(plain_reference, reference, exact=True)
    engine.close()


@everywhere
def test_beside_an_engine(transport: str, world: int) -> None:
    run(world, _beside, transport)


def _inference_only(transport: str) -> None:
    """An engine without optimizer runs; asked for a step it says what is missing."""
    plain, batch = plain_copy(build_lm), lm_batch(0, 0, dist.get_rank())
    engine = zp.Engine(plain_copy(build_lm), config={"transport": transport})
    engine.eval()
    with torch.no_grad():
        same(plain(batch), engine(batch), exact=True)
    try:
        engine.step()
    except zp.errors.ConfigError as error:
        assert "without an optimizer" in str(error)
        assert "zp.Engine(model, optimizer)" in str(error)
    else:
        raise AssertionError("a step without an optimizer")
    engine.close()


@everywhere
def test_inference_engine(transport: str, world: int) -> None:
    run(world, _inference_only, transport)


def _left_out(transport: str) -> None:
    """A model built outside of init is not sharded: nothing is on globally, also while another one is."""
    with zp.init({"transport": transport}):
        build_lm()
    left_out = build_lm()
    assert not any(zp.is_paged(p) for p in left_out.parameters())
    sharded = zp.shard(build_lm(), {"transport": transport})
    assert all(zp.is_paged(p) for p in sharded.parameters())
    also_left_out = build_lm()
    assert not any(zp.is_paged(p) for p in also_left_out.parameters())


@everywhere
def test_leaving_a_model_out(transport: str, world: int) -> None:
    run(world, _left_out, transport)
