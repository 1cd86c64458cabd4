"""Several forwards before one backward (contrastive, preference losses), with one under no_grad in between."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import assert_same_training
from tests.harness.models import build_mlp, build_tied_lm, lm_batch, mlp_batch, next_token
from tests.scenarios.beside import everywhere


def _difference(model: nn.Module, x: Tensor) -> Tensor:
    one = model(x[:3])
    with torch.no_grad():
        target = model(x)[2:]  # of other rows: else the last bias has no gradient but noise, which Adam blows up
    other = model(x[2:])
    return (one - other).square().mean() + 0.1 * (one - target).square().mean()


def _preference(model: nn.Module, tokens: Tensor) -> Tensor:
    chosen, rejected = next_token(model, tokens[:1]), next_token(model, tokens[1:])
    with torch.inference_mode():
        baseline = next_token(model, tokens)
    return -F.logsigmoid(rejected - chosen) + 0.01 * (chosen - baseline.clone()).square()


CASES = {"difference": (build_mlp, mlp_batch, _difference), "preference": (build_tied_lm, lm_batch, _preference)}


@everywhere
@pytest.mark.parametrize("case", CASES)
def test_one_backward(case: str, transport: str, world: int) -> None:
    build, batches, loss = CASES[case]
    for settings in ({}, {"resident_bytes": 0}):
        assert_same_training(build, batches, loss=loss, world=world, transport=transport, steps=3, config=settings)
