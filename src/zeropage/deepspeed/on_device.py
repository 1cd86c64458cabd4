"""`deepspeed.OnDevice`: modules made inside have their parameters on one device and of one dtype."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch

__all__ = ["OnDevice"]


class OnDevice:
    """Tensors made inside, without a device or a dtype of their own, get these ("meta" takes no memory)."""

    def __init__(self, dtype: torch.dtype | None, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._inside = ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            if self.dtype is not None:
                self._inside.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
            self._inside.enter_context(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.close()
