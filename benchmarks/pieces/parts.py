"""B1, B5 and B8: what a step and a start are made of."""

from __future__ import annotations

from pathlib import Path

from benchmarks.alternate import Case
from benchmarks.competitors.stepping import NUMEL
from benchmarks.fleet import Competitor

__all__ = ["b1", "b5", "b8"]


def b1() -> list[Case]:
    """Gather and reduce one unit, 2 ranks, against what FSDP2 and DeepSpeed call."""
    return [
        _moving(what, size, precision)
        for what in ("Gather", "Reduce")
        for size in (16, 128)
        for precision in ("fp32", "bf16")
    ]


def _moving(what: str, megabytes: int, precision: str) -> Case:
    module = "benchmarks.competitors.moving"
    zeropage = [
        Competitor(f"zeropage {transport}", f"{module}:Zeropage{what}", {"transport": transport}, ("zeropage",))
        for transport in ("shared", "collective")
    ]
    call = {"Gather": "all_gather_into_tensor", "Reduce": "reduce_scatter_tensor"}[what]
    theirs = [Competitor(f"dist.{call}", f"{module}:Torch{what}")]
    if what == "Reduce" and precision == "bf16":
        theirs.append(Competitor(f"dist.{call} in fp32", f"{module}:Torch{what}", {"wide": True}))
    return Case(
        name=f"B1 {what.lower()} {megabytes} MB {precision}",
        competitors=[*zeropage, *theirs],
        job={"model": "", "tokens": megabytes << 20, "precision": precision},
        steps=10 if megabytes < 64 else 4,
        together=True,
        tolerance=1e-6,
        nbytes=4 * megabytes << 20,
        per_unit=1e-3,
        unit="ms",
    )


def b5() -> list[Case]:
    """50 M parameters are stepped: nanoseconds a parameter. By one rank, and by four with and without spare threads."""
    module = "benchmarks.competitors.stepping"
    return [
        Case(
            name="B5 optimizer, bf16, clipped",
            competitors=[
                Competitor("zeropage", f"{module}:Zeropage", libraries=("zeropage",)),
                Competitor(
                    "zeropage with sums in bf16",
                    f"{module}:Zeropage",
                    {"reduce_dtype": "bf16"},
                    ("zeropage",),
                    gated=False,
                ),
                Competitor("torch", f"{module}:Torch"),
                Competitor("torch with one flat tensor", f"{module}:Torch", {"one": True}),
            ],
            job={"model": "", "tokens": 0},
            world=1,
            tolerance=1e-2,
            nbytes=24 * NUMEL,
            per_unit=NUMEL * 1e-9,
            unit="ns a parameter",
        ),
        Case(
            name="B5 optimizer, bf16, clipped, 4 ranks",
            competitors=[
                Competitor(name, f"{module}:{work}", {"unbound": unbound}, libraries, gated=work == "Zeropage")
                for work, libraries in (("Zeropage", ("zeropage",)), ("Torch", ()))
                for unbound in (False, True)
                for name in (work.lower() + " with all threads" * unbound,)
            ],
            job={"model": "", "tokens": 0},
            world=4,
            tolerance=1e-2,
            nbytes=24 * NUMEL,
            per_unit=NUMEL * 1e-9,
            unit="ns a parameter",
        ),
    ]


def b8(folder: Path) -> list[Case]:
    """1 GB of safetensors, made in `folder`: until it could be trained ("ready"), and until its first step is done.

    The difference is the step itself, and the first touch of gradients and optimizer states. Two floors: one rank
    reads the bytes into a small buffer, and all ranks read their parts into new memory.
    """
    return [
        Case(
            name=f"B8 load, {'first step included' if train else 'ready to train'}, {'cold' if cold else 'warm'}",
            competitors=[
                Competitor(
                    name,
                    f"benchmarks.competitors.loading:{work}",
                    options,
                    libraries,
                    gated=gated,
                    size=size,
                    stays=name != "DeepSpeed",  # which does not give its memory back
                )
                for name, work, libraries, gated, size in (
                    ("zeropage", "Zeropage", ("zeropage", "transformers"), True, 1.0),
                    ("zeropage from_pretrained", "ZeropagePretrained", ("zeropage", "transformers"), True, 1.0),
                    ("DeepSpeed", "DeepSpeed", ("deepspeed", "transformers"), True, 2.0),
                    ("reading the files", "Reading", (), False, 0.2),
                    ("reading to keep", "Keeping", (), False, 0.4),
                )
                for options in ({"folder": str(folder), "cold": cold, "train": train},)
            ],
            job={"model": "", "tokens": 0},
            steps=1,
            warm_up=0,
            together=True,
            tolerance=1e-5 if train else None,
            nbytes=5 << 30,
        )
        for cold, train in ((False, False), (True, False), (False, True))
    ]
