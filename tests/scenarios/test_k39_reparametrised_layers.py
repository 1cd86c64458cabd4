"""weight_norm (old and new), spectral_norm, own parametrizations, and RNNs with their flat lists of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.harness import assert_same_training
from tests.scenarios.beside import everywhere


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _conv_old() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        first = nn.utils.weight_norm(nn.Conv1d(3, 5, 3))
    return nn.Sequential(first, nn.Tanh(), nn.ConvTranspose1d(5, 3, 3))


def _conv_new() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Conv1d(3, 5, 3)), nn.Tanh(), nn.Conv1d(5, 3, 3))


def _spectral_old() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Conv1d(3, 5, 3)), nn.Tanh(), nn.Conv1d(5, 3, 3))


def _spectral_new() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Conv1d(3, 5, 3)), nn.Tanh(), nn.Conv1d(5, 3, 3))


def _own() -> nn.Module:
    layer = nn.Linear(11, 11)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return layer


class _Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(11, 7, num_layers=2, bidirectional=True)
        self.out = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


def _lstm() -> nn.Module:
    return _Recurrent("LSTM")


def _gru() -> nn.Module:
    return _Recurrent("GRU")


BUILDS = [_conv_old, _conv_new, _spectral_old, _spectral_new, _own, _lstm, _gru]


def _batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(4, 3, 11, generator=torch.Generator().manual_seed(97 * step + rank))


def _names(model: nn.Module, engine: Any) -> list[str]:
    return list(model.state_dict())


@everywhere
@pytest.mark.parametrize("build", BUILDS)
def test_training(build, transport: str, world: int) -> None:
    for init in (False, True):
        done = assert_same_training(build, _batch, world=world, transport=transport, steps=3, init=init, inspect=_names)
        with torch.random.fork_rng(devices=[]):
            wanted = list(build().state_dict())
        assert all(rank.extra == wanted for rank in done.ranks)
