"""What a checkpoint holds: logical tensors by name, in boxes, and some small values.

The format is that of `torch.distributed.checkpoint`. Keys are `model.<name>`, `master.<name>` (fp32 values behind
a 16-bit parameter), `optimizer.<name>.<state>`, and two kinds of bytes of a `torch.save` that loads with
`weights_only`: `extra` (counters, groups, client state) and `rank.<r>` (random generators, place in the data).
"""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from zeropage.checkpoint.named import extra_states_of, first_names, is_extra_state, tensors_of
from zeropage.checkpoint.parts import Part, whole_part
from zeropage.checkpoint.reading import SliceReader
from zeropage.checkpoint.verdict import told
from zeropage.errors import CheckpointError
from zeropage.optim import ShardedOptimizer, record_of
from zeropage.pager import Pager
from zeropage.steps import over_slice
from zeropage.tensor import PagedTensor

__all__ = [
    "VERSION", "Stateful", "Training", "alone", "entries_of", "groups_of", "model_tensors", "pack", "parameters_of",
    "read_extra", "read_packed",
]  # fmt: skip

VERSION = 2


class Training(Protocol):
    """What a checkpoint asks of an engine, and gives back to it."""

    global_step: int
    module: nn.Module
    lr_scheduler: Any

    @property
    def pagers(self) -> list[Pager]: ...

    @property
    def process_group(self) -> Any: ...

    @property
    def sharded_optimizer(self) -> ShardedOptimizer | None: ...

    def progress(self) -> dict[str, Any]: ...

    def restore_progress(self, state: Mapping[str, Any]) -> None: ...


class Stateful(Protocol):
    """A data loader that knows its position (`torchdata`'s protocol)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def model_tensors(engine: Training) -> dict[str, torch.Tensor]:
    """All tensors of the module that have elements, by name; extra states are kept apart."""
    named = tensors_of(engine.module)
    return {name: value.detach() for name, value in named.items() if value.numel() and not is_extra_state(name)}


def _about_names(engine: Training) -> dict[str, Any]:
    """What the format cannot say: which names are tied to an earlier one, and tensors without elements."""
    named = tensors_of(engine.module)
    return {
        "tied": {name: first for name, first in first_names(named).items() if name != first},
        "empty": {name: (value.dtype, tuple(value.shape)) for name, value in named.items() if not value.numel()},
    }


def parameters_of(engine: Training) -> dict[str, PagedTensor]:
    return {name: p for name, p in engine.module.named_parameters() if isinstance(p, PagedTensor)}


def _names(engine: Training) -> dict[PagedTensor, str]:
    return {p: name for name, p in parameters_of(engine).items()}


def entries_of(
    engine: Training,
    client_state: Mapping[str, Any] | None,
    *,
    trainable_only: bool,
    leave_out: Collection[str],
    data_loader: Stateful | None,
) -> list[tuple[str, Part]]:
    """What this rank writes: its boxes of what is sharded, and on the first rank what all have alike."""
    extra_states = extra_states_of(engine.module)
    unknown = sorted(set(leave_out) - tensors_of(engine.module).keys() - extra_states.keys())
    if unknown:
        raise CheckpointError(f"leave_out names {', '.join(unknown[:8])}: the model has no such tensors")
    left_out = sorted({*leave_out, *(_frozen(engine) if trainable_only else ())})
    extra = {
        "version": VERSION,
        "world": engine.pagers[0].transport.world,
        "left_out": left_out,
        "frozen": _frozen(engine),
        "progress": engine.progress(),
        "groups": groups_of(engine),
        "state": _small_state(engine),
        "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "client_state": dict(client_state or {}),
        "extra_states": {name: value for name, value in extra_states.items() if name not in left_out},
        **_about_names(engine),
    }
    rank = engine.pagers[0].transport.rank
    tensors = _tensors(engine, left_out) | {"extra": pack(extra)}
    found = []
    for key, value in tensors.items():
        if isinstance(value, PagedTensor):
            found += [(key, Part(tuple(value.shape), box, part.detach())) for box, part in value._node.page.boxes()]
        elif rank == 0:
            # a copy: buffers and step counters may change at any time
            found.append((key, whole_part(value.detach().clone())))
    found.append((f"rank.{rank}", whole_part(pack(_state_of_rank(data_loader)))))
    return found


def _frozen(engine: Training) -> list[str]:
    return sorted(
        name
        for name, parameter in engine.module.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    )


def _state_of_rank(data_loader: Stateful | None) -> dict[str, Any]:
    """What belongs to this rank alone: random generators, and its place in the data."""
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": [version, list(internal), gauss],
        "data_loader": None if data_loader is None else data_loader.state_dict(),
    }


def _tensors(engine: Training, left_out: list[str]) -> dict[str, torch.Tensor]:
    apart = set(left_out)
    state = {f"model.{name}": value for name, value in model_tensors(engine).items() if name not in apart}
    sharded = engine.sharded_optimizer
    if sharded is None:
        return state
    names = _names(engine)
    for parameter in sharded.parameters():
        name, record = names[parameter], record_of(parameter)
        master = sharded.masters.get(record)
        if master is not None and master.agrees_with(record.page):
            state[f"master.{name}"] = over_slice(master.slice, record.page, f"{name} in fp32")
        for key, value in sharded.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state[f"optimizer.{name}.{key}"] = value
    return state


def _small_state(engine: Training) -> dict[str, dict[str, Any]]:
    """Optimizer state that is not made of tensors, by parameter."""
    sharded = engine.sharded_optimizer
    if sharded is None:
        return {}
    names = _names(engine)
    found = {
        names[p]: {k: v for k, v in sharded.optimizer.state.get(p, {}).items() if not isinstance(v, torch.Tensor)}
        for p in sharded.parameters()
    }
    return {name: values for name, values in found.items() if values}


def groups_of(engine: Training) -> list[dict[str, Any]]:
    sharded = engine.sharded_optimizer
    if sharded is None:
        return []
    names = _names(engine)
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [names[p] for p in group["params"]]}
        for group in sharded.optimizer.param_groups
    ]


def read_extra(path: Path, metadata: Metadata) -> dict[str, Any]:
    """Counters, groups, names and client state."""
    extra = read_packed(path, metadata, "extra")
    if extra["version"] > VERSION:
        raise CheckpointError(f"{path} has format {extra['version']}; this zeropage reads up to {VERSION}")
    return extra


def read_packed(path: Path, metadata: Metadata, key: str) -> dict[str, Any]:
    """The values of an entry that is not a tensor of the model: `extra` or `rank.<r>`."""
    described = metadata.state_dict_metadata.get(key)
    if not isinstance(described, TensorStorageMetadata):
        raise CheckpointError(f"{path} was not written by zeropage: it has no entry {key!r}")
    data = torch.empty(described.size, dtype=torch.uint8)
    try:
        with alone():
            load({key: data}, storage_reader=SliceReader(path), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{path}: {key!r} cannot be read ({told(error)}); load another tag") from error
    values: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return values


@contextmanager
def alone() -> Iterator[None]:
    """One process does it by itself, on purpose: torch need not warn of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def pack(values: dict[str, Any]) -> torch.Tensor:
    """As bytes that `torch.load(weights_only=True)` reads."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            "client_state, the scheduler, the optimizer or a module's get_extra_state() holds a value that could not "
            f"be loaded again; use numbers, strings, tensors, lists and dicts: {error}"
        ) from error
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
