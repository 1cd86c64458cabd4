"""`deepspeed.zero.unwrap_model_for_generation`: the model of an engine, to generate with between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["unwrap_model_for_generation"]


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Yield the module of an engine. Pages come as operators touch them, on each rank in its own order and number."""
    yield model.module
