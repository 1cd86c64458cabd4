"""What stands in a DeepSpeed checkpoint folder, as values that can do nothing.

It owns the knowledge of names, keys and layouts, of which deepspeed/utils/zero_to_fp32.py and the optimizers'
`state_dict` in deepspeed/runtime/zero are the source. The one rule: whatever is missing or does not agree is a
CheckpointError that names file and key, raised while reading, so that who converts has nothing left to doubt.

[Note: inert classes] The files are pickles that hold objects of DeepSpeed's own classes. They are read with
`torch.load(weights_only=True)`, which executes nothing, and every class under `deepspeed.` is mapped onto `Inert`,
which only keeps what it is given; DeepSpeed need not be installed. Classes of anybody else are refused. Tensors
stay in the file (`mmap`) until they are used.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zeropage.errors import CheckpointError

__all__ = [
    "Folder",
    "Group",
    "Inert",
    "Piece",
    "RankFile",
    "Spread",
    "is_deepspeed",
    "read_folder",
    "stage_of",
    "tag_of",
]

_LATEST = "latest"
_OPTIM = re.compile(r"(?P<prefix>bf16_|fp16_|)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
# Some versions of Python pickle a member of an enum as this call; here it makes an `Inert` like any class.
_LOOKUPS = ("builtins.getattr", "__builtin__.getattr")


class Inert:
    """Stands for an object of a DeepSpeed class: keeps its arguments and its state, and has no behaviour."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file's content; a key that is not there names file and key."""

    path: Path
    values: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise CheckpointError(
                f"{self.path} has no entry {key!r}, so it is not one that DeepSpeed's ZeRO writes; save it again there"
            )
        return self.values[key]

    def inside(self, key: str) -> RankFile:
        return RankFile(self.path, self[key])


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements `[low, high)` of a rank's flat part."""

    rank: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Spread:
    """One tensor, in pieces of the ranks' flat parts."""

    parts: Sequence[torch.Tensor]
    pieces: Sequence[Piece]
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def flat(self) -> list[torch.Tensor]:
        """The pieces in order; together they are the tensor (views of the files)."""
        return [self.parts[piece.rank].view(-1)[piece.low : piece.high] for piece in self.pieces]


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that DeepSpeed has flattened together."""

    index: int
    """The optimizer group that they belong to."""

    masters: dict[str, Spread]
    """The values that the optimizer steps, by parameter."""

    states: dict[str, dict[str, Spread]]
    """Optimizer state that has a value for each element, by key and parameter."""

    whole: dict[str, Any]
    """Optimizer state that is one for all of them, like `step`."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A checkpoint, checked. Tensors are views of the files."""

    path: Path
    stage: int
    world: int
    model: RankFile
    """Rank 0's."""

    frozen: dict[str, Spread]
    """Stage 3 only: elsewhere frozen parameters stand in the model's file like any weight."""

    groups: list[Group]
    settings: list[dict[str, Any]]
    """Of each optimizer group, without its parameters."""

    shuffled: bool
    """Whether `round_robin_gradients` has changed the order of parameters."""

    loss_scaler: Mapping[str, Any] | None
    """The state of DeepSpeed's loss scaler; None where the optimizer has none."""


# -- the folder


def tag_of(source: Path, tag: str | None) -> str:
    """The tag asked for, or the one that `latest` names."""
    if tag is not None:
        found, remedy = tag, "name another tag"
    elif (source / _LATEST).is_file():
        found = (source / _LATEST).read_text().strip()
        remedy = f"the file {source / _LATEST} names it; name another tag"
    else:
        raise CheckpointError(f"{source} holds no checkpoint: there is no file {_LATEST!r}; name a tag")
    if not found or not (source / found).is_dir():
        there = sorted(path.name for path in source.glob("*/")) if source.is_dir() else []
        raise CheckpointError(
            f"{source} has no checkpoint {found!r}: {remedy} (there are: {', '.join(there) or 'none'})"
        )
    return found


def is_deepspeed(source: Path, tag: str | None) -> bool:
    """Whether DeepSpeed wrote this checkpoint. Raises nothing: what is not there is not DeepSpeed's."""
    try:
        path = source / tag_of(source, tag)
    except CheckpointError:
        return False
    written_by_torch = (path / ".metadata").exists()
    return not written_by_torch and any(any(path.glob(f"*_{kind}_states.pt")) for kind in ("model", "optim"))


def read_folder(path: Path) -> Folder:
    """Read and check `path`, the folder of one tag.

    Raises:
        CheckpointError: something is missing, truncated, inconsistent, or of a kind that cannot be converted.
    """
    optims = [_load(file) for file in _optim_files(path)]
    states = [file.inside("optimizer_state_dict") for file in optims]
    stage = _stage(states)
    _check_count(states)
    models = [_load(file) for file in _model_files(path, stage, len(optims))]
    scaler = states[0].values.get("loss_scaler")
    return Folder(
        path,
        stage,
        len(optims),
        models[0],
        _frozen(models) if stage == 3 else {},
        list(_groups(states, models[0], stage)),
        [{k: v for k, v in group.items() if k != "params"} for group in _base(states[0], stage)["param_groups"]],
        stage < 3 and _zero_settings(optims[0]).get("round_robin_gradients", False),
        scaler.state if isinstance(scaler, Inert) else None,
    )


def _optim_files(path: Path) -> list[Path]:
    """The file of each data-parallel rank, in order."""
    found: dict[str, dict[int, Path]] = {}
    for file in sorted(path.glob("*_optim_states.pt")):
        match = _OPTIM.fullmatch(file.name)
        if match is None or int(match["mp"]) != 0:
            raise CheckpointError(
                f"{file} belongs to a model that was cut by tensor, pipeline or expert parallelism; "
                "merge it with DeepSpeed's own tools first"
            )
        found.setdefault(match["prefix"], {})[int(match["rank"])] = file
    if not found:
        raise CheckpointError(
            f"{path} has no file zero_pp_rank_0_mp_rank_00_optim_states.pt: it was not saved with ZeRO, or a rank has "
            "not written; copy the whole folder"
        )
    if len(found) > 1:
        raise CheckpointError(
            f"{path} holds optimizer files of two runs, {' and '.join(min(f.values()).name for f in found.values())}; "
            "remove those of the older one"
        )
    ((prefix, files),) = found.items()
    for rank in range(max(files)):
        if rank not in files:
            raise _missing(path / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return [files[rank] for rank in sorted(files)]


def _check_count(states: list[RankFile]) -> None:
    """Every file was written by a run of as many ranks as there are files."""
    for file in states:
        count = file["partition_count"]
        counts = set(count) if isinstance(count, (list, tuple)) else {count}
        if len(counts) != 1 or "ds_zero_partition_groups" in file.values:
            raise CheckpointError(
                f"{file.path} is cut among experts (partition_count is {count}); merge it with DeepSpeed's own tools first"
            )
        (world,) = counts
        if world > len(states):
            last = states[-1].path
            raise _missing(last.with_name(last.name.replace(f"rank_{len(states) - 1}_mp", f"rank_{len(states)}_mp")))
        if world < len(states):
            raise CheckpointError(
                f"{states[-1].path} is left over: {file.path.name} was written by {world} ranks "
                "(partition_count); remove the files of other runs"
            )


def _model_files(path: Path, stage: int, world: int) -> list[Path]:
    odd = [file for file in sorted(path.glob("*.pt")) if file.name.startswith("layer_") or "_mp_rank_01_" in file.name]
    if odd:
        raise CheckpointError(
            f"{odd[0]} belongs to a pipeline or to experts; merge it with DeepSpeed's own tools first"
        )
    names = ["mp_rank_00_model_states.pt"]
    if stage == 3:
        names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(world)]
    for name in names:
        if not (path / name).is_file():
            raise _missing(path / name)
    return [path / name for name in names]


def _missing(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is missing; every rank writes files: copy all of them into one folder")


# -- one file


def _load(path: Path) -> RankFile:
    """See [Note: inert classes]."""
    try:
        unknown = get_unsafe_globals_in_checkpoint(path)
    except Exception as error:
        raise _damaged(path, error) from error
    foreign = sorted(name for name in unknown if not name.startswith("deepspeed.") and name not in _LOOKUPS)
    if foreign:
        raise CheckpointError(
            f"{path} holds objects of {', '.join(foreign)}, which are not loaded from a file that anybody could have "
            "made. If you trust it, allow them with torch.serialization.add_safe_globals([...])."
        )
    inert: list[Any] = [(Inert, name) for name in {*unknown, *_LOOKUPS}]
    try:
        with safe_globals(inert):
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise _damaged(path, error) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__} and not a dict; DeepSpeed did not write it")
    return RankFile(path, values)


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read, it may be truncated: copy or save it again ({error})")


def stage_of(value: object) -> int:
    """The stage behind a number, or behind a member of DeepSpeed's enum however it was pickled."""
    if isinstance(value, Inert) and len(value.arguments) == 1:
        return int(value.arguments[0])
    if isinstance(value, Inert) and len(value.arguments) == 2:
        return _STAGES[value.arguments[1]]
    if isinstance(value, int):
        return value
    raise ValueError(f"{value!r} is no stage of ZeRO")


def _stage(states: list[RankFile]) -> int:
    """The stage that all files agree on."""
    # DeepSpeed's BF16_Optimizer, which is stage 1 with gradients in fp32, writes no stage.
    found = {file.path: stage_of(file.values.get("zero_stage", 1)) for file in states}
    first = states[0].path
    for path, stage in found.items():
        if stage != found[first]:
            raise CheckpointError(f"{path} is of ZeRO stage {stage}, {first.name} of stage {found[first]}; save again")
    if found[first] not in (1, 2, 3):
        raise CheckpointError(f"{first} is of ZeRO stage {found[first]}; stages 1, 2 and 3 can be read")
    return found[first]


# -- flat groups


def _base(state: RankFile, stage: int) -> RankFile:
    """The state_dict of the torch optimizer inside."""
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    if not isinstance(state[key], dict):
        raise CheckpointError(
            f"{state.path}: {key!r} is not a state_dict, as DeepSpeed writes with elastic_checkpoint; save again without it"
        )
    return state.inside(key)


def _zero_settings(optim: RankFile) -> dict[str, Any]:
    config = optim.values.get("ds_config")
    found = config.get("zero_optimization") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _groups(states: list[RankFile], model: RankFile, stage: int) -> Iterator[Group]:
    shapes = model["param_shapes"]
    shapes = [shapes] if isinstance(shapes, dict) else shapes
    if shapes is None:
        raise CheckpointError(f"{model.path} was saved without an optimizer: 'param_shapes' is empty")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    bases = [_base(state, stage) for state in states]
    # Flat groups come in the order of the optimizer's; stage 3 may cut one of those into several.
    places = [(index, number) for index, g in enumerate(bases[0]["param_groups"]) for number in g["params"]]
    for state in states:
        if not len(state[key]) == len(shapes) == len(places):
            raise CheckpointError(
                f"{state.path}: {key!r} has {len(state[key])} flat groups, the optimizer {len(places)}, and "
                f"{model.path.name} has shapes of {len(shapes)}; these files are not of one save"
            )
    paddings = states[0].values.get("param_alignment_paddings")
    for place, (index, number) in enumerate(places):
        named = {name: torch.Size(shape) for name, shape in shapes[place].items()}
        parts = [state[key][place] for state in states]
        sizes = [part.numel() for part in parts]
        where = f"{key}[{place}] of {states[0].path} and of the other ranks' files"
        if stage == 3:
            pieces = _cut_each(named, sizes, where)
        else:
            pieces = _cut_together(named, sizes, paddings[place] if paddings else [0] * len(named), where)
        whole, elementwise = _split(bases, number, sizes)
        yield Group(
            index,
            {name: Spread(parts, pieces[name], shape) for name, shape in named.items()},
            {k: {n: Spread(state, pieces[n], shape) for n, shape in named.items()} for k, state in elementwise.items()},
            whole,
        )


def _frozen(models: list[RankFile]) -> dict[str, Spread]:
    """The parameters that stage 3 cuts and no optimizer steps."""
    found = {}
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        parts = [file.inside("frozen_param_fragments")[name] for file in models]
        where = f"frozen_param_fragments[{name!r}] of {models[0].path} and of the other ranks' files"
        size = torch.Size(shape)
        found[name] = Spread(parts, _cut_each({name: size}, [part.numel() for part in parts], where)[name], size)
    return found


def _cut_each(shapes: Mapping[str, torch.Size], sizes: Sequence[int], where: str) -> dict[str, list[Piece]]:
    """Stage 3: each parameter is cut in `world` equal parts; a rank holds its part of each, one after the other."""
    world, start = len(sizes), 0
    found: dict[str, list[Piece]] = {}
    for name, shape in shapes.items():
        count = shape.numel()
        each = -(-count // world)
        lengths = [max(0, min(each, count - rank * each)) for rank in range(world)]
        found[name] = [Piece(rank, start, start + length) for rank, length in enumerate(lengths) if length]
        start += each
    if any(size != start for size in sizes):
        raise CheckpointError(
            f"{where} have {list(sizes)} elements, the shapes in 'param_shapes' need {start} each; save again, without "
            "offload to NVMe and without MiCS"
        )
    return found


def _cut_together(
    shapes: Mapping[str, torch.Size], sizes: Sequence[int], paddings: Sequence[int], where: str
) -> dict[str, list[Piece]]:
    """Stages 1 and 2: parameters stand one after the other, and the whole is cut in `world` parts."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    uneven = any(size and (before != sizes[0] or size > before) for before, size in itertools.pairwise(sizes))
    found: dict[str, list[Piece]] = {}
    position = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        end = position + shape.numel()
        found[name] = [
            Piece(rank, max(position, start) - start, min(end, start + size) - start)
            for rank, (start, size) in enumerate(zip(starts, sizes, strict=True))
            if max(position, start) < min(end, start + size)
        ]
        position = end + padding
    if uneven or sum(sizes) < position:
        raise CheckpointError(
            f"{where} have {list(sizes)} elements, the shapes in 'param_shapes' need {position} together; save again"
        )
    return found


def _split(
    bases: list[RankFile], number: int, sizes: Sequence[int]
) -> tuple[dict[str, Any], dict[str, list[torch.Tensor]]]:
    """An optimizer's state of one flat group: what is one for all of it, and what has a value for each element."""
    found: list[dict[str, Any]] = [base["state"].get(number, {}) for base in bases]
    whole, elementwise = {}, {}
    for base, state, size in zip(bases, found, sizes, strict=True):
        if state.keys() != found[0].keys():
            raise CheckpointError(
                f"{base.path}: the optimizer's state {number} has other keys than in {bases[0].path.name}; save again"
            )
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                whole.setdefault(key, value)
            elif value.numel() >= size:  # these may be padded where the weights are not
                elementwise.setdefault(key, []).append(value)
            else:
                raise CheckpointError(
                    f"{base.path}: state {number}[{key!r}] has {value.numel()} elements for {size} weights; "
                    "state that is kept in another way cannot be converted"
                )
    return whole, elementwise
