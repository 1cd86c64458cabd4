"""Sums of gradients, over every pair of dtypes that a gradient and its sum may have."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from zeropage.transport import accumulate

PIECE = 1 << 18  # elements that are added at a time where the dtypes differ
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [0, 1, PIECE, PIECE + 3]
PAIRS = list(product(DTYPES, DTYPES))  # of a sum and its gradients


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize(("sums", "gradients"), PAIRS)
def test_parts_are_added_in_the_precision_of_the_sum(
    sums: torch.dtype, gradients: torch.dtype, scale: float, first: bool
) -> None:
    for length in LENGTHS:
        target = torch.randn(length).to(sums)
        gradient = torch.randn(length).to(gradients)
        exact = scale * gradient.double() + (0 if first else target.double())
        accumulate(target, gradient, scale, first=first)
        roundings = 2 if sums != gradients or not first else 1  # the product's, and that of the sum or of the copy
        info = torch.finfo(sums)
        error = roundings * info.eps * (gradient.double().abs() * scale + exact.abs() + info.smallest_normal)
        assert ((target.double() - exact).abs() <= error).all()


@pytest.mark.parametrize(("sums", "gradients"), PAIRS)
def test_halves_are_added_with_one_rounding(sums: torch.dtype, gradients: torch.dtype) -> None:
    """Two ranks: a product that is exact, so the sum is what the exact one rounds to."""
    target = torch.randn(PIECE + 3).to(gradients).to(sums)
    gradient = torch.randn(PIECE + 3).to(gradients)
    exact = 0.5 * gradient.double() + target.double()
    accumulate(target, gradient, 0.5, first=False)
    if sums == gradients or sums == torch.float32:
        assert torch.equal(target, exact.to(sums))
    else:
        torch.testing.assert_close(target.double(), exact, rtol=torch.finfo(sums).eps, atol=torch.finfo(sums).tiny)


@pytest.mark.parametrize(("sums", "gradients"), PAIRS)
def test_what_stood_there_before_the_first_part_does_not_matter(sums: torch.dtype, gradients: torch.dtype) -> None:
    target = torch.full((PIECE + 3,), torch.nan, dtype=sums)
    gradient = torch.randn(PIECE + 3).to(gradients)
    accumulate(target, gradient, 0.5, first=True)
    torch.testing.assert_close(target, (0.5 * gradient.double()).to(sums), rtol=2 * torch.finfo(sums).eps, atol=1e-7)
