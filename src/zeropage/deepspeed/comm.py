"""`deepspeed.comm`: `torch.distributed` under DeepSpeed's names.

Calls take DeepSpeed's additional keywords for profiling (`prof`, `log_name`, `debug`) and ignore them. Asked before
there is a process group, rank and world are those of one process by itself.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import init_device_mesh

from zeropage.deepspeed.logs import log_dist, logger
from zeropage.errors import ConfigError
from zeropage.transport import end_group

__all__ = [
    "ProcessGroup", "ReduceOp", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "allgather_fn", "barrier", "broadcast",
    "broadcast_object_list", "destroy_process_group", "gather", "get_all_ranks_from_group", "get_global_rank",
    "get_local_rank", "get_rank", "get_world_group", "get_world_size", "has_all_gather_into_tensor",
    "has_all_reduce_coalesced", "has_coalescing_manager", "has_reduce_scatter_tensor", "inference_all_reduce",
    "init_distributed", "initialize_mesh_device", "irecv", "is_available", "is_initialized", "isend", "log_summary",
    "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_fn", "reduce_scatter_tensor",
    "scatter", "send",
]  # fmt: skip

_F = TypeVar("_F", bound=Callable[..., Any])
_MINUTES = 30  # torch's own default is 10 for nccl; DeepSpeed gives all backends this
_LAUNCHERS = {
    "RANK": ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
}


def _unprofiled(function: _F) -> _F:
    @functools.wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str = "", debug: Any = None, **options: Any) -> Any:
        return function(*args, **options)

    return call  # type: ignore[return-value]  # the same function, with more keywords


def _newest(*names: str) -> Any:
    """The function of torch of the first name that this version has (some got new names)."""
    return next(vars(dist)[name] for name in names if name in vars(dist))


_gather_into_one = _newest("all_gather_single", "all_gather_into_tensor")
_scatter_from_one = _newest("reduce_scatter_single", "reduce_scatter_tensor")
all_gather = _unprofiled(dist.all_gather)
all_gather_into_tensor = _unprofiled(_gather_into_one)
all_gather_object = _unprofiled(dist.all_gather_object)
all_reduce = _unprofiled(dist.all_reduce)
all_to_all = _unprofiled(dist.all_to_all)
all_to_all_single = _unprofiled(dist.all_to_all_single)
allgather_fn = _unprofiled(_gather_into_one)
barrier = _unprofiled(dist.barrier)
broadcast = _unprofiled(dist.broadcast)
broadcast_object_list = _unprofiled(dist.broadcast_object_list)
destroy_process_group = dist.destroy_process_group
gather = _unprofiled(dist.gather)
inference_all_reduce = _unprofiled(dist.all_reduce)
irecv = _unprofiled(dist.irecv)
is_available = dist.is_available
isend = _unprofiled(dist.isend)
monitored_barrier = _unprofiled(dist.monitored_barrier)
new_group = dist.new_group
recv = _unprofiled(dist.recv)
reduce = _unprofiled(dist.reduce)
reduce_scatter = _unprofiled(dist.reduce_scatter)
reduce_scatter_fn = _unprofiled(_scatter_from_one)
reduce_scatter_tensor = _unprofiled(_scatter_from_one)
scatter = _unprofiled(dist.scatter)
send = _unprofiled(dist.send)


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    """This process's number on its host, as the launcher says."""
    for name in ("LOCAL_RANK", *_LAUNCHERS["LOCAL_RANK"]):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    return [get_global_rank(group, rank) for rank in range(get_world_size(group))]


def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> None:
    """Reduce each tensor; one after the other, done when it returns."""
    for tensor in tensors:
        dist.all_reduce(tensor, op=op, group=group)


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return False


def has_coalescing_manager() -> bool:
    return False


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Nothing: zeropage moves pages below `torch.distributed`, so its collectives would tell little."""
    return {} if return_dict else None


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """A mesh of all ranks (torch's `init_device_mesh`); only its data-parallel dimension may have several."""
    sizes = dict(zip(mesh_dim_names, mesh_shape, strict=True))
    others = {name: size for name, size in sizes.items() if name != "data_parallel" and size != 1}
    if others:
        raise ConfigError(f"only data parallelism is there, so mesh sizes {others} must be 1; use all ranks for data")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the default process group, unless there is one: from torchrun's, SLURM's or MPI's variables.

    Without a launcher the group has this process alone.

    Args:
        dist_backend: any of torch's; "nccl" becomes "gloo" on hosts without CUDA.
        timeout: a `timedelta`, or minutes.
        rank, world_size: where the program knows them better than the environment.

    Raises:
        ConfigError: a group is missing and `dist_init_required` is False, or the address of rank 0 is missing.
    """
    if is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError(
            "there is no process group, and dist_init_required=False says that none is to be started; call "
            "torch.distributed.init_process_group() before, or leave dist_init_required out"
        )
    _read_launcher()
    wait = timeout if isinstance(timeout, timedelta) else timedelta(minutes=_MINUTES if timeout is None else timeout)
    backend = _backend(dist_backend)
    rank = int(os.environ.get("RANK", 0)) if rank < 0 else rank
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size < 0 else world_size
    if init_method is None and world_size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=wait)
        atexit.register(end_group)
        return
    if init_method is None:
        if "MASTER_ADDR" not in os.environ:
            raise ConfigError(
                f"MASTER_ADDR must be set for {world_size} ranks to find each other; torchrun and `zeropage run` set it"
            )
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    if verbose:
        log_dist(f"starting torch.distributed with backend {backend}", ranks=[0])
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=wait)
    atexit.register(end_group)


def _backend(asked: str | None) -> str:
    if not torch.cuda.is_available():
        if asked not in (None, "gloo", "mpi"):
            logger.info("backend %s is not there without CUDA; gloo is taken", asked)
            return "gloo"
        return asked or "gloo"
    # parameters and their slices may be in host memory: both kinds of tensors must be served
    return "cpu:gloo,cuda:nccl" if asked in (None, "nccl") else asked


def _read_launcher() -> None:
    """SLURM's and MPI's variables under torchrun's names."""
    for name, others in _LAUNCHERS.items():
        found = [os.environ[other] for other in others if other in os.environ]
        if found:
            os.environ.setdefault(name, found[0])
