"""`deepspeed.utils.zero_to_fp32`: one plain fp32 state dict from a checkpoint folder, without a process group.

The folder is one that an engine of zeropage saved, or DeepSpeed itself (any of its stages 1 to 3). Also a command:
DeepSpeed puts a script of this name into every checkpoint folder, and so does `save_checkpoint`.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from zeropage.checkpoint import convert_deepspeed
from zeropage.checkpoint.contents import read_extra
from zeropage.checkpoint.deepspeed_files import is_deepspeed
from zeropage.checkpoint.folder import METADATA
from zeropage.errors import CheckpointError
from zeropage.weights.plan import dtype_of, size_of

__all__ = [
    "LazyTensor", "convert_zero_checkpoint_to_fp32_state_dict", "convert_zero_checkpoint_to_state_dict",
    "get_checkpoint_files", "get_fp32_state_dict_from_zero_checkpoint", "get_model_state_file",
    "get_model_state_files", "get_optim_files", "load_state_dict_from_zero_checkpoint", "main", "to_torch_tensor",
]  # fmt: skip

_SHORT = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor of a checkpoint, read by `contiguous()`; floating-point ones come as fp32."""

    folder: Path
    key: str
    shape: torch.Size
    saved_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.saved_dtype.is_floating_point else self.saved_dtype

    def contiguous(self) -> torch.Tensor:
        value = torch.empty(self.shape, dtype=self.saved_dtype)
        if value.numel():
            with _alone():
                load({self.key: value}, checkpoint_id=self.folder, no_dist=True)
        return value.to(self.dtype)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The model of `checkpoint_dir/tag` (default: the tag in `latest`): exact fp32 values where there are masters.

    With `lazy_mode` the values are `LazyTensor`s, read one by one (not for what DeepSpeed itself has saved, which is
    converted as a whole). Names that were tied share one tensor.

    Raises:
        ValueError: no tag is given and there is no file `latest`.
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: it is damaged.
    """
    folder = _folder(Path(checkpoint_dir), tag)
    if is_deepspeed(folder.parent, folder.name):
        with tempfile.TemporaryDirectory() as scratch:
            convert_deepspeed(folder.parent, Path(scratch) / "converted", folder.name)
            found = _lazily(Path(scratch) / "converted" / folder.name, exclude_frozen_parameters)
            return to_torch_tensor(found)
    found = _lazily(folder, exclude_frozen_parameters)
    return found if lazy_mode else to_torch_tensor(found)


def _folder(checkpoint_dir: Path, tag: str | None) -> Path:
    if tag is None:
        pointer = checkpoint_dir / "latest"
        if not pointer.is_file():
            raise ValueError(f"Unable to find 'latest' file at {pointer}; name a tag")
        tag = pointer.read_text().strip()
    folder = checkpoint_dir / tag
    if not folder.is_dir():
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    return folder


def _lazily(folder: Path, exclude_frozen: bool) -> dict[str, Any]:
    if not (folder / METADATA).exists():
        raise FileNotFoundError(f"{folder} is no checkpoint of zeropage or DeepSpeed")
    metadata = FileSystemReader(folder).read_metadata()
    with _alone():
        extra = read_extra(folder, metadata)
    if exclude_frozen and "frozen" not in extra:
        raise CheckpointError(f"{folder} does not tell which parameters are frozen; save it again, or keep them all")
    frozen = set(extra["frozen"]) if exclude_frozen else set()
    found: dict[str, Any] = {}
    for name in _names(metadata, extra):
        first = extra.get("tied", {}).get(name, name)
        if name not in frozen:
            found[name] = found[first] if first in found else _lazy(folder, metadata, extra, name)
    return found


def _names(metadata: Metadata, extra: Mapping[str, Any]) -> list[str]:
    saved = [key.removeprefix("model.") for key in metadata.state_dict_metadata if key.startswith("model.")]
    return [*saved, *(name for name in extra.get("empty", {}) if name not in saved)]


def _lazy(folder: Path, metadata: Metadata, extra: Mapping[str, Any], name: str) -> LazyTensor:
    for key in (f"master.{name}", f"model.{name}"):
        about = metadata.state_dict_metadata.get(key)
        if isinstance(about, TensorStorageMetadata):
            return LazyTensor(folder, key, about.size, about.properties.dtype)
    dtype, shape = extra["empty"][name]
    return LazyTensor(folder, f"model.{name}", torch.Size(shape), dtype)


def to_torch_tensor(
    state_dict: Mapping[str, Any], return_empty_tensor: bool = False, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Read lazy tensors, each once; or give empty ones of their shapes."""
    made: dict[int, torch.Tensor] = {}
    found = {}
    for name, value in state_dict.items():
        if id(value) not in made:
            wanted = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
            made[id(value)] = (
                torch.empty(value.shape, dtype=wanted) if return_empty_tensor else value.contiguous().to(wanted)
            )
        found[name] = made[id(value)]
    return found


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Any,
    output_dir: Any,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the state dict as `pytorch_model.bin` or `model.safetensors`; in several files, with an index, if large.

    Tied names are written once, under the first of them.
    """
    target = Path(output_dir)
    wanted = dtype_of(_SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True)
    if safe_serialization:
        values = _untied(values)
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    files = _files(values, wanted, None if max_shard_size is None else size_of(max_shard_size))
    target.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, start=1):
        part = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        file = f"{stem}{part}.{suffix}"
        tensors = to_torch_tensor({name: values.pop(name) for name in names}, dtype=wanted)
        if safe_serialization:
            save_file(tensors, target / file, metadata={"format": "pt"})
        else:
            torch.save(tensors, target / file)
        places |= dict.fromkeys(names, file)
        total += sum(value.nbytes for value in {id(v): v for v in tensors.values()}.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (target / f"{stem}.{suffix}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Any,
    output_dir: Any,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """`convert_zero_checkpoint_to_state_dict` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Any, tag: str | None = None) -> nn.Module:
    """Put `model` into host memory and the checkpoint's values into it; names that it lacks are left out."""
    model.to("cpu")
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _untied(values: dict[str, Any]) -> dict[str, Any]:
    first: dict[int, str] = {}
    return {name: value for name, value in values.items() if first.setdefault(id(value), name) == name}


def _files(values: Mapping[str, Any], dtype: torch.dtype | None, limit: int | None) -> list[list[str]]:
    """Which names go into which file: in order, each file filled as far as `limit` bytes allow."""
    files: list[list[str]] = [[]]
    room = limit
    for name, value in values.items():
        wanted = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
        size = value.shape.numel() * wanted.itemsize
        if room is not None and limit is not None and size > room and files[-1]:
            files.append([])
            room = limit
        files[-1].append(name)
        room = None if room is None else room - size
    return files


# -- the small files that programs look for


def get_model_state_file(checkpoint_dir: Any, zero_stage: int) -> str:
    """The first rank's file of counters and client state in the folder of one tag."""
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    name = "mp_rank_00_model_states.pt" if zero_stage <= 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    if not (folder / name).exists():
        raise FileNotFoundError(f"can't find model states file at '{folder / name}'")
    return str(folder / name)


def get_checkpoint_files(checkpoint_dir: Any, glob_pattern: str) -> list[str]:
    """The files that match, in the order of the numbers in their names."""
    found = [str(path) for path in Path(checkpoint_dir).glob(glob_pattern)]
    if not found:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return sorted(found, key=lambda path: [int(t) if t.isdigit() else t for t in re.split(r"(\d+)", path)])


def get_optim_files(checkpoint_dir: Any) -> list[str]:
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: Any) -> list[str]:
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


@contextmanager
def _alone() -> Iterator[None]:
    """One process reads by itself, on purpose: torch need not warn of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


# -- the command


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make one plain state dict out of a ZeRO checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder that holds the tags, and the file `latest`")
    parser.add_argument("output_dir", help="where to write")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of values a file")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of pickles")
    parser.add_argument("--dtype", default="float32", help="of floating-point tensors")
    parser.add_argument("-t", "--tag", default=None, help="default: what `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted; there is nothing more to tell")
    given = parser.parse_args(arguments)
    convert_zero_checkpoint_to_state_dict(
        given.checkpoint_dir,
        given.output_dir,
        given.dtype,
        given.max_shard_size,
        given.safe_serialization,
        given.tag,
        given.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
