"""DeepSpeed's `z3_leaf_module` helpers. A module is marked and found again; pages need no such mark.

DeepSpeed gathers a marked module as a whole, since its experts run in another order every time. Here operators
fault in what they touch, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

__all__ = [
    "get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter",
]  # fmt: skip

_MARK = "_z3_leaf"  # the attribute that DeepSpeed sets too


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module itself is marked."""
    return bool(model.__dict__.get(_MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """False: no parameter is gathered with a whole module."""
    return False


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules in `model`, itself included."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    model.__dict__[_MARK] = flag


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes (or names of classes, with or without their module); returns them.

    Raises:
        ValueError: there is none, and `raise_if_not_found`.
    """
    return _mark_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The opposite of `set_z3_leaf_modules`."""
    return _mark_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names; returns them, and the names that no module has.

    Raises:
        ValueError: a name is missing, and `raise_if_not_found`.
    """
    return _mark_by_name(model, module_names, str.__eq__, flag, raise_if_not_found, "named")


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so; returns them, and the suffixes that no name has.

    Raises:
        ValueError: a suffix is missing, and `raise_if_not_found`.
    """
    return _mark_by_name(model, module_name_suffixes, str.endswith, flag, raise_if_not_found, "matching suffixes")


def _mark_by_class(model: nn.Module, classes: Sequence[type | str], flag: bool, required: bool) -> list[nn.Module]:
    if not all(isinstance(each, (type, str)) for each in classes):
        raise TypeError(f"leaf_module_classes must be classes or names of classes, not {classes}")
    types = tuple(each for each in classes if isinstance(each, type))
    found = [module for module in model.modules() if isinstance(module, types) or _names(module) & {*classes}]
    if not found and required:
        raise ValueError(f"No modules of type {list(classes)} found in model {type(model).__name__}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _names(module: nn.Module) -> set[str]:
    cls = type(module)
    return {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}


def _mark_by_name(
    model: nn.Module,
    wanted: Sequence[str],
    fits: Callable[[str, str], bool],
    flag: bool,
    required: bool,
    how: str,
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    found = {each: [module for name, module in modules.items() if fits(name, each)] for each in wanted}
    missing = [each for each, matched in found.items() if not matched]
    marked = list(dict.fromkeys(module for matched in found.values() for module in matched))
    for module in marked:
        set_z3_leaf_module(module, flag)
    if missing and required:
        raise ValueError(f"No modules {how} {missing} found in model {type(model).__name__}")
    return marked, missing
