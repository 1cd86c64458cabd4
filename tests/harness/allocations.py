"""How many bytes torch's allocator held at most while a piece of code ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Allocations", "allocations"]


@dataclass
class Allocations:
    """Bytes beyond what was held at the start: at the worst moment, and at the end."""

    peak: int = 0
    end: int = 0


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Count what torch allocates and frees inside. Mapped shared memory does not pass through its allocator."""
    found = Allocations()
    activities = [torch.profiler.ProfilerActivity.CPU]
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # also those that carry messages
    with torch.profiler.profile(activities=activities, profile_memory=True, experimental_config=everywhere) as profiler:
        yield found
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        found.end += event.nbytes()
        found.peak = max(found.peak, found.end)
