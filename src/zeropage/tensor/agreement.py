"""Every rank must run the same write: what is compared before one is applied.

The operator, its target and a fingerprint of its plain operands (tensors and numbers) travel with the
meeting that opens a write batch. Inside an optimizer's step nothing is compared: there would be a meeting
for every parameter.
"""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch._ops import OpOverload

from zeropage.errors import DivergenceError
from zeropage.page import Page
from zeropage.pager import Pager
from zeropage.tensor.base import Paged
from zeropage.tensor.rules import targets
from zeropage.tensor.trees import numbers_in, tensors_in

__all__ = ["agreed", "agreed_batch"]


def agreed_batch(
    pages: list[Page], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], target: Paged
) -> AbstractContextManager[object]:
    """A write batch that all ranks open for the same write with the same plain operands."""
    name = func._schema.name.split("::")[1]
    intent = f"{name} on {target._node.page.name} {tuple(target.shape)}"
    return agreed(pages, intent, _operands(func, args, kwargs))


def agreed(pages: list[Page], intent: str, operands: list[Any]) -> AbstractContextManager[object]:
    """A write batch over `pages` that all ranks open with the same plain operands.

    Raises:
        DivergenceError: they brought different ones; nothing is written then.
    """
    stack = ExitStack()
    for pager in dict.fromkeys(page.pager for page in pages):
        payload = b""
        if pager.transport.world > 1 and not pager.step.active():
            payload = str(_fingerprint(operands)).encode()
        stack.enter_context(_Agreed(pager, [page for page in pages if page.pager is pager], intent, payload))
    return stack


def _operands(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that are read only: what is in the others before does not matter, or is paged."""
    written = {target.index for target in targets(func)}, {target.name for target in targets(func)}
    return [
        *(value for index, value in enumerate(args) if index not in written[0]),
        *(value for name, value in kwargs.items() if name not in written[1]),
    ]


class _Agreed(AbstractContextManager[None]):
    """`pager.writing`, with a check that every rank brought the same operands."""

    def __init__(self, pager: Pager, pages: list[Page], intent: str, payload: bytes) -> None:
        self._batch = pager.writing(pages, intent, payload)
        self._intent = intent

    def __enter__(self) -> None:
        answers = self._batch.__enter__()
        if any(answer != answers[0] for answer in answers):
            error = DivergenceError(
                f"the ranks brought different values to {self._intent}. Every rank must run the same write; to "
                "let one rank decide, write inside zp.gather(params, writer=rank)."
            )
            self._batch.__exit__(type(error), error, None)
            raise error

    def __exit__(self, *details: Any) -> bool | None:
        return self._batch.__exit__(*details)


def _fingerprint(operands: Any) -> int:
    """A number that differs, almost surely, where the plain operands differ (tensors and Python numbers)."""
    found = zlib.crc32(repr(list(numbers_in(operands))).encode())
    for tensor in tensors_in(operands):
        if isinstance(tensor, Paged) or tensor.device.type == "meta" or tensor.layout != torch.strided:
            continue
        found = zlib.crc32(_digest(tensor), found)
    return found


def _digest(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = values.view(torch.uint8) if tensor.numel() else torch.empty(0, device="cpu")
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    total = int(raw[:whole].view(torch.int64).sum()) if whole else 0
    edge = raw[:64].numpy().tobytes() + raw[-64:].numpy().tobytes() if raw.device.type == "cpu" else b""
    return f"{tuple(tensor.shape)} {tensor.dtype} {total}".encode() + edge
