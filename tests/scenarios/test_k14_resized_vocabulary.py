"""Embedding and head are replaced by larger ones after sharding: same rows on all ranks, sharded, trained, saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import LM, WIDTH, lm_batch, next_token
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same_parameters

ROWS = 19


def _resize(model: LM, seed: int) -> None:
    """As model code does it: new modules, the old rows copied, weights tied anew."""
    torch.manual_seed(seed)
    old = model.embedding
    new = nn.Embedding(ROWS, WIDTH)
    with torch.no_grad():
        new.weight[: old.num_embeddings] = old.weight
    model.embedding = new
    model.head = nn.Linear(WIDTH, ROWS, bias=False)
    model.head.weight = model.embedding.weight


def _build() -> LM:
    return LM(tied=True)


def _scenario(transport: str, folder: Path, init: bool) -> None:
    rank = dist.get_rank()
    plain = plain_copy(_build)
    torch.manual_seed(0)
    if init:
        with zp.init({"transport": transport}):
            model = _build()
    else:
        model = zp.shard(_build(), {"transport": transport})
    _resize(plain, seed=100)
    _resize(model, seed=100 + rank)  # every rank draws other rows: the first rank's are taken
    assert model.embedding.weight is model.head.weight
    assert zp.is_paged(model.head.weight)
    assert model.embedding.num_embeddings == model.embedding.weight.shape[0] == model.head.out_features == ROWS
    same_parameters(plain, model)

    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2):
        _step(plain, reference, engine, step)
    same_parameters(plain, model)

    engine.save(folder)
    for step in range(2, 4):
        _step(plain, reference, engine, step)
    engine.close()

    torch.manual_seed(5)
    resumed = zp.shard(_build(), {"transport": transport})
    _resize(resumed, seed=6)
    again = zp.Engine(resumed, torch.optim.AdamW(resumed.parameters(), lr=1e-2))
    again.load(folder)
    assert resumed.embedding.weight is resumed.head.weight
    for step in range(2, 4):
        again.backward(next_token(again, lm_batch(step, 0, rank) + 2))
        again.step()
    same_parameters(plain, resumed)
    again.close()


def _step(plain: nn.Module, reference: torch.optim.Optimizer, engine: zp.Engine, step: int) -> None:
    """Tokens run up to the new rows."""
    averaged_backward(plain.parameters(), lambda rank: next_token(plain, lm_batch(step, 0, rank) + 2))
    reference.step()
    reference.zero_grad()
    engine.backward(next_token(engine, lm_batch(step, 0, dist.get_rank()) + 2))
    assert engine.step().applied


@everywhere
@pytest.mark.parametrize("init", [True, False])
def test_new_rows(init: bool, transport: str, world: int, tmp_path: Path) -> None:
    run(world, _scenario, transport, tmp_path, init)
