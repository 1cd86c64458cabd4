"""torch.compile of a whole sharded model and of its blocks: plain torch's numbers, and no endless recompiling."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import LM, build_lm, lm_batch, next_token
from tests.scenarios.beside import averaged_backward, plain_copy, same, same_parameters


def _scenario(transport: str, backend: str, whole: bool) -> tuple[int, int]:
    """Trains, evaluates, trains; how many graphs were compiled at first, and after all toggles."""
    torch._dynamo.reset()
    graphs = 0

    def counting(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    rank = dist.get_rank()
    plain, model = plain_copy(build_lm), plain_copy(build_lm)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = zp.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), {"transport": transport})
    called: nn.Module = engine.module
    if whole:
        called = torch.compile(model, backend=counting)
    else:
        assert isinstance(model, LM)
        for block in model.blocks:
            block.compile(backend=counting)
    first = 0
    for round_number in range(2):
        plain.train()
        model.train()
        for step in range(2):
            number = 2 * round_number + step
            averaged_backward(plain.parameters(), lambda r, n=number: next_token(plain, lm_batch(n, 0, r)))
            reference.step()
            reference.zero_grad()
            engine.backward(next_token(called, lm_batch(number, 0, rank)))
            engine.step()
        same_parameters(plain, model, exact=False)
        plain.eval()
        model.eval()
        with torch.no_grad():
            batch = lm_batch(90 + round_number, 0, rank)
            same(plain(batch), called(batch), exact=False)
        if round_number == 0:
            first = graphs
    engine.close()
    torch._dynamo.reset()
    return first, graphs


# after a graph break dynamo looks at the `.grad` of activations, also without any sharding
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("backend", "transport"),
    [
        ("eager", "shared"),
        pytest.param("eager", "collective", marks=pytest.mark.slow),
        pytest.param("aot_eager", "shared", marks=pytest.mark.slow),
        pytest.param("aot_eager", "collective", marks=pytest.mark.slow),
    ],
)
def test_compiled(backend: str, transport: str) -> None:
    for whole in (True, False):
        for first, in_all in run(2, _scenario, transport, backend, whole, timeout=120):
            assert first > 0, "something was compiled"
            assert in_all <= first, f"{in_all - first} graphs more after train and eval took turns"
