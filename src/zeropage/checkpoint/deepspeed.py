"""DeepSpeed's checkpoints, turned into zeropage's: weights, fp32 masters, optimizer state, counters, loss scale.

It owns the translation; what files there are is `deepspeed_files`'s to know, and where a parameter is in them
`deepspeed_groups`'s. Everything is read and checked before anything is written, and written as `Engine.save` would
have. Memory is bounded: tensors are views of the mapped files where they stand in one piece, and otherwise put
together in a mapped scratch file, one at a time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeropage.checkpoint.contents import VERSION, Training, pack
from zeropage.checkpoint.deepspeed_files import is_deepspeed, tag_of
from zeropage.checkpoint.deepspeed_groups import Folder, Group, Piece, Spread, read_folder
from zeropage.checkpoint.folder import Lock, stage
from zeropage.checkpoint.parts import whole_part
from zeropage.checkpoint.saving import About, Save
from zeropage.checkpoint.verdict import one_verdict
from zeropage.errors import CheckpointError
from zeropage.loss_scale import DynamicLossScale
from zeropage.optim import NARROW

__all__ = ["Converted", "convert_deepspeed", "loss_scale_from", "opened"]

# What DeepSpeed writes into the model's file beside the user's client state.
_OWN_KEYS = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts", "ds_autoep_layers",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert_deepspeed` wrote, and out of what."""

    tag: str
    stage: int
    """DeepSpeed's ZeRO stage."""

    world: int
    """How many ranks had written it."""

    global_step: int
    num_parameters: int
    """Trained parameters, tied ones once."""


def convert_deepspeed(source: Path, target: Path, tag: str | None = None) -> Converted:
    """Write the DeepSpeed checkpoint `source/tag` (default: the one that `latest` names) as `target/tag`.

    ZeRO stages 1, 2 and 3, written by any number of ranks, without tensor, pipeline or expert parallelism. What an
    engine loads is what DeepSpeed held, to the bit. A learning-rate scheduler of torch is carried over; the state of
    DeepSpeed's own ones is put into the client state, as `deepspeed_lr_scheduler`.

    Raises:
        CheckpointError: a file or an entry is missing, truncated or inconsistent, or `target/tag` exists; nothing
            has been written then.
    """
    tag = tag_of(source, tag)
    if (target / tag).exists():
        raise CheckpointError(f"{target / tag} exists; choose another folder, or remove it")
    folder = read_folder(source / tag)
    tensors, extra = _tensors(folder), _extra(folder)
    pack(extra)  # raises for what could not be loaded again
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_space(tensors, target.parent)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        state = {key: _whole(value, Path(scratch) / str(number)) for number, (key, value) in enumerate(tensors.items())}
        _write(state, extra, target, tag)
    trained = sum(len(group.masters) for group in folder.groups)
    return Converted(tag, folder.stage, folder.world, extra["progress"]["global_step"], trained)


@contextmanager
def opened(engine: Training, folder: Path, tag: str | None) -> Iterator[Path]:
    """The folder to load from: `folder`, or for the time of the body a conversion of it if DeepSpeed wrote it.

    All ranks together. Rank 0 converts, beside the original, or in the system's temporary folder where that is
    not writable. The body must end with all ranks having read, or with an error on all of them.
    """
    for pager in engine.pagers:
        pager.close_batch()
    transport = engine.pagers[0].transport
    if not any(transport.meet("open a checkpoint", b"deepspeed" if is_deepspeed(folder, tag) else b"")):
        yield folder
        return
    beside: Path | None = None
    try:
        with one_verdict(transport, "convert a DeepSpeed checkpoint"):
            if transport.rank == 0:
                beside = _temporary(folder)
                convert_deepspeed(folder, beside / "converted", tag)
        answers = transport.meet("find the conversion", b"" if beside is None else str(beside).encode())
        yield Path(answers[0].decode()) / "converted"
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)


def _temporary(folder: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=".zeropage-", dir=folder))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="zeropage-"))


def _write(state: dict[str, torch.Tensor], extra: dict[str, Any], folder: Path, tag: str) -> None:
    """As `Engine.save`, by one process alone."""
    entries = [(key, whole_part(value)) for key, value in {**state, "extra": pack(extra)}.items()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder)
    about = About(tag, extra["progress"]["global_step"], 1, None, {"torch": str(torch.__version__)})
    saving = Save(0, stage(folder, tag), entries, about, lock, timeout_s=0.0)
    saving.join()
    if saving.problem:
        raise CheckpointError(saving.problem)


# -- tensors


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor of the checkpoint to be, and the dtype that it is to have."""

    source: Spread
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.source.shape.numel() * self.dtype.itemsize

    @property
    def in_place(self) -> bool:
        """Whether a view of the file it is in will do."""
        return len(self.source.pieces) == 1 and self.source.dtype == self.dtype


def _tensors(folder: Folder) -> dict[str, _Value]:
    found = {f"model.{name}": value for name, value in _weights(folder)}
    for group in folder.groups:
        for name, master in group.masters.items():
            weight = found.get(f"model.{name}")
            if weight is None:
                raise CheckpointError(f"{folder.model.path} has no weight {name!r} in 'module'; save it again")
            if weight.source.shape != master.shape:
                raise CheckpointError(
                    f"{folder.model.path}: {name!r} has shape {tuple(weight.source.shape)} in 'module' and "
                    f"{tuple(master.shape)} in 'param_shapes'; save it again"
                )
            if master.dtype != weight.dtype:
                found[f"master.{name}"] = _Value(master, master.dtype)
            for key, spreads in group.states.items():
                dtype = spreads[name].dtype
                found[f"optimizer.{name}.{key}"] = _Value(spreads[name], torch.float32 if dtype in NARROW else dtype)
            for key, number in _scalars(folder, group).items():
                if isinstance(number, torch.Tensor):
                    found[f"optimizer.{name}.{key}"] = _Value(_in_one_piece(number), number.dtype)
    return found


def _weights(folder: Folder) -> Iterator[tuple[str, _Value]]:
    """Weights and buffers. In stage 3 'module' has placeholders for weights, right in nothing but their dtype."""
    cut = {name: spread for group in folder.groups for name, spread in group.masters.items()} | folder.frozen
    other_names: Mapping[str, str] = folder.model["shared_params"] or {}
    buffers = frozenset(folder.model["buffer_names"])
    for name, value in folder.model["module"].items():
        if not isinstance(value, torch.Tensor):
            continue
        source = _in_one_piece(value)
        if folder.stage == 3 and name not in buffers:
            cut_source = cut.get(other_names.get(name, name))
            if cut_source is None:
                raise CheckpointError(
                    f"{folder.model.path} has no value of the frozen parameter {name!r}: it was saved with "
                    "exclude_frozen_parameters=True; save it again without"
                )
            source = cut_source
        if source.shape.numel():
            yield name, _Value(source, value.dtype)


def _check_space(tensors: Mapping[str, _Value], folder: Path) -> None:
    """A mapped file that the disk has no room for would end the process at its first write."""
    needed = sum(value.nbytes * (1 if value.in_place else 2) for value in tensors.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder} has {free:,} bytes free; the conversion needs {needed:,}, half of it for a while"
        )


def _in_one_piece(value: torch.Tensor) -> Spread:
    return Spread([value.reshape(-1)], [Piece(0, 0, value.numel())], value.shape)


def _whole(value: _Value, scratch: Path) -> torch.Tensor:
    """A view of the file that it is in or, if it has to be put together or cast, of a new file `scratch`."""
    pieces, shape = value.source.flat(), value.source.shape
    if value.in_place:
        return pieces[0].view(shape)
    whole = torch.from_file(str(scratch), shared=True, size=shape.numel(), dtype=value.dtype)
    start = 0
    for piece in pieces:
        whole[start : start + piece.numel()].copy_(piece)
        start += piece.numel()
    return whole.view(shape)


# -- everything else


def _extra(folder: Folder) -> dict[str, Any]:
    model = folder.model
    client_state = {key: value for key, value in model.values.items() if key not in _OWN_KEYS}
    scheduler = model.values.get("lr_scheduler")
    if scheduler is not None and "last_epoch" not in scheduler:  # DeepSpeed's own, which torch's cannot load
        client_state["deepspeed_lr_scheduler"] = scheduler
        scheduler = None
    skipped = int(model["skipped_steps"])
    scaler = folder.loss_scaler
    return {
        "version": VERSION,
        "world": folder.world,
        "left_out": [],
        "frozen": sorted(model.values.get("frozen_param_shapes") or ()),
        "progress": {
            "global_step": int(model["global_steps"]) - skipped,  # DeepSpeed counts skipped steps too
            "skipped_steps": skipped,
            "micro_steps": 0,
            "loss_scale": DynamicLossScale().state_dict() if scaler is None else loss_scale_from(scaler),
        },
        "groups": _settings(folder),
        "state": _small_state(folder),
        "scheduler": scheduler,
        "client_state": client_state,
    }


def _settings(folder: Folder) -> list[dict[str, Any]]:
    """The optimizer's groups, in the order in which the program had given their parameters."""
    found = []
    for index, settings in enumerate(folder.settings):
        names = [name for group in folder.groups if group.index == index for name in group.masters]
        kept = {key: value for key, value in settings.items() if key != "step"}
        found.append({**kept, "params": _unshuffled(names, folder.world) if folder.shuffled else names})
    return found


def _unshuffled(names: Sequence[str], world: int) -> list[str]:
    """Undo what round_robin_gradients does: deal parameters out to `world` ranks, then take rank after rank."""
    order = [index for rank in range(world) for index in range(rank, len(names), world)]
    return [name for _, name in sorted(zip(order, names, strict=True))]


def _scalars(folder: Folder, group: Group) -> dict[str, Any]:
    """State that is one for a whole flat group. Fused optimizers count steps in the group's settings."""
    step = folder.settings[group.index].get("step")
    found = dict(group.whole) if step is None or not group.states else {"step": step, **group.whole}
    if "step" in found:
        found["step"] = torch.tensor(float(found["step"]))  # as torch's optimizers keep it
    return found


def _small_state(folder: Folder) -> dict[str, dict[str, Any]]:
    found = {}
    for group in folder.groups:
        plain = {k: v for k, v in _scalars(folder, group).items() if not isinstance(v, torch.Tensor)}
        found.update({name: plain for name in group.masters if plain})
    return found


def loss_scale_from(state: Mapping[str, Any]) -> dict[str, Any]:
    """`DynamicLossScale.state_dict` for the state of a loss scaler of DeepSpeed.

    DeepSpeed numbers its updates, remembers that of the last overflow, and doubles the scale at a clean update that
    is a multiple of the window away from the update after it; so the first window is one update longer, which
    `clean_steps` = -1 expresses. A scale of 1 that never changes is what DeepSpeed has where nothing is scaled.
    """
    if "last_overflow_iter" not in state:
        scale = float(state["cur_scale"])
        return (DynamicLossScale() if scale == 1 else DynamicLossScale(scale=scale)).state_dict()
    clean = int(state["cur_iter"]) - int(state["last_overflow_iter"]) - 1
    return {
        "scale": float(state["cur_scale"]),
        "clean_steps": -1 if clean == 0 else (clean - 1) % int(state["scale_window"]),
        "tolerance": max(0, int(state["cur_hysteresis"]) - 1),
    }
