"""Parts of a checkpoint of `torch.distributed.checkpoint`, read straight into their place.

torch's reader loads each saved part whole and copies what is wanted of it. Where the values of a part are in its file
is known if this library wrote it (`checkpoint/blob.py`): then only the wanted bytes are read, and without a copy.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from zeropage.checkpoint.blob import Blob
from zeropage.checkpoint.parts import Part, read_part
from zeropage.layout import Box

__all__ = ["SliceReader"]


class SliceReader(FileSystemReader):
    """torch's reader of checkpoint folders, in place where that can be; it reads all that torch's own reads."""

    _metadata: Metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **options)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        foreign = []
        with ExitStack() as opened:
            files: dict[str, int] = {}
            for item in plan.items:
                place = self.storage_data[item.storage_index]
                name = place.relative_path
                if name not in files:
                    files[name] = opened.enter_context((Path(self.path) / name).open("rb", buffering=0)).fileno()
                found = None if item.type is LoadItemType.BYTE_IO else self._values_at(files[name], item.storage_index)
                if found is None:
                    foreign.append(item)
                    continue
                shape, dtype, start = found
                values = planner.resolve_tensor(item).detach()
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                read_part(files[name], dtype, start, Part(shape, box, values))
                planner.commit_tensor(item, values)
        if foreign:
            return super().read_data(LoadPlan(foreign), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _values_at(self, file: int, index: MetadataIndex) -> tuple[tuple[int, ...], torch.dtype, int] | None:
        """Shape and dtype of a saved part, and the byte at which its values begin; None if it is not known."""
        place, described = self.storage_data[index], self._metadata.state_dict_metadata[index.fqn]
        if place.transform_descriptors or not isinstance(described, TensorStorageMetadata):
            return None
        shape = next((tuple(chunk.sizes) for chunk in described.chunks if chunk.offsets == index.offset), None)
        if shape is None:
            return None
        blob = Blob(shape, described.properties.dtype)
        if os.pread(file, len(blob.head), place.offset) != blob.head:
            return None
        return shape, described.properties.dtype, place.offset + len(blob.head)
