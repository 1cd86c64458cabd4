"""The files of a DeepSpeed checkpoint folder: which there must be, and their content as values that can do nothing.

It owns names and loading; what the entries mean is `deepspeed_groups`'s to know. The one rule: whatever is missing
or cannot be read is a CheckpointError that names the file, and the entry.

[Note: inert classes] The files are pickles that hold objects of DeepSpeed's own classes. They are read with
`torch.load(weights_only=True)`, which executes nothing, and every class under `deepspeed.` is mapped onto `Inert`,
which only keeps what it is given; DeepSpeed need not be installed. Classes of anybody else are refused. Tensors
stay in the file (`mmap`) until they are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zeropage.checkpoint.folder import LATEST, METADATA
from zeropage.errors import CheckpointError

__all__ = ["Inert", "RankFile", "check_count", "is_deepspeed", "load_file", "model_files", "optim_files", "tag_of"]

_OPTIM = re.compile(r"(?P<prefix>bf16_|fp16_|)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
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


# -- the folder


def tag_of(source: Path, tag: str | None) -> str:
    """The tag asked for, or the one that `latest` names."""
    if tag is not None:
        found, remedy = tag, "name another tag"
    elif (source / LATEST).is_file():
        found = (source / LATEST).read_text().strip()
        remedy = f"the file {source / LATEST} names it; name another tag"
    else:
        raise CheckpointError(f"{source} holds no checkpoint: there is no file {LATEST!r}; name a tag")
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
    written_by_torch = (path / METADATA).exists()
    return not written_by_torch and any(any(path.glob(f"*_{kind}_states.pt")) for kind in ("model", "optim"))


def optim_files(path: Path) -> list[Path]:
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


def check_count(states: list[RankFile]) -> None:
    """Every file was written by a run of as many ranks as there are files."""
    for file in states:
        count = file["partition_count"]
        counts = set(count) if isinstance(count, (list, tuple)) else {count}
        if len(counts) != 1 or "ds_zero_partition_groups" in file.values:
            raise CheckpointError(
                f"{file.path} is cut among experts (partition_count is {count}); merge it with DeepSpeed's own tools"
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


def model_files(path: Path, stage: int, world: int) -> list[Path]:
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


def load_file(path: Path) -> RankFile:
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
