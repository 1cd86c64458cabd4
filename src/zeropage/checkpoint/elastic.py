"""Checkpoints that any number of ranks loads: logical tensors by name, each rank reading and writing boxes.

The format is that of `torch.distributed.checkpoint`. Keys are `model.<name>`, `master.<name>` (fp32 values behind
a 16-bit parameter), `optimizer.<name>.<state>`, and two kinds of bytes of a `torch.save` that loads with
`weights_only`: `extra` (counters, groups, client state) and `rank.<r>` (random generators, place in the data).
"""

from __future__ import annotations

import io
import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from zeropage.checkpoint.folder import Lock, Manifest, check_tag, find, stage
from zeropage.checkpoint.named import first_names, tensors_of
from zeropage.checkpoint.saving import About, Part, Save
from zeropage.checkpoint.verdict import one_verdict, raise_together
from zeropage.errors import CheckpointError
from zeropage.optim import NARROW, ShardedOptimizer, record_of
from zeropage.steps import over_slice
from zeropage.tensor import PagedTensor

if TYPE_CHECKING:
    from zeropage.engine import Engine

__all__ = [
    "VERSION", "LoadResult", "Stateful", "begin_save", "end_save", "load_checkpoint", "pack",
    "read_extra", "read_packed",
]  # fmt: skip

VERSION = 2


class Stateful(Protocol):
    """A data loader that knows its position (`torchdata`'s protocol)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


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


def begin_save(
    engine: Engine,
    folder: Path,
    tag: str | None,
    client_state: Mapping[str, Any] | None,
    *,
    keep: int | None,
    trainable_only: bool,
    latest: bool,
    data_loader: Stateful | None,
) -> Save:
    """Begin to write what `Engine.save` says. The values are read while they lie where they are."""
    tag = tag if tag is not None else f"step{engine.global_step}"
    for pager in engine.pagers:
        pager.close_batch()
        pager.transport.meet(f"save {tag}")
    transport = engine.pagers[0].transport
    staging: Path | None = None
    lock: Lock | None = None
    parts: list[Part] = []
    problem = ""
    try:
        try:
            check_tag(tag)
            if keep is not None and keep < 1:
                raise CheckpointError(f"keep={keep} would leave no checkpoint; keep 1 or more")
            parts = _parts(engine, client_state, trainable_only=trainable_only, data_loader=data_loader)
            if transport.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                lock = Lock(folder)
                staging = stage(folder, tag)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        made = transport.meet(f"begin to save {tag}", b"" if staging is None else staging.name.encode())[0].decode()
        if made and not (folder / made).is_dir():
            problem = problem or f"{folder} is another folder there: all ranks must save to one file system"
        raise_together(transport, f"save to {folder}", problem)
    except BaseException:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            lock.release()
        raise
    about = About(tag, engine.global_step, transport.world, keep, {"torch": str(torch.__version__)}, latest)
    return Save(transport.rank, folder / made, parts, about, lock, engine.pagers[0].config.timeout_s)


def end_save(engine: Engine, saving: Save) -> None:
    """Wait until the checkpoint is published (all ranks together).

    Raises:
        CheckpointError: a rank could not write its part. What was there before is as it was.
    """
    transport = engine.pagers[0].transport
    saving.await_reported()
    try:
        raise_together(transport, f"write {saving.tag}", saving.problem)
        saving.join()
        raise_together(transport, f"publish {saving.tag}", saving.problem)
    except BaseException:
        saving.abort()
        raise


def load_checkpoint(
    engine: Engine,
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
        metadata = FileSystemReader(path).read_metadata()
        extra = read_extra(path, metadata)
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
        n: value for n, value in _model(engine).items() if n not in left_out and (strict or f"model.{n}" in there)
    }
    # [Note: in place] Where every byte has been checked, values are read into the model itself: one part at a time is
    # in memory besides. Without checksums (format 1) they are read into memory of their own first.
    checked = manifest is not None
    into = targets if checked else {name: _room_like(value, name) for name, value in targets.items()}
    if sharded is not None and checked:
        _let_go(sharded)
    masters = {} if sharded is None else _empty_masters(engine, metadata)
    found = {} if sharded is None else _empty_optimizer(engine, sharded, metadata)
    state = {key: value for key, (value, _) in found.items()} | masters
    with _writing(engine, path.name, targets), one_verdict(transport, f"read {path.name}"), torch.no_grad():
        _together(load, engine, {**_keys(into, metadata, exact=sharded is not None), **state}, path)
        if Manifest.read(path) != manifest:
            raise CheckpointError(f"{path} was replaced while it was read: the model holds parts of both; load again")
    if not checked:
        _put_in_place(engine, path.name, targets, into)
    if sharded is not None:
        _restore_optimizer(engine, sharded, extra, found, masters)
    if not weights_only:
        engine.restore_progress(extra["progress"])
        if engine.lr_scheduler is not None and extra["scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(extra["scheduler"])
        if restored:
            _restore_rank(of_rank, data_loader)
    return LoadResult(path.name, extra["client_state"], int(extra["progress"]["global_step"]), world, restored)


def _room_like(value: torch.Tensor, name: str) -> torch.Tensor:
    """Memory to read into, apart from what the model uses."""
    if isinstance(value, PagedTensor):
        page = value._node.page
        return over_slice(torch.zeros_like(page.own()), page, f"room for {name}")
    return torch.zeros_like(value)


def _keys(named: dict[str, torch.Tensor], metadata: Metadata, *, exact: bool) -> dict[str, torch.Tensor]:
    """By key of the checkpoint: what to read it into. `exact`: a wide parameter takes the master, to train on."""
    found = {}
    for name, value in named.items():
        wide = isinstance(value, PagedTensor) and value.dtype not in NARROW
        master = f"master.{name}"
        found[master if exact and wide and master in metadata.state_dict_metadata else f"model.{name}"] = value
    return found


@contextmanager
def _writing(engine: Engine, tag: str, named: dict[str, torch.Tensor]) -> Iterator[None]:
    """A write batch over all pages of the model."""
    pages = dict.fromkeys(value._node.page for value in named.values() if isinstance(value, PagedTensor))
    with ExitStack() as batches:
        for pager in engine.pagers:
            own = [page for page in pages if page.pager is pager]
            batches.enter_context(pager.writing(own, f"load {tag}"))
        yield
    for parameter in engine.module.parameters():
        torch.autograd.graph.increment_version(parameter)


def _put_in_place(engine: Engine, tag: str, named: dict[str, torch.Tensor], read: dict[str, torch.Tensor]) -> None:
    """Copy what was read into the model."""
    with torch.no_grad(), _writing(engine, tag, named):
        for name, value in named.items():
            found = read[name]
            if isinstance(value, PagedTensor) and isinstance(found, PagedTensor):
                value._node.page.own().copy_(found._node.page.own())
            else:
                value.copy_(found)


def _let_go(sharded: ShardedOptimizer) -> None:
    """Make room for the state that comes."""
    for parameter in sharded.parameters():
        sharded.optimizer.state.pop(parameter, None)
    sharded.masters.clear()


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


def _parts(
    engine: Engine,
    client_state: Mapping[str, Any] | None,
    *,
    trainable_only: bool,
    data_loader: Stateful | None,
) -> list[Part]:
    """What this rank writes: its boxes of what is sharded, and on the first rank what all have alike."""
    left_out = _frozen(engine) if trainable_only else []
    extra = {
        "version": VERSION,
        "world": engine.pagers[0].transport.world,
        "left_out": left_out,
        "frozen": _frozen(engine),
        "progress": engine.progress(),
        "groups": _groups(engine),
        "state": _small_state(engine),
        "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "client_state": dict(client_state or {}),
        **_about_names(engine),
    }
    rank = engine.pagers[0].transport.rank
    tensors = _tensors(engine, left_out) | {"extra": pack(extra)}
    found = []
    for key, value in tensors.items():
        if isinstance(value, PagedTensor):
            for box, part in value._node.page.boxes():
                found.append(Part(key, tuple(value.shape), box.offset, part.detach()))
        elif rank == 0:
            # a copy: buffers and step counters may change at any time
            found.append(Part(key, tuple(value.shape), (0,) * value.dim(), value.detach().clone()))
    own = pack(_state_of_rank(data_loader))
    found.append(Part(f"rank.{rank}", tuple(own.shape), (0,), own))
    return found


def _frozen(engine: Engine) -> list[str]:
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


def _restore_rank(saved: dict[str, Any], data_loader: Stateful | None) -> None:
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    if data_loader is not None and saved["data_loader"] is not None:
        data_loader.load_state_dict(saved["data_loader"])


def _tensors(engine: Engine, left_out: list[str]) -> dict[str, torch.Tensor]:
    apart = set(left_out)
    state = {f"model.{name}": value for name, value in _model(engine).items() if name not in apart}
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
    with _alone():
        load({key: data}, checkpoint_id=path, no_dist=True)
    values: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return values


def _check_model(engine: Engine, metadata: Metadata, extra: dict[str, Any], path: Path, *, strict: bool) -> None:
    saved = metadata.state_dict_metadata
    left_out = set(extra.get("left_out", ()))
    here = _model(engine)
    problems = []
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


def _has_elements(described: object) -> bool:
    return isinstance(described, TensorStorageMetadata) and described.size.numel() > 0


def _check_optimizer(engine: Engine, sharded: ShardedOptimizer, extra: dict[str, Any], path: Path) -> None:
    saved, here = extra["groups"], _groups(engine)
    if len(saved) != len(here):
        raise CheckpointError(f"{path} has {len(saved)} optimizer groups, this engine has {len(here)}")
    trained = {name for name, p in _parameters(engine).items() if p.requires_grad}
    for index, (there, mine) in enumerate(zip(saved, here, strict=True)):
        # DeepSpeed leaves frozen parameters out of its groups
        here_too = [name for name in mine["params"] if name in trained or name in there["params"]]
        if there["params"] != here_too:
            odd = sorted(set(there["params"]) ^ set(here_too)) or ["their order"]
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
    _let_go(sharded)
    for value, (parameter, key) in restored.values():
        optimizer.state[parameter][key] = value
    for group, saved in zip(optimizer.param_groups, extra["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
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


# -- small values


def pack(values: dict[str, Any]) -> torch.Tensor:
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
