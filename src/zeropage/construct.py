"""Making a sharded model: parameters are paged as they are made, or an existing model in place.

Every path handles one parameter at a time, so building, loading and initialising take the shards plus one
parameter's worth of memory.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # in no __all__

from zeropage.config import Config
from zeropage.errors import AdoptionError, ConfigError, OutOfMemoryError
from zeropage.gradients import Gradients
from zeropage.hosted import HostedTransport
from zeropage.layout import Layout
from zeropage.memory.device import Lane, open_lane
from zeropage.memory.disk import rounded
from zeropage.memory.host import available_bytes
from zeropage.pager import Pager
from zeropage.relay import OrderedTransport
from zeropage.steps import StepHooks
from zeropage.tensor import PagedTensor, check_parameter
from zeropage.threads import fitting_threads
from zeropage.transport import Group, Transport, find_group, open_transport
from zeropage.watch import Watcher, can_be_paged, storage_key

__all__ = ["Space", "init", "pagers_of", "shard", "space_of"]

_log = logging.getLogger(__name__)

ConfigLike = Config | Mapping[str, Any] | str | Path | None
_M = TypeVar("_M", bound=nn.Module)


class Space:
    """Everything that serves the pages of one `init` or `shard` call."""

    def __init__(self, config: Config, group: object, device: torch.device) -> None:
        """`device`: where the parameters are, of several the one that computes."""
        on_cpu = device.type in ("cpu", "meta")
        if "disk" in (config.offload.parameters, config.offload.optimizer):
            _check_disk_is_possible(on_cpu=on_cpu)
        self.group = find_group(group, config.timeout_s)
        lane = open_lane(device)
        self.pager = Pager(_transport_for(device, lane, config, self.group), config, lane)
        _warn_of_threads(self.pager.transport)
        self.gradients = Gradients(self.pager)
        self.steps = StepHooks(self.pager)
        self.watcher = Watcher(self.pager)
        self.pager.space = self
        self.pager.abandoned = self.close

    def close(self) -> None:
        """Stop watching and let go of the peers. Pages that are still used afterwards raise."""
        self.watcher.remove()
        self.steps.remove()
        self.pager.space = None
        self.pager.close()


class init:
    """Parameters made inside are paged as they are made (collective).

    Args:
        config: a `Config`, a mapping, a path to JSON, or None for the defaults.
        group: a `torch.distributed` process group; None for the default one, for one started from a
            launcher's variables (torchrun, SLURM), or for this process alone.

    Only the thread that opened the context is watched. Contexts may be nested: modules belong to the
    innermost. Parameters that are registered later in these modules are paged too.

    Under `torch.device("meta")` random values are drawn when the context ends (or when they are read in it), and only
    those of parameters that got no others by then: a loader that builds a model there draws nothing.

    Raises:
        ConfigError: a wrong setting, or a transport that cannot run here.
    """

    def __init__(self, config: ConfigLike = None, group: object = None) -> None:
        self._config = Config.of(config)
        self._group = group
        self._space: Space | None = None

    def __enter__(self) -> init:
        self._space = Space(self._config, self._group, torch.get_default_device())
        if self._config.seed is not None:
            torch.manual_seed(self._config.seed)
        self._space.watcher.open()
        self._space.pager.draws.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._space is not None
        try:
            if error is None:
                self._space.watcher.check_all_paged()
                self._space.pager.settle_draws()
        finally:
            self._space.pager.draws.close()
            self._space.watcher.close()


def shard(model: _M, config: ConfigLike = None, group: object = None) -> _M:
    """Page the parameters of `model` in place (collective); returns `model`.

    Parameter objects keep their identity, hooks, attributes and gradients, so an optimizer made before
    still holds the right ones. All ranks take the first rank's values. Parameters that are paged already
    stay as they are; calling it again is harmless.

    Args: as for `init`. An error is raised before anything has been changed.

    Raises:
        ConfigError: a wrong setting, or a transport that cannot run here.
        OutOfMemoryError, OffloadError: the shards would not fit in memory, or on the disk (bytes wanted and available).
        AdoptionError: a parameter cannot be paged (named, with the reason).
    """
    settings = Config.of(config)
    plain = [(n, p) for n, p in model.named_parameters() if can_be_paged(p)]
    lazy = any(isinstance(p, UninitializedTensorMixin) for p in model.parameters())
    known = pagers_of(model)
    if not plain and not lazy and known:
        return model
    _check_parameters(plain)
    if known and config is None and group is None:
        space = space_of(known[0])
    else:
        apart = [p.device for _, p in plain if p.device.type not in ("cpu", "meta")]
        space = Space(settings, group, apart[0] if apart else torch.device("cpu"))
    _check_room(plain, space.pager)
    space.watcher.page_module(model)
    return model


def pagers_of(model: nn.Module) -> list[Pager]:
    """The pagers behind the model's paged parameters, in the order of first use."""
    found = {parameter._node.page.pager: None for parameter in model.parameters() if isinstance(parameter, PagedTensor)}
    return list(found)


def space_of(pager: Pager) -> Space:
    space = pager.space
    if not isinstance(space, Space):
        raise AdoptionError("the engine that served these parameters was closed; shard the model again")
    return space


def _check_parameters(named: list[tuple[str, nn.Parameter]]) -> None:
    ranges: dict[int, list[tuple[int, int, tuple[Any, ...], str]]] = {}
    for name, parameter in named:
        check_parameter(parameter, name)
        key = storage_key(parameter)
        if key is not None:
            size = parameter.element_size()
            low = parameter.storage_offset() * size
            last = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True))
            ranges.setdefault(key[0], []).append((int(low), int(low + (last + 1) * size), key, name))
    for parts in ranges.values():
        parts.sort(key=lambda part: part[:2])
        for one, other in pairwise(parts):
            if one[2] != other[2] and other[0] < one[1]:
                raise AdoptionError(
                    f"{one[3]!r} and {other[3]!r} share a part of one storage; give each a copy of its own "
                    "(p.data = p.data.clone()) before sharding."
                )


def _transport_for(device: torch.device, lane: Lane, config: Config, group: Group) -> Transport:
    """How pages on `device` are moved; with slices in host memory if anything is offloaded there (collective)."""
    hosts = "host" in (config.offload.parameters, config.offload.optimizer)
    if not lane.serves(device):
        on_cpu = device.type in ("cpu", "meta")
        if hosts and not on_cpu:
            _log.warning("offload to 'host' has no effect on %s: shards and optimizer states stay there", device)
        return open_transport(config, group, on_cpu=on_cpu)
    if hosts:
        return HostedTransport(open_transport(config, group, on_cpu=True), lane, config.bucket_bytes)
    return OrderedTransport(open_transport(config, group, on_cpu=False), lane)


def _warn_of_threads(transport: Transport) -> None:
    threads, fitting = torch.get_num_threads(), fitting_threads(transport)
    if transport.rank == 0 and threads > fitting:
        _log.warning(
            "%d ranks with %d threads each share %d cores and will wait for each other: start them with "
            "OMP_NUM_THREADS=%d, or call torch.set_num_threads(%d) in each",
            transport.world, threads, os.cpu_count(), fitting, fitting,
        )  # fmt: skip


def _check_disk_is_possible(*, on_cpu: bool) -> None:
    if not on_cpu:
        raise ConfigError(
            "offload to 'disk' is for parameters in host memory in this version; move the model to the CPU"
        )
    if sys.platform != "linux":
        raise ConfigError(f"offload to 'disk' needs Linux (fallocate, O_DIRECT), this is {sys.platform}; remove it")


def _check_room(named: list[tuple[str, nn.Parameter]], pager: Pager) -> None:
    """The shards of all ranks on this host must fit beside what is there already."""
    world = 1 if pager.transport.name == "collective" else pager.transport.world
    if pager.config.offload.parameters == "disk":
        wanted = sum(rounded(nbytes) for nbytes in _slice_bytes(named, pager))
        pager.offload_together("take room on the disk", _why_no_room(pager, wanted * world))
        return
    wanted = world * sum(_slice_bytes(named, pager))
    available = available_bytes()
    if wanted > available:
        raise OutOfMemoryError(
            f"the shards take {wanted:,} bytes on this host and {available:,} are available; use more hosts, a "
            "narrower dtype, or fewer parameters."
        )


def _slice_bytes(named: list[tuple[str, nn.Parameter]], pager: Pager) -> list[int]:
    """Bytes of the largest slice of each parameter in host memory."""
    return [
        Layout(parameter.numel(), pager.transport.world).chunk * parameter.element_size()
        for _, parameter in named
        if parameter.device.type in ("cpu", "meta") or isinstance(pager.transport, HostedTransport)
    ]


def _why_no_room(pager: Pager, wanted: int) -> str:
    disk = pager.disk
    assert disk is not None
    if wanted <= disk.available:
        return ""
    return (
        f"{disk.path}: the shards take {wanted:,} bytes on this disk and {disk.available:,} are free. Make room, or "
        "set offload.folder to another disk."
    )
