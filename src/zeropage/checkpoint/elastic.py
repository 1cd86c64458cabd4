"""Checkpoints that any number of ranks loads: logical tensors by name, each rank reading and writing boxes.

A folder holds one sub-folder a tag, in the format of `torch.distributed.checkpoint`, and a file `latest` that
names the last one. Keys are `model.<name>`, `master.<name>` (fp32 values behind a 16-bit parameter),
`optimizer.<name>.<state>` and `extra` (bytes of a `torch.save` that loads with `weights_only`: counters, groups,
client state).
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from zeropage.checkpoint.named import first_names, tensors_of
from zeropage.checkpoint.verdict import one_verdict
from zeropage.errors import CheckpointError
from zeropage.optim import NARROW, ShardedOptimizer, record_of
from zeropage.steps import over_slice
from zeropage.tensor import PagedTensor

if TYPE_CHECKING:
    from zeropage.engine import Engine

__all__ = ["LoadResult", "latest", "load_checkpoint", "read_extra", "save_checkpoint"]

_LATEST = "latest"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What `Engine.load` found: the tag, and the `client_state` that was saved with it."""

    tag: str
    client_state: dict[str, Any]
    global_step: int


def save_checkpoint(
    engine: Engine, folder: Path, tag: str | None, client_state: Mapping[str, Any] | None, *, wait: bool
) -> str:
    """See `Engine.save`. `wait=False` is accepted and waits: writing beside training is not there yet."""
    tag = tag if tag is not None else f"step{engine.global_step}"
    if not tag or "/" in tag or tag == _LATEST:
        raise CheckpointError(f"tag {tag!r} cannot name a checkpoint; use letters and digits")
    for pager in engine.pagers:
        pager.close_batch()
        pager.transport.meet(f"save {tag}")
    state = _tensors(engine)
    state["extra"] = _pack(
        {
            "version": _VERSION,
            "progress": engine.progress(),
            "groups": _groups(engine),
            "state": _small_state(engine),
            "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
            "client_state": dict(client_state or {}),
            **_about_names(engine),
        }
    )
    with torch.no_grad():
        _together(save, engine, state, folder / tag)
    if engine.pagers[0].transport.rank == 0:
        _point(folder, tag)
    engine.pagers[0].transport.meet(f"saved {tag}")
    return tag


def load_checkpoint(engine: Engine, folder: Path, tag: str | None, *, weights_only: bool) -> LoadResult:
    """See `Engine.load`. Everything is read and checked, on all ranks, before anything is changed."""
    sharded = None if weights_only else engine.sharded_optimizer
    for pager in engine.pagers:
        pager.close_batch()
    with one_verdict(engine.pagers[0].transport, "check a checkpoint"):
        tag = latest(folder) if tag is None else tag
        path = folder / tag
        if not (path / ".metadata").exists():
            raise CheckpointError(f"{path} is not a checkpoint: it has no .metadata file")
        metadata = FileSystemReader(path).read_metadata()
        extra = read_extra(path, metadata)
        _check_model(engine, metadata, path)
        if sharded is not None:
            _check_optimizer(engine, sharded, extra, path)
    model = {f"model.{name}": _room_like(value, name) for name, value in _model(engine).items()}
    restored = {} if sharded is None else _empty_optimizer(engine, sharded, metadata)
    masters = {} if sharded is None else _empty_masters(engine, metadata)
    with one_verdict(engine.pagers[0].transport, f"read {tag}"), torch.no_grad():
        _together(load, engine, {**model, **{key: value for key, (value, _) in restored.items()}, **masters}, path)
    _put_in_place(engine, tag, model, masters)
    if sharded is not None:
        _restore_optimizer(engine, sharded, extra, restored, masters)
        engine.restore_progress(extra["progress"])
        if engine.lr_scheduler is not None and extra["scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(extra["scheduler"])
    return LoadResult(tag, extra["client_state"], int(extra["progress"]["global_step"]))


def _room_like(value: torch.Tensor, name: str) -> torch.Tensor:
    """Memory to read into, apart from what the model uses."""
    if isinstance(value, PagedTensor):
        page = value._node.page
        return over_slice(torch.zeros_like(page.own()), page, f"room for {name}")
    return torch.zeros_like(value)


def _put_in_place(engine: Engine, tag: str, model: dict[str, torch.Tensor], masters: dict[str, torch.Tensor]) -> None:
    """Copy what was read into the model, in one write batch."""
    targets = {f"model.{name}": value for name, value in _model(engine).items()}
    paged = {key: value._node.page for key, value in targets.items() if isinstance(value, PagedTensor)}
    with torch.no_grad(), ExitStack() as batches:
        for pager in engine.pagers:
            pages = [page for page in dict.fromkeys(paged.values()) if page.pager is pager]
            batches.enter_context(pager.writing(pages, f"load {tag}"))
        for key, value in targets.items():
            read = model[key]
            page = paged.get(key)
            if page is not None and page.dtype not in NARROW:
                read = masters.get(key.replace("model.", "master.", 1), read)  # more exact than the weight
            if page is not None and isinstance(read, PagedTensor):
                page.own().copy_(read._node.page.own())
            else:
                value.copy_(read)
    for parameter in engine.module.parameters():
        torch.autograd.graph.increment_version(parameter)


# -- what is saved


def _model(engine: Engine) -> dict[str, torch.Tensor]:
    """All tensors of the module that have elements, by name."""
    return {name: value.detach() for name, value in tensors_of(engine.module).items() if value.numel()}


def _about_names(engine: Engine) -> dict[str, Any]:
    """What the format cannot say: which names are tied to an earlier one, and tensors without elements."""
    named = tensors_of(engine.module)
    return {
        "tied": {name: first for name, first in first_names(named).items() if name != first},
        "empty": {name: (value.dtype, tuple(value.shape)) for name, value in named.items() if not value.numel()},
    }


def _parameters(engine: Engine) -> dict[str, PagedTensor]:
    return {name: p for name, p in engine.module.named_parameters() if isinstance(p, PagedTensor)}


def _names(engine: Engine) -> dict[PagedTensor, str]:
    return {p: name for name, p in _parameters(engine).items()}


def _tensors(engine: Engine) -> dict[str, Any]:
    state: dict[str, Any] = {f"model.{name}": value for name, value in _model(engine).items()}
    sharded = engine.sharded_optimizer
    if sharded is None:
        return state
    names = _names(engine)
    for parameter in sharded.parameters():
        name, record = names[parameter], record_of(parameter)
        master = sharded.masters.get(record)
        if master is not None and master.agrees_with(record.page):
            state[f"master.{name}"] = over_slice(master.values, record.page, f"{name} in fp32")
        for key, value in sharded.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state[f"optimizer.{name}.{key}"] = value
    return state


def _small_state(engine: Engine) -> dict[str, dict[str, Any]]:
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


def _groups(engine: Engine) -> list[dict[str, Any]]:
    sharded = engine.sharded_optimizer
    if sharded is None:
        return []
    names = _names(engine)
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [names[p] for p in group["params"]]}
        for group in sharded.optimizer.param_groups
    ]


# -- what is loaded


def read_extra(path: Path, metadata: Metadata) -> dict[str, Any]:
    described = metadata.state_dict_metadata.get("extra")
    if not isinstance(described, TensorStorageMetadata):
        raise CheckpointError(f"{path} was not written by zeropage: it has no entry 'extra'")
    data = torch.empty(described.size, dtype=torch.uint8)
    with _alone():
        load({"extra": data}, checkpoint_id=path, no_dist=True)
    extra: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    if extra["version"] > _VERSION:
        raise CheckpointError(f"{path} has format version {extra['version']}; this zeropage reads up to {_VERSION}")
    return extra


def _check_model(engine: Engine, metadata: Metadata, path: Path) -> None:
    saved = metadata.state_dict_metadata
    here = _model(engine)
    problems = []
    for name, value in here.items():
        described = saved.get(f"model.{name}")
        if not isinstance(described, TensorStorageMetadata):
            problems.append(f"{name} is missing")
        elif described.size != value.shape:
            problems.append(f"{name} has shape {tuple(described.size)} there and {tuple(value.shape)} here")
    for key, described in saved.items():
        name = key.removeprefix("model.")
        if name != key and name not in here and _has_elements(described):
            problems.append(f"{name} is not in the model")
    if problems:
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(problems[:8])}")


def _has_elements(described: object) -> bool:
    return isinstance(described, TensorStorageMetadata) and described.size.numel() > 0


def _check_optimizer(engine: Engine, sharded: ShardedOptimizer, extra: dict[str, Any], path: Path) -> None:
    saved, here = extra["groups"], _groups(engine)
    if len(saved) != len(here):
        raise CheckpointError(f"{path} has {len(saved)} optimizer groups, this engine has {len(here)}")
    for index, (there, mine) in enumerate(zip(saved, here, strict=True)):
        if there["params"] != mine["params"]:
            odd = sorted(set(there["params"]) ^ set(mine["params"])) or ["their order"]
            raise CheckpointError(f"optimizer group {index} of {path} holds other parameters: {', '.join(odd[:8])}")


def _empty_optimizer(
    engine: Engine, sharded: ShardedOptimizer, metadata: Metadata
) -> dict[str, tuple[torch.Tensor, tuple[PagedTensor, str]]]:
    """Room for every saved state of every parameter, by key."""
    found: dict[str, tuple[torch.Tensor, tuple[PagedTensor, str]]] = {}
    by_name = _parameters(engine)
    stepped = set(sharded.parameters())
    for key, described in metadata.state_dict_metadata.items():
        if not key.startswith("optimizer.") or not isinstance(described, TensorStorageMetadata):
            continue
        name, state = key.removeprefix("optimizer.").rsplit(".", 1)
        parameter = by_name.get(name)
        if parameter is None or parameter not in stepped:
            continue
        found[key] = (_room(described, parameter, key), (parameter, state))
    return found


def _empty_masters(engine: Engine, metadata: Metadata) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in _parameters(engine).items():
        described = metadata.state_dict_metadata.get(f"master.{name}")
        if isinstance(described, TensorStorageMetadata):
            found[f"master.{name}"] = _room(described, parameter, f"master.{name}")
    return found


def _room(described: TensorStorageMetadata, parameter: PagedTensor, name: str) -> torch.Tensor:
    page = parameter._node.page
    dtype = described.properties.dtype
    if described.size != page.spec.shape:
        return torch.zeros(described.size, dtype=dtype)
    low, high = page.bounds
    return over_slice(torch.zeros(high - low, dtype=dtype, device=page.spec.device), page, name)


def _restore_optimizer(
    engine: Engine,
    sharded: ShardedOptimizer,
    extra: dict[str, Any],
    restored: dict[str, tuple[torch.Tensor, tuple[PagedTensor, str]]],
    masters: dict[str, torch.Tensor],
) -> None:
    optimizer = sharded.optimizer
    for parameter in sharded.parameters():
        optimizer.state.pop(parameter, None)
    for value, (parameter, key) in restored.values():
        optimizer.state[parameter][key] = value
    for group, saved in zip(optimizer.param_groups, extra["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    sharded.masters.clear()
    by_name = _parameters(engine)
    for name, parameter in by_name.items():
        master = masters.get(f"master.{name}")
        if isinstance(master, PagedTensor) and parameter.dtype in NARROW:
            sharded.keep_master(record_of(parameter), master._node.page.own())
    for name, values in extra["state"].items():
        optimizer.state[by_name[name]].update(values)


# -- torch.distributed.checkpoint


def _together(function: Callable[..., Any], engine: Engine, state: dict[str, Any], path: Path) -> None:
    """torch's `save` or `load`, on the ranks that the model is sharded over."""
    if engine.process_group is None:
        with _alone():
            function(state, checkpoint_id=path, no_dist=True)
    else:
        function(state, checkpoint_id=path, process_group=engine.process_group)


@contextmanager
def _alone() -> Iterator[None]:
    """One process does it by itself, on purpose: torch need not warn of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


# -- small files


def _pack(values: dict[str, Any]) -> torch.Tensor:
    """As bytes that `torch.load(weights_only=True)` reads."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            "client_state, the scheduler or the optimizer holds a value that could not be loaded again; use numbers, "
            f"strings, tensors, lists and dicts: {error}"
        ) from error
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _point(folder: Path, tag: str) -> None:
    """Replace `latest` in one step."""
    temporary = folder / f".{_LATEST}.new"
    with temporary.open("w") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / _LATEST)


def latest(folder: Path) -> str:
    pointer = folder / _LATEST
    if not pointer.exists():
        raise CheckpointError(f"{folder} holds no checkpoint: there is no file {_LATEST!r}; name a tag")
    return pointer.read_text().strip()
