"""B2, B3 and B9: the time of a training step.

Losses of all competitors must agree: in fp32 to 1e-5; in bf16 to 1e-2, which is what other orders of summation, sums
over ranks in bf16 (DDP) or fp32 (the others), and 8 bits of mantissa leave after some tens of steps.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.alternate import Case
from benchmarks.fleet import Competitor
from benchmarks.models import SHAPES

__all__ = ["COMPETITORS", "TOLERANCE", "b2", "b3", "b9"]

TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}

_BESIDE = 1 << 30  # bytes that two ranks take beside parameters, gradients and states: libraries, activations

COMPETITORS = (
    Competitor("zeropage shared", "benchmarks.competitors.zeropage:Training", {"transport": "shared"}, ("zeropage",)),
    Competitor(
        "zeropage collective", "benchmarks.competitors.zeropage:Training", {"transport": "collective"}, ("zeropage",)
    ),
    Competitor("FSDP2", "benchmarks.competitors.fsdp2:Training", libraries=("torch.distributed.fsdp",)),
    Competitor("DeepSpeed", "benchmarks.competitors.deepspeed:Training", libraries=("deepspeed",), size=1.8),
    Competitor("DDP", "benchmarks.competitors.plain:Ddp", size=2.0),
    Competitor("compute only", "benchmarks.competitors.plain:ComputeOnly", size=1.5, gated=False),
)

# In fp32 DeepSpeed takes twice what it takes in bf16: about 60 bytes a parameter.
_WIDE = tuple(replace(one, size=3.6) if one.name == "DeepSpeed" else one for one in COMPETITORS)


def b2() -> list[Case]:
    """Few tokens, so that moving parameters and gradients is most of the work; once with four ranks."""
    models = (("210M", 64), ("124M", 128), ("test", 64))
    two = [_step(model, count, precision) for model, count in models for precision in ("fp32", "bf16")]
    return [*two, _step("124M", 128, "fp32", world=4)]


def _step(model: str, count: int, precision: str, world: int = 2) -> Case:
    return Case(
        name=f"B2 {model} {precision}" + (f", {world} ranks" if world != 2 else ""),
        competitors=_WIDE if precision == "fp32" else COMPETITORS,
        job={"model": model, "tokens": count, "precision": precision},
        world=world,
        tolerance=TOLERANCE[precision],
        nbytes=17 * SHAPES[model].numel + _BESIDE * world // 2,
    )


def b3() -> list[Case]:
    """Many tokens: computing is most of the work, and communication should vanish beside it."""
    return [
        Case(
            name=f"B3 350M {precision} x{accumulate}",
            competitors=COMPETITORS,
            job={
                "model": "350M", "tokens": 1024, "precision": precision, "accumulate": accumulate,
                "checkpointing": True,
            },
            steps=1,
            warm_up=0,
            tolerance=TOLERANCE[precision],
            nbytes=18 * SHAPES["350M"].numel + _BESIDE,
        )
        for precision, accumulate in (("bf16", 1), ("bf16", 8))
    ]  # fmt: skip


def b9() -> list[Case]:
    """200 blocks so small that only the cost of running them shows, on one rank: microseconds a block and step."""
    zeropage, _, fsdp2, deepspeed, _, compute = COMPETITORS
    return [
        Case(
            name="B9 200 tiny blocks",
            competitors=(
                replace(zeropage, name="zeropage local", options={"transport": "auto"}),
                fsdp2,
                deepspeed,
                replace(compute, name="plain torch", gated=True),
            ),
            job={"model": "tiny", "tokens": 64},
            world=1,
            steps=20,
            warm_up=3,
            tolerance=TOLERANCE["fp32"],
            nbytes=1 << 28,
            per_unit=200e-6,
            unit="us a block",
        )
    ]
