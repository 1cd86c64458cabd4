"""torch's own operator database: every operator gives the same bits when its arguments are paged leaves.

Each sample runs twice, on plain leaves and on paged ones, forward, backward and in place. Frames are
poisoned and none may stay resident (see `leaves`), so an operator that reads a frame after its call, or
keeps one, differs. What differs on purpose stands in the tables below, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import zeropage as zp
from tests.operators.leaves import Leaves, copy_of, map_tensors, paged_leaves

PARTS = 8
SAMPLES = 8
"""How many samples of an operator run in the fast tests, spread over its list; the slow ones run all."""

# Their result is whatever memory held before.
UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

pytestmark = pytest.mark.filterwarnings("ignore")  # samples use deprecated and beta operators


@dataclass(frozen=True)
class Outcome:
    """What one call gave: outputs and gradients, flat, as plain dense tensors or Python values."""

    outputs: list[Any]
    gradients: list[Tensor | None]


@pytest.fixture(scope="module")
def leaves() -> Iterator[Leaves]:
    with paged_leaves() as made:
        yield made


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_equal_plain_ones(leaves: Leaves, part: int) -> None:
    check_operators(leaves, op_db[part::PARTS], SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_equal_plain_ones_on_all_samples(leaves: Leaves, part: int) -> None:
    check_operators(leaves, op_db[part::PARTS], None)


def check_operators(leaves: Leaves, operators: Sequence[OpInfo], samples: int | None) -> None:
    differences = [
        f"{operator.full_name}: {difference}"
        for operator in operators
        for difference in differences_of(operator, leaves, samples)
    ]
    assert not differences, "\n".join(differences)


def differences_of(operator: OpInfo, leaves: Leaves, limit: int | None) -> list[str]:
    """What is wrong with `operator` on paged leaves; empty if nothing is."""
    found = []
    for sample in samples_of(operator, limit):
        try:
            plain = call(operator, sample, None)
        except Exception:
            continue  # not a sample for this build of torch
        try:
            paged = call(operator, sample, leaves)
        except Exception as error:
            found.append(f"raises {type(error).__name__}: {error}")
            continue
        found += compare(plain, paged)
    return found


def samples_of(operator: OpInfo, limit: int | None) -> list[SampleInput]:
    dtypes = operator.supported_dtypes("cpu")
    if not dtypes:
        return []  # an operator of another device
    dtype = torch.float32 if torch.float32 in dtypes else min(dtypes, key=str)
    needed = operator.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    samples = list(operator.sample_inputs("cpu", dtype, requires_grad=needed))
    return samples if limit is None else samples[:: -(-len(samples) // limit) or 1]


# -- one call


def call(operator: OpInfo, sample: SampleInput, leaves: Leaves | None) -> Outcome:
    """Forward and backward of one sample on copies of its tensors: paged ones if `leaves` are given."""
    made: list[Tensor] = []
    again: dict[int, Tensor] = {}

    def leaf(tensor: Tensor) -> Tensor:
        if id(tensor) not in again:
            again[id(tensor)] = leaf_of(tensor, leaves)
            made.append(again[id(tensor)])
        return again[id(tensor)]

    inputs, args, kwargs = (map_tensors(part, leaf) for part in (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(0)
    output = operator(inputs, *args, **kwargs)
    if leaves is not None:
        leaves.evict()
    outputs = flat(output)
    backward([out for out in outputs if isinstance(out, Tensor) and out.requires_grad])
    if leaves is not None:
        leaves.evict()
    names_only = operator.name in UNDEFINED
    return Outcome(
        [described(out) if names_only else value_of(out) for out in outputs],
        [None if tensor.grad is None else value_of(tensor.grad) for tensor in made],
    )


def leaf_of(tensor: Tensor, leaves: Leaves | None) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor
    if leaves is not None:
        return leaves.make(tensor)
    return copy_of(tensor).requires_grad_(tensor.requires_grad)


def flat(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in flat(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in flat(item)]
    return [tree]


def backward(outputs: list[Tensor]) -> None:
    """With a cotangent of its own for every element."""
    if outputs:
        torch.autograd.backward(outputs, [cotangent(out) for out in outputs])


def cotangent(output: Tensor) -> Tensor:
    made = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape).to(output.dtype)
    return made if output.layout == torch.strided else made.to_sparse(layout=output.layout)


def value_of(out: Any) -> Any:
    """A plain dense copy."""
    if not isinstance(out, Tensor):
        return out
    out = out.detach()
    if out.layout != torch.strided:
        out = out.to_dense()
    if out.is_quantized:
        out = out.dequantize()
    return zp.full(out) if zp.is_paged(out) else out.resolve_conj().resolve_neg().clone()


def described(out: Any) -> Any:
    return (out.shape, out.dtype, out.device) if isinstance(out, Tensor) else out


# -- comparison


def compare(plain: Outcome, paged: Outcome) -> list[str]:
    found = []
    for what, ours, theirs in (("output", plain.outputs, paged.outputs), ("gradient", plain.gradients, paged.gradients)):
        if len(ours) != len(theirs):
            found.append(f"{len(theirs)} {what}s, not {len(ours)}")
            continue
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            difference = difference_of(one, other)
            if difference:
                found.append(f"{what} {index} {difference}")
    return found


def difference_of(one: Any, other: Any) -> str:
    """What is different between two values; empty if nothing is, to the bit (any NaN equals any other)."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        same = type(one) is type(other) and (one == other or one != one)
        return "" if same else f"is {other!r}, not {one!r}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"is {tuple(other.shape)} {other.dtype}, not {tuple(one.shape)} {one.dtype}"
    if torch.equal(one, other):
        return ""
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return "has other values"
    if torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
        return ""
    scale = one.abs().nan_to_num().max()
    return f"differs by {float((one - other).abs().max() / scale):.1e} of its greatest value"
