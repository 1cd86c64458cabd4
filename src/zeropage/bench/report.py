"""What `zeropage bench` found, for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zeropage.bench.disk import DiskRates
from zeropage.bench.expect import Expected, Model, Move
from zeropage.transport.probe import TransportVerdict

__all__ = ["Findings", "Rate", "render"]


@dataclass(frozen=True, slots=True)
class Rate:
    """Something a second: bytes of all ranks together, or FLOP of one rank while all compute."""

    what: str
    rate: float
    precision: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything; seconds, bytes a second, FLOP a second, nanoseconds a parameter."""

    torch: str
    cores: int
    ranks: int
    threads: int
    transports: tuple[TransportVerdict, ...]
    moves: list[Move]
    memory: list[Rate]
    disk: DiskRates
    compute: list[Rate]
    optimizer_ns: float
    model: Model
    expected: list[Expected]

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists, for JSON."""
        found = asdict(self)
        for plain, expected in zip(found["expected"], self.expected, strict=True):
            plain["step"] = expected.step
        return found


def render(found: Findings) -> Group:
    """As tables for a terminal."""
    parts: list[RenderableType] = [_machine(found), Text()]
    if found.moves:
        parts += [_moves(found), Text()]
    parts += [_expected(found), Text(_what_is_expected(found))]
    return Group(*parts)


def _machine(found: Findings) -> Table:
    table = Table("what", "rate", title=f"{found.ranks} ranks on {found.cores} cores, torch {found.torch}")
    table.title_justify = "left"
    table.columns[1].justify = "right"
    for rate in found.memory:
        table.add_row(f"memory, {rate.what} (read and written, all ranks)", f"{rate.rate / 1e9:.1f} GB/s")
    where = "past the page cache" if found.disk.direct else "through the page cache"
    table.add_row(f"disk, write until it is kept, {where}", f"{found.disk.write / 1e9:.2f} GB/s")
    table.add_row(f"disk, read, {where}", f"{found.disk.read / 1e9:.2f} GB/s")
    for rate in found.compute:
        what = "square matmul" if rate.what == "matmul" else f"linear layers, {found.model.tokens} tokens"
        table.add_row(f"{what}, {rate.precision} (a rank, while all compute)", f"{rate.rate / 1e9:.0f} GFLOP/s")
    what = f"AdamW with clipping, {found.model.precision} (a rank)"
    table.add_row(what, f"{found.optimizer_ns:.2f} ns a parameter")
    return table


def _moves(found: Findings) -> Table:
    """A row for each size and way; times of the slowest rank."""
    table = Table("unit", "by", "gather", "reduce", title=f"Moving a unit of {found.model.precision}")
    table.title_justify = "left"
    for column in table.columns[2:]:
        column.justify = "right"
    took = {(move.nbytes, move.by, move.what): move.seconds for move in found.moves}
    for nbytes in dict.fromkeys(move.nbytes for move in found.moves):
        for by in dict.fromkeys(move.by for move in found.moves):
            times = (f"{took[nbytes, by, what] * 1e3:.3f} ms" for what in ("gather", "reduce"))
            table.add_row(_size(nbytes), by, *times)
        table.add_section()
    for verdict in found.transports:
        if not verdict.can_run:
            table.add_row("", verdict.name, "cannot run here:", verdict.reason)
    return table


def _expected(found: Findings) -> Table:
    model = found.model
    again = ", activations computed again" if model.checkpointing else ""
    table = Table(
        "transport", "compute", "gather", "reduce", "hidden", "optimizer", "step",
        title=f"Expected seconds: {model.parameters:.3g} parameters, {model.tokens} tokens a rank, "
        f"{model.precision}{again}",
    )  # fmt: skip
    table.title_justify = "left"
    for column in table.columns[1:]:
        column.justify = "right"
    for one in found.expected:
        times = (one.compute, one.gather, one.reduce, -one.hidden, one.optimizer, one.step)
        table.add_row(one.transport, *(f"{time:.3f}" for time in times))
    return table


def _what_is_expected(found: Findings) -> str:
    factor, times = (8, "three times") if found.model.checkpointing else (6, "twice")
    return (
        f"A step is {factor} FLOP a parameter and token at the rate of the linear layers, parameters gathered {times} "
        "and gradients reduced once at the rates of the largest unit, and the optimizer on this rank's part. Hidden is "
        "what a rank waits without working, as far as there is computing to hide it. Attention, the loss, Python, and "
        "devices other than the processor are not counted."
    )


def _size(nbytes: int) -> str:
    for name, unit in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} bytes"
