"""Ten corrections to the first sketch of the idea, each with the case that showed it to be wrong.

The cases on one rank run with pages in poisoned frames, as on many.
"""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.operators.leaves import CONFIG, group_of_one

TRANSPORTS = ("shared", "collective")


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with group_of_one():
        yield


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Parameter]:
    """A plain tensor, and a paged parameter equal to it."""
    values = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    holder = nn.Module()
    holder.register_parameter("w", nn.Parameter(values.clone()))
    parameter = zp.shard(holder, CONFIG).w
    return values, parameter


# -- 1. views in inference mode


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "select": lambda p: p[1],
    "t": lambda p: p.t(),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.transpose(0, 1),
    "unsqueeze": lambda p: p.unsqueeze(0),
    "detach": lambda p: p.detach(),
    "expand": lambda p: p.expand(3, 6, 8),
    "chunk": lambda p: p.chunk(2),
    "split": lambda p: p.split([1, 5]),
    "tensor_split": lambda p: p.tensor_split(3),
    "unbind": lambda p: p.unbind(1),
    "diagonal": lambda p: p.diagonal(1),
    "unfold": lambda p: p.unfold(1, 3, 2),
    "as_strided": lambda p: p.as_strided((2, 3), (1, 2), 4),
    "view of another dtype": lambda p: p.detach().view(torch.int32),
    "view_as_complex": lambda p: torch.view_as_complex(p.view(6, 4, 2)),
    "squeeze of dimensions": lambda p: p.view(6, 1, 8, 1).squeeze((1, 3)),
    "movedim": lambda p: p.movedim(0, 1),
    "narrow": lambda p: p.narrow(1, 2, 3),
    "slice": lambda p: p[1:5:2, 3:],
    "flatten": lambda p: p.flatten(),
    "unflatten": lambda p: p.unflatten(1, (2, 4)),
    "swapaxes": lambda p: p.swapaxes(0, 1),
    "mT": lambda p: p.mT,
    "permute": lambda p: p.permute(1, 0),
    "expand_as": lambda p: p.expand_as(torch.empty(2, 6, 8)),
    "broadcast_to": lambda p: torch.broadcast_to(p, (2, 6, 8)),
    "ravel": lambda p: p.ravel(),
    "hsplit": lambda p: p.hsplit(2),
    "contiguous": lambda p: p.contiguous(),
    "reshape": lambda p: p.reshape(8, 6),
    "type_as": lambda p: p.type_as(torch.empty(1)),
    "to its own dtype": lambda p: p.to(torch.float32),
    "dropout in eval": lambda p: nn.functional.dropout(p, 0.5, training=False),
    "atleast_3d": lambda p: torch.atleast_3d(p),
    "chained": lambda p: p.t()[2:5].unsqueeze(1).expand(-1, 2, -1)[..., 1],
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", VIEWS)
def test_1_and_6_views_are_lazy_and_alive(name: str, mode: Callable[[], Any]) -> None:
    """In every mode; none of them is an alias of a frame, all of them see a later write."""
    values, parameter = weight(6, 8)
    with mode():
        ours, theirs = listed(VIEWS[name](parameter)), listed(VIEWS[name](values))
        parameter.sum()  # its frame goes to others
    assert len(ours) == len(theirs)
    assert all(zp.is_paged(one) for one in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(zp.full(one), other)
    with torch.no_grad():
        parameter.mul_(3)
        values.mul_(3)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(zp.full(one), other)


def listed(views: Any) -> list[Tensor]:
    return list(views) if isinstance(views, (list, tuple)) else [views]


# -- 2. torch's C++ setter of data


def test_2_conversions_stay_paged() -> None:
    plain = nn.Linear(6, 8)
    paged = zp.shard(copy.deepcopy(plain), CONFIG)
    state = {name: value + 1 for name, value in plain.state_dict().items()}
    for convert in (
        lambda model: model.to(torch.bfloat16), lambda model: model.float(), lambda model: model.to("cpu"),
        lambda model: model.load_state_dict(copy.deepcopy(state), assign=True),
        lambda model: model.double(),
    ):  # fmt: skip
        convert(plain)
        convert(paged)
        for one, other in zip(plain.parameters(), paged.parameters(), strict=True):
            assert zp.is_paged(other) and isinstance(other, nn.Parameter)
            assert torch.equal(one.detach(), zp.full(other))
    paged(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    assert paged.weight.grad.dtype is torch.float64


# -- 3. what an exchange of implementations drops


def test_3_references_gradients_and_attributes_survive() -> None:
    model = nn.LSTM(4, 5)
    reference = weakref.ref(model.weight_hh_l0)
    model.weight_hh_l0.mark = "kept"
    model(torch.randn(2, 3, 4))[0].sum().backward()
    gradient = model.weight_hh_l0.grad.clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    zp.shard(model, CONFIG)
    assert reference() is model.weight_hh_l0 is model._flat_weights[1]
    assert model.weight_hh_l0.mark == "kept"
    assert torch.equal(zp.full(model.weight_hh_l0.grad), gradient)
    before = zp.full(model.weight_hh_l0)
    optimizer.step()
    assert torch.equal(zp.full(model.weight_hh_l0), before.add(gradient, alpha=-0.1))


# -- 4. memory that is not there


def test_4_other_processes_get_values() -> None:
    values, parameter = weight(6, 8)
    for sent in (parameter, parameter.detach(), parameter.detach()[2:]):
        got = pickle.loads(ForkingPickler.dumps(sent))
        assert not zp.is_paged(got)
        assert torch.equal(got.detach(), values[6 - got.shape[0] :])
    assert isinstance(pickle.loads(ForkingPickler.dumps(parameter)), nn.Parameter)
    with pytest.raises(zp.errors.UnsupportedOperationError):
        parameter.share_memory_()
    assert parameter.detach().untyped_storage().nbytes() == values.untyped_storage().nbytes()


# -- 5. a second parameter over a page


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_5_a_parameter_made_from_a_page_is_reduced(transport: str) -> None:
    gradients = run(2, run_second_parameters, transport)
    expected = [second_parameters(nn.Linear(6, 8), rank) for rank in range(2)]
    for name, one in expected[0].items():
        mean = (one + expected[1][name]) / 2
        for found in gradients:
            assert torch.allclose(found[name], mean, rtol=1e-6, atol=1e-7), name


def run_second_parameters(transport: str) -> dict[str, Tensor]:
    model = zp.shard(nn.Linear(6, 8), {"transport": transport})
    return second_parameters(model, torch.distributed.get_rank())


def second_parameters(model: nn.Module, rank: int) -> dict[str, Tensor]:
    with torch.no_grad():
        model.weight.copy_(torch.arange(48.0).view(8, 6) / 50)
        model.bias.zero_()
    torch.nn.utils.parametrizations.weight_norm(model)
    model.again = nn.Parameter(model.bias.detach())
    model.transposed = nn.Parameter(model.bias.detach().view(2, 4).t())
    inputs = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    ((model(inputs) * model.again.exp()).sum() + (model.transposed * (rank + 1)).exp().sum()).backward()
    return {name: zp.full(parameter.grad) for name, parameter in model.named_parameters()}


# -- 7. writes are collective, reads are not


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_7_ranks_may_read_different_pages_between_writes(transport: str) -> None:
    assert all(run(2, run_uneven_reads, transport))


def run_uneven_reads(transport: str) -> bool:
    rank = torch.distributed.get_rank()
    settings = {"transport": transport, "resident_bytes": 0, "poison_frames": True}
    model = zp.shard(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)), settings)
    right = True
    with torch.no_grad():
        for number in range(20):
            for parameter in model.parameters():
                parameter.fill_(number)
            for _ in range((number * (rank + 1)) % 7):
                right &= bool(model[(rank + number) % 2].weight.eq(number).all())
    return right


# -- 8. an overflow that one rank alone sees


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_8_all_ranks_skip_when_one_finds_an_overflow(transport: str) -> None:
    found = run(2, run_overflow, transport)
    assert found == [(False, 4.0), (False, 4.0)]


def run_overflow(transport: str) -> tuple[bool, float]:
    model = zp.shard(nn.Linear(40, 40), {"transport": transport})
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(2, 40)).sum()).backward()
    if torch.distributed.get_rank() == 1:
        zp.local(model.weight.grad)[-1] = float("inf")  # in the slice of the last rank alone
    before = zp.full(model.weight)
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(zp.full(model.weight), before), scaler.get_scale()


# -- 9. weights that compiled code would keep for backward


def test_9_compiled_code_saves_no_full_weight() -> None:
    model = zp.shard(nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 50)), CONFIG)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    compiled = torch.compile(model, backend="eager")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(torch.randn(3, 50)).sum().backward()
    weights = [tensor for tensor in saved if sorted(tensor.shape) == [50, 60]]
    assert weights and all(zp.is_paged(tensor) for tensor in weights)
    torch._dynamo.reset()


# -- 10. results are paged inside an optimizer step only


class Looking(torch.optim.Optimizer):
    """Notes what kind of tensor each expression gives inside `step`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.seen: dict[str, bool] = {}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"]
        self.seen = kinds(parameter)
        with torch.enable_grad():  # as a closure that runs the model would
            self.seen["with gradients"] = zp.is_paged(parameter * 2)


def kinds(parameter: Tensor) -> dict[str, bool]:
    results = {
        "zeros_like": torch.zeros_like(parameter),
        "product": parameter * 2,
        "sum of two": parameter + parameter,
        "clone": parameter.clone(),
        "with a plain operand": parameter * torch.ones(8),
        "foreach": torch._foreach_mul([parameter], 2)[0],
        "reduced": parameter.sum(0),
        "broadcast to more": parameter + torch.ones(2, 6, 8),
    }
    return {name: zp.is_paged(result) for name, result in results.items()}


def test_10_results_are_paged_inside_a_step_only() -> None:
    _, parameter = weight(6, 8)
    with torch.no_grad():
        assert not any(kinds(parameter).values())
    optimizer = Looking([parameter])
    optimizer.step()
    whole = {"reduced", "broadcast to more", "with gradients"}
    assert optimizer.seen == {name: name not in whole for name in optimizer.seen}
    assert not any(kinds(parameter.detach()).values())
