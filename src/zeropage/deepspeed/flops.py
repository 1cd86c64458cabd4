"""`flops_profiler`: the floating-point operations of one step, counted by torch as operators run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zeropage.deepspeed.logs import logger
from zeropage.deepspeed.settings import FlopsProfilerSettings

__all__ = ["FlopsProfiler"]


class FlopsProfiler:
    """Counts what runs inside `counting`, and tells it by module when the step `profile_step` has ended.

    Backward is counted too if it runs inside. An operator is counted by its shapes, so a page counts as the tensor
    that it stands for.
    """

    def __init__(
        self,
        settings: FlopsProfilerSettings,
        model: nn.Module,
        rank: int = 0,
        *,
        tell: Callable[[str], None] = logger.info,
    ) -> None:
        self._settings, self._model, self._rank, self._tell = settings, model, rank, tell
        self._counts: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def counting(self, step: int) -> Iterator[None]:
        """The body belongs to step number `step` (the first is 1); it is counted if that is the one."""
        if step != self._settings.profile_step:
            yield
            return
        counter = FlopCounterMode(display=False)
        with counter:
            yield
        for name, counts in counter.get_flop_counts().items():
            self._counts[name] += sum(counts.values())

    def step_done(self, step: int) -> None:
        """Tell the table, on the first rank, if step number `step` was the one that was counted."""
        if step != self._settings.profile_step or self._rank:
            return
        table = self.table()
        if self._settings.output_file:
            Path(self._settings.output_file).write_text(table + "\n", encoding="utf-8")
        else:
            self._tell(table)

    def get_total_flops(self) -> int:
        """Operations counted so far (a multiplication and an addition are two)."""
        return self._counts.get("Global", 0)

    def table(self) -> str:
        """Totals, the heaviest modules of every depth, and all modules if `detailed`."""
        settings, total = self._settings, self.get_total_flops()
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        lines = [f"floating-point operations of step {settings.profile_step}: {total:.4g}, {parameters} parameters"]
        by_depth = _by_depth(self._counts)
        deepest = max(by_depth, default=0) if settings.module_depth < 0 else settings.module_depth
        for depth in range(deepest + 1):
            heaviest = sorted(by_depth.get(depth, []), key=lambda found: -found[1])[: settings.top_modules]
            lines += [f"  depth {depth}: {name} {count:.4g}" for name, count in heaviest]
        if settings.detailed:
            lines.append("all modules:")
            lines += [f"  {name} {count:.4g}" for name, count in sorted(self._counts.items()) if name != "Global"]
        return "\n".join(lines)


def _by_depth(counts: Mapping[str, int]) -> dict[int, list[tuple[str, int]]]:
    found: dict[int, list[tuple[str, Any]]] = {}
    for name, count in counts.items():
        if name != "Global":
            found.setdefault(name.count("."), []).append((name, count))
    return found
