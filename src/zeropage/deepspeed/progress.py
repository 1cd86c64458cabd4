"""What a run tells of its progress: a line every `steps_per_print` steps, with samples per second and memory.

With `wall_clock_breakdown` the line says too how the time of those steps was spent.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from zeropage.deepspeed.accelerator import get_accelerator
from zeropage.deepspeed.logs import logger
from zeropage.deepspeed.settings import Settings

__all__ = ["Progress"]


class Progress:
    """Takes note of phases and steps, and tells them when a line is due.

    Args:
        rank: only the first tells.
        clock: seconds, from any start.
    """

    def __init__(
        self,
        settings: Settings,
        rank: int,
        *,
        tell: Callable[[str], None] = logger.info,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._settings = settings
        self._tells = rank == 0
        self._tell, self._clock = tell, clock
        self._began = clock()
        self._since = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The body is a part of a step, like "forward"; its time is told with `wall_clock_breakdown`."""
        if not self._settings.wall_clock_breakdown:
            yield
            return
        device = get_accelerator()
        device.synchronize()
        began = self._clock()
        try:
            yield
        finally:
            device.synchronize()
            self._seconds[name] += self._clock() - began

    def step_done(self, step: int, skipped: int, lr: Sequence[float], mom: Sequence[object] = ()) -> None:
        """Step number `step` (the first is 1) has ended."""
        self._since += 1
        if step % self._settings.steps_per_print:
            return
        if self._tells:
            self._tell(self._line(step, skipped, lr, mom))
        self._began, self._since = self._clock(), 0
        self._seconds.clear()

    def _line(self, step: int, skipped: int, lr: Sequence[float], mom: Sequence[object]) -> str:
        parts = [f"step={step}", f"skipped={skipped}", f"lr={list(lr)}"]
        if mom:
            parts.append(f"mom={list(mom)}")
        elapsed = self._clock() - self._began
        if self._settings.throughput and elapsed > 0:
            parts.append(f"samples/s={self._since * self._settings.train_batch_size / elapsed:.4g}")
        device = get_accelerator()
        parts.append(
            f"memory={device.memory_allocated() / 1e9:.2f}GB, peak={device.max_memory_allocated() / 1e9:.2f}GB"
        )
        parts += [f"{name}={1e3 * seconds / self._since:.2f}ms" for name, seconds in self._seconds.items()]
        return ", ".join(parts)
