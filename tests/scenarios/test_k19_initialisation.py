"""A model built under `zp.init` has, bit for bit, the values of an unsharded one built from the same seed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import LM, VOCABULARY, WIDTH
from tests.scenarios.beside import same_parameters


class _Initialised(LM):
    """Its own scheme, run at the end of `__init__`: std 0.02, a padding row of zeros, orthogonal heads."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.square = nn.Parameter(torch.empty(5, 5))
        self.apply(_init_weights)


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(mean=0.0, std=0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    elif isinstance(module, nn.Embedding):
        module.weight.data.normal_(std=0.02)
        if module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()
    elif isinstance(module, _Initialised):
        nn.init.eye_(module.square)


def _again(model: LM) -> None:
    """Every scheme that works on the whole tensor, after construction and outside of the context."""
    with torch.no_grad():
        model.blocks[0].norm1.weight.fill_(0.5)
        model.head.weight.mul_(0.1).add_(torch.linspace(0, 1, WIDTH))
        model.embedding.weight[5:7] = torch.arange(WIDTH, dtype=torch.float32)
    nn.init.orthogonal_(model.blocks[0].qkv.weight)
    nn.init.trunc_normal_(model.blocks[0].out.weight, std=0.02)
    nn.init.xavier_uniform_(model.blocks[0].up.weight)
    nn.init.kaiming_normal_(model.blocks[0].down.weight, nonlinearity="relu")
    nn.init.sparse_(model.blocks[1].out.weight, sparsity=0.4)
    nn.init.uniform_(model.blocks[1].up.bias, -1, 1)
    model.blocks[1].down.reset_parameters()


def _scenario(transport: str) -> None:
    torch.manual_seed(7)
    plain = _Initialised()
    state = torch.get_rng_state()
    torch.manual_seed(7)
    with zp.init({"transport": transport}):
        model = _Initialised()
    assert torch.equal(torch.get_rng_state(), state), "the generator has moved as in plain torch"
    same_parameters(plain, model, exact=True)
    assert all(zp.is_paged(p) for p in model.parameters())
    row = zp.full(model.embedding.weight)[3]
    assert torch.equal(row, torch.zeros(WIDTH))

    torch.manual_seed(8)
    _again(plain)
    state = torch.get_rng_state()
    torch.manual_seed(8)
    _again(model)
    assert torch.equal(torch.get_rng_state(), state)
    same_parameters(plain, model, exact=True)


def _ranks_seeded_apart(transport: str) -> None:
    """A script that seeds by rank: all ranks get what rank 0 would have had, or are told why not."""
    torch.manual_seed(40)
    plain = _Initialised()
    nn.init.uniform_(plain.head.weight)
    torch.manual_seed(40 + dist.get_rank())
    with zp.init({"transport": transport}):
        model = _Initialised()
    nn.init.uniform_(model.head.weight)
    same_parameters(plain, model, exact=True)
    with pytest.raises(zp.errors.DivergenceError, match=r"different values to copy_ on head\.weight"):
        nn.init.orthogonal_(model.head.weight)  # computes in a plain tensor of this rank's own
    same_parameters(plain, model, exact=True)


def _seed_in_config(transport: str) -> None:
    torch.manual_seed(41)
    plain = _Initialised()
    torch.manual_seed(42)
    with zp.init({"transport": transport, "seed": 41}):
        model = _Initialised()
    same_parameters(plain, model, exact=True)


def _on_meta(transport: str) -> None:
    """Under torch's meta device: what constructors draw is kept, what they leave to others is missed when read."""
    torch.manual_seed(43)
    plain = nn.Sequential(nn.Linear(7, 17), nn.LayerNorm(17), nn.Embedding(5, 3, padding_idx=1))
    torch.manual_seed(43)
    with zp.init({"transport": transport}), torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 17), nn.LayerNorm(17), nn.Embedding(5, 3, padding_idx=1))
        model.scale = nn.Parameter(torch.ones(5))
    assert model.scale.device.type == "cpu"
    with pytest.raises(zp.errors.UninitializedPageError, match="'scale'"):
        model.scale.sum()
    del model.scale
    same_parameters(plain, model, exact=True)

    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(7, 17), nn.LayerNorm(17), nn.Embedding(5, 3, padding_idx=1))
    zp.shard(bare, {"transport": transport})
    with pytest.raises(zp.errors.UninitializedPageError, match=r"0\.(weight|bias)"):
        bare(torch.randn(2, 7))
    torch.manual_seed(43)
    for module in bare:
        module.reset_parameters()
    same_parameters(plain, bare, exact=True)


@pytest.mark.parametrize("scenario", [_scenario, _ranks_seeded_apart, _seed_in_config, _on_meta])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_values_are_those_of_plain_torch(transport: str, world: int, scenario) -> None:
    run(world, scenario, transport)
