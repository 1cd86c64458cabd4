"""What an engine may set for itself on a model that is sharded already, and what was settled when it was sharded.

The rule: a setting that comes too late is an error where it changes numbers, and a warning where it changes memory
alone; both name DeepSpeed's key.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

from torch import nn

from zeropage.config import Config
from zeropage.construct import pagers_of
from zeropage.deepspeed.logs import log_dist
from zeropage.deepspeed.settings import Settings, section
from zeropage.errors import ConfigError
from zeropage.pager import Pager

__all__ = ["own_settings", "without_effect"]

# Settings that each engine has of its own, and one that changes numbers, which was looked at before.
_OF_AN_ENGINE = frozenset({
    "precision", "cast_frozen", "loss_scale", "clip_grad_norm", "skip_nonfinite", "reduce_dtype",
})  # fmt: skip


def own_settings(settings: Settings, model: nn.Module) -> Config:
    """The settings for an engine of `model`; if that is sharded already, only those that an engine has of its own.

    Raises:
        ConfigError: gradients are to be summed in another dtype than the model was sharded with.
    """
    config, pagers = settings.config, pagers_of(model)
    given = {key: getattr(config, key) for key in config.model_fields_set if key != "accumulate"}
    if config.precision in ("fp16", "bf16"):
        # DeepSpeed casts everything. What has 16 bits already keeps its dtype here: a teacher may need the other one.
        given.setdefault("cast_frozen", "wide")
    if pagers:
        for pager in pagers:
            _check_sums(settings, pager)
        for message in dict.fromkeys(
            message
            for pager in pagers
            for message in without_effect(settings, pager.config, on_device=_is_on_device(pager))
        ):
            log_dist(message, ranks=[0], level=logging.WARNING)
        given = {key: value for key, value in given.items() if key in _OF_AN_ENGINE}
    return Config(**given)


def _check_sums(settings: Settings, pager: Pager) -> None:
    wanted, fixed = settings.config.reduce_dtype, pager.config.reduce_dtype
    if "reduce_dtype" in settings.config.model_fields_set and wanted != fixed:
        types = section(settings.raw, "data_types")
        named = "data_types.grad_accum_dtype" if "grad_accum_dtype" in types else "communication_data_type"
        raise ConfigError(
            f"config key {named!r} says {wanted}, and the model was sharded with sums of gradients in {fixed}; "
            "give the same configuration to zero.Init(config_dict_or_path=...), or to the engine that comes first"
        )


def without_effect(settings: Settings, fixed: Config, *, on_device: bool) -> Iterator[str]:
    """What the configuration says about memory and a model that was sharded with `fixed` does not do."""
    wanted = settings.config
    told = (
        "the model was sharded before, with another one. Give the configuration to "
        "zero.Init(config_dict_or_path=...), or to the engine that comes first"
    )
    stays = fixed.resident_bytes == sys.maxsize
    if (settings.stage < 3) != stays:
        does = "stay until the next step changes them" if stays else "leave as others need the room"
        yield f"config key 'zero_optimization.stage' = {settings.stage} has no effect on memory: {told}; values {does}"
    elif "resident_bytes" in wanted.model_fields_set and wanted.resident_bytes != fixed.resident_bytes:
        yield f"config key 'zero_optimization.stage3_max_live_parameters' has no effect: {told}"
    for key, place in (("offload_param", "parameters"), ("offload_optimizer", "optimizer")):
        asked, given = getattr(wanted.offload, place), getattr(fixed.offload, place)
        if asked != given and (on_device or "disk" in (asked, given)):  # else host memory is where everything is
            yield f"config key 'zero_optimization.{key}' has no effect: {told}"


def _is_on_device(pager: Pager) -> bool:
    return any(page.spec.device.type not in ("cpu", "meta") for page in pager.pages.values())
