"""`engine.offload_states`, and the names that programs pass to it.

DeepSpeed moves what an engine keeps on the accelerator to host memory while another program (generation, say) needs the
room. Here what leaves is the gathered values; slices in host memory are where they should go already.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

from zeropage.deepspeed.logs import logger
from zeropage.errors import ConfigError

if TYPE_CHECKING:
    from zeropage.engine import Engine

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum", "offload_states"]


class OffloadDeviceEnum(str, Enum):
    """Where states can go; here it is host memory."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """What can be moved, by DeepSpeed's names. Here all of them are slices, which stay where they are."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def offload_states(engine: Engine, include: Iterable[OffloadStateTypeEnum | str] | None, device: str) -> None:
    """Drop gathered values, whatever `include` names; they come back as they are touched.

    Raises:
        ConfigError: an unknown state or device; the shards are on a GPU.
    """
    known, devices = [state.value for state in OffloadStateTypeEnum], [place.value for place in OffloadDeviceEnum]
    unknown = [state for state in include or () if state not in known]
    if unknown:
        raise ConfigError(f"offload_states: there are no states {unknown!r}; include may name {', '.join(known)}")
    if device not in devices or device == "nvme":
        raise ConfigError(f"offload_states: device={device!r} cannot be had; offload is to 'cpu' only")
    if device == "none":
        logger.warning("offload_states: device='none' moves nothing; write device='cpu'")
        return
    if any(parameter.device.type != "cpu" for parameter in engine.module.parameters()):
        raise ConfigError(
            "offload_states: shards on a GPU cannot be moved while they are in use; set offload_param and "
            "offload_optimizer in the configuration"
        )
    for pager in engine.pagers:
        pager.evict_all()
