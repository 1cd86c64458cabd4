"""Operators that write to a page: each rank runs the same write and keeps its own slice.

    rule        when                                           what is done                       moves
    slices      elementwise, and the target runs over its      on the own slices alone            nothing
                page in flat order
    scratch     elementwise on any other view                  on a full-size scratch that holds  nothing
                                                               the own slice only
    random      draws random numbers                           draw all of them, keep the slice   nothing
                (a page without values may have to wait: see draws)
    full        everything else                                gather privately, apply, keep      a gather

Nothing is ever applied in memory that other ranks can see, apart from the own slice inside a write batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch._ops import OpOverload

from zeropage.errors import UnsupportedOperationError
from zeropage.page import CastNode, Node, Page, ViewNode
from zeropage.tensor import c10d, identity, randomness
from zeropage.tensor.agreement import agreed, agreed_batch
from zeropage.tensor.base import Paged
from zeropage.tensor.copies import keep_own, private_copy, stand_in
from zeropage.tensor.rules import WriteRule, careful, returned_targets, targets, write_rule
from zeropage.tensor.slices import can_slice, cut, cut_lists, item_of
from zeropage.tensor.trees import paged_in, plain, rebuild, tensors_in

aten = torch.ops.aten

__all__ = ["write"]

# These give every element of the target a new value: what was there before does not matter.
_OVERWRITES = {"aten::copy_", "aten::fill_", "aten::zero_"}
_DRAWS = {
    aten.normal_, aten.uniform_, aten.exponential_, aten.bernoulli_, aten.random_, aten.log_normal_, aten.cauchy_,
    aten.geometric_,
}  # fmt: skip


def _overwrites(func: OpOverload, target: Paged, kwargs: dict[str, Any]) -> bool:
    return func._schema.name in _OVERWRITES or func.overloadpacket in _DRAWS or target is kwargs.get("out")


def write(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes to some of its arguments, at least one argument being paged."""
    if func.namespace == "c10d":
        return c10d.run(func, args, kwargs)
    rule = write_rule(func)
    written = [target.of(args, kwargs) for target in targets(func)]
    paged = paged_in(written)
    if rule is WriteRule.REFUSE and (paged or func.overloadpacket is aten.set_):
        if _keeps_size(func, args, kwargs):  # what many operators do to their out= first
            return args[0]
        if _replaces(func, args):
            identity.set_data(args[0], args[1])
            return args[0]
        raise _refusal(func, paged or paged_in([args, kwargs]))
    if not paged:
        return careful(func)(*plain(args), **plain(kwargs))
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        return _unscale(func, args)
    if any(isinstance(tensor._node.root, CastNode) for tensor in paged):
        made = _write_casts(func, args, kwargs, paged)
    elif any(tensor._node.page.edits is not None for tensor in paged):
        made = _write_edits(func, args, kwargs, paged)
    elif any(isinstance(value, (list, tuple)) for value in written):
        made = _write_lists(func, args, kwargs, paged)
    else:
        made = _write_pages(func, rule, args, kwargs, paged)
    return _result(func, written, made)


def _result(func: OpOverload, written: list[Any], made: Any) -> Any:
    """What the operator returns: the objects that it was given where it wrote to them, else what it made."""
    places = returned_targets(func)
    if len(places) == 0:
        return None
    if len(places) == 1:
        return made if places[0] is None else written[places[0]]
    return tuple(part if place is None else written[place] for part, place in zip(made, places, strict=True))


def _keeps_size(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is a resize to the size that the tensor has."""
    if func is not aten.resize_.default or kwargs.get("memory_format") is not None:
        return False
    return isinstance(args[0], Paged) and tuple(args[0].shape) == tuple(args[1])


def _replaces(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether this is `p.set_(t)` with a `t` like `p` (torch's parametrize does it): `p` stands for `t` from now on."""
    if func is not aten.set_.source_Tensor or not isinstance(args[0], Paged):
        return False
    one, other = args[:2]
    same = one.shape == other.shape and one.stride() == other.stride()
    return bool(same and one.dtype == other.dtype and one.device == other.device)


def _refusal(func: OpOverload, paged: Sequence[Paged]) -> UnsupportedOperationError:
    names = ", ".join(repr(tensor._node.page.name) for tensor in paged)
    return UnsupportedOperationError(
        f"{func._schema.name} would change or share the shape or storage of {names}, which a sharded "
        "parameter cannot follow. Assign a new value (p.data = t), or use the out-of-place operator."
    )


# -- the rules


def _write_pages(
    func: OpOverload, rule: WriteRule, args: tuple[Any, ...], kwargs: dict[str, Any], paged: list[Paged]
) -> Any:
    target = paged[0]
    if len(paged) == 1 and _waits(func, args, kwargs, target):
        return None
    for each in paged:
        _require_values(each, overwritten=_overwrites(func, each, kwargs))
    if rule is WriteRule.POINTWISE and len(paged) == 1 and can_slice(target) and _fits(args, kwargs, target):
        return _on_slices(func, args, kwargs, target)
    seen = paged_in([args, kwargs])
    overlapping = any(t._node.page is target._node.page and t is not target for t in seen)
    reads = rule is WriteRule.RANDOM and not _overwrites(func, target, kwargs)  # may draw as its values say
    gathers = rule is WriteRule.OTHER or overlapping or reads or len(paged) > 1
    return _on_copies(func, args, kwargs, paged, gathers=gathers, draws=rule is WriteRule.RANDOM)


def _waits(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], target: Paged) -> bool:
    """Whether this gives numbers to a page that has no values, and was put off. See `draws`."""
    node = target._node
    page, rest = node.page, args[1:]
    draws, fills = func.overloadpacket in _DRAWS, func._schema.name in ("aten::fill_", "aten::zero_")
    if page.written or not (draws or fills) or page.edits is not None or kwargs.get("generator") is not None:
        return False
    if args[0] is not target or [*tensors_in([rest, kwargs])]:
        return False
    # what waits must not keep the page alive
    pager, spec, view = page.pager, page.spec, _view_of(node)

    def make(page: Page) -> None:
        copy = private_copy(page, gathers=False)
        with pager.writing([page], f"{func._schema.name} on {page.name}, which waited"):
            with randomness.of_first_rank(pager, enabled=draws):
                func(view(page.shaped(copy)), *rest, **kwargs)
            keep_own({page: copy})

    def skip() -> None:
        with randomness.of_first_rank(pager, enabled=True):
            func(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device), *rest, **kwargs)

    if fills:
        return page.pager.draws.put_off_part(page, make)
    whole = node.in_order and node.spec.shape == spec.shape and node.spec.stride == spec.stride
    return whole and page.pager.draws.put_off(page, make, skip)


def _view_of(node: Node) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes of the whole page the view that `node` is, without a reference to the page."""
    makes: list[Callable[[torch.Tensor], torch.Tensor]] = []
    while isinstance(node, ViewNode):
        makes.insert(0, node.make)
        node = node.parent
    return lambda whole: reduce(lambda value, make: make(value), makes, whole)


def _fits(args: tuple[Any, ...], kwargs: dict[str, Any], target: Paged) -> bool:
    """Whether the operands of an elementwise operator give the target's shape. If not, an out= is resized."""
    if target is not kwargs.get("out"):
        return True
    operands = [tensor.shape for tensor in tensors_in(args)]
    return not operands or torch.broadcast_shapes(*operands) == target.shape


def _require_values(target: Paged, *, overwritten: bool) -> None:
    """A page without values can be overwritten as a whole, but not updated."""
    page = target._node.page
    whole = target._node.spec.shape.numel() == page.layout.numel
    if not page.written and not (whole and overwritten):
        page.pager.fault(page)  # raises, naming the page


def _on_slices(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], target: Paged) -> Any:
    node = target._node
    page = node.page
    others = rebuild([args, kwargs], lambda t: t if t is target else cut(t, node))
    with agreed_batch([page], func, args, kwargs, target):
        own = page.own()
        ready = rebuild(others, lambda t: own if t is target else t)
        return func(*ready[0], **ready[1])


def _on_copies(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    paged: list[Paged],
    *,
    gathers: bool,
    draws: bool,
) -> Any:
    """Apply the operator to private full copies of the targets' pages; keep the own slices."""
    pages = list(dict.fromkeys(tensor._node.page for tensor in paged))
    pager = pages[0].pager
    copies = {page: private_copy(page, gathers=gathers) for page in pages}
    ready = rebuild([args, kwargs], partial(stand_in, copies=copies))
    with agreed_batch(pages, func, args, kwargs, paged[0]):
        with randomness.of_first_rank(pager, enabled=draws):
            made = careful(func)(*ready[0], **ready[1])
        _settle_stand_ins(func, (args, kwargs), ready, copies)
        keep_own(copies)
    return made


def _settle_stand_ins(
    func: OpOverload, given: Sequence[Any], ready: Sequence[Any], copies: dict[Page, torch.Tensor]
) -> None:
    """What torch may have done to the tensors that it wrote to, besides writing.

    It resizes an out= (and the argument of some in-place operators) that has the wrong shape, and may leave
    the conjugate in place of the values, with a bit set (`linalg_lu_solve`).
    """
    for target in targets(func):
        ours, theirs = tensors_in(target.of(*given)), tensors_in(target.of(*ready))
        for tensor, given_to in zip(ours, theirs, strict=True):
            if not isinstance(tensor, Paged):
                continue
            page = tensor._node.page
            if tensor.shape != given_to.shape:
                raise UnsupportedOperationError(
                    f"{func._schema.name} would resize {page.name!r} from {tuple(tensor.shape)} to "
                    f"{tuple(given_to.shape)}, which a sharded parameter cannot follow. Give it arguments that "
                    "fit, or assign the result: p.data = t."
                )
            if given_to.is_conj() or given_to.is_neg():
                tensor._node.apply(page.shaped(copies[page])).copy_(given_to.clone())


def _write_lists(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], paged: list[Paged]) -> Any:
    """`_foreach_` and `_fused_` operators; their first list is a target."""
    first = args[0]
    if write_rule(func) is not WriteRule.POINTWISE or not all(can_slice(tensor) for tensor in first):
        return _write_one_by_one(func, args, kwargs)
    nodes = [tensor._node for tensor in first]
    pages = list(dict.fromkeys(tensor._node.page for tensor in paged))
    ready = cut_lists(args, nodes), cut_lists(kwargs, nodes)
    with agreed_batch(pages, func, args, kwargs, paged[0]):
        return func(*ready[0], **ready[1])


def _write_one_by_one(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The lists hold plain tensors too, or parameters that cannot be cut (those without dimensions)."""
    count = len(args[0])
    for index in range(count):
        one, options = item_of(args, index, count), item_of(kwargs, index, count)
        paged = paged_in([target.of(one, options) for target in targets(func)])
        if not paged:
            func(*plain(one), **plain(options))
        elif write_rule(func) is WriteRule.POINTWISE and can_slice(one[0][0]):
            _write_lists(func, one, options, paged)
        else:
            _on_copies(func, one, options, paged, gathers=True, draws=False)


def _write_casts(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], paged: list[Paged]) -> Any:
    """A cast is a private copy: it is written where it is."""
    if not all(isinstance(tensor._node.root, CastNode) for tensor in paged):
        raise UnsupportedOperationError(
            f"{func._schema.name} would write to a parameter and to a cast of one at once; write them one by one."
        )
    for tensor in paged:
        root = tensor._node.root
        assert isinstance(root, CastNode)
        root.settle()
    return func(*plain(args), **plain(kwargs))


def _write_edits(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], paged: list[Paged]) -> Any:
    """Inside a `gather` block with a writer: apply to this rank's private full values.

    The block has one of them in hand at a time. So operands are read first, and with several targets each is
    handed back after the operator.
    """
    pages = list(dict.fromkeys(tensor._node.page for tensor in paged))
    for page in pages:
        if page.edits is None:
            raise UnsupportedOperationError(
                f"{func._schema.name} would write to {page.name!r}, which is not gathered, together with one that "
                "is; write them one by one, or gather both."
            )

    def read(tensor: torch.Tensor) -> torch.Tensor:
        is_target = isinstance(tensor, Paged) and tensor._node.page in pages
        return tensor if is_target else plain(tensor)

    ready = rebuild([args, kwargs], read)
    values = {page: page.edits.open(page) for page in pages if page.edits is not None}

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, Paged):
            return tensor
        page = tensor._node.page
        return tensor._node.apply(page.shaped(values[page]))

    ready = rebuild(ready, replace)
    made = func(*ready[0], **ready[1])
    for page, value in values.items():
        assert page.edits is not None
        page.edits.close(page, value)
    return made


def _unscale(func: OpOverload, args: tuple[Any, ...]) -> None:
    """`GradScaler.unscale_`: on slices, and what one rank finds all ranks know."""
    gradients, found, inverse = args
    pages = list(dict.fromkeys(tensor._node.page for tensor in gradients))
    pager = pages[0].pager
    with agreed(pages, "unscale gradients", [inverse]):
        func([page.own() for page in pages], found, plain(inverse))
    answers = pager.transport.meet("non-finite gradients", str(float(found)).encode())
    found.fill_(max(float(answer) for answer in answers))
