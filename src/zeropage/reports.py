"""What the engine tells: the outcome of a step, and where the memory is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeropage.gradients import Record
from zeropage.memory.disk import DiskSlice
from zeropage.pager import Pager

__all__ = ["MemoryReport", "StepResult"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What `Engine.step` did.

    `grad_norm` is the global 2-norm of the averaged, unscaled gradient before clipping; None when no step
    was due. `reason` says why nothing was applied; empty when something was.
    """

    applied: bool
    grad_norm: float | None
    loss_scale: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes on this rank, in memory or on disk (`by_device` tells).

    `frames` are gathered copies alive now, `peak_frames` the most there ever were. `allocators` is what those of the
    devices say of everything in them, activations too: bytes of "cuda:0 allocated", "cuda:0 peak", "cuda:0 reserved".
    """

    parameters: int
    gradients: int
    optimizer: int
    frames: int
    peak_frames: int
    by_device: Mapping[str, int] = field(default_factory=dict)
    allocators: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.frames

    @staticmethod
    def of(records: Sequence[Record], optimizer: Mapping[str, int], pagers: Sequence[Pager]) -> MemoryReport:
        """The report over these parameters, bytes of state in "memory" and on "disk", and the frames of `pagers`."""
        by_device: dict[str, int] = {}
        parameters = gradients = 0
        for record in records:
            own, summed = record.page.store.nbytes, record.gradient_bytes
            parameters += own
            gradients += summed
            device = str(record.page.store.slice.device)
            place = "disk" if isinstance(record.page.store.slice, DiskSlice) else device
            by_device[device] = by_device.get(device, 0) + summed
            by_device[place] = by_device.get(place, 0) + own
        for device in list(by_device)[:1]:
            by_device[device] += optimizer.get("memory", 0)
        if optimizer.get("disk"):
            by_device["disk"] = by_device.get("disk", 0) + optimizer["disk"]
        return MemoryReport(
            parameters=parameters,
            gradients=gradients,
            optimizer=sum(optimizer.values()),
            frames=sum(pager.resident_bytes for pager in pagers),
            peak_frames=sum(pager.counters.peak_resident_bytes for pager in pagers),
            by_device=by_device,
            allocators={name: nbytes for pager in pagers for name, nbytes in pager.lane.memory().items()},
        )
