"""A model built under `zp.init` has, bit for bit, the values of an unsharded one built from the same seed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import LM, VOCABULARY, WIDTH
from tests.scenarios.beside import same, same_parameters


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
    state = torch.get_rng_state()
    torch.manual_seed(43)
    with zp.init({"transport": transport}), torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 17), nn.LayerNorm(17), nn.Embedding(5, 3, padding_idx=1))
        model.scale = nn.Parameter(torch.ones(5))
    assert torch.equal(torch.get_rng_state(), state)
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


def _three() -> nn.Sequential:
    """Each is seeded for itself, and drawn twice; the embedding has a row of zeros."""
    torch.manual_seed(44)
    first = nn.Linear(7, 17)
    torch.manual_seed(45)
    rest = nn.Linear(3, 5), nn.Linear(5, 3), nn.Embedding(5, 3, padding_idx=1)
    rest[2].reset_parameters()
    return nn.Sequential(first, *rest)


def _on_meta_overwritten(transport: str) -> None:
    """What gets other values before the context ends is not drawn, but for the sake of what is drawn after it."""
    plain = _three()
    state = torch.get_rng_state()
    with zp.init({"transport": transport}), torch.device("meta"):
        model = _three()
        with torch.no_grad():
            model[0].weight.copy_(torch.ones(17, 7, device="cpu"))
        model[1].weight = nn.Parameter(torch.zeros(5, 3, device="cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    same(torch.ones(17, 7), model[0].weight, exact=True)
    same(torch.zeros(5, 3), model[1].weight, exact=True)
    for name in ("0.bias", "1.bias", "2.weight", "2.bias", "3.weight"):
        same(plain.get_parameter(name), model.get_parameter(name), name, exact=True)


def _on_meta_needed_early(transport: str) -> None:
    """Reading, editing and copying inside the context find the values there."""
    plain = _three()
    total = plain[0].weight.sum()
    for module in plain[1:]:
        module.reset_parameters()
    with torch.no_grad():
        plain[2].bias[1] = 5
        plain[3].weight.mul_(2)
    with zp.init({"transport": transport}), torch.device("meta"):
        model = _three()
        assert torch.equal(model[0].weight.sum(), total)
        model[1].reset_parameters()
        model[2].reset_parameters()
        model[3].reset_parameters()
    with zp.init({"transport": transport}), torch.device("meta"):
        later = _three()
        later[1].reset_parameters()
        later[2].reset_parameters()
        with zp.gather([later[2].bias], writer=0), torch.no_grad():
            later[2].bias[1] = 5
        twin = copy.deepcopy(later[2])
        later[3].reset_parameters()
        later[3].weight.data.mul_(2)
    with torch.no_grad():
        model[2].bias[1] = 5
        model[3].weight.mul_(2)
    same_parameters(plain, model, exact=True)
    same_parameters(plain, later, exact=True)
    same_parameters(plain[2], twin, exact=True)


def _converted_without_values(transport: str) -> None:
    """A conversion does not make values where there are none."""
    with torch.device("meta"):
        model = nn.Linear(7, 17)
    zp.shard(model, {"transport": transport}).bfloat16()
    with pytest.raises(zp.errors.UninitializedPageError, match="weight"):
        model.weight.sum()
    torch.manual_seed(47)
    model.reset_parameters()
    torch.manual_seed(47)
    same_parameters(nn.Linear(7, 17, dtype=torch.bfloat16), model, exact=True)


def _on_meta_beside_others(transport: str) -> None:
    """Numbers that others draw in between are not used twice, and all ranks have the same."""
    torch.manual_seed(46)
    with zp.init({"transport": transport}), torch.device("meta"):
        one = nn.Parameter(torch.empty(64))
        model = nn.ParameterList([one])
        nn.init.uniform_(model[0])
        other = torch.rand(64, device="cpu")
        again = nn.Embedding(8, 8)
    got = zp.full(model[0])
    assert not got.eq(other).any() and zp.full(again.weight).isfinite().all()
    others = [torch.empty(64) for _ in range(dist.get_world_size())]
    dist.all_gather(others, got)
    assert all(torch.equal(got, each) for each in others)
    dist.barrier()


def _on_meta_and_gone(transport: str) -> None:
    """A loader that sets every parameter anew leaves the generator alone, as in plain torch; so does an error."""
    torch.manual_seed(44)
    before = torch.get_rng_state()
    with zp.init({"transport": transport}), torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 17), nn.Embedding(5, 3, padding_idx=2))
        model[0].weight = nn.Parameter(torch.zeros(17, 7, device="cpu"))
        model[0].bias = nn.Parameter(torch.zeros(17, device="cpu"))
        model[1].weight = nn.Parameter(torch.zeros(5, 3, device="cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ZeroDivisionError), zp.init({"transport": transport}), torch.device("meta"):
        nn.Linear(3, 3)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


SCENARIOS = [
    _scenario,
    _ranks_seeded_apart,
    _seed_in_config,
    _on_meta,
    _on_meta_overwritten,
    _on_meta_needed_early,
    _on_meta_beside_others,
    _converted_without_values,
    _on_meta_and_gone,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_values_are_those_of_plain_torch(transport: str, world: int, scenario) -> None:
    run(world, scenario, transport)
