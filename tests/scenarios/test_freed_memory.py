"""What a model is made from goes back to the system, also where the C library would keep it for later."""

from __future__ import annotations

import torch
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.resident import held, map_blocks_from

MB = 1 << 20
LAYERS, LAYER = 200, 4 * MB
BOUND = 110 * MB  # what may have been freed and not yet given back (64 MB), a layer, and torch's own


def _build() -> tuple[int, int]:
    """Bytes of memory that nobody shares, which this rank has got more of: by a model, and by its masters."""
    map_blocks_from(32 * MB)  # as the C library does by itself once a block of this size has been freed
    torch.ones(1024, 1024)
    before = held("Pss_Anon")
    with zp.init({"transport": "shared", "precision": "bf16"}):
        model = nn.ParameterList(torch.ones(1024, 1024) for _ in range(LAYERS))
    built = held("Pss_Anon") - before
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    cast = held("Pss_Anon") - before - LAYERS * LAYER // 2
    engine.close()
    return built, cast


def test_building_and_casting() -> None:
    for built, cast in run(2, _build):
        assert built < BOUND, f"built: {built / MB:.0f} MB"
        assert cast < BOUND, f"cast: {cast / MB:.0f} MB"
