"""Loading a checkpoint on any number of ranks: each reads the parts that its own slices want, into their place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from zeropage.checkpoint.contents import (
    Stateful,
    Training,
    alone,
    groups_of,
    model_tensors,
    parameters_of,
    read_extra,
    read_packed,
)
from zeropage.checkpoint.folder import Manifest, find
from zeropage.checkpoint.named import extra_states_of, set_extra_states
from zeropage.checkpoint.reading import SliceReader
from zeropage.checkpoint.verdict import one_verdict, told
from zeropage.errors import CheckpointError
from zeropage.optim import NARROW, ShardedOptimizer, record_of
from zeropage.steps import over_slice
from zeropage.tensor import PagedTensor

__all__ = ["LoadResult", "load_checkpoint"]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What `Engine.load` found.

    Attributes:
        tag: the checkpoint that was taken.
        client_state: what was saved with it.
        global_step: steps applied when it was saved.
        world: ranks that saved it.
        restored_ranks: whether what belongs to each rank alone was restored too: random generators, and the
            position of a data loader. That is so if as many ranks load as saved.
    """

    tag: str
    client_state: dict[str, Any]
    global_step: int
    world: int
    restored_ranks: bool


def load_checkpoint(
    engine: Training,
    folder: Path,
    tag: str | None,
    *,
    weights_only: bool,
    strict: bool = True,
    data_loader: Stateful | None = None,
) -> LoadResult:
    """See `Engine.load`. Everything is read and checked, on all ranks, before anything is changed."""
    sharded = None if weights_only else engine.sharded_optimizer
    for pager in engine.pagers:
        pager.close_batch()
    transport = engine.pagers[0].transport
    with one_verdict(transport, "check a checkpoint"):
        path = find(folder, tag)
        manifest = Manifest.read(path)
        if manifest is not None:
            manifest.check(path, sorted(manifest.files)[transport.rank :: transport.world])
        metadata = SliceReader(path).read_metadata()
        extra = read_extra(path, metadata)
        _check_whole(metadata, path)
        _check_model(engine, metadata, extra, path, strict=strict)
        if sharded is not None:
            _check_optimizer(engine, sharded, extra, path)
        world = extra.get("world", 0)
        own = f"rank.{transport.rank}"
        restored = not weights_only and world == transport.world and own in metadata.state_dict_metadata
        of_rank = read_packed(path, metadata, own) if restored else {}
    left_out = set(extra.get("left_out", ()))
    there = metadata.state_dict_metadata
    targets = {
        name: value
        for name, value in model_tensors(engine).items()
        if name not in left_out and (strict or f"model.{name}" in there)
    }
    # [Note: in place] Where every byte has been checked, values are read into the model itself: one part at a time is
    # in memory besides. Without checksums (format 1) they are read into memory of their own first.
    checked = manifest is not None
    into = targets if checked else {name: _room_like(value, name) for name, value in targets.items()}
    if sharded is not None and checked:
        sharded.forget()  # makes room for the state that comes
    masters = {} if sharded is None else _empty_masters(engine, sharded, metadata)
    found = {} if sharded is None else _empty_optimizer(engine, sharded, metadata)
    state = {key: value for key, (value, _) in found.items()} | masters
    with _writing(engine, path.name, targets), one_verdict(transport, f"read {path.name}"), torch.no_grad():
        with _telling_what_is_left(path, manifest):
            _load(engine, {**_keys(into, metadata, exact=sharded is not None), **state}, path)
        if Manifest.read(path) != manifest:
            raise CheckpointError(f"{path} was replaced while it was read: the model holds parts of both; load again")
    if not checked:
        _put_in_place(engine, path.name, targets, into)
    if sharded is not None:
        _restore_optimizer(engine, sharded, extra, found, masters)
    set_extra_states(engine.module, extra.get("extra_states", {}))
    if not weights_only:
        engine.restore_progress(extra["progress"])
        if engine.lr_scheduler is not None and extra["scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(extra["scheduler"])
        if restored:
            _restore_rank(of_rank, data_loader)
    return LoadResult(path.name, extra["client_state"], int(extra["progress"]["global_step"]), world, restored)


@contextmanager
def _telling_what_is_left(path: Path, manifest: Manifest | None) -> Iterator[None]:
    """A disk that fails when values are being read into the model itself leaves it in between."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if manifest is None:
            raise
        why = told(error)
        try:
            manifest.check(path, ())  # torch does not say which file it was
        except CheckpointError as named:
            why = str(named)
        raise CheckpointError(
            f"reading {path} failed in the middle: {why}. The model is partly new, and its optimizer has no state: "
            "load a checkpoint before anything else."
        ) from error


def _room_like(value: torch.Tensor, name: str) -> torch.Tensor:
    """Memory to read into, apart from what the model uses."""
    if isinstance(value, PagedTensor):
        page = value._node.page
        return over_slice(torch.empty_like(page.own()), page, f"room for {name}")
    return torch.empty_like(value)


def _keys(named: dict[str, torch.Tensor], metadata: Metadata, *, exact: bool) -> dict[str, torch.Tensor]:
    """By key of the checkpoint: what to read it into. `exact`: a wide parameter takes the master, to train on."""
    found = {}
    for name, value in named.items():
        wide = isinstance(value, PagedTensor) and value.dtype not in NARROW
        master = f"master.{name}"
        found[master if exact and wide and master in metadata.state_dict_metadata else f"model.{name}"] = value
    return found


@contextmanager
def _writing(engine: Training, tag: str, named: dict[str, torch.Tensor]) -> Iterator[None]:
    """A write batch over all pages of the model."""
    pages = dict.fromkeys(value._node.page for value in named.values() if isinstance(value, PagedTensor))
    with ExitStack() as batches:
        for pager in engine.pagers:
            own = [page for page in pages if page.pager is pager]
            batches.enter_context(pager.writing(own, f"load {tag}"))
        yield
    for parameter in engine.module.parameters():
        torch.autograd.graph.increment_version(parameter)


def _put_in_place(engine: Training, tag: str, named: dict[str, torch.Tensor], read: dict[str, torch.Tensor]) -> None:
    """Copy what was read into the model."""
    with torch.no_grad(), _writing(engine, tag, named):
        for name, value in named.items():
            found = read[name]
            if isinstance(value, PagedTensor) and isinstance(found, PagedTensor):
                value._node.page.own().copy_(found._node.page.own())
            else:
                value.copy_(found)


def _check_whole(metadata: Metadata, path: Path) -> None:
    """Every tensor must be covered by its parts: what is read is written over memory that holds anything."""
    for key, about in metadata.state_dict_metadata.items():
        if not isinstance(about, TensorStorageMetadata):
            continue
        if sum(chunk.sizes.numel() for chunk in about.chunks) != about.size.numel():
            raise CheckpointError(f"{path} does not hold all of {key!r}; load another tag")


def _check_model(engine: Training, metadata: Metadata, extra: dict[str, Any], path: Path, *, strict: bool) -> None:
    saved = metadata.state_dict_metadata
    left_out = set(extra.get("left_out", ()))
    here = model_tensors(engine)
    problems = _extra_problems(engine, extra, left_out) if strict else []
    for name, value in here.items():
        described = saved.get(f"model.{name}")
        if not isinstance(described, TensorStorageMetadata):
            if strict and name not in left_out:
                problems.append(f"{name} is missing")
        elif described.size != value.shape:
            problems.append(f"{name} has shape {tuple(described.size)} there and {tuple(value.shape)} here")
    for key, described in saved.items():
        name = key.removeprefix("model.")
        if strict and name != key and name not in here and _has_elements(described):
            problems.append(f"{name} is not in the model")
    if problems:
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(problems[:8])}")


def _extra_problems(engine: Training, extra: dict[str, Any], left_out: set[str]) -> list[str]:
    if "extra_states" not in extra:  # of format 2 before it had them, or older
        return []
    there, here = extra["extra_states"].keys(), extra_states_of(engine.module).keys()
    missing = [f"{name} is missing" for name in sorted(here - there - left_out)]
    return missing + [f"{name} is not in the model" for name in sorted(there - here)]


def _has_elements(described: object) -> bool:
    return isinstance(described, TensorStorageMetadata) and described.size.numel() > 0


def _check_optimizer(engine: Training, sharded: ShardedOptimizer, extra: dict[str, Any], path: Path) -> None:
    saved, here = extra["groups"], groups_of(engine)
    if len(saved) != len(here):
        raise CheckpointError(f"{path} has {len(saved)} optimizer groups, this engine has {len(here)}")
    trained = {name for name, p in parameters_of(engine).items() if p.requires_grad}
    for index, (there, mine) in enumerate(zip(saved, here, strict=True)):
        # DeepSpeed leaves frozen parameters out of its groups
        here_too = [name for name in mine["params"] if name in trained or name in there["params"]]
        if there["params"] != here_too:
            odd = sorted(set(there["params"]) ^ set(here_too)) or ["their order"]
            raise CheckpointError(f"optimizer group {index} of {path} holds other parameters: {', '.join(odd[:8])}")


def _empty_optimizer(
    engine: Training, sharded: ShardedOptimizer, metadata: Metadata
) -> dict[str, tuple[torch.Tensor, tuple[PagedTensor, str]]]:
    """Room for every saved state of every parameter, by key."""
    found: dict[str, tuple[torch.Tensor, tuple[PagedTensor, str]]] = {}
    by_name = parameters_of(engine)
    stepped = set(sharded.parameters())
    for key, described in metadata.state_dict_metadata.items():
        if not key.startswith("optimizer.") or not isinstance(described, TensorStorageMetadata):
            continue
        name, state = key.removeprefix("optimizer.").rsplit(".", 1)
        parameter = by_name.get(name)
        if parameter is None or parameter not in stepped:
            continue
        if sharded.is_one_number(state) and not described.size:
            room = torch.zeros((), dtype=described.properties.dtype)
        else:
            room = _room(sharded, described, parameter, key)
        found[key] = (room, (parameter, state))
    return found


def _empty_masters(engine: Training, sharded: ShardedOptimizer, metadata: Metadata) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in parameters_of(engine).items():
        described = metadata.state_dict_metadata.get(f"master.{name}")
        if isinstance(described, TensorStorageMetadata):
            found[f"master.{name}"] = _room(sharded, described, parameter, f"master.{name}")
    return found


def _room(
    sharded: ShardedOptimizer, described: TensorStorageMetadata, parameter: PagedTensor, name: str
) -> torch.Tensor:
    page = parameter._node.page
    dtype = described.properties.dtype
    if described.size != page.spec.shape:
        return torch.empty(described.size, dtype=dtype)
    return sharded.room(page, dtype, name)


def _restore_optimizer(
    engine: Training,
    sharded: ShardedOptimizer,
    extra: dict[str, Any],
    restored: dict[str, tuple[torch.Tensor, tuple[PagedTensor, str]]],
    masters: dict[str, torch.Tensor],
) -> None:
    optimizer = sharded.optimizer
    sharded.forget()
    for value, (parameter, key) in restored.values():
        optimizer.state[parameter][key] = value
    for group, saved in zip(optimizer.param_groups, extra["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    by_name = parameters_of(engine)
    for name, parameter in by_name.items():
        master = masters.get(f"master.{name}")
        if isinstance(master, PagedTensor) and parameter.dtype in NARROW:
            sharded.keep_master(record_of(parameter), master._node.page.store.slice)
    for name, values in extra["state"].items():
        optimizer.state[by_name[name]].update(values)
    sharded.restored()


def _load(engine: Training, state: dict[str, Any], path: Path) -> None:
    """torch's `load`, on the ranks that the model is sharded over."""
    if engine.process_group is None:
        with alone():
            load(state, storage_reader=SliceReader(path), no_dist=True)
    else:
        load(state, storage_reader=SliceReader(path), process_group=engine.process_group)


def _restore_rank(saved: dict[str, Any], data_loader: Stateful | None) -> None:
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    if data_loader is not None and saved["data_loader"] is not None:
        data_loader.load_state_dict(saved["data_loader"])
