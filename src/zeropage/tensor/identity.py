"""A parameter keeps its identity: paged in place, re-pointed by `p.data = t`, copied, given an address.

The rule: optimizers, hooks, attributes and references that held the parameter before hold it afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from zeropage.errors import AdoptionError, UnsupportedOperationError
from zeropage.memory.host import allocate
from zeropage.page import CastNode, Page, Spec
from zeropage.pager import Pager
from zeropage.tensor.base import Paged, wrap
from zeropage.tensor.trees import plain

__all__ = [
    "OWN_ATTRIBUTES",
    "addressed",
    "check_parameter",
    "dense_spec",
    "differentiable",
    "duplicate",
    "new_page_of",
    "page_in_place",
    "set_data",
    "snapshot",
]

# What this library keeps in a paged tensor's __dict__; everything else there is the user's.
OWN_ATTRIBUTES = frozenset({"_node", "_parameter", "_record", "_life"})


def dense_spec(tensor: torch.Tensor, device: torch.device | None = None) -> Spec:
    """The metadata of a page for `tensor`: its strides if they are dense, else row-major; no offset."""
    like = torch.empty_like(Spec.of(tensor, torch.device("cpu")).meta())  # keeps dense strides
    return Spec(
        tensor.shape, like.stride(), 0, None,
        tensor.dtype, torch.strided, tensor.device if device is None else device,
    )  # fmt: skip


def page_in_place(parameter: nn.Parameter, pager: Pager, name: str, cls: type[Paged], page: Page | None = None) -> None:
    """Make `parameter` paged, as the same object (collective). All ranks take the first rank's values.

    A given `page` holds the values already (parameters that share storage share a page).

    Raises:
        AdoptionError: the parameter is in use by a graph, is sparse, or is not a leaf.
    """
    check_parameter(parameter, name)
    if page is None:
        page = new_page_of(parameter.detach(), pager, name)
    gradient = parameter.grad
    parameter.grad = None
    wrapper: Any = wrap(_class_for(cls, type(parameter)), page, parameter.requires_grad)
    _exchange(parameter, wrapper, name)
    parameter.__dict__["_node"] = page
    parameter._is_param = True  # adopted here
    if gradient is not None:
        parameter.grad = gradient


def new_page_of(values: torch.Tensor, pager: Pager, name: str) -> Page:
    """A page with the first rank's `values`; one on the meta device has none yet (collective)."""
    transport = pager.transport
    if values.device.type == "meta":
        page = pager.new_page(name, dense_spec(values, device=pager.home))
        page.written = False
        return page
    page = pager.new_page(name, dense_spec(values))
    with torch.no_grad():
        transport.scatter(page.store, page.flat(values) if transport.rank == 0 else None, 0)
    pager.slack.freed(values.nbytes)
    return page


def set_data(tensor: Paged, value: torch.Tensor) -> None:
    """`tensor.data = value`: let it stand for another page.

    A paged value of the same metadata shares its page, as torch shares the storage; anything else becomes a
    new page with its values (collective).
    """
    node = tensor._node
    if not isinstance(node, Page):
        raise UnsupportedOperationError(
            f"the data of a view or cast of {node.page.name!r} cannot be assigned; assign that of the parameter."
        )
    if value is tensor or node.replace(value):
        return
    record = tensor.__dict__.get("_record")
    page = _page_for(value, node)
    if page is node:
        return
    if page.spec != node.spec:
        wrapper = wrap(type(tensor), page, requires_grad=tensor.requires_grad and differentiable(page.dtype))
        torch.Tensor.data.__set__(tensor, wrapper)  # type: ignore[attr-defined]
    tensor._node = page
    if record is not None:
        record.repoint(page)
        tensor.__dict__["_life"] = Life(page)


def _page_for(value: torch.Tensor, old: Page) -> Page:
    pager = old.pager
    if not isinstance(value, Paged):
        _refuse_part_of_buffer(value, old.name)
        return new_page_of(value.detach(), pager, old.name)
    node = value._node
    if isinstance(node, Page):
        return node
    if isinstance(node, CastNode) and isinstance(node.source, Page) and node.source.spec.shape == node.spec.shape:
        source = node.source  # every rank converts its own slice
        if not source.written:
            pager.settle_draws()
        page = pager.new_page(old.name, source.spec._replace(dtype=node.spec.dtype))
        with torch.no_grad(), pager.writing([page], f"convert {old.name} to {page.dtype}"):
            page.own().copy_(node.convert(source.own()))
        page.written = source.written
        pager.slack.freed(source.store.nbytes)
        return page
    return new_page_of(plain(value.detach()), pager, old.name)


def _refuse_part_of_buffer(value: torch.Tensor, name: str) -> None:
    if value.device.type == "meta" or value.layout != torch.strided:
        return
    part = value.untyped_storage().nbytes() > value.numel() * value.element_size() and value.numel() > 0
    if part and not _called_by(nn.utils.vector_to_parameters):
        raise UnsupportedOperationError(
            f"{name!r} was given a part of a larger buffer as its data; later writes to the buffer would not reach "
            "the sharded parameter. Assign a copy: p.data = t.clone()."
        )


def _called_by(function: Any) -> bool:
    """Whether `function` is on the stack (`vector_to_parameters` promises copies, and hands out parts)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def duplicate(tensor: Paged) -> Paged:
    """An independent paged copy; a parameter stays one (collective)."""
    source = tensor._node
    if not isinstance(source, Page):
        page = new_page_of(plain(tensor.detach()), source.page.pager, source.page.name)
    else:
        pager = source.pager
        if not source.written:
            pager.settle_draws()
        page = pager.new_page(source.name, source.spec)
        with pager.writing([page], f"copy {source.name}"):
            page.own().copy_(source.own())
        page.written = source.written
    made = wrap(type(tensor), page, tensor.requires_grad)
    if tensor._is_param:
        made._is_param = True
    return made


def addressed(tensor: Paged) -> torch.Tensor:
    """The full values at an address that belongs to this page alone. See [Note: addresses].

    They stay there until the page is written. Where memory has no addresses of its own kind (on
    accelerators) and for casts, the address is that of the moment.
    """
    node = tensor._node
    page = node.page
    if not page.framed or isinstance(node.root, CastNode) or page.spec.device.type != "cpu":
        return plain(tensor.detach())  # type: ignore[no-any-return]
    found = page.pager.addresses.range_of(page, page.layout.numel, page.dtype)
    if found.version != page.version or page.edits is not None:
        with torch.no_grad():
            found.base.copy_(page.flat(plain(wrap(type(tensor), page))))
        found.version = page.version
    return node.apply(page.shaped(found.base))


def snapshot(tensor: Paged) -> torch.Tensor:
    """A plain full copy for pickling; tensors of one page that are pickled together share a storage."""
    node = tensor._node
    page = node.page
    if isinstance(node.root, CastNode):
        return plain(tensor.detach()).clone()  # type: ignore[no-any-return]
    copies = page.pager.addresses
    whole = copies.copy_of(page, page.version, page.dtype) if page.edits is None else None
    if whole is None:
        whole = allocate(page.layout.numel, page.dtype, page.spec.device)
        with torch.no_grad():
            whole.copy_(page.flat(plain(wrap(type(tensor), page))))
        copies.keep_copy(page, page.version, whole)
    return node.apply(page.shaped(whole))


class Life:
    """Tells the page when the parameter that stands for it goes away."""

    __slots__ = ("_page",)

    def __init__(self, page: Page) -> None:
        page.enter()
        self._page = page

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            self._page.leave()
        except Exception:
            if not ends():  # a parameter that outlives Python's modules goes with the process
                raise


def differentiable(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can have a gradient."""
    return dtype.is_floating_point or dtype.is_complex


def check_parameter(parameter: torch.Tensor, name: str) -> None:
    """Raise AdoptionError for a parameter that cannot be paged, with the reason."""
    if parameter.layout != torch.strided or parameter.is_quantized or parameter.is_nested:
        raise AdoptionError(
            f"{name!r} is {parameter.layout}; only dense parameters can be sharded. Keep it as a buffer."
        )
    if not parameter.is_leaf:
        raise AdoptionError(f"{name!r} is the result of an operator, not a leaf; shard before computing with it.")


def _class_for(cls: type[Paged], original: type) -> type[Paged]:
    """`cls`, with what a Parameter subclass adds (its methods, its `__torch_function__`)."""
    if original is nn.Parameter or original is torch.Tensor:
        return cls
    own = original.__dict__.get("__torch_function__")
    extra = {} if own is None else {"__torch_function__": own}
    return type(original)(f"Paged{original.__name__}", (cls, original), extra)


def _exchange(parameter: torch.Tensor, wrapper: Paged, name: str) -> None:
    """Put the wrapper's implementation behind the parameter object.

    The steps of `torch.utils.swap_tensors`, which refuses parameters with weak references (every RNN has
    them); identity is kept here, so they stay right. Hooks live with the implementation on the C++ side
    and with the object on Python's; assigning them again registers them with the new implementation.
    """
    attributes = dict(parameter.__dict__)
    if parameter._use_count() > 1:  # type: ignore[attr-defined]
        raise AdoptionError(
            f"{name!r} is held by a graph (a loss computed from it is alive, or it was used in a way that torch "
            "remembers). Shard the model before the first forward, or drop what was computed with it."
        )
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    parameter.__class__, wrapper.__class__ = wrapper.__class__, parameter.__class__
    parameter.__dict__.clear()
    torch._C._swap_tensor_impl(parameter, wrapper)
    parameter.__dict__.update(attributes)
    needed = parameter.requires_grad
    if any(hooks) and differentiable(parameter.dtype):
        parameter.requires_grad_(True)
    parameter._backward_hooks = None
    parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # torch clears it so
    if hooks[0] is not None:
        parameter._backward_hooks = hooks[0]
    if hooks[1] is not None:
        parameter._post_accumulate_grad_hooks = hooks[1]
    if any(hooks):
        parameter.requires_grad_(needed)
