"""`export`: Hugging Face safetensors from a live sharded model, or offline from a checkpoint folder.

Nothing is gathered. The plan gives every tensor its place in a file; each rank writes the bytes of its own
slices there. Memory beside the shards: one piece of `parts.PIECE` bytes; offline, the largest part that one
rank had saved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from zeropage.checkpoint.named import first_names, tensors_of, whole_page
from zeropage.checkpoint.parts import Part, own_parts, whole_part
from zeropage.checkpoint.verdict import one_verdict
from zeropage.construct import pagers_of
from zeropage.errors import CheckpointError
from zeropage.tensor import PagedTensor
from zeropage.transport.base import Transport
from zeropage.transport.local import LocalTransport
from zeropage.weights.draft import Draft, place_for
from zeropage.weights.loading import transport_of
from zeropage.weights.plan import Described, Plan, dtype_of, plan_files, size_of
from zeropage.weights.saved import SavedModel

__all__ = ["export"]


def export(
    model_or_checkpoint: nn.Module | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
) -> None:
    """Write weights as Hugging Face safetensors: `model.safetensors`, or several files and their index.

    The files have the same bytes from any number of ranks, and from a model or a checkpoint of it. They hold
    what `state_dict()` holds; tied weights once, under their first name. Files of an earlier export in
    `folder` are replaced at the end, and other files there stay: who opens the folder at any moment, or after
    this program was killed, finds the whole earlier export or the whole new one.

    Args:
        model_or_checkpoint: a sharded model: all ranks call together, each writes its own slices, all into
            one `folder` that every host sees. Or a folder that `Engine.save` wrote (its latest tag, or one
            tag's folder): this process does it alone, without a process group. A plain model: likewise.
        folder: made if it is not there.
        max_shard_size: bytes of values a file: a number, "5GB" (10^9), "512MiB" (2^20). A larger tensor has
            a file to itself.
        dtype: what floating-point tensors are converted to ("fp32", "bf16", "fp16"); None: as they are.

    Raises:
        ConfigError: a size or a dtype that cannot be.
        CheckpointError: on all ranks: a tensor has no values or no safetensors dtype, a value is beyond fp16,
            the disk is full, ranks do not see one folder. An earlier export is whole then.
    """
    limit, wanted = size_of(max_shard_size), dtype_of(dtype)
    if isinstance(model_or_checkpoint, nn.Module):
        _export_model(model_or_checkpoint, Path(folder), limit, wanted)
    else:
        saved = SavedModel(Path(model_or_checkpoint))
        plan = plan_files(_converted(saved.tensors, wanted), limit)
        _write(plan, Path(folder), LocalTransport(), saved.parts)


def _export_model(model: nn.Module, folder: Path, limit: int, dtype: torch.dtype | None) -> None:
    transport = transport_of(model)
    for pager in pagers_of(model):
        pager.close_batch()
    named = tensors_of(model)
    first = first_names(named)
    with one_verdict(transport, "check what to export"):
        for name, value in named.items():
            _check(name, value)
        described = {
            name: (value.dtype, tuple(value.shape)) for name, value in named.items() if first[name] == name
        }  # fmt: skip
        plan = plan_files(_converted(described, dtype), limit)

    def parts_of(name: str) -> Iterable[Part]:
        page = whole_page(named[name])
        if page is not None:
            return own_parts(page)
        return [_plain_part(named[name])] if transport.rank == 0 else []

    with torch.no_grad():
        _write(plan, folder, transport, parts_of)


def _plain_part(tensor: torch.Tensor) -> Part:
    return whole_part(tensor._full() if isinstance(tensor, PagedTensor) else tensor.detach())


def _check(name: str, value: torch.Tensor) -> None:
    page = whole_page(value)
    if value.layout != torch.strided or value.is_quantized:
        raise CheckpointError(f"{name!r} is not a dense tensor; safetensors files cannot hold it")
    if (page is not None and not page.written) or (page is None and value.device.type == "meta"):
        raise CheckpointError(f"{name!r} has no values yet (it is on the meta device): initialise or load it first")
    if page is not None and page.edits is not None:
        raise CheckpointError(f"{name!r} is being edited by zp.gather(..., writer=...); export outside of that block")


def _converted(tensors: Described, dtype: torch.dtype | None) -> Described:
    return {
        name: (dtype if dtype is not None and own.is_floating_point else own, shape)
        for name, (own, shape) in tensors.items()
    }


def _write(plan: Plan, folder: Path, transport: Transport, parts_of: Callable[[str], Iterable[Part]]) -> None:
    """Create, write, publish: all ranks go on together, and on an error nothing is left behind."""
    draft = _same_draft(plan, folder, transport)
    first = transport.rank == 0
    with ExitStack() as until_published:
        with one_verdict(transport, "create the files of an export"), _telling_of(folder):
            if first:
                until_published.enter_context(draft.made())
        with one_verdict(transport, "see the files of an export"), _telling_of(folder):
            draft.check_in_sight()
        with one_verdict(transport, "write the files of an export"), _telling_of(folder):
            draft.write(parts_of)
        with one_verdict(transport, "publish an export"), _telling_of(folder):
            if first:
                draft.publish()


@contextmanager
def _telling_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error}. An earlier export is whole; make room or choose another folder."
        ) from error


def _same_draft(plan: Plan, folder: Path, transport: Transport) -> Draft:
    """The first rank's target and temporary folder (collective).

    Raises:
        CheckpointError: ranks have different tensors or settings.
    """
    target = folder.absolute()
    mine = json.dumps([plan.digest(), str(target), str(place_for(target))]).encode()
    answers = [json.loads(answer) for answer in transport.meet("plan an export", mine)]
    other = [rank for rank, answer in enumerate(answers) if answer[0] != answers[0][0]]
    if other:
        raise CheckpointError(
            f"ranks {other} export other names, shapes or dtypes than rank 0, or with another max_shard_size; "
            "call export with the same model and settings on all ranks"
        )
    return Draft(plan, Path(answers[0][1]), Path(answers[0][2]))
