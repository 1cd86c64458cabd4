"""Toy models with sizes that no number of ranks divides, and a batch for each rank, step and micro-batch.

A `build_*` function makes a model from torch's present seed; `*_batch(step, micro, rank)` gives what this
rank is fed, so that ranks see different data; a loss is a function of (model, batch).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 17
WIDTH = 6


def generator(step: int, micro: int, rank: int) -> torch.Generator:
    """Random numbers that depend on nothing else."""
    return torch.Generator().manual_seed(1_000_003 * step + 1_009 * micro + rank)


# --- losses -----------------------------------------------------------------------------------------


def mean_square(model: nn.Module, batch: object) -> Tensor:
    """For any model whose output is one tensor."""
    output = model(batch)
    assert isinstance(output, Tensor)
    return output.float().square().mean()


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """For language models: cross entropy of each next token."""
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# --- MLP --------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Three linear layers, 7 -> 17 -> 17 -> 7."""

    def __init__(self, wide: int = 17) -> None:
        super().__init__()
        self.first = nn.Linear(7, wide)
        self.second = nn.Linear(wide, wide)
        self.third = nn.Linear(wide, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def build_mlp() -> nn.Module:
    return MLP()


def mlp_batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(5, 7, generator=generator(step, micro, rank))


# --- LM ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm causal attention and a feed-forward layer.

    Queries, keys and values have no bias: the gradient of a key's bias is zero but for rounding, and an
    Adam would blow that noise up to full steps, so that no tolerance could hold.
    """

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 17)
        self.down = nn.Linear(17, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LM(nn.Module):
    """Embedding 17 x 6, two blocks, a norm and a head, which may be tied to the embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens))


def build_lm() -> nn.Module:
    return LM(tied=False)


def build_tied_lm() -> nn.Module:
    return LM(tied=True)


def lm_batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randint(VOCABULARY, (3, 11), generator=generator(step, micro, rank))


# --- MoE --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routed:
    """Inputs of a mixture of experts, and the experts that they may go to."""

    x: Tensor
    experts: tuple[int, ...]


class MoE(nn.Module):
    """Four equal experts; each row goes to the best of those that its batch allows (top-1)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(7, 4)
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.head = nn.Linear(7, 5)

    def forward(self, batch: Routed) -> Tensor:
        scores = self.router(batch.x).softmax(-1)
        allowed = torch.tensor(batch.experts)
        choice = allowed[scores[:, allowed].argmax(-1)]
        mixed = torch.zeros_like(batch.x)
        for number in choice.unique().tolist():
            rows = choice == number
            # Only experts that were chosen run: other ranks may run others.
            mixed = mixed.index_put((rows,), self.experts[number](batch.x[rows]) * scores[rows, number, None])
        return self.head(mixed)


def build_moe() -> nn.Module:
    return MoE()


def moe_batch(step: int, micro: int, rank: int) -> Routed:
    """Rank 0 may use experts 0 and 1, each other rank only expert 2; expert 3 is never used."""
    return Routed(mlp_batch(step, micro, rank), (0, 1) if rank == 0 else (2,))


# --- TwoTower ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A batch with text, and perhaps images."""

    tokens: Tensor
    image: Tensor | None


class TwoTower(nn.Module):
    """An image tower and a text tower, added and sent through a joint block; images may be absent."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Linear(7, WIDTH)
        self.text = nn.Embedding(VOCABULARY, WIDTH)
        self.joint = Block()

    def forward(self, batch: Pair) -> Tensor:
        x = self.text(batch.tokens)
        if batch.image is not None:
            x = x + self.vision(batch.image)[:, None]
        return self.joint(x)


def build_two_tower() -> nn.Module:
    return TwoTower()


def two_tower_batch(step: int, micro: int, rank: int) -> Pair:
    """One rank has images and the others none, taking turns."""
    tokens = lm_batch(step, micro, rank)
    image = torch.randn(3, 7, generator=generator(step, micro, rank)) if (step + rank) % 2 == 0 else None
    return Pair(tokens, image)
