"""What is trained: a Llama of a given size, and a chain of tiny blocks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["SHAPES", "Llama", "Shape", "Tiny", "build", "tokens"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes; heads are 64 wide."""

    layers: int
    width: int
    inner: int
    vocabulary: int

    @property
    def numel(self) -> int:
        block = 4 * self.width**2 + 3 * self.width * self.inner + 2 * self.width
        return self.layers * block + 2 * self.vocabulary * self.width + self.width


SHAPES = {
    "test": Shape(2, 128, 256, 512),
    "124M": Shape(12, 768, 2048, 25600),
    "210M": Shape(12, 1024, 2816, 28000),
    "350M": Shape(22, 1024, 2816, 32000),
    "1B": Shape(16, 2048, 5632, 32000),
    "8B": Shape(32, 4096, 14336, 32000),
}


class Block(nn.Module):
    """Attention with rotary positions and a gated MLP, each behind an RMSNorm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attention_norm(x)
        batch, length, width = y.shape
        q, k, v = (
            linear(y).view(batch, length, width // 64, 64).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Gives the loss of the next token. `checkpointing` recomputes each block in backward."""

    def __init__(self, shape: Shape, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text[:, :-1])
        cos, sin = _angles(x.shape[1], x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False) if self.checkpointing else block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), text[:, 1:].flatten())


class TinyBlock(nn.Module):
    """One small Linear beside a residual path: nearly nothing but the cost of running a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.linear(x), alpha=0.02)  # 200 of them must not blow rounding errors up


class Tiny(nn.Module):
    def __init__(self, count: int = 200, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TinyBlock(width) for _ in range(count))
        self.width = width

    def forward(self, text: Tensor) -> Tensor:
        x = (text[:, : self.width].to(self.blocks[0].linear.weight.dtype) / 1000).sin()
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def build(name: str, *, checkpointing: bool = False) -> nn.Module:
    """The model of that name, with torch's own initial values from the current seed."""
    return Tiny() if name == "tiny" else Llama(SHAPES[name], checkpointing=checkpointing)


def tokens(name: str, count: int, step: int, rank: int) -> Tensor:
    """One sequence, other ones for every step and rank, of `count` inputs: (1, count + 1)."""
    vocabulary = 1000 if name == "tiny" else SHAPES[name].vocabulary
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (4, 64) if name == "tiny" else (1, count + 1)
    return torch.randint(0, vocabulary, shape, generator=generator)


def described(name: str) -> dict[str, Any]:
    return {} if name == "tiny" else asdict(SHAPES[name]) | {"numel": SHAPES[name].numel}


def _angles(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64)
    angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
