"""What a rank does by itself: memory and arithmetic. All ranks do it at once, as in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from zeropage.config import MIB

__all__ = ["Layers", "Matmul", "memory_works"]

_SQUARE = 1024
_WIDTH, _DEPTH, _MOST_ROWS = 2048, 4, 512
_STREAM = 64 * MIB  # far more than caches hold


def memory_works(nbytes: int = _STREAM) -> Iterator[tuple[str, int, Callable[[int], object]]]:
    """The name of a work over arrays of `nbytes`, the bytes that it reads and writes, and the work."""
    one, other = (torch.ones(nbytes // 4, dtype=torch.float32, device="cpu") for _ in range(2))
    half = torch.ones(nbytes // 4, dtype=torch.bfloat16, device="cpu")
    count = len(one)
    yield "copy", 8 * count, lambda _: one.copy_(other)
    yield "add in place", 12 * count, lambda _: one.add_(other)
    yield "cast bf16 to fp32", 6 * count, lambda _: one.copy_(half)


class Matmul:
    """A product of two square matrices."""

    flop = 2 * _SQUARE**3

    def __init__(self, dtype: torch.dtype) -> None:
        self._one, self._other = (torch.randn(_SQUARE, _SQUARE, device="cpu").to(dtype) for _ in range(2))

    def once(self, index: int) -> object:
        return self._one @ self._other


class Layers:
    """Forward and backward of some linear layers that do not fit in caches, at the number of tokens of a step.

    More than 512 tokens go no faster, so no more are taken.
    """

    def __init__(self, dtype: torch.dtype, tokens: int) -> None:
        rows = min(tokens, _MOST_ROWS)
        self.flop = 6 * rows * _DEPTH * _WIDTH**2
        self._weights = [
            (torch.randn(_WIDTH, _WIDTH, device="cpu") / _WIDTH**0.5).to(dtype).requires_grad_() for _ in range(_DEPTH)
        ]
        self._input = torch.randn(rows, _WIDTH, device="cpu").to(dtype).requires_grad_()

    def once(self, index: int) -> object:
        value = self._input
        for weight in self._weights:
            value = F.linear(value, weight)
        return torch.autograd.grad(value, [self._input, *self._weights], torch.ones_like(value))
