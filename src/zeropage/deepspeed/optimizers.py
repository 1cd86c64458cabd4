"""The optimizers that a configuration names, and those that DeepSpeed has classes for: torch's own, one and all.

torch's own steps run on each rank's slices, so there is nothing that a kernel of DeepSpeed would be needed for. Names
and defaults are DeepSpeed's: "Adam" means AdamW unless `adam_w_mode` is false, and decays nothing by default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zeropage.deepspeed.lion import Lion
from zeropage.deepspeed.settings import Settings
from zeropage.errors import ConfigError, UnsupportedOperationError

__all__ = ["DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLion", "make_optimizer"]

_Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]

_ELSEWHERE = {
    "lamb": "torch has no LAMB",
    "muon": "torch.optim.Muon takes matrices only, so the groups have to be made in the program",
    "muadam": "it belongs to the package mup",
    "muadamw": "it belongs to the package mup",
    "musgd": "it belongs to the package mup",
    "onebitadam": "1-bit optimizers change results",
    "onebitlamb": "1-bit optimizers change results",
    "zerooneadam": "1-bit optimizers change results",
}


def make_optimizer(settings: Settings, parameters: _Parameters) -> torch.optim.Optimizer:
    """The optimizer that `settings.optimizer` names, over `parameters` (or groups of them).

    Raises:
        ConfigError: no optimizer is named; torch has none of that name; an argument is unknown to it, or still "auto".
    """
    wanted = settings.optimizer
    if wanted is None:
        raise ConfigError("config has no 'optimizer' block; name one there, or pass an optimizer object")
    name = wanted.type.lower()
    arguments = {key: tuple(v) if isinstance(v, list) else v for key, v in wanted.params.items()}
    left = [key for key, value in arguments.items() if isinstance(value, str) and value == "auto"]
    if left:
        raise ConfigError(
            f"config key 'optimizer.params.{left[0]}' is 'auto': only the Hugging Face Trainer and Accelerate put a "
            "number there. Write the number."
        )
    if "max_grad_norm" in arguments:
        raise ConfigError(
            "config key 'optimizer.params.max_grad_norm' is no argument of an optimizer; write it as "
            "'gradient_clipping' at the top level"
        )
    if name in _ELSEWHERE:
        raise ConfigError(
            f"config key 'optimizer.type' = {wanted.type!r}: {_ELSEWHERE[name]}; make the optimizer in the program and "
            "pass the object, or name AdamW, Adam, Adagrad, Lion or SGD"
        )
    return _build(_maker(name, wanted.type, arguments), parameters, arguments, wanted.type)


def _maker(name: str, given: str, arguments: dict[str, Any]) -> Callable[..., torch.optim.Optimizer]:
    """Who makes it; takes those of DeepSpeed's own out of `arguments`."""
    if name in ("adam", "adamw"):
        decoupled = arguments.pop("adam_w_mode", True) or name == "adamw"
        if arguments.pop("torch_adam", False):
            return torch.optim.AdamW if decoupled else torch.optim.Adam
        arguments["adam_w_mode"] = decoupled
        return _adam
    if name == "adagrad":
        return _adagrad
    if name == "lion":
        return _lion
    by_name = {known.lower(): known for known in dir(torch.optim) if known[0].isupper() and known != "Optimizer"}
    if name not in by_name:
        raise ConfigError(f"config key 'optimizer.type' = {given!r}: neither DeepSpeed nor torch.optim has it")
    maker: Callable[..., torch.optim.Optimizer] = vars(torch.optim)[by_name[name]]
    return maker


def _build(
    maker: Callable[..., torch.optim.Optimizer], parameters: _Parameters, arguments: dict[str, Any], name: str
) -> torch.optim.Optimizer:
    known = inspect.signature(maker).parameters
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ConfigError(
            f"config key 'optimizer.params.{unknown[0]}': {name} has no such argument; it takes "
            f"{', '.join(key for key in known if key != 'params')}"
        )
    return maker(parameters, **arguments)


def _adam(
    params: _Parameters,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    if not bias_correction:
        raise ConfigError(
            "Adam without bias_correction is not in torch; leave it out or write an optimizer of your own"
        )
    _states_are_fp32(fp32_optimizer_states)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def _cpu_adam(
    model_params: _Parameters,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    return _adam(
        model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad, True, fp32_optimizer_states
    )


def _adagrad(
    model_params: _Parameters,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    _states_are_fp32(fp32_optimizer_states)
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


def _lion(
    params: _Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    _states_are_fp32(fp32_optimizer_states)
    return Lion(params, lr=lr, betas=betas, weight_decay=weight_decay)


def _states_are_fp32(asked: bool) -> None:
    if not asked:
        raise ConfigError("fp32_optimizer_states=False cannot be honoured: optimizer states are fp32; leave it out")


def _class_for(name: str, make: Callable[..., torch.optim.Optimizer]) -> type:
    """A class under DeepSpeed's name whose objects are torch's: calling it makes what `make` makes."""

    def make_or_refuse(cls: type, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
        if cls is not made:
            raise UnsupportedOperationError(f"{name} cannot be subclassed; subclass {make.__name__[1:]} of torch.optim")
        return make(*arguments, **options)

    made = type(name, (torch.optim.Optimizer,), {"__new__": make_or_refuse, "__doc__": make.__doc__})
    return made


FusedAdam = _class_for("FusedAdam", _adam)
DeepSpeedCPUAdam = _class_for("DeepSpeedCPUAdam", _cpu_adam)
DeepSpeedCPUAdagrad = _class_for("DeepSpeedCPUAdagrad", _adagrad)
DeepSpeedCPULion = _class_for("DeepSpeedCPULion", _lion)
FusedLion = _class_for("FusedLion", _lion)
