"""`PagedTensor`: a tensor that always tells its shape and holds no memory of its own.

It is a wrapper subclass whose operators are dispatched *below* autograd: autograd saves the wrapper, not
the values, so a weight that is saved for backward takes no memory and is faulted in when its kernel runs.
This file holds what torch does not send through dispatch: Python attributes, pointers, copies, pickles.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zeropage.errors import UnsupportedOperationError
from zeropage.page import Page
from zeropage.tensor import identity, stepping
from zeropage.tensor.base import Paged, uncompiled, wrap
from zeropage.tensor.deepspeed_view import DeepSpeedView
from zeropage.tensor.dispatch import Handler, handler_of
from zeropage.tensor.rules import careful
from zeropage.tensor.trees import plain

__all__ = ["PagedTensor"]

_real_grad: Any = torch.Tensor.grad  # the slots of the C++ side
_real_data: Any = torch.Tensor.data


class PagedTensor(DeepSpeedView, Paged):
    """A sharded parameter, a view of one, or a cast of one.

    Shape, dtype, device and strides are those of the full tensor; any operator sees the full values.
    Made by `zeropage.init` and `zeropage.shard`, not by hand.
    """

    _table: dict[Any, tuple[Handler | None, Any]] = {}  # noqa: RUF012  (what each operator does, once known)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, **attributes: Any) -> PagedTensor:
        """Another parameter over the page of `data`, for code that calls `type(p)(p.data, ...)`.

        Raises:
            UnsupportedOperationError: `data` is a plain tensor, which belongs to no sharded model yet.
        """
        if not isinstance(data, Paged):
            raise UnsupportedOperationError(
                "a paged tensor cannot be made from a plain one by itself: make an nn.Parameter, put it into a module, "
                "and shard that (zp.shard), or make it inside zp.init()."
            )
        made: Any = torch.nn.Parameter(data, requires_grad)
        made.__dict__.update(attributes)
        return made  # type: ignore[no-any-return]

    @classmethod
    @uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        entry = PagedTensor._table.get(func)
        if entry is None:
            entry = PagedTensor._table[func] = handler_of(func)
        handler, call = entry
        if handler is not None:
            return handler(PagedTensor, func, args, kwargs or {})
        ready = []
        for argument in args:
            if isinstance(argument, Paged):
                node = argument._node
                if node.scope.entered:
                    return stepping.read(PagedTensor, func, args, kwargs or {})
                argument = node.live
                if argument is None:
                    argument = node.fault()
            elif argument.__class__ is list or argument.__class__ is tuple:
                argument = plain(argument)
            ready.append(argument)
        if kwargs:
            return careful(func)(*ready, **plain(kwargs))
        return call(*ready)

    # -- what it is

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        node = self._node
        kind = "Parameter" if self._is_param else "tensor"
        extra = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"<paged {kind} {node.page.name!r} shape={tuple(self.shape)} dtype={self.dtype} "
            f"device={self.device} {node.page.residency.value}{extra}>"
        )

    @property
    def _is_param(self) -> bool:
        """Whether torch should take this for an `nn.Parameter`. torch sets it on every new parameter."""
        return bool(self.__dict__.get("_parameter", False))

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__dict__["_parameter"] = value
        if value:
            self._node.page.pager.adopt(self)

    # -- gradient and data

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient summed over micro-batches and averaged over ranks (paged), or None.

        Raises:
            GradientError: inside a backward pass, where sums are not complete.
        """
        record = self.__dict__.get("_record")
        if record is None:
            return _real_grad.__get__(self)  # type: ignore[no-any-return]
        return record.gradient()  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        record = self.__dict__.get("_record")
        if record is None:
            _real_grad.__set__(self, value)
        else:
            record.assign_gradient(value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        """The same page without autograd, as in torch: writes to it show in this tensor."""
        return _real_data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        identity.set_data(self, value)

    # -- values as Python and as memory

    def _full(self) -> torch.Tensor:
        """The full values: not to be written, not to be kept over a write of the page."""
        return plain(self.detach())  # type: ignore[no-any-return]

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """A read-only copy. Writing to it would be lost, so numpy refuses."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        array = self._full().clone().numpy()
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        return self._full().tolist()

    def __format__(self, spec: str) -> str:
        return format(self._full(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def data_ptr(self) -> int:
        """The address of the full values, which stay there until the parameter is written or evicted."""
        return identity.addressed(self).data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return identity.addressed(self).untyped_storage()

    def storage(self) -> Any:
        return identity.addressed(self).storage()

    def __dlpack__(self, **options: Any) -> Any:
        return self._full().clone().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    def share_memory_(self) -> Any:
        raise UnsupportedOperationError(
            f"{self._node.page.name!r} is sharded and cannot be moved to torch's shared memory; hand zp.full(p) to "
            "the other process."
        )

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        return self._full().pin_memory()

    # -- copies

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the plain full tensor or parameter, readable without this library."""
        full: torch.Tensor = identity.snapshot(self)
        if self._is_param:
            full = torch.nn.Parameter(full, self.requires_grad)
        full.__dict__.update(self._user_attributes())
        return full.__reduce_ex__(protocol)

    def _user_attributes(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in identity.OWN_ATTRIBUTES}

    def __copy__(self) -> PagedTensor:
        """Another tensor over the same page, as torch's shallow copy shares the storage."""
        made = wrap(PagedTensor, self._node, self.requires_grad)
        made.__dict__.update(self._user_attributes())
        if self._is_param:
            made._is_param = True
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A paged copy (every rank copies its own slice; all ranks must copy together)."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        made = identity.duplicate(self)
        memo[id(self)] = made
        for key, value in self._user_attributes().items():
            made.__dict__[key] = copy.deepcopy(value, memo)
        return made

    # -- torch.distributed.checkpoint's protocol for sharded tensors (`_Checkpointable`)

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box, _ in self._whole_page().boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box, part in self._whole_page().boxes():
            if torch.Size(box.offset) == index.offset:
                return part
        raise ValueError(f"{self._node.page.name!r}: this rank holds no part at {index.offset}")

    def _whole_page(self) -> Page:
        page = self._node
        if not isinstance(page, Page):
            raise UnsupportedOperationError(
                f"a view or a cast of {page.page.name!r} cannot be saved as a sharded tensor; save the parameter, or "
                "zp.full() of the view."
            )
        return page


def over(page: Page, requires_grad: bool = False) -> PagedTensor:
    """A paged tensor over a whole page."""
    return wrap(PagedTensor, page, requires_grad)
