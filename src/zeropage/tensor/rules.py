"""What kind of operator is this? Read from its schema and its tags, never from a list of names alone.

The answers decide what happens when the operator meets a page (see `dispatch` and `writes`). Each is worked
out once per operator and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from zeropage.tensor.trees import tensors_in

aten = torch.ops.aten

__all__ = [
    "STATISTICS",
    "Kind",
    "WriteRule",
    "careful",
    "composite_kernel",
    "direct",
    "is_pointwise",
    "kind_of",
    "returned_targets",
    "targets",
    "write_rule",
]


class Kind(Enum):
    """How an operator is served when an argument is paged."""

    READ = "read"  # give it the full values
    VIEW = "view"  # stay lazy: remember the recipe
    CAST = "cast"  # stay lazy, but a copy in meaning
    FACTORY = "factory"  # needs metadata only
    WRITE = "write"  # changes an argument
    COMPOSITE = "composite"  # let its own kernel take it apart first


class WriteRule(Enum):
    """What an operator that writes needs."""

    POINTWISE = "pointwise"  # each element by itself: the own slice is enough
    RANDOM = "random"  # draws as many numbers as the target has elements
    OTHER = "other"  # looks at several elements: gather, apply, keep the own slice
    REFUSE = "refuse"  # changes shape or storage behind autograd's back


# Outputs of these alias their input although no schema says so.
_UNDECLARED_VIEWS = {
    "aten::_unsafe_view",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
    "aten::unsafe_chunk",
    "aten::_reshape_alias",
}
# A wrapper cannot carry the conjugate or negative bit, so these are copies.
_LAZY_BITS = {aten._conj.default, aten._neg_view.default}
_FACTORIES = {
    "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided",
}  # fmt: skip
# Composite operators that never return their argument: faster, and equal to the bit, when left whole.
_WHOLE = {
    aten.linear.default, aten.layer_norm.default, aten.rms_norm.default, aten.matmul.default,
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.group_norm.default,
    aten.scaled_dot_product_attention.default, aten.bilinear.default, aten.embedding_bag.default,
}  # fmt: skip
# Pointwise operators that carry no tag.
_POINTWISE = {
    "copy_", "fill_", "zero_", "masked_fill_", "masked_fill", "eq_", "ne_", "lt_", "le_", "gt_", "ge_",
    "_to_copy", "clone", "where", "zeros_like", "ones_like", "full_like", "empty_like",
}  # fmt: skip
# Steps of optimizers on lists of tensors.
_FUSED_STEPS = {"_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"}
# Arguments 3 and 4 are written if argument 5 is true, although no schema says so.
STATISTICS = {aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}
_REFUSED = ("set_", "resize_", "resize_as_", "as_strided_", "set_data", "_resize_output_")
_DIRECT = {
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.embedding.default: torch.embedding,
    aten.convolution.default: torch.convolution,
    aten.linear.default: torch._C._nn.linear,
}


def _base_name(func: OpOverload) -> str:
    return func._schema.name.split("::")[1]


@cache
def kind_of(func: OpOverload) -> Kind:
    schema = func._schema
    if _is_mutable(func):
        return Kind.WRITE
    if composite_kernel(func) is not None and func not in _WHOLE:
        return Kind.COMPOSITE
    if func in _LAZY_BITS or func is aten._to_copy.default:
        return Kind.CAST
    if func.is_view or schema.name in _UNDECLARED_VIEWS:
        return Kind.VIEW
    if func.namespace == "aten" and _base_name(func) in _FACTORIES:
        return Kind.FACTORY
    return Kind.READ


@cache
def direct(func: OpOverload) -> Callable[..., Any]:
    """The quickest callable for `func` on positional arguments (torch's own C function for the hot ones)."""
    found: Any = _DIRECT.get(func, func if func in _WHOLE else careful(func))
    return found  # type: ignore[no-any-return]


@cache
def careful(func: OpOverload) -> Callable[..., Any]:
    """`func` for use inside dispatch.

    [Note: lazy bits] Inside dispatch torch leaves out the keys that resolve lazy conjugates and negatives. A
    kernel made of other operators (`linalg_pinv`) may take such views itself, and would read them without
    their bit. For those kernels the keys are put back where complex numbers are at work.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    alone = any(has(func.name(), key) for key in ("CPU", "CUDA"))
    if alone and "linalg_" not in func.name():  # those of linear algebra call others too
        return func

    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(tensor.dtype.is_complex for tensor in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
            excluded = excluded.remove(key)
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            return func(*args, **kwargs)

    return call


@cache
def composite_kernel(func: OpOverload) -> Callable[..., Any] | None:
    """The kernel that takes a composite operator apart, if that is all it has.

    [Note: composites] In inference mode composite operators reach dispatch whole, and some return their
    argument (dropout in eval, contiguous). Their own kernel splits them; Python decompositions would choose
    other kernels, and other last bits.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    if not has(name, "CompositeImplicitAutograd") or has(name, "CPU") or has(name, "CUDA"):
        return None
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return lambda *args, **kwargs: func._op_dk(key, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Target:
    """An argument that an operator writes."""

    index: int
    name: str

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.name in kwargs:
            return kwargs[self.name]
        return args[self.index] if self.index < len(args) else None


@cache
def targets(func: OpOverload) -> tuple[Target, ...]:
    arguments = func._schema.arguments
    if func.namespace == "c10d":  # carries no alias annotations
        return (Target(0, arguments[0].name),) if func._schema.name.endswith("_") else ()
    return tuple(
        Target(index, argument.name)
        for index, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def returned_targets(func: OpOverload) -> tuple[int | None, ...]:
    """For each result, the place among `targets` of the argument that it is; None for a new tensor."""
    places = {}
    for place, target in enumerate(targets(func)):
        alias = func._schema.arguments[target.index].alias_info
        for name in alias.before_set if alias is not None else ():
            places[name] = place
    found: list[int | None] = []
    for result in func._schema.returns:
        names = result.alias_info.before_set if result.alias_info is not None else ()
        found.append(next((places[name] for name in names if name in places), None))
    return tuple(found)


def _is_mutable(func: OpOverload) -> bool:
    return func._schema.is_mutable or func.namespace == "c10d"


@cache
def write_rule(func: OpOverload) -> WriteRule:
    if torch.Tag.inplace_view in func.tags or _base_name(func) in _REFUSED:
        return WriteRule.REFUSE
    if torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket is aten.random_:
        return WriteRule.RANDOM
    if is_pointwise(func):
        return WriteRule.POINTWISE
    return WriteRule.OTHER


@cache
def is_pointwise(func: OpOverload) -> bool:
    """Whether each output element depends on the input elements at its own place alone."""
    name = _base_name(func)
    if name in _POINTWISE or torch.Tag.pointwise in func.tags or name.rstrip("_") in _FUSED_STEPS:
        return True
    if name.startswith("_foreach_"):
        single = name.removeprefix("_foreach_").rstrip("_")
        return single != "max" and (f"{single}_" in _POINTWISE or _some_pointwise(_overloads(single)))
    return _is_mutable(func) and _some_pointwise(each for each in _overloads(name) if _has_arguments_of(func, each))


def _some_pointwise(overloads: Iterable[OpOverload]) -> bool:
    return any(torch.Tag.pointwise in each.tags for each in overloads)


def _overloads(name: str) -> list[OpOverload]:
    """Those of the operator that does out of place what the one of that name does."""
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    elif name.startswith("__i"):
        name = "__" + name[3:]
    packet = getattr(aten, name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def _has_arguments_of(func: OpOverload, other: OpOverload) -> bool:
    """Whether `func` takes the arguments of `other`, perhaps a place for the result besides."""
    taken = [argument.name for argument in func._schema.arguments if not argument.is_out]
    return taken == [argument.name for argument in other._schema.arguments]
