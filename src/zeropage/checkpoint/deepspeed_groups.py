"""What the entries of a DeepSpeed checkpoint mean: flat groups, and where in them each parameter is.

Its sources are deepspeed/utils/zero_to_fp32.py and the `state_dict`s in deepspeed/runtime/zero. The one rule:
everything is checked here, so that who converts has nothing left to doubt; what does not agree is a CheckpointError
that names file and entry.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeropage.checkpoint.deepspeed_files import Inert, RankFile, check_count, load_file, model_files, optim_files
from zeropage.errors import CheckpointError

__all__ = ["Folder", "Group", "Piece", "Spread", "read_folder", "stage_of"]

_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


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


def read_folder(path: Path) -> Folder:
    """Read and check `path`, the folder of one tag.

    Raises:
        CheckpointError: something is missing, truncated, inconsistent, or of a kind that cannot be converted.
    """
    optims = [load_file(file) for file in optim_files(path)]
    states = [file.inside("optimizer_state_dict") for file in optims]
    stage = _stage(states)
    check_count(states)
    models = [load_file(file) for file in model_files(path, stage, len(optims))]
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
            f"{state.path}: {key!r} is not a state_dict, as with elastic_checkpoint; save it again without"
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
    whole: dict[str, Any] = {}
    elementwise: dict[str, list[torch.Tensor]] = {}
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
