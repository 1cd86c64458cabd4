"""The time of a training step, from what was measured. Pure.

    compute    6 FLOP for each parameter and token of the rank (8 if activations are computed again), at the rate
               of plain linear layers, forward and backward, while all ranks compute
    gather     the parameters once for forward and once for backward (and once more if activations are computed
               again), at the rate of the largest unit that was measured
    reduce     the gradients once, likewise
    optimizer  this rank's 1/N of the parameters

What cannot be hidden: the part of a gather or reduce in which the rank's own cores work (copies, sums, sockets). The
rest is waiting, and is hidden behind computing as far as there is any: with nothing beside a processor to carry
messages, that is little. Attention, normalisation and the loss are not counted, nor is Python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeropage.errors import ConfigError

__all__ = ["Expected", "Model", "Move", "Rates", "expect"]

_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Model:
    """What is to be trained; `tokens` are those of one rank in one step.

    Raises:
        ConfigError: a number that cannot be; names the option.
    """

    parameters: float
    tokens: int
    precision: str
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.parameters < math.inf:
            raise ConfigError(f"--parameters {self.parameters:g}: a model has at least one, as in --parameters 1.2e9")
        if self.tokens < 1:
            raise ConfigError(f"--tokens {self.tokens}: at least one token is needed")
        if self.precision not in _BYTES:
            raise ConfigError(f"--precision {self.precision!r}: it is one of {', '.join(_BYTES)}")


@dataclass(frozen=True, slots=True)
class Move:
    """A whole unit of `nbytes` gathered, or reduced: seconds of the slowest rank, and of its processors meanwhile."""

    what: str
    by: str
    nbytes: int
    seconds: float
    processor: float

    @property
    def busy(self) -> float:
        """Seconds in which the rank itself worked."""
        return min(self.seconds, self.processor)


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one rank, while all ranks do the same. `ns` is nanoseconds a parameter that the rank steps."""

    flops: float
    ns: float


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of a step over one transport. `hidden` is the part of `gather` and `reduce` that costs no time."""

    transport: str
    compute: float
    gather: float
    reduce: float
    hidden: float
    optimizer: float

    @property
    def step(self) -> float:
        return self.compute + self.gather + self.reduce - self.hidden + self.optimizer


def expect(
    model: Model, ranks: int, rates: Rates, transport: str, gather: Move | None = None, reduce: Move | None = None
) -> Expected:
    """The step of `model` on `ranks` ranks; without moves nothing has to be exchanged (one rank)."""
    nbytes = model.parameters * _BYTES[model.precision]
    gathered = nbytes * (3 if model.checkpointing else 2)
    compute = (8 if model.checkpointing else 6) * model.parameters * model.tokens / rates.flops
    took, waited = _over(gather, gathered)
    took_too, waited_too = _over(reduce, nbytes)
    return Expected(
        transport=transport,
        compute=compute,
        gather=took,
        reduce=took_too,
        hidden=min(compute, waited + waited_too),
        optimizer=model.parameters / ranks * rates.ns * 1e-9,
    )


def _over(move: Move | None, nbytes: float) -> tuple[float, float]:
    """Seconds of moving `nbytes` in such units, and how many of them are waiting."""
    if move is None:
        return 0.0, 0.0
    units = nbytes / move.nbytes
    return units * move.seconds, units * (move.seconds - move.busy)
