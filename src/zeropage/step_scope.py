"""Is the code that runs now inside an optimizer's step?"""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch

__all__ = ["StepScope"]


class StepScope:
    """Whether the code that runs now is inside an optimizer's step.

    [Note: step frames] torch runs a hook before every `optimizer.step()`, but the hook after it is left out
    when the step raises. So what is remembered is the stack frame of the step: code is inside the step if
    that frame is on its own stack, and gradients are off (a closure that runs the model turns them on).
    """

    __slots__ = ("_local", "entered", "intent")

    def __init__(self) -> None:
        self._local = threading.local()
        self._local.frame = None
        self.entered = False  # cheap to ask: if false, `active()` is false in every thread
        self.intent = ""

    def enter(self, frame: FrameType, intent: str) -> None:
        self._local.frame = frame
        self.entered = True
        self.intent = intent

    def leave(self) -> None:
        self._local.frame = None
        self.entered = False

    @property
    def possible(self) -> bool:
        return self._frame is not None

    @property
    def _frame(self) -> FrameType | None:
        try:
            return self._local.frame  # type: ignore[no-any-return]
        except AttributeError:  # another thread than the one that made this object
            return None

    def active(self) -> bool:
        wanted = self._frame
        if wanted is None or torch.is_grad_enabled():
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame is wanted:
                return True
            frame = frame.f_back
        self.leave()
        return False
