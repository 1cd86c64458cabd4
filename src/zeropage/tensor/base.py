"""The smallest thing that is a paged tensor: a wrapper with metadata and a node, without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zeropage.page import Node

__all__ = ["Paged", "uncompiled", "wrap"]

_make = torch.Tensor._make_wrapper_subclass
_throw_on_pointer = torch._C._set_throw_on_mutable_data_ptr
_frames = torch._C._dynamo.eval_frame
_P = TypeVar("_P", bound="Paged")
_F = TypeVar("_F", bound=Callable[..., Any])


class Paged(torch.Tensor):
    """What the operator rules know of a paged tensor: its node. See `PagedTensor` for the rest."""

    _node: Node


def wrap(cls: type[_P], node: Node, requires_grad: bool = False) -> _P:
    """A new tensor of class `cls` over `node`.

    [Note: wrappers outside inference mode] A wrapper made in inference mode could not be seen through a view
    later ("Cannot set version_counter for inference tensor"), so the mode is put off while it is made.
    """
    made: Any
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            made = _make(cls, *node.spec, requires_grad=requires_grad)
    elif requires_grad:
        made = _make(cls, *node.spec, requires_grad=True)
    else:  # the usual case; a keyword costs as much as the rest
        made = _make(cls, *node.spec)
    made._node = node
    _throw_on_pointer(made)  # a raw pointer to memory that is not there becomes an error
    return made  # type: ignore[no-any-return]


def uncompiled(function: _F) -> _F:
    """Let torch.compile leave `function` and whatever it calls alone.

    `torch._dynamo.disable` does so by a wrapper, which costs more than the function; this marks its code.
    """
    skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
    _frames.set_code_exec_strategy(function.__code__, skip)
    return function
