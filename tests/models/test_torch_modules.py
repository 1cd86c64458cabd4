"""torch's own modules and autograd's own tools train as in plain torch, bit for bit on two ranks over `shared`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.harness import assert_same_training

WIDTH = 8


def _sequence(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Wrapped(nn.Module):
    """A module, and how to call it on a batch of sequences."""

    def __init__(self, make: Callable[[], nn.Module], call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = make()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


class Doubled(torch.autograd.Function):
    """A custom function that saves the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight.t(), 2 * x.flatten(0, -2).t() @ grad.flatten(0, -2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def _plain(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def _first(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)[0]


def _channels_first(module: nn.Module, x: Tensor) -> Tensor:
    return module(x.transpose(1, 2))


def _attend(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, x, x)[0]


def _cell(module: nn.Module, x: Tensor) -> Tensor:
    state = x.new_zeros(x.shape[0], WIDTH)
    for time in range(x.shape[1]):
        state = module(x[:, time], state)
    return state


def _train_then_fast_path(module: nn.Module, x: Tensor) -> Tensor:
    """Evaluation takes torch's fused path, between two training calls."""
    module.eval()
    with torch.no_grad():
        module(x)
    module.train()
    return module(x)


def _in_bags(module: nn.Module, x: Tensor) -> Tensor:
    return module((x.abs().flatten(1) * 3).long().clamp(max=9))


def _two_inputs(module: nn.Module, x: Tensor) -> Tensor:
    return module(x, x.flip(1))


def _checkpointed(module: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    return checkpoint(module, x.requires_grad_(), use_reentrant=reentrant)


def _doubled(module: nn.Module, x: Tensor) -> Tensor:
    return Doubled.apply(x, module.weight)


def _autocast(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module(x).float()


def _functional_call(module: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(module, dict(module.named_parameters()), (x,))


def _penalised(module: nn.Module, x: Tensor) -> Tensor:
    """Double backward: the loss holds a gradient."""
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    return slope


def _inference_between(module: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        module(x)
    return module(x)


def _saved_on_cpu(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return module(x)


def _vmapped(module: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(module)(x)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))


def _weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def _spectral_norm() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "linear": (partial(nn.Linear, WIDTH, 3), _plain),
    "multihead attention": (partial(nn.MultiheadAttention, WIDTH, 2, batch_first=True), _attend),
    "multihead attention, other widths": (
        partial(nn.MultiheadAttention, WIDTH, 2, batch_first=True, kdim=WIDTH, vdim=WIDTH, bias=False), _attend,
    ),
    "transformer encoder layer": (_encoder_layer, _train_then_fast_path),
    "lstm": (partial(nn.LSTM, WIDTH, 6, 2, batch_first=True, bidirectional=True), _first),
    "gru cell": (partial(nn.GRUCell, WIDTH, WIDTH), _cell),
    "conv1d": (partial(nn.Conv1d, WIDTH, 4, 3, padding=1), _channels_first),
    "transposed conv1d": (partial(nn.ConvTranspose1d, WIDTH, 4, 3), _channels_first),
    "batch norm": (partial(nn.BatchNorm1d, WIDTH), _channels_first),
    "layer norm": (partial(nn.LayerNorm, WIDTH), _plain),
    "group norm": (partial(nn.GroupNorm, 2, WIDTH), _channels_first),
    "prelu": (partial(nn.PReLU, WIDTH), _channels_first),
    "embedding bag": (partial(nn.EmbeddingBag, 10, 4), _in_bags),
    "bilinear": (partial(nn.Bilinear, WIDTH, WIDTH, 3), _two_inputs),
    "tied": (Tied, _plain),
    "checkpoint, re-entrant": (_mlp, partial(_checkpointed, reentrant=True)),
    "checkpoint": (_mlp, partial(_checkpointed, reentrant=False)),
    "custom function that saves the weight": (partial(nn.Linear, WIDTH, WIDTH, bias=False), _doubled),
    "autocast": (_mlp, _autocast),
    "weight norm": (_weight_norm, _plain),
    "spectral norm": (_spectral_norm, _plain),
    "functional_call": (_mlp, _functional_call),
    "double backward": (_mlp, _penalised),
    "inference mode between": (_mlp, _inference_between),
    "save_on_cpu": (_mlp, _saved_on_cpu),
    "vmap": (_mlp, _vmapped),
}  # fmt: skip


def build(name: str) -> nn.Module:
    return Wrapped(*CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_bit_equal_on_two_ranks(name: str) -> None:
    assert_same_training(partial(build, name), _sequence, steps=3, optimizer=_sgd)


@pytest.mark.parametrize("name", CASES)
def test_over_messages_with_hardly_any_room(name: str) -> None:
    """Every touch gathers, every frame is taken back at once and poisoned."""
    config = {"resident_bytes": 0, "readahead": False, "poison_frames": True}
    assert_same_training(
        partial(build, name), _sequence, steps=3, optimizer=_sgd, transport="collective", config=config, exact=True
    )


def _functional_gradients(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss made from torch.func.grad with respect to the input, over the sharded weights."""
    return torch.func.grad(lambda x: F.softplus(model(x)).sum())(batch).square().mean()


def test_func_grad() -> None:
    assert_same_training(_mlp, _sequence, steps=3, optimizer=_sgd, loss=_functional_gradients, call_engine=False)
