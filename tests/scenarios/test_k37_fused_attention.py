"""nn.MultiheadAttention and the encoder layer, whose fast paths never call the modules that own the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import assert_same_training, run
from tests.scenarios.beside import everywhere, plain_copy, same

WIDTH = 6


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class _Uneven(nn.Module):
    """Keys and values of other widths: three projections instead of one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, kdim=5, vdim=4, batch_first=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found, weights = self.attention(x, x[..., :5], x[..., :4], average_attn_weights=False)
        return torch.cat([found.flatten(1), weights.flatten(1)], 1)


def _layer() -> nn.Module:
    # the gradient of a key's bias is zero but for rounding, which an Adam would blow up
    return nn.TransformerEncoderLayer(WIDTH, 2, 17, dropout=0.1, batch_first=True, bias=False)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 17, dropout=0.0, batch_first=True, activation="gelu", bias=False)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _transformer() -> nn.Module:
    class Both(nn.Transformer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, x.flip(1))

    return Both(WIDTH, 2, 1, 1, 17, dropout=0.0, batch_first=True, bias=False)


def _batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(97 * step + rank))


BUILDS = [_Attention, _Uneven, _layer, _encoder, _transformer]


def _loss(model: Any, x: Tensor) -> Tensor:
    """The squares of a normalised output would have no gradient but noise."""
    return model(x).cos().mean()


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@everywhere
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("build", BUILDS)
def test_training(build, transport: str, world: int) -> None:
    assert_same_training(build, _batch, loss=_loss, optimizer=_sgd, world=world, transport=transport, steps=3)


def _fast_path(transport: str) -> None:
    """train, the fast path of eval, its nested tensors with a mask, train again."""

    def build() -> nn.Module:
        return nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=True
        )

    plain = plain_copy(build)
    model = zp.shard(plain_copy(build), {"transport": transport})
    x = _batch(0, 0, dist.get_rank())
    padding = torch.arange(7).expand(3, 7) >= torch.tensor([7, 5, 2])[:, None]
    for _ in range(2):
        same(plain(x), model(x), "train", exact=True)
        plain.eval()
        model.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                same(plain(x), model(x), f"eval under {mode.__name__}", exact=True)
                same(
                    plain(x, src_key_padding_mask=padding),
                    model(x, src_key_padding_mask=padding),
                    f"padded eval under {mode.__name__}",
                    exact=True,
                )
        plain.train()
        model.train()
    plain(x).square().mean().backward()
    model(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@everywhere
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage.*:UserWarning")
def test_train_eval_train(transport: str, world: int) -> None:
    run(world, _fast_path, transport)
