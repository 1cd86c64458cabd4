"""What ranks find in their slices before a step, and what they conclude together.

Every decision of a step (apply, skip, clip by how much) is taken from the same exchanged findings, so all
ranks take the same one.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from zeropage.errors import DivergenceError
from zeropage.gradients import Record
from zeropage.transport import Transport

__all__ = ["Findings", "Verdict", "agree"]


@dataclass(frozen=True, slots=True)
class Findings:
    """What one rank found in its slices of all gradients."""

    square_sum: float
    overflow: bool
    bad_parameter: str  # the first in its own backward whose gradient was not finite
    bad_loss: bool
    backwards: int  # backward passes since the last step
    save_failed: bool  # a checkpoint that it was writing

    @staticmethod
    def of(
        records: Sequence[Record], *, bad_parameter: str, bad_loss: bool, backwards: int, save_failed: bool
    ) -> Findings:
        norms = _norms([record.own_gradient() for record in records if record.has_gradient()])
        overflow = not all(map(math.isfinite, norms))
        square_sum = sum(norm * norm for norm in norms)
        return Findings(square_sum, overflow, bad_parameter, bad_loss, backwards, save_failed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks conclude. `square_sum` is that of the whole gradient; `reason` says why to skip, if so."""

    square_sum: float
    reason: str
    bad_loss: bool
    save_failed: bool


def agree(mine: Findings, transport: Transport, attempt: int, *, may_skip: bool) -> Verdict:
    """Exchange findings (collective); skip for non-finite values if `may_skip`.

    Raises:
        DivergenceError: some ranks have run a backward pass since the last step and others none: their
            gradients do not belong to one step.
    """
    answers = transport.meet(f"judge step {attempt}", pickle.dumps(astuple(mine)))
    findings = [Findings(*pickle.loads(answer)) for answer in answers]
    idle = [rank for rank, found in enumerate(findings) if not found.backwards]
    if idle and len(idle) < len(findings):
        raise DivergenceError(
            f"at step {attempt} the other ranks have run a backward pass since the last step, rank {_list(idle)} has "
            "not. Every rank must run as many steps as the others; one without data can run "
            "engine.backward(0 * loss) on an old batch."
        )
    return Verdict(
        square_sum=math.fsum(found.square_sum for found in findings),
        reason=_reason(findings) if may_skip else "",
        bad_loss=any(found.bad_loss for found in findings),
        save_failed=any(found.save_failed for found in findings),
    )


def _norms(slices: Sequence[torch.Tensor]) -> list[float]:
    """The 2-norm of each; those of one dtype and device are fetched by one call."""
    alike: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for own in slices:
        alike[own.dtype, own.device].append(own)
    found: list[float] = []
    for (dtype, _), some in alike.items():
        if dtype.itemsize == 2:
            norms = tuple(torch.linalg.vector_norm(own, dtype=torch.float32) for own in some)
        else:
            norms = torch._foreach_norm(some)
        found += torch.stack(norms).tolist()
    return found


def _reason(findings: list[Findings]) -> str:
    losses = [rank for rank, found in enumerate(findings) if found.bad_loss]
    if losses:
        return f"the loss is not finite on rank {_list(losses)}"
    for rank, found in enumerate(findings):
        if found.bad_parameter:
            return f"the gradient of {found.bad_parameter!r} is not finite on rank {rank}"
    if any(found.overflow for found in findings):
        return "the sum of the gradients over ranks is not finite"
    return ""


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
