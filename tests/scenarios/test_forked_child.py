"""A forked child (a data loader's worker, a subprocess) can neither hang with a rank's model nor disturb the ranks."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

import zeropage as zp
from tests.harness import run
from tests.harness.models import build_mlp, mlp_batch
from tests.scenarios.beside import averaged_backward, everywhere, plain_copy, same_parameters

_SECONDS = 20.0


def _in_child(act: Callable[[], object]) -> int:
    """The exit code of a forked child that runs `act`: 0, or 1 if it raised; negative if it had to be killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    ends = time.monotonic() + _SECONDS
    while time.monotonic() < ends:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -9


def _trained_beside_children(transport: str) -> None:
    plain, model = plain_copy(build_mlp), plain_copy(build_mlp)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), {"transport": transport})
    transport_of = weakref.ref(engine._pagers[0].transport)

    def drop() -> None:
        nonlocal model, engine
        del model, engine
        gc.collect()
        assert transport_of() is None, "it was let go of"

    def read() -> None:
        for parameter in model.parameters():
            zp.full(parameter)

    def read_refused() -> None:
        try:
            read()
        except zp.errors.UnsupportedOperationError as error:
            assert "forked child" in str(error)
        else:
            raise AssertionError("it was read")

    assert _in_child(drop) == 0
    for step in range(3):
        averaged_backward(plain.parameters(), lambda rank, s=step: plain(mlp_batch(s, 0, rank)).square().mean())
        reference.step()
        reference.zero_grad()
        engine.backward(engine(mlp_batch(step, 0, dist.get_rank())).square().mean())
        engine.step()
        dist.barrier()  # over `shared` a child may read what is not being written
        assert _in_child(read if transport == "shared" else read_refused) == 0
        assert _in_child(drop) == 0
        dist.barrier()
    same_parameters(plain, model)
    engine.close()


@everywhere
def test_trained_beside_children(transport: str, world: int) -> None:
    run(world, _trained_beside_children, transport)
