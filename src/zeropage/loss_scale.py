"""The factor that keeps small fp16 gradients from vanishing, and how it follows overflows.

Plain arithmetic, equal on every rank as long as every rank is told the same: whoever calls `update` has
agreed on the verdict with all ranks before. The rule is the one of DeepSpeed's `DynamicLossScaler`
(deepspeed/runtime/fp16/loss_scaler.py), with the hysteresis restored by a full clean window. There the first window
after an overflow is one update longer than the others; here all are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeropage.errors import CheckpointError

__all__ = ["DynamicLossScale"]

FACTOR = 2.0
"""Growth and shrinkage; a power of two, so that scaling changes no bit of a gradient's mantissa."""

LARGEST = 2.0**126
"""The scale never grows above this: it has to fit into float32, and so does its double."""


@dataclass(slots=True, eq=False)
class DynamicLossScale:
    """A loss scale that is halved by overflows and doubled by a window of clean steps."""

    scale: float = 65536.0
    """The present factor."""

    window: int = 1000
    """How many clean steps in a row double the scale."""

    hysteresis: int = 2
    """The overflow, counted since the last full clean window, from which on each one halves the scale."""

    min: float = 1.0
    """The scale never falls below this."""

    dynamic: bool = True
    """Whether the scale changes at all."""

    clean_steps: int = field(default=0, init=False)
    """Clean steps since the last overflow or growth."""

    tolerance: int = field(init=False)
    """How many more overflows are left before each one halves the scale."""

    exhausted: bool = field(default=False, init=False)
    """Whether the last step overflowed although the scale could not fall any more: scaling cannot help."""

    def __post_init__(self) -> None:
        self.tolerance = self.hysteresis - 1

    def update(self, found_nonfinite: bool) -> None:
        """Take note of one optimizer step, and of whether a gradient in it was infinite or not a number."""
        self.exhausted = False
        if not self.dynamic:
            return
        if found_nonfinite:
            self._overflow()
        else:
            self._clean_step()

    def _overflow(self) -> None:
        self.clean_steps = 0
        if self.tolerance > 0:
            self.tolerance -= 1
            return
        self.exhausted = self.scale <= self.min
        self.scale = max(self.scale / FACTOR, self.min)

    def _clean_step(self) -> None:
        self.clean_steps += 1
        if self.clean_steps < self.window:
            return
        self.clean_steps = 0
        self.tolerance = self.hysteresis - 1
        if self.scale < LARGEST:
            self.scale *= FACTOR

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: where the scale stands. The settings come from the config."""
        return {"scale": self.scale, "clean_steps": self.clean_steps, "tolerance": self.tolerance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stood, within the present settings; a static scale stays as configured.

        Raises:
            CheckpointError: a key is missing.
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise CheckpointError(f"the loss scale's state lacks {', '.join(missing)}")
        self.exhausted = False
        if not self.dynamic:
            return
        self.scale = max(float(state["scale"]), self.min)
        self.clean_steps = int(state["clean_steps"])
        self.tolerance = min(int(state["tolerance"]), self.hysteresis - 1)
