"""Parameters are used by methods other than forward, by properties, by children called directly, by outsiders."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.harness import assert_same_training
from tests.harness.models import LM, lm_batch
from tests.scenarios.beside import everywhere


class _Doors(LM):
    def __init__(self) -> None:
        super().__init__(tied=False)

    def forward(self, tokens: Tensor) -> Tensor:
        raise AssertionError("forward is not used here")

    @property
    def penalty(self) -> Tensor:
        """Computed from weights alone."""
        return self.head.weight.square().sum() + self.embedding.weight[2:5].abs().mean()

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            following = self.head(self.encode(tokens)[:, -1]).argmax(-1)
            tokens = torch.cat([tokens, following[:, None]], 1)
        return tokens


class _Wrapper(nn.Module):
    """What trainers put around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = _Doors()


def _encode(model: _Wrapper, tokens: Tensor) -> Tensor:
    return model.lm.encode(tokens).cos().mean()


def _property(model: _Wrapper, tokens: Tensor) -> Tensor:
    return model.lm.penalty * tokens.float().mean()


def _child(model: _Wrapper, tokens: Tensor) -> Tensor:
    return model.lm.blocks[1](model.lm.embedding(tokens)).square().mean()


def _generated(model: _Wrapper, tokens: Tensor) -> Tensor:
    longer = model.lm.generate(tokens, 3)
    return model.lm.head(model.lm.encode(longer)).square().mean()


def _outsider(model: _Wrapper, tokens: Tensor) -> Tensor:
    """Code that only holds the parameters."""
    weights = dict(model.named_parameters())
    x = nn.functional.embedding(tokens, weights["lm.embedding.weight"])
    return torch.einsum("bsw,vw->bsv", x, weights["lm.head.weight"]).square().mean()


WAYS: dict[str, Callable[[_Wrapper, Tensor], Tensor]] = {
    "encode": _encode,
    "property": _property,
    "child": _child,
    "generated": _generated,
    "outsider": _outsider,
}


@everywhere
@pytest.mark.parametrize("way", WAYS)
def test_training(way: str, transport: str, world: int) -> None:
    assert_same_training(
        _Wrapper, lm_batch, loss=WAYS[way], world=world, transport=transport, steps=2, call_engine=False
    )
