"""Watching modules: parameters that appear after sharding are paged as they appear.

torch has hooks of its own for "a parameter (or a module) is being registered"; nothing is patched. They are
global, so each watcher looks at the modules that it knows, and, inside `init()`, at its own thread only.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # in no __all__
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from zeropage.errors import DivergenceError
from zeropage.hooks import register
from zeropage.page import Page
from zeropage.pager import Pager
from zeropage.tensor import PagedTensor, page_in_place

__all__ = ["Watcher"]


class Watcher:
    """Pages every parameter that is registered in a module it knows (all modules, while `open`)."""

    def __init__(self, pager: Pager) -> None:
        self._pager = pager
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._thread: int | None = None
        self._depth = 0
        self._waiting: dict[int, tuple[nn.Parameter, str]] = {}  # by the number of the page that each replaces
        self._told: list[set[int]] = [set() for _ in range(pager.transport.world)]  # by rank: such numbers
        self._handles = [
            register(register_module_parameter_registration_hook, self.parameter_registered),
            register(register_module_module_registration_hook, self.module_registered),
        ]

    def open(self) -> None:
        """Take every module that this thread makes from now on, until `close`."""
        if self._depth == 0:
            self._pager.parameters += 1  # what is made first may be dropped again: the pager stays for the rest
        self._thread = threading.get_ident()
        self._depth += 1

    def close(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._thread = None
            self._waiting.clear()
            for numbers in self._told:
                numbers.clear()
            self.name_all()
            self._pager.parameter_left()

    def check_all_paged(self) -> None:
        """At the end of `init`: every parameter that was set on one rank was set on all.

        Raises:
            DivergenceError: ranks set different ones.
        """
        if self._waiting and self._depth == 1:
            names = ", ".join(sorted(name for _, name in self._waiting.values())[:8])
            raise DivergenceError(f"only this rank gave values to {names}; set the same parameters on every rank")

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def page_module(self, module: nn.Module) -> None:
        """Page every plain parameter of `module`, one at a time, and watch it (collective)."""
        _let_go_of_derived(module)
        sharing: dict[tuple[Any, ...], Page] = {}
        for name, parameter in list(module.named_parameters()):
            if not can_be_paged(parameter):
                continue
            key = storage_key(parameter)
            page_in_place(parameter, self._pager, name, PagedTensor, sharing.get(key) if key else None)
            if key and isinstance(parameter, PagedTensor):
                sharing[key] = parameter._node.page
        for child in module.modules():
            self._modules.add(child)
            if any(isinstance(p, UninitializedTensorMixin) for p in child.parameters(recurse=False)):
                self._await_lazy(child)
        name_pages(module)

    def name_all(self) -> None:
        """Give pages the names that they have in the outermost modules known."""
        known = list(self._modules)
        inner = {id(child) for module in known for child in module.children()}
        for module in known:
            if id(module) not in inner:
                name_pages(module)

    def parameter_registered(self, module: nn.Module, name: str, value: Any) -> None:
        here = self._thread is not None and self._thread == threading.get_ident()
        if not here and module not in self._modules:
            return
        self._modules.add(module)
        if isinstance(value, UninitializedTensorMixin):
            self._await_lazy(module)
        elif can_be_paged(value):
            label = f"{type(module).__name__}.{name}"
            old: object = module._parameters.get(name)
            if isinstance(old, PagedTensor) and value.device.type == "cpu" != old.device.type:
                value.data = value.data.to(old.device)  # a loader reads into host memory, whatever it replaces
            if here and isinstance(old, PagedTensor):
                number = old._node.page.number
                self._waiting[number] = value, label
                self._page_those_set_everywhere(number)
            else:
                page_in_place(value, self._pager, label, PagedTensor)

    def _page_those_set_everywhere(self, number: int) -> None:
        """[Note: loaders in any order] A loader that goes through a set of names sets parameters in another order on
        every rank (transformers does with missing keys). So a parameter that replaces a paged one stays plain until
        all ranks have set it. A rank tells one number at each meeting, and remembers what all have told: what a
        meeting costs does not grow with what waits.
        """
        answers = [int(a) for a in self._pager.transport.meet("set a parameter anew", str(number).encode())]
        for numbers, told in zip(self._told, answers, strict=True):
            numbers.add(told)
        for told in sorted(set(answers)):
            if all(told in numbers for numbers in self._told):
                for numbers in self._told:
                    numbers.remove(told)
                value, label = self._waiting.pop(told)
                if can_be_paged(value):  # not in another place already
                    page_in_place(value, self._pager, label, PagedTensor)

    def module_registered(self, module: nn.Module, name: str, child: Any) -> None:
        if not isinstance(child, nn.Module):
            return
        if self._thread == threading.get_ident():
            # modules without parameters of their own are known too: they may get some later
            self._modules.update((module, child))
            if any(can_be_paged(parameter) for parameter in child.parameters()):
                self.page_module(child)
        elif module in self._modules:
            self.page_module(child)

    def _await_lazy(self, module: nn.Module) -> None:
        """Page the parameters of a lazy module when its first forward has given them shapes."""
        self._pager.parameters += 1  # a model of lazy modules alone has no page yet that would keep the pager

        def materialised(module: nn.Module, inputs: Any) -> None:
            self.page_module(module)
            handle.remove()
            self._pager.parameter_left()

        handle = module.register_forward_pre_hook(materialised)


def _let_go_of_derived(module: nn.Module) -> None:
    """Old-style weight_norm and spectral_norm keep a weight that they computed; its graph would hold the parameters.

    They compute it anew before every forward, so the values may go on without the graph.
    """
    for child in module.modules():
        for hook in child._forward_pre_hooks.values():
            if isinstance(hook, (SpectralNorm, WeightNorm)):
                derived = getattr(child, hook.name)
                if isinstance(derived, torch.Tensor) and not derived.is_leaf:
                    setattr(child, hook.name, derived.detach())


def can_be_paged(parameter: object) -> bool:
    """Whether it is a parameter with a shape that is not paged yet."""
    return isinstance(parameter, nn.Parameter) and not isinstance(parameter, (UninitializedTensorMixin, PagedTensor))


def name_pages(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, PagedTensor):
            parameter._node.page.name = name


def storage_key(parameter: torch.Tensor) -> tuple[Any, ...] | None:
    """What two parameters that are the same view of the same storage have in common."""
    if parameter.device.type == "meta" or parameter.layout != torch.strided or parameter.numel() == 0:
        return None
    storage = parameter.untyped_storage()
    return (
        storage.data_ptr(),
        parameter.storage_offset(),
        parameter.shape,
        parameter.stride(),
        parameter.dtype,
    )
