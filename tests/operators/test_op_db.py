"""torch's own operator database: every operator gives the same bits when its arguments are paged leaves.

Each sample runs twice, on plain leaves and on paged ones, forward, backward and in place. Frames are
poisoned and none may stay resident (see `leaves`), so an operator that reads a frame after its call, or
keeps one, differs. What differs on purpose stands in the tables below, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import zeropage as zp
from tests.operators.leaves import Leaves, copy_of, map_tensors, paged_leaves

PARTS = 8
SAMPLES = 3
"""How many samples of an operator run in the fast tests, spread over its list; the slow ones run all."""

# Their result is whatever memory held before.
UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}

# torch reads the memory of an index tensor before anything is dispatched.
REFUSED = {"tensor_split": RuntimeError}

# Refused where they would write running statistics to a parameter.
STATISTICS = {"native_batch_norm", "nn.functional.batch_norm"}

# Refused in place or with out=, since they change the shape of what they write (addbmm: that of a number;
# matmul: that of a vector, for a moment).
RESHAPED = {
    "addbmm", "as_strided", "as_strided.partial_views", "matmul", "nn.functional.dropout3d", "resize_",
    "resize_as_", "squeeze", "squeeze.multiple", "t", "transpose", "unsqueeze",
}  # fmt: skip

# torch's own code assigns a new tensor to its out= when an argument is of any subclass: the result is lost.
LOSES_OUT = {"linalg.matrix_rank", "linalg.matrix_rank.hermitian"}

TOLERANCE = 1e-5
"""The greatest difference of the operators in `LAST_BITS`, relative to the greatest value: some sixty roundings, since
LAPACK's other ways to singular values differ by more or fewer of them from one processor to the next."""

LAST_BITS = {
    # torch takes another road for any tensor subclass: in formulas of autograd ...
    "masked_fill", "prod", "masked.prod",
    # ... and by asking for singular vectors where it needs only the values
    "norm.nuc", "linalg.cond", "linalg.norm", "linalg.matrix_norm", "linalg.svdvals",
    # LAPACK: depends on where in memory the argument lies
    "linalg.lstsq", "linalg.lstsq.grad_oriented", "linalg.pinv.singular",
    # in place with a smaller operand: vector kernels run over whole slices, not over each row
    "atan2", "float_power", "igamma", "igammac", "logaddexp", "logaddexp2", "pow",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # samples use deprecated and beta operators


@dataclass(frozen=True)
class Outcome:
    """What one call gave: flat lists of plain dense tensors and Python values."""

    outputs: list[Any]
    gradients: list[Tensor | None] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    """The arguments after a call that writes to one of them."""
    random_state: Tensor | None = None


@pytest.fixture(scope="module")
def leaves() -> Iterator[Leaves]:
    with paged_leaves() as made:
        yield made


@pytest.mark.parametrize("part", range(1))
def test_operators_equal_plain_ones(leaves: Leaves, part: int) -> None:
    check_operators(leaves, op_db[part::PARTS], SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_equal_plain_ones_on_all_samples(leaves: Leaves, part: int) -> None:
    check_operators(leaves, op_db[part::PARTS], None)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.slow
def test_complex_operators_equal_plain_ones(leaves: Leaves, part: int) -> None:
    check_operators(leaves, op_db[part::PARTS], SAMPLES, torch.complex64)


@pytest.mark.slow
def test_linear_algebra_on_complex_numbers_equals_plain(leaves: Leaves) -> None:
    """Its kernels take conjugate views of their own (see [Note: lazy bits])."""
    names = ("linalg.", "pinverse", "svd", "conj", "mH", "H", "vdot", "inner", "real", "imag", "resolve")
    operators = [operator for operator in op_db if operator.name.startswith(names)]
    check_operators(leaves, operators, 2, torch.complex64)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_operators_raise(leaves: Leaves, name: str) -> None:
    (operator,) = (operator for operator in op_db if operator.full_name == name)
    refusals = 0
    for sample in samples_of(operator, None):
        try:
            call(operator, sample, leaves)
        except REFUSED[name]:
            refusals += 1
    assert refusals


def check_operators(
    leaves: Leaves, operators: Sequence[OpInfo], limit: int | None, dtype: torch.dtype | None = None
) -> None:
    differences = [
        f"{operator.full_name}: {difference}"
        for operator in operators
        if operator.full_name not in REFUSED
        for difference in differences_of(operator, leaves, samples_of(operator, limit, dtype))
    ]
    assert not differences, "\n".join(differences)


def differences_of(operator: OpInfo, leaves: Leaves, samples: list[SampleInput]) -> list[str]:
    """What is wrong with `operator` on paged leaves; empty if nothing is."""
    found = []
    tolerant = operator.full_name in LAST_BITS
    for sample in samples:
        tolerance = TOLERANCE if tolerant or is_complex(sample) else 0.0
        for way in (call, call_in_place, call_with_out):
            try:
                plain = way(operator, sample, None)
            except Exception:
                continue  # not a sample for this build of torch, or the operator does not work this way
            try:
                paged = way(operator, sample, leaves)
            except Exception as error:
                may = STATISTICS if way is call else RESHAPED
                if operator.full_name in may and isinstance(error, RuntimeError):
                    continue
                found.append(f"{way.__name__} raises {type(error).__name__}: {error}")
                continue
            found += [f"{way.__name__}: {what}" for what in compare(plain, paged, tolerance)]
    return found


def samples_of(operator: OpInfo, limit: int | None, dtype: torch.dtype | None = None) -> list[SampleInput]:
    """At most `limit` samples of a dtype: float32, or the first that the operator has."""
    known = operator.supported_dtypes("cpu")
    if not known or (dtype is not None and dtype not in known):
        return []
    if dtype is None:
        dtype = torch.float32 if torch.float32 in known else min(known, key=str)
    needed = operator.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    samples = list(operator.sample_inputs("cpu", dtype, requires_grad=needed))
    return samples if limit is None else samples[:: -(-len(samples) // limit) or 1]


def is_complex(sample: SampleInput) -> bool:
    """Complex kernels round differently in their vector and their scalar loops."""
    return isinstance(sample.input, Tensor) and sample.input.dtype.is_complex


# -- one call


class Arguments:
    """Copies of a sample's tensors: paged leaves if `leaves` are given, else plain ones."""

    def __init__(self, sample: SampleInput, leaves: Leaves | None) -> None:
        self._leaves = leaves
        self._copies: dict[int, Tensor] = {}
        self.input, self.args, self.kwargs = (
            map_tensors(part, self._copy) for part in (sample.input, sample.args, sample.kwargs)
        )
        torch.default_generator.manual_seed(0)

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._copies.values())

    def _copy(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = leaf_of(tensor, self._leaves)
        return self._copies[id(tensor)]


def call(operator: OpInfo, sample: SampleInput, leaves: Leaves | None) -> Outcome:
    """Forward and backward."""
    given = Arguments(sample, leaves)
    outputs = flat(operator(given.input, *given.args, **given.kwargs))
    if leaves is not None:
        require_own_memory(outputs, leaves)
        leaves.evict()
    backward([out for out in outputs if isinstance(out, Tensor) and out.requires_grad])
    if leaves is not None:
        leaves.evict()
    undefined = operator.name in UNDEFINED
    return Outcome(
        [described(out) if undefined else value_of(out) for out in outputs],
        gradients=[None if tensor.grad is None else value_of(tensor.grad) for tensor in given.tensors],
        random_state=torch.get_rng_state(),
    )


@torch.no_grad()
def call_in_place(operator: OpInfo, sample: SampleInput, leaves: Leaves | None) -> Outcome:
    given = Arguments(sample, leaves)
    output = operator.inplace_variant(given.input, *given.args, **given.kwargs)
    if output is not given.input:
        raise AssertionError("an in-place operator must return its argument")
    return Outcome(
        [value_of(output)],
        written=[value_of(tensor) for tensor in given.tensors],
        random_state=torch.get_rng_state(),
    )


@torch.no_grad()
def call_with_out(operator: OpInfo, sample: SampleInput, leaves: Leaves | None) -> Outcome:
    given = Arguments(sample, leaves)
    if not operator.supports_out or operator.full_name in LOSES_OUT:
        raise TypeError(f"{operator.full_name} takes no out=")
    shapes = operator(given.input, *given.args, **given.kwargs)
    if operator.name in UNDEFINED or not isinstance(shapes, Tensor) or shapes.layout != torch.strided:
        raise TypeError(f"{operator.full_name} returns several tensors, or no values")
    out = leaf_of(torch.zeros_like(value_of(shapes)), leaves)
    torch.default_generator.manual_seed(0)
    returned = operator(given.input, *given.args, **given.kwargs, out=out)
    if returned is not out:
        raise AssertionError("an operator must return its out=")
    return Outcome(
        [value_of(out)],
        written=[value_of(tensor) for tensor in given.tensors],
        random_state=torch.get_rng_state(),
    )


def leaf_of(tensor: Tensor, leaves: Leaves | None) -> Tensor:
    if tensor.layout != torch.strided:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copy_of(tensor).requires_grad_(tensor.requires_grad) if leaves is None else leaves.make(tensor)


def require_own_memory(outputs: list[Any], leaves: Leaves) -> None:
    """A result that is an alias of a frame would change it when it is written."""
    frames = {frame.untyped_storage().data_ptr() for frame in leaves.frames() if frame.numel()}
    for out in outputs:
        if isinstance(out, Tensor) and not zp.is_paged(out) and out.layout == torch.strided:
            assert out.untyped_storage().data_ptr() not in frames, "the result shares memory with a frame"


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
    return zp.full(out) if zp.is_paged(out) else out.resolve_conj().resolve_neg().clone()


# These have no comparison.
WIDER = {
    torch.complex32: torch.complex64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}  # fmt: skip


def described(out: Any) -> Any:
    return (out.shape, out.dtype, out.device) if isinstance(out, Tensor) else out


# -- comparison


def compare(plain: Outcome, paged: Outcome, tolerance: float) -> list[str]:
    found = []
    for what in ("outputs", "gradients", "written"):
        ours, theirs = getattr(plain, what), getattr(paged, what)
        if len(ours) != len(theirs):
            found.append(f"{len(theirs)} {what}, not {len(ours)}")
            continue
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            difference = difference_of(one, other, tolerance)
            if difference:
                found.append(f"{what}[{index}] {difference}")
    if not torch.equal(plain.random_state, paged.random_state):
        found.append("another number of random numbers was drawn")
    return found


def difference_of(one: Any, other: Any, tolerance: float) -> str:
    """What is different between two values; empty if nothing is, to the bit (any NaN equals any other)."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        same = type(one) is type(other) and (one == other or one != one)
        return "" if same else f"is {other!r}, not {one!r}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"is {described(other)}, not {described(one)}"
    if one.dtype in WIDER:
        one, other = one.to(WIDER[one.dtype]), other.to(WIDER[one.dtype])
    if torch.equal(one, other):
        return ""
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return "has other values"
    scale = float(one.abs().nan_to_num().max())
    if torch.allclose(one, other, rtol=0, atol=tolerance * scale, equal_nan=True):
        return ""
    return f"differs by {float((one - other).abs().nan_to_num().max()) / scale:.1e} of its greatest value"
