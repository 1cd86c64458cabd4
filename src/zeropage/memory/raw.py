"""The memory of a tensor as bytes, for files."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["as_bytes", "bytes_of"]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor (one of a single element may have any strides) as bytes (1-D), not copied."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The same of a tensor on the host, as a buffer."""
    array: Any = as_bytes(tensor).numpy()
    return memoryview(array)
