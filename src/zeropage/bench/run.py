"""One pass over everything: the ranks, the disk, and what follows from them."""

from __future__ import annotations

import torch

from zeropage.bench.disk import measure_disk
from zeropage.bench.expect import Expected, Move, Rates, expect
from zeropage.bench.ranks import ask_ranks
from zeropage.bench.report import Findings, Rate
from zeropage.bench.settings import Settings, cores
from zeropage.transport.probe import TransportVerdict, probe_transports

__all__ = ["measure"]


def measure(settings: Settings) -> Findings:
    """Measure this machine.

    Raises:
        OffloadError: the folder cannot be used.
        PeerLostError: a rank failed.
    """
    verdicts = tuple(verdict for verdict in probe_transports() if (verdict.name == "local") == (settings.ranks == 1))
    usable = tuple(verdict.name for verdict in verdicts if verdict.can_run)
    disk = measure_disk(settings.folder, settings.disk_bytes)
    found = ask_ranks(settings.ranks, settings.threads, settings.job(usable))
    moves = [Move(**move) for move in found["moves"]]
    compute = [Rate(**rate) for rate in found["compute"]]
    (layers,) = (rate.rate for rate in compute if rate.what == "layers")
    rates = Rates(layers, found["optimizer_ns"])
    return Findings(
        torch=torch.__version__,
        cores=cores(),
        ranks=settings.ranks,
        threads=settings.threads,
        transports=verdicts,
        moves=moves,
        memory=[Rate(**rate) for rate in found["memory"]],
        disk=disk,
        compute=compute,
        optimizer_ns=found["optimizer_ns"],
        model=settings.model,
        expected=_expected(settings, verdicts, moves, rates),
    )


def _expected(
    settings: Settings, verdicts: tuple[TransportVerdict, ...], moves: list[Move], rates: Rates
) -> list[Expected]:
    largest = {(move.by, move.what): move for move in sorted(moves, key=lambda move: move.nbytes)}
    return [
        expect(
            settings.model, settings.ranks, rates, name, largest.get((name, "gather")), largest.get((name, "reduce"))
        )
        for name in (verdict.name for verdict in verdicts if verdict.can_run)
    ]
