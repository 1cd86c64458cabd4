"""What each kind of operator does when it meets a page, writes aside (those are in `writes`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from zeropage.errors import UnsupportedOperationError
from zeropage.page import CastNode, Node, Spec, ViewNode
from zeropage.tensor import stepping, writes
from zeropage.tensor.base import Paged, wrap
from zeropage.tensor.rules import STATISTICS, Kind, careful, composite_kernel, direct, kind_of
from zeropage.tensor.slices import item_of
from zeropage.tensor.trees import any_paged, paged_in, plain

aten = torch.ops.aten

__all__ = ["Handler", "handler_of"]

Handler = Callable[[type[Paged], Any, tuple[Any, ...], dict[str, Any]], Any]

# Views whose result runs over the same elements in the same order.
_ORDER_KEEPING = {
    aten.view.default, aten.detach.default, aten.alias.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten._unsafe_view.default, aten._reshape_alias.default,
    aten.view_as_real.default,
}  # fmt: skip
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}


def handler_of(func: Any) -> tuple[Handler | None, Callable[..., Any]]:
    """The handler of an operator, or None for "give it the full values", and what to call then."""
    if not isinstance(func, OpOverload):
        return _higher_order, func
    kind = kind_of(func)
    if func.overloadpacket in STATISTICS:
        return _with_statistics, func
    if kind is Kind.READ and func._schema.name.startswith("aten::_foreach_"):
        return _foreach, func
    if kind is Kind.READ:
        return None, direct(func)
    if func in _SAME:
        return _same, func
    if kind is Kind.VIEW:
        return _view_of(func), func
    return _HANDLERS[kind], func


def _higher_order(cls: type[Paged], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*plain(args), **plain(kwargs))


def _read(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return careful(func)(*plain(args), **plain(kwargs))


def _with_statistics(cls: type[Paged], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch norms write to their running statistics in training, which no schema tells."""
    written = paged_in(args[3:5])
    if written and args[5]:
        raise UnsupportedOperationError(
            f"{func._schema.name} would write running statistics to {written[0]._node.page.name!r}, differently on "
            "each rank. Keep them as buffers, or train with training=False."
        )
    return _read(func, args, kwargs)


def _foreach(cls: type[Paged], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One tensor of the list at a time: all of them at once might be the whole model."""
    stepping_now = stepping.applies(args, kwargs)
    if stepping_now:
        made = stepping.on_slices(cls, func, args, kwargs)
        if made is not NotImplemented:
            return made
    found, count = [], len(args[0])
    for index in range(count):
        one, options = item_of(args, index, count), item_of(kwargs, index, count)
        made = stepping.on_slices(cls, func, one, options) if stepping_now else NotImplemented
        found += _read(func, one, options) if made is NotImplemented else made
    return found


def _composite(cls: type[Paged], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kernel = composite_kernel(func)
    assert kernel is not None
    return kernel(*args, **kwargs)


def _factory(cls: type[Paged], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if not isinstance(source, Paged):
        return _read(func, args, kwargs)
    if stepping.applies(args, kwargs):
        made = stepping.on_slices(cls, func, args, kwargs)
        if made is not NotImplemented:
            return made
    spec = source._node.spec
    # Memory that nobody touches costs nothing; only its metadata is looked at.
    stand_in = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    return func(stand_in, *plain(args[1:]), **plain(kwargs))


def _same(cls: type[Paged], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    return wrap(cls, source._node) if isinstance(source, Paged) else _read(func, args, kwargs)


def _view_of(func: OpOverload) -> Handler:
    """The handler of one view operator."""
    token = object()  # stands for `func` in keys: operators are slow to hash

    def view(cls: type[Paged], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        if not isinstance(source, Paged):
            return _read(func, args, kwargs)
        node = source._node
        rest = args[1:]
        key: Hashable = token
        if rest or kwargs:
            if any_paged(rest):
                rest = plain(rest)
            key = (token, tuple(map(_frozen, rest)), *sorted(kwargs.items()))
        kid = node.kids.get(key)
        if kid is None:
            kid = _new_view(node, func, rest, kwargs)
            node.keep(key, kid)
        if isinstance(kid, tuple):
            return [wrap(cls, part) for part in kid]
        return wrap(cls, kid)

    return view


def _frozen(argument: Any) -> Hashable:
    return tuple(argument) if isinstance(argument, list) else argument


def _new_view(node: Node, func: OpOverload, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Node | tuple[Node, ...]:
    spec = node.spec
    made = func(spec.meta(), *rest, **kwargs)
    if isinstance(made, (list, tuple)):

        def pick(base: torch.Tensor, index: int) -> Any:
            return func(base, *rest, **kwargs)[index]

        return tuple(
            ViewNode(node, Spec.of(part, spec.device), partial(pick, index=index)) for index, part in enumerate(made)
        )
    in_order = node.in_order and func in _ORDER_KEEPING and _is_dense(spec) and not spec.dtype.is_complex
    return ViewNode(node, Spec.of(made, spec.device), lambda base: func(base, *rest, **kwargs), in_order=in_order)


def _is_dense(spec: Spec) -> bool:
    """Row-major without gaps: flat order is the logical order."""
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _cast(cls: type[Paged], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if not isinstance(source, Paged):
        return _read(func, args, kwargs)
    if stepping.applies(args, kwargs):
        made = stepping.on_slices(cls, func, args, kwargs)
        if made is not NotImplemented:
            return made
    node = source._node
    if func is aten._conj.default:
        return _copy_node(cls, node, torch.conj_physical, Spec.of(torch.empty_like(node.spec.meta()), node.spec.device))
    if func is aten._neg_view.default:
        return _copy_node(cls, node, torch.neg, Spec.of(torch.empty_like(node.spec.meta()), node.spec.device))
    options = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking", "layout")}
    if _changes_more_than_dtype(kwargs, node.spec):
        return _read(func, args, kwargs)
    meta = func(node.spec.meta(), **options)
    return _copy_node(cls, node, lambda base: aten._to_copy.default(base, **options), Spec.of(meta, node.spec.device))


def _changes_more_than_dtype(kwargs: dict[str, Any], spec: Spec) -> bool:
    device = kwargs.get("device")
    layout = kwargs.get("layout")
    return (
        (device is not None and torch.device(device) != spec.device)
        or bool(kwargs.get("pin_memory"))
        or (layout is not None and layout != torch.strided)
        or kwargs.get("dtype") in (None, spec.dtype)
    )


def _copy_node(cls: type[Paged], node: Node, convert: Callable[[torch.Tensor], torch.Tensor], spec: Spec) -> Paged:
    return wrap(cls, CastNode(node, spec, convert))


def _write(cls: type[Paged], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return writes.write(func, args, kwargs)


_HANDLERS: dict[Kind, Handler] = {
    Kind.CAST: _cast,
    Kind.FACTORY: _factory,
    Kind.WRITE: _write,
    Kind.COMPOSITE: _composite,
}
