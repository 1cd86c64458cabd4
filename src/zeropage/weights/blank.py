"""Tensors without values: those on the meta device that a file does not hold are initialised by their modules.

Buffers that are not persistent stand in no file, so a model on the meta device has them all without values.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from zeropage.checkpoint.named import whole_page
from zeropage.construct import pagers_of
from zeropage.errors import CheckpointError

__all__ = ["Blank", "find_blanks", "initialise", "materialise", "warn_of_blanks"]

_log = logging.getLogger(__name__)


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
    """A module with parameters or buffers that have no values and get none from a file."""

    prefix: str  # of the module in the model
    module: nn.Module
    names: tuple[str, ...]  # of those parameters and buffers in the module
    ways: tuple[Callable[[], None], ...]  # to initialise it, the best one first

    @property
    def keys(self) -> list[str]:
        return [_key(self.prefix, name) for name in self.names]


def find_blanks(
    model: nn.Module, targets: dict[str, torch.Tensor], ready: list[str], missing: list[str]
) -> list[Blank]:
    """The modules of `missing` tensors without values, in the order of the model. Nothing is changed.

    So are those with buffers on the meta device that `state_dict()` leaves out, if they can be initialised.

    Args:
        targets: the tensors of `state_dict()`.
        ready: keys that will be loaded.

    Raises:
        CheckpointError: nobody can initialise a missing one, or that would also change values that are to stay.
    """
    empty = {key for key in missing if _without_values(targets[key])}
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {_key(prefix, leaf): leaf for leaf in (*module._parameters, *module._buffers)}
        mine = [key for key in own if key in empty]
        transient = _transient(module)
        if not mine and not transient:
            continue
        ways = _ways(model, prefix, module)
        staying = [key for key in own if key in targets and key not in ready and key not in empty]
        if mine and (not ways or staying):
            why = f"that would change {staying} too" if staying else "the module has no reset_parameters()"
            raise CheckpointError(
                f"{mine} are not in the file and have no values; {why}. Initialise {prefix or 'the model'!r} yourself "
                "before loading."
            )
        if ways and not staying:
            found.append(Blank(prefix, module, (*(own[key] for key in mine), *transient), tuple(ways)))
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
    """Give values to each module in turn (made by all ranks): by the first way that reaches its parameters.

    A buffer that nothing gives values to is on the meta device again afterwards, where reading it is an error.

    Raises:
        CheckpointError: a buffer of `state_dict()` is such a one.
    """
    for blank in blanks:
        left = _initialise_one(blank)
        for name, buffer in left.items():
            blank.module._buffers[name] = torch.empty_like(buffer, device="meta")
        persistent = [_key(blank.prefix, name) for name in left if name not in blank.module._non_persistent_buffers_set]
        if persistent:
            raise CheckpointError(
                f"{persistent} are not in the file, and the initialisation of {type(blank.module).__name__} leaves "
                f"them out. Initialise {blank.prefix or 'the model'!r} yourself before loading."
            )


def _initialise_one(blank: Blank) -> dict[str, torch.Tensor]:
    """The buffers that were left out."""
    module = blank.module
    odd = {name: buffer for name in blank.names if (buffer := module._buffers.get(name)) is not None}
    versions = {name: buffer._version for name, buffer in odd.items()}
    for way in blank.ways:
        with torch.no_grad():
            way()
        for name in [*odd]:
            buffer = odd[name]
            if module._buffers.get(name) is not buffer or buffer._version != versions[name] or not _is_odd(buffer):
                del odd[name]
        parameters = [module._parameters.get(name) for name in blank.names]
        if not odd and not any(parameter is not None and _without_values(parameter) for parameter in parameters):
            break
    return odd


def warn_of_blanks(model: nn.Module) -> None:
    """Name the buffers that are on the meta device still."""
    names = [
        _key(prefix, leaf)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for leaf in _transient(module)
    ]
    if names:
        _log.warning(
            "the buffers %s are on the meta device: no file holds them, and no module initialises them. Give them "
            "values before the model is used",
            ", ".join(names[:8]) + (", ..." if len(names) > 8 else ""),
        )


def _transient(module: nn.Module) -> list[str]:
    """Names of its buffers on the meta device that `state_dict()` leaves out."""
    return [
        leaf
        for leaf, buffer in module._buffers.items()
        if leaf in module._non_persistent_buffers_set and buffer is not None and buffer.device.type == "meta"
    ]


def _is_odd(buffer: torch.Tensor) -> bool:
    """Whether it has the values that `materialise` gave it."""
    return bool((buffer.isnan() if _has_nan(buffer) else buffer == _odd(buffer)).all())


def _odd(buffer: torch.Tensor) -> float:
    if buffer.dtype is torch.bool:
        return False
    return math.nan if _has_nan(buffer) else torch.iinfo(buffer.dtype).min


def _has_nan(buffer: torch.Tensor) -> bool:
    return buffer.dtype.is_floating_point or buffer.dtype.is_complex


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
