"""The model in a folder that `Engine.save` wrote, read part by part in one process.

Parts are those that ranks wrote. The format is that of `torch.distributed.checkpoint`; one reader serves all
parts, so its metadata is read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from zeropage.checkpoint.contents import read_extra
from zeropage.checkpoint.folder import locate
from zeropage.checkpoint.parts import Part
from zeropage.checkpoint.reading import SliceReader
from zeropage.errors import CheckpointError
from zeropage.layout import Box
from zeropage.weights.plan import Described

__all__ = ["SavedModel"]

_PREFIX = "model."


class SavedModel:
    """The tensors of a saved model.

    Args:
        folder: that of one tag, or the one that holds the tags (the latest is taken).

    Raises:
        CheckpointError: there is no checkpoint, or a part of it is missing.
    """

    def __init__(self, folder: Path) -> None:
        path = locate(folder)
        self._reader = SliceReader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        extra = read_extra(path, self._metadata)
        if extra.get("left_out"):
            raise CheckpointError(
                f"{path} was saved without some parameters (trainable_only, leave_out) and lacks "
                f"{extra['left_out'][0]!r}. Load it over its base and export the model."
            )
        tied, empty = extra.get("tied", {}), extra.get("empty", {})
        self._chunks: dict[str, tuple[torch.dtype, torch.Size, list[ChunkStorageMetadata]]] = {}
        for key, about in self._metadata.state_dict_metadata.items():
            name = key.removeprefix(_PREFIX)
            if name != key and isinstance(about, TensorStorageMetadata) and name not in tied:
                if sum(chunk.sizes.numel() for chunk in about.chunks) != about.size.numel():
                    raise CheckpointError(f"{path} does not hold all of {name!r}; use another checkpoint")
                self._chunks[name] = about.properties.dtype, about.size, about.chunks
        self.tensors: Described = {
            **{name: (dtype, tuple(size)) for name, (dtype, size, _) in self._chunks.items()},
            **{name: about for name, about in empty.items() if name not in tied},
        }
        parts = [chunk.sizes.numel() * dtype.itemsize for dtype, _, chunks in self._chunks.values() for chunk in chunks]
        self._room = torch.empty(max(parts, default=0), dtype=torch.uint8)

    def parts(self, name: str) -> Iterable[Part]:
        """The parts of a tensor, each read when it is asked for, and gone when the next one is."""
        return self._read(name) if name in self._chunks else []

    def _read(self, name: str) -> Iterator[Part]:
        dtype, size, chunks = self._chunks[name]
        key = _PREFIX + name
        for chunk in chunks:
            values = self._room[: chunk.sizes.numel() * dtype.itemsize].view(dtype).view(chunk.sizes)
            planner = DefaultLoadPlanner()
            planner.set_up_planner({key: values}, self._metadata, is_coordinator=True)
            start = torch.Size([0] * len(size))
            item = ReadItem(
                LoadItemType.TENSOR, MetadataIndex(key), start, MetadataIndex(key, chunk.offsets), start, chunk.sizes
            )
            self._reader.read_data(LoadPlan([item]), planner).wait()
            yield Part(tuple(size), Box(tuple(chunk.offsets), tuple(chunk.sizes)), values)
