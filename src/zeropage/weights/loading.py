"""`load_safetensors`: every rank reads the bytes of its own slices, after everything has been checked.

Memory beside the shards: one piece of `parts.PIECE` bytes, and only where a dtype is converted or a page is
not row-major.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from zeropage.checkpoint.named import identity_of, set_extra_states, tensors_of, whole_page
from zeropage.checkpoint.parts import Part, announce_part, own_parts, read_part, whole_part
from zeropage.checkpoint.verdict import one_verdict
from zeropage.construct import pagers_of
from zeropage.errors import CheckpointError
from zeropage.page import Page
from zeropage.tensor import PagedTensor
from zeropage.transport.base import Transport
from zeropage.transport.local import LocalTransport
from zeropage.weights.blank import find_blanks, initialise, materialise, warn_of_blanks
from zeropage.weights.header import Entry
from zeropage.weights.source import Source, find_source

__all__ = ["LoadedWeights", "load_safetensors", "transport_of"]

_AHEAD = 32 << 20
"""Bytes that the kernel is asked to bring from the disk before they are read."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What `load_safetensors` found. Unpacks like torch's result: `missing, unexpected = ...`."""

    missing_keys: list[str]
    """Of the model, and not in the files, or there with another shape. Tied weights need one of their names."""
    unexpected_keys: list[str]
    """In the files, and not of the model."""
    mismatched_keys: list[str]
    """In both, with different shapes; those without a value from a tied name are missing keys too."""

    def __iter__(self) -> Iterator[list[str]]:
        yield self.missing_keys
        yield self.unexpected_keys


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> LoadedWeights:
    """Load weights from safetensors files into a sharded (or plain) model, all ranks together.

    Each rank reads the bytes of its own slices, in pieces of at most 64 MB; buffers and plain parameters are
    read whole on every rank. Values take the dtypes of the model. Names, shapes and the files themselves are
    checked on all ranks before anything changes. Parameters on the meta device get their first values.
    Buffers there that `state_dict()` leaves out get theirs from the module that has them, as if they were missing;
    those that no module initialises are named in a warning.

    Args:
        model: keys are those of its `state_dict()`.
        path: a `.safetensors` file, or a folder with `model.safetensors` or `model.safetensors.index.json`
            and its files, on every rank's host.
        strict: if False, what is missing keeps its values; what has none yet is initialised, one module at
            a time, by the model's `_init_weights(module)` or the module's `reset_parameters()`.

    Raises:
        CheckpointError: on all ranks: a file is missing, damaged or not whole; the ranks see different
            files; keys or shapes do not fit and `strict`; a value cannot be converted; something missing cannot
            be initialised. Nothing has changed then. If reading fails later (a broken disk), it says so.
    """
    transport = transport_of(model)
    targets = tensors_of(model)
    with one_verdict(transport, "check safetensors files"):
        source = find_source(Path(path))
        found = _compare(targets, source)
        if strict:
            _refuse_any(found, path)
        ready = [key for key in targets if key in source.places and key not in found.mismatched_keys]
        _check_targets(targets, source, ready)
        blanks = find_blanks(model, targets, ready, found.missing_keys)
    _agree(transport, source)
    targets = materialise(model, targets, [*ready, *found.missing_keys, *(key for b in blanks for key in b.keys)])
    initialise(blanks)
    _read(model, targets, source, ready, transport)
    warn_of_blanks(model)
    return found


def transport_of(model: nn.Module) -> Transport:
    """How the ranks of a sharded model meet; for a plain model, this process alone."""
    pagers = pagers_of(model)
    return pagers[0].transport if pagers else LocalTransport()


def _compare(targets: dict[str, torch.Tensor], source: Source) -> LoadedWeights:
    there = source.places
    mismatched = [key for key, value in targets.items() if key in there and there[key][1].shape != tuple(value.shape)]
    loaded: set[Hashable] = {
        identity_of(value) for key, value in targets.items() if key in there and key not in mismatched
    }
    missing = [key for key, value in targets.items() if identity_of(value) not in loaded and value.numel()]
    return LoadedWeights(missing, [key for key in there if key not in targets], mismatched)


def _refuse_any(found: LoadedWeights, path: str | os.PathLike[str]) -> None:
    missing = [key for key in found.missing_keys if key not in found.mismatched_keys]
    problems = [
        f"{len(keys)} {what} ({', '.join(keys[:8])}{', ...' if len(keys) > 8 else ''})"
        for keys, what in (
            (missing, "of the model's keys are not there"),
            (found.unexpected_keys, "keys are not of the model"),
            (found.mismatched_keys, "have another shape"),
        )
        if keys
    ]
    if problems:
        raise CheckpointError(
            f"{os.fspath(path)} does not fit the model: {'; '.join(problems)}. Build the model that was saved, or pass "
            "strict=False to keep or initialise what is missing."
        )


def _check_targets(targets: dict[str, torch.Tensor], source: Source, ready: list[str]) -> None:
    """Every tensor that is to be loaded must be able to take its values."""
    for key in ready:
        path, entry = source.places[key]
        value, page = targets[key], whole_page(targets[key])
        if not torch.can_cast(entry.dtype, value.dtype):
            raise CheckpointError(
                f"{key!r} is {entry.dtype} in {path.name} and {value.dtype} in the model: converting it would lose "
                "values. Give the model that dtype first."
            )
        if page is None and isinstance(value, PagedTensor):
            raise CheckpointError(f"{key!r} is a view or a cast of a sharded parameter; load the parameter itself")
        if page is not None and page.edits is not None:
            raise CheckpointError(f"{key!r} is being edited by zp.gather(..., writer=...); load outside of that block")
        if page is None and value.device.type == "meta" and isinstance(value, nn.Parameter):
            raise CheckpointError(f"{key!r} is on the meta device and not sharded; call zp.shard(model) before loading")


def _agree(transport: Transport, source: Source) -> None:
    """A slice of one file and a slice of another make no tensor."""
    digests = transport.meet("compare safetensors files", source.digest().encode())
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise CheckpointError(
            f"ranks {other} see other safetensors files than rank 0; give all ranks the same ones, or a shared folder"
        )


def _read(
    model: nn.Module, targets: dict[str, torch.Tensor], source: Source, ready: list[str], transport: Transport
) -> None:
    """Put the values in place, in one write batch."""
    pages = list(dict.fromkeys(page for key in ready if (page := whole_page(targets[key])) is not None))
    unwritten = [page for page in pages if not page.written]
    failure = ""
    with torch.no_grad(), ExitStack() as batches:
        for pager in pagers_of(model):
            mine = [page for page in pages if page.pager is pager]
            batches.enter_context(pager.writing(mine, f"load {len(mine)} parameters from safetensors"))
        try:
            _fill(targets, source, ready)
        except Exception as error:
            failure = f"reading the weights failed in the middle ({error}): the model is half loaded; load it again"
    for key in ready:
        torch.autograd.graph.increment_version(targets[key])
    try:
        with one_verdict(transport, "read safetensors files"):
            if failure:
                raise CheckpointError(failure)
    except CheckpointError:
        for page in unwritten:
            page.written = False
        raise
    set_extra_states(model, {key: targets[key] for key in ready})


def _fill(targets: dict[str, torch.Tensor], source: Source, ready: list[str]) -> None:
    for path in dict.fromkeys(source.places[key][0] for key in ready):
        with path.open("rb") as file:
            source.check_same(file.fileno(), path)
            here = [key for key in ready if source.places[key][0] == path]
            waiting = deque[tuple[Entry, Part]]()
            announced = 0  # bytes of what waits
            for entry, part in _parts_of(targets, source, here):
                announce_part(file.fileno(), entry.dtype, entry.start, part)
                waiting.append((entry, part))
                announced += part.values.nbytes
                while announced > _AHEAD:
                    announced -= _read_first(file.fileno(), waiting)
            while waiting:
                _read_first(file.fileno(), waiting)


def _parts_of(targets: dict[str, torch.Tensor], source: Source, keys: list[str]) -> Iterator[tuple[Entry, Part]]:
    for key in keys:
        page: Page | None = whole_page(targets[key])
        for part in [whole_part(targets[key].detach())] if page is None else own_parts(page):
            yield source.places[key][1], part


def _read_first(file: int, waiting: deque[tuple[Entry, Part]]) -> int:
    """The bytes of what was read."""
    entry, part = waiting.popleft()
    read_part(file, entry.dtype, entry.start, part)
    return part.values.nbytes
