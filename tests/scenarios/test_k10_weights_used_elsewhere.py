"""A weight that is used outside its own module's forward is gathered there, and its gradient counted once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import assert_same_training
from tests.harness.models import LM, lm_batch
from tests.scenarios.beside import everywhere


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """A fused loss: it takes the head's weight and never makes all the logits at once."""
    hidden, targets = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    total = hidden.new_zeros(())
    for rows, wanted in zip(hidden.split(7), targets.split(7), strict=True):
        total = total + F.cross_entropy(F.linear(rows, weight), wanted, reduction="sum")
    return total / targets.numel()


class _FusedLM(LM):
    """Takes its loss inside forward, and never calls its head."""

    def forward(self, tokens: Tensor) -> Tensor:
        return chunked_cross_entropy(self.encode(tokens), self.head.weight, tokens)


class _SiblingLM(LM):
    """Hands its embedding to functional code beside its modules, and calls the head as well."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encode(tokens)
        return chunked_cross_entropy(hidden, self.head.weight + 0.5 * self.embedding.weight, tokens) + (
            self.head(hidden).square().mean()
        )


def _fused() -> LM:
    return _FusedLM(tied=False)


def _fused_tied() -> LM:
    return _FusedLM(tied=True)


def _sibling() -> LM:
    return _SiblingLM(tied=False)


def _inside(model: LM, tokens: Tensor) -> Tensor:
    return model(tokens)


def _outside(model: LM, tokens: Tensor) -> Tensor:
    """The trainer's own loss, after the forward."""
    return chunked_cross_entropy(model.encode(tokens), model.head.weight, tokens)


@everywhere
@pytest.mark.parametrize("build", [_fused, _fused_tied, _sibling])
def test_inside_the_forward(build, transport: str, world: int) -> None:
    assert_same_training(build, lm_batch, loss=_inside, world=world, transport=transport, steps=2)


@everywhere
@pytest.mark.parametrize("build", [_fused, _fused_tied])
def test_outside_the_forward(build, transport: str, world: int) -> None:
    assert_same_training(build, lm_batch, loss=_outside, world=world, transport=transport, steps=2, call_engine=False)


def _norm_penalty(model: LM, tokens: Tensor) -> Tensor:
    """Weights alone, no forward at all: a penalty on the product of two of them."""
    return (model.head.weight @ model.blocks[0].out.weight).square().sum() + torch.linalg.norm(model.norm.weight)


@everywhere
def test_no_forward_at_all(transport: str, world: int) -> None:
    assert_same_training(
        _fused, lm_batch, loss=_norm_penalty, world=world, transport=transport, steps=2, call_engine=False
    )
