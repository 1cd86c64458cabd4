"""Tensors without values: those on the meta device that a file does not hold are initialised by their modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from zeropage.checkpoint.named import whole_page
from zeropage.construct import pagers_of
from zeropage.errors import CheckpointError

__all__ = ["Blank", "find_blanks", "initialise", "materialise"]


@runtime_checkable
class _InitialisesParts(Protocol):
    """A model that initialises its modules, like `PreTrainedModel` of transformers."""

    def _init_weights(self, module: nn.Module) -> None: ...


@runtime_checkable
class _InitialisesItself(Protocol):
    def reset_parameters(self) -> None: ...


@runtime_checkable
class _InitialisesItselfQuietly(Protocol):
    def _reset_parameters(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Blank:
    """A module with parameters that have no values and get none from a file."""

    module: nn.Module
    names: tuple[str, ...]  # of those parameters and buffers in the module
    ways: tuple[Callable[[], None], ...]  # to initialise it, the best one first


def find_blanks(
    model: nn.Module, targets: dict[str, torch.Tensor], ready: list[str], missing: list[str]
) -> list[Blank]:
    """The modules of `missing` tensors without values, in the order of the model. Nothing is changed.

    Raises:
        CheckpointError: nobody can initialise one, or that would also change values that are to stay.
    """
    empty = {key for key in missing if _without_values(targets[key])}
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {_key(prefix, leaf): leaf for leaf in (*module._parameters, *module._buffers)}
        mine = [key for key in own if key in empty]
        if not mine:
            continue
        ways = _ways(model, prefix, module)
        staying = [key for key in own if key in targets and key not in ready and key not in empty]
        if not ways or staying:
            why = f"that would change {staying} too" if staying else "the module has no reset_parameters()"
            raise CheckpointError(
                f"{mine} are not in the file and have no values; {why}. Initialise {prefix or 'the model'!r} yourself "
                "before loading."
            )
        found.append(Blank(module, tuple(own[key] for key in mine), tuple(ways)))
        empty.difference_update(mine)
    if empty:
        raise CheckpointError(f"{sorted(empty)} are not in the file, have no values, and belong to no module")
    return found


def materialise(model: nn.Module, targets: dict[str, torch.Tensor], keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """`targets` with memory for those buffers among `keys` that are on the meta device, put into the model.

    Until they are filled they hold values that nobody takes for right ones.
    """
    homes = [pager.home for pager in pagers_of(model)]
    made: dict[int, torch.Tensor] = {}
    found, wanted = dict(targets), set(keys)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            key = _key(prefix, leaf)
            if key in wanted and buffer is not None and buffer.device.type == "meta":
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty_like(buffer, device=homes[0] if homes else "cpu").fill_(_odd(buffer))
                module._buffers[leaf] = found[key] = made[id(buffer)]
    return found


def initialise(blanks: list[Blank]) -> None:
    """Give values to each module in turn (made by all ranks): by the first way that reaches its parameters."""
    for blank in blanks:
        for way in blank.ways:
            with torch.no_grad():
                way()
            parameters = [blank.module._parameters.get(name) for name in blank.names]
            if not any(parameter is not None and _without_values(parameter) for parameter in parameters):
                break


def _odd(buffer: torch.Tensor) -> float:
    if buffer.dtype is torch.bool:
        return False
    return torch.iinfo(buffer.dtype).min if not buffer.dtype.is_floating_point else math.nan


def _key(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf


def _without_values(tensor: torch.Tensor) -> bool:
    page = whole_page(tensor)
    return not page.written if page is not None else tensor.device.type == "meta"


def _ways(model: nn.Module, prefix: str, module: nn.Module) -> list[Callable[[], None]]:
    ways: list[Callable[[], None]] = []
    names = prefix.split(".") if prefix else []
    for depth in range(len(names), -1, -1):  # in a composite model, the innermost one decides
        parent = model.get_submodule(".".join(names[:depth]))
        if isinstance(parent, _InitialisesParts):
            ways.append(_call_with(parent, module))
            break
    if isinstance(module, _InitialisesItself):
        ways.append(module.reset_parameters)
    elif isinstance(module, _InitialisesItselfQuietly):
        ways.append(module._reset_parameters)
    return ways


def _call_with(parent: _InitialisesParts, module: nn.Module) -> Callable[[], None]:
    return lambda: parent._init_weights(module)
