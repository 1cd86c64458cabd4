"""The memory of a tensor as bytes, for files."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["bytes_of"]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host (one of a single element may have any strides), not copied."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
