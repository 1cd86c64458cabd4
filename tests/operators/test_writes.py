"""Writes to sharded parameters: every rank runs the same one, and the full value is that of plain torch.

Each case in the tables runs on a plain model and on a sharded one from the same seed. All parameters and
the state of the random generator must agree to the bit afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import init

import zeropage as zp
from tests.harness import run

TRANSPORTS = ("shared", "collective")
WORLDS = (2, 3)
Write = Callable[[Any], Any]


class Weights(nn.Module):
    """Parameters of every kind that the rules tell apart. No slice of them is a whole number of rows."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        for name, shape in {
            "p": (30, 41), "q": (30, 41), "turned": (41, 30), "row": (41,), "kernel": (16, 6, 3, 3),
            "square": (20, 20), "short": (5,), "number": (),
        }.items():  # fmt: skip
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draw)))
        self.narrow = nn.Parameter(torch.randn(30, 41, generator=draw).bfloat16())
        self.last = nn.Parameter(torch.randn(6, 8, 5, 3, generator=draw).contiguous(memory_format=torch.channels_last))
        self.frozen = nn.Parameter(torch.randint(0, 9, (30, 41), generator=draw), requires_grad=False)


def fixed(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def mask() -> Tensor:
    return fixed(30, 41) > 0.5


INITS: dict[str, Write] = {
    "uniform_": lambda m: init.uniform_(m.p, -1, 2),
    "normal_": lambda m: init.normal_(m.p, 1, 2),
    "trunc_normal_": lambda m: init.trunc_normal_(m.p, std=0.5),
    "constant_": lambda m: init.constant_(m.p, 0.3),
    "ones_": lambda m: init.ones_(m.p),
    "zeros_": lambda m: init.zeros_(m.p),
    "eye_": lambda m: init.eye_(m.p),
    "dirac_": lambda m: init.dirac_(m.kernel, 2),
    "xavier_uniform_": lambda m: init.xavier_uniform_(m.p),
    "xavier_normal_": lambda m: init.xavier_normal_(m.kernel),
    "kaiming_uniform_": lambda m: init.kaiming_uniform_(m.p, a=5**0.5),
    "kaiming_normal_": lambda m: init.kaiming_normal_(m.kernel, mode="fan_out"),
    "orthogonal_": lambda m: init.orthogonal_(m.turned),
    "sparse_": lambda m: init.sparse_(m.p, 0.3),
    "uniform_ of all kinds": lambda m: [init.uniform_(w) for w in (m.narrow, m.last, m.short, m.number, m.row)],
    "normal_ of all kinds": lambda m: [init.normal_(w) for w in (m.narrow, m.last, m.short, m.number, m.row)],
    "reset_parameters": lambda m: nn.Linear.reset_parameters(_Linear(m.p, m.short)),
}

RANDOM: dict[str, Write] = {
    "normal_ of data": lambda m: m.p.data.normal_(0, 0.02),
    "uniform_ of a slice": lambda m: m.p.data[3:7].uniform_(),
    "normal_ of a transposed view": lambda m: m.p.data.t().normal_(),
    "exponential_": lambda m: m.p.exponential_(),
    "bernoulli_": lambda m: m.p.bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda m: m.p.bernoulli_(fixed(30, 41).sigmoid()),
    "random_": lambda m: m.frozen.random_(0, 100),
    "log_normal_": lambda m: m.p.log_normal_(),
    "cauchy_": lambda m: m.p.cauchy_(),
    "geometric_": lambda m: m.p.geometric_(0.4),
    "with a generator": lambda m: m.p.normal_(generator=torch.Generator().manual_seed(3)),
    "dropout in place": lambda m: nn.functional.dropout(m.p.data, 0.5, inplace=True),
    "rrelu in place": lambda m: nn.functional.rrelu_(m.p.data, training=True),
    "randn with out": lambda m: torch.randn(30, 41, out=m.p.data),
    "normal with out": lambda m: torch.normal(0.0, 1.0, (30, 41), out=m.p),
    "rand of an operand": lambda m: m.p.add_(torch.rand(30, 41)),
    "a random mask": lambda m: m.p.mul_(torch.rand_like(m.p) < 0.5),
}

ELEMENTWISE: dict[str, Write] = {
    "copy_": lambda m: m.p.data.copy_(fixed(30, 41)),
    "copy_ of a row": lambda m: m.p.copy_(fixed(41)),
    "copy_ of another dtype": lambda m: m.p.copy_(fixed(30, 41).double()),
    "copy_ into another dtype": lambda m: m.narrow.copy_(fixed(30, 41)),
    "fill_": lambda m: m.p.data.fill_(3),
    "fill_ with a tensor": lambda m: m.p.data.fill_(torch.tensor(2.5)),
    "zero_": lambda m: m.p.data.zero_(),
    "mul_": lambda m: m.p.data.mul_(0.5),
    "mul_ with a number of many digits": lambda m: m.p.mul_(1 / 3),
    "add_ with alpha": lambda m: m.p.add_(fixed(30, 41), alpha=-0.1),
    "add_ of a column": lambda m: m.p.add_(fixed(30, 1)),
    "add_ of a 0-d tensor": lambda m: m.p.add_(torch.tensor(1.5, dtype=torch.float64)),
    "add_ of a 0-d parameter": lambda m: m.p.add_(m.number),
    "div_, sub_, pow_": lambda m: m.p.div_(3).sub_(1).pow_(2),
    "operators": lambda m: _operators(m.p),
    "clamp_ and others": lambda m: m.p.clamp_(-1, 1).abs_().sqrt_().neg_().exp_().tanh_(),
    "relu_": lambda m: torch.relu_(m.p),
    "masked_fill_": lambda m: m.p.masked_fill_(mask(), 7),
    "nan_to_num_": lambda m: m.p.div_(0).nan_to_num_(1.0, 2.0, 3.0),
    "eq_": lambda m: m.p.eq_(m.q),
    "lerp_ between parameters": lambda m: m.p.lerp_(m.q, 0.1),
    "lerp_ with a plain tensor": lambda m: m.p.lerp_(fixed(30, 41), fixed(30, 41)),
    "addcmul_ between parameters": lambda m: m.p.addcmul_(m.q, m.narrow.float(), value=0.3),
    "addcdiv_": lambda m: m.p.addcdiv_(m.q, fixed(30, 41).abs() + 1, value=0.3),
    "copy_ between parameters": lambda m: m.p.copy_(m.q),
    "copy_ from another layout": lambda m: m.p.copy_(m.turned.t()),
    "copy_ into another layout": lambda m: m.last.copy_(fixed(6, 8, 5, 3)),
    "channels_last and its view": lambda m: m.last.data.add_(m.last.data * 2).permute(0, 2, 3, 1).mul_(3),
    "add_ of a row parameter": lambda m: m.p.add_(m.row),
    "0-d": lambda m: m.number.mul_(3).add_(1).copy_(m.number * 2),
    "few elements": lambda m: m.short.mul_(2).add_(torch.arange(5.0)),
    "integers": lambda m: m.frozen.add_(3).bitwise_and_(5),
    "copysign_ with itself": lambda m: m.p.mul_(m.p),
    "out of add": lambda m: torch.add(m.q, fixed(30, 41), alpha=2, out=m.p),
    "out of mul, plain operands": lambda m: torch.mul(fixed(30, 41), fixed(41), out=m.p),
    "out of a maximum over a dimension": lambda m: torch.max(
        fixed(30, 41), 0, out=(m.row.data, torch.empty(41, dtype=torch.long))
    ),
    "out of a cast": lambda m: torch.add(m.q, 1, out=m.narrow),
    "foreach": lambda m: (
        torch._foreach_mul_([m.p, m.narrow, m.short], 0.3),
        torch._foreach_add_([m.p, m.row], [m.q, fixed(41)], alpha=0.1),
        torch._foreach_lerp_([m.p, m.row], [fixed(30, 41), fixed(41)], 0.1),
        torch._foreach_copy_([m.p, m.square], [m.q, fixed(20, 20)]),
        torch._foreach_addcdiv_([m.p], [m.q], [fixed(30, 41).abs() + 1], [0.3]),
        torch._foreach_zero_([m.short]),
        torch._foreach_sqrt_([m.row.abs_()]),
    ),
    "foreach with plain tensors and parameters without dimensions": lambda m: (
        torch._foreach_add_([m.p, m.number, fixed(3), m.square.data.t()], [m.q, fixed(), fixed(3), fixed(20, 20)]),
        torch._foreach_mul_([m.number, m.p], 2),
        torch._foreach_add_([fixed(30, 41)], [m.p]),
    ),
}  # fmt: skip

VIEWS: dict[str, Write] = {
    "a slice": lambda m: m.p.data[1:3].copy_(fixed(2, 41)),
    "columns": lambda m: m.p.data[:, 2].mul_(3),
    "transposed": lambda m: m.p.data.t().copy_(fixed(41, 30)),
    "flat": lambda m: m.p.data.view(-1)[3:20].fill_(2),
    "view of the same order": lambda m: m.p.data.view(41, 30).mul_(fixed(41, 30)),
    "reshaped": lambda m: m.p.data.reshape(-1).add_(fixed(1230)),
    "split": lambda m: [part.mul_(i) for i, part in enumerate(m.p.data.split(7))],
    "chunk": lambda m: m.p.data.chunk(3)[1].zero_(),
    "unbind": lambda m: m.p.data.unbind(1)[3].copy_(m.p.data.unbind(1)[4]),
    "diagonal": lambda m: m.p.data.diagonal().fill_(1),
    "select": lambda m: m.p.data.select(0, 2).add_(1),
    "narrow": lambda m: m.p.data.narrow(1, 3, 5).sub_(1),
    "unsqueeze and squeeze": lambda m: m.p.data.unsqueeze(1).mul_(2).squeeze(1).add_(1),
    "view of another dtype": lambda m: m.p.data.view(torch.int32).bitwise_and_(-16),
    "real and imaginary parts": lambda m: torch.view_as_complex(m.square.data.view(20, 10, 2)).imag.zero_(),
    "as_strided": lambda m: m.p.data.as_strided((4, 5), (2, 50), 7).fill_(4),
    "p[i] = v": lambda m: _set(m.p, 2, fixed(41)),
    "p[i, j] = number": lambda m: _set(m.p, (2, 3), 5.0),
    "p[:, a:b] = v": lambda m: _set(m.p, (slice(None), slice(3, 6)), 1.0),
    "p[mask] = number": lambda m: _set(m.p, mask(), 0.5),
    "p[mask] = values": lambda m: _set(m.p, mask(), fixed(int(mask().sum()))),
    "p[indices] = v": lambda m: _set(m.p, torch.tensor([3, 9, 12]), fixed(3, 41)),
    "p[...] = q": lambda m: _set(m.p, ..., m.q),
    "p[::2] += 1": lambda m: _set(m.p, slice(None, None, 2), m.p[::2] + 1),
    "self-aliasing": lambda m: m.p[:3].copy_(m.p[3:6]),
    "overlapping": lambda m: m.p.data[0].add_(m.p.data[:, 0][:30].sum()),
    "with a copy of its own transposed": lambda m: m.square.add_(m.square.t().clone()),
    "copy_ of a broadcast page": lambda m: m.p[:, 1:2].copy_(m.q[:, :1]),
}

OTHERS: dict[str, Write] = {
    "index_add_": lambda m: m.p.index_add_(0, torch.tensor([1, 1, 4]), fixed(3, 41)),
    "index_copy_": lambda m: m.p.index_copy_(0, torch.tensor([1, 4]), fixed(2, 41)),
    "index_fill_": lambda m: m.p.index_fill_(1, torch.tensor([1, 4]), 9),
    "index_put_": lambda m: m.p.index_put_((torch.tensor([1, 1]), torch.tensor([2, 2])), fixed(2), accumulate=True),
    "scatter_": lambda m: m.p.scatter_(1, torch.arange(30).view(30, 1), 3.0),
    "scatter_add_": lambda m: m.p.scatter_add_(1, torch.arange(30).view(30, 1), fixed(30, 1)),
    "masked_scatter_": lambda m: m.p.masked_scatter_(mask(), fixed(30, 41)),
    "tril_, triu_": lambda m: m.p.tril_(2) is m.p and m.q.triu_(),
    "cumsum_": lambda m: m.p.cumsum_(0),
    "addmm_": lambda m: m.square.addmm_(fixed(20, 3), fixed(3, 20), alpha=0.5),
    "addmm_ of pages": lambda m: m.square.addmm_(m.square, m.square.t()),
    "fill_diagonal_": lambda m: m.square.fill_diagonal_(3),
    "renorm_": lambda m: m.p.renorm_(2, 0, 0.5),
    "out of mm": lambda m: torch.mm(m.p, m.turned[:, :20], out=m.square.data[:0].new_empty(30, 20)) is not None
    and torch.mm(m.square, m.square, out=m.square),
    "out of sum": lambda m: torch.sum(m.p, 0, out=m.row),
    "out of cat": lambda m: torch.cat([m.q[:10], fixed(20, 41)], out=m.p),
    "out of two": lambda m: torch.sort(m.q, 1, out=(m.p, m.frozen)),
    "set through data": lambda m: setattr(m.p, "data", fixed(30, 41)),
    "data of another page": lambda m: setattr(m.p, "data", m.q.data * 2),
    "data of a view": lambda m: setattr(m.p, "data", m.turned.data.t().clone()),
    "data of another dtype": lambda m: setattr(m.p, "data", m.p.data.bfloat16()),
    "data of another shape": lambda m: setattr(m.p, "data", fixed(7, 70)),
    "data swapped": lambda m: _swap(m.p, m.q),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(fixed(1271), [m.p, m.row]),
    "parameters_to_vector": lambda m: m.p.copy_(nn.utils.parameters_to_vector([m.q, m.row])[41:].view(30, 41)),
    "load_state_dict": lambda m: m.load_state_dict({n: torch.ones_like(v) for n, v in m.state_dict().items()}),
    "load_state_dict, assigned": lambda m: m.load_state_dict(
        {n: torch.ones_like(v) for n, v in m.state_dict().items()}, assign=True
    ),
    "converted module": lambda m: m.bfloat16(),
    "embedding with max_norm": lambda m: nn.functional.embedding(torch.tensor([1, 2, 1]), m.p, max_norm=0.5),
    "clip_grad_norm_ without gradients": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "batch_norm statistics": lambda m: nn.functional.batch_norm(
        fixed(9, 5), torch.zeros(5), torch.ones(5), m.short, m.short, training=True
    ),
    "a cast is private": lambda m: m.p.data.double().mul_(2),
    "an in-place write on a clone": lambda m: m.p.detach().clone().mul_(2),
}  # fmt: skip

TABLES = {"init": INITS, "random": RANDOM, "elementwise": ELEMENTWISE, "views": VIEWS, "others": OTHERS}


class _Linear(nn.Module):
    """What `nn.Linear.reset_parameters` looks at."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias


def _operators(p: Tensor) -> None:
    p += 1
    p *= 2
    p -= 0.5
    p /= 3
    p **= 2


def _set(p: Tensor, key: Any, value: Any) -> None:
    p[key] = value


def _swap(p: Tensor, q: Tensor) -> None:
    p.data, q.data = q.data, p.data


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("transport", ["shared", pytest.param("collective", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", WORLDS)
def test_writes_equal_plain_ones(world: int, transport: str, table: str) -> None:
    for differences in run(world, run_table, table, transport):
        assert not differences, "\n".join(differences)


def run_table(table: str, transport: str) -> list[str]:
    """What differs, on this rank, after each write of a table."""
    found = []
    for name, write in TABLES[table].items():
        plain, paged = Weights(), zp.shard(Weights(), {"transport": transport, "poison_frames": True})
        try:
            found += [f"{name}: {difference}" for difference in differences_of(write, plain, paged)]
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
        dist.barrier()
    return found


def differences_of(write: Write, plain: nn.Module, paged: nn.Module) -> list[str]:
    found = []
    states = []
    for model in (plain, paged):
        torch.default_generator.manual_seed(1)
        with torch.no_grad():
            write(model)
        states.append(torch.get_rng_state())
    if not torch.equal(*states):
        found.append("the random generator is elsewhere")
    for (name, one), (_, other) in zip(plain.named_parameters(), paged.named_parameters(), strict=True):
        if not zp.is_paged(other):
            found.append(f"{name} is not paged any more")
        elif (one.shape, one.dtype) != (other.shape, other.dtype):
            found.append(f"{name} is {tuple(other.shape)} {other.dtype}, not {tuple(one.shape)} {one.dtype}")
        elif not torch.equal(one.detach(), zp.full(other)):
            found.append(f"{name} has other values")
    return found


# -- what all ranks must agree on


DIVERGENT: dict[str, Callable[[Any, int], Any]] = {
    "another tensor": lambda m, rank: m.p.copy_(fixed(30, 41) + rank),
    "another number": lambda m, rank: m.p.mul_(0.5 + rank),
    "another list": lambda m, rank: torch._foreach_add_([m.p], [fixed(30, 41) * (rank + 1)]),
    "another index": lambda m, rank: _set(m.p, torch.tensor([rank, 5]), 0.0),
    "another operator": lambda m, rank: m.p.zero_() if rank else m.p.fill_(1),
    "another parameter": lambda m, rank: (m.p if rank else m.q).zero_(),
    "another shape": lambda m, rank: m.p.data[: rank + 1].zero_(),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_different_writes_raise_on_all_ranks(transport: str) -> None:
    for found in run(2, run_divergent, transport):
        assert found == dict.fromkeys(DIVERGENT, "DivergenceError")


def run_divergent(transport: str) -> dict[str, str]:
    raised = {}
    model = zp.shard(Weights(), {"transport": transport})
    with torch.no_grad():
        for name, write in DIVERGENT.items():
            try:
                write(model, dist.get_rank())
            except Exception as error:
                raised[name] = type(error).__name__
            model.p.copy_(fixed(30, 41))  # the model is usable afterwards
    assert torch.equal(zp.full(model.p), fixed(30, 41))
    return raised


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_first_ranks_generator_decides_where_they_differ(transport: str) -> None:
    expected = torch.empty(30, 41).normal_(generator=torch.Generator().manual_seed(100))
    values, following = zip(*run(2, run_seeded_by_rank, transport), strict=True)
    assert all(torch.equal(value, expected) for value in values)
    assert not torch.equal(*following)  # each rank's own generator goes on


def run_seeded_by_rank(transport: str) -> tuple[Tensor, Tensor]:
    model = zp.shard(Weights(), {"transport": transport})
    torch.manual_seed(100 + dist.get_rank())
    init.normal_(model.p)
    return zp.full(model.p), torch.rand(5)


# -- writes that cannot be kept


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_cannot_be_kept_raises_and_changes_nothing(transport: str) -> None:
    expected = dict.fromkeys(REFUSED, "UnsupportedOperationError") | {"operands that do not fit": "RuntimeError"}
    for found in run(2, run_refused, transport):
        assert found == expected


REFUSED: dict[str, Write] = {
    "resize_": lambda m: m.p.data.resize_(3, 3),
    "t_": lambda m: m.p.data.t_(),
    "unsqueeze_": lambda m: m.p.data.unsqueeze_(0),
    "set_": lambda m: m.p.data.set_(torch.ones(3)),
    "as_strided_": lambda m: m.p.data.as_strided_((2, 2), (1, 1)),
    "out of another shape": lambda m: torch.mm(fixed(3, 4), fixed(4, 5), out=m.p.data),
    "elementwise out of another shape": lambda m: torch.add(fixed(3, 4), 1, out=m.p.data),
    "a parameter and a cast of one": lambda m: torch.sort(m.q.double(), out=(m.p.data.double(), m.frozen.data)),
    "part of a buffer as data": lambda m: setattr(m.p, "data", fixed(60, 41)[:30]),
    "data of a view": lambda m: setattr(m.p[0], "data", fixed(41)),
    "statistics of a batch norm": lambda m: nn.functional.batch_norm(
        fixed(9, 5), m.short.data, torch.ones(5), training=True
    ),
    "operands that do not fit": lambda m: m.p.add_(fixed(7, 7)),
}


def run_refused(transport: str) -> dict[str, str]:
    raised = {}
    model = zp.shard(Weights(), {"transport": transport})
    with torch.no_grad():
        for name, write in REFUSED.items():
            try:
                write(model)
            except Exception as error:
                raised[name] = type(error).__name__
    for (name, one), (_, other) in zip(Weights().named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(one.detach(), zp.full(other)), name
    return raised


# -- pages without values


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_parameter_from_the_meta_device_has_no_values_until_it_is_overwritten(transport: str) -> None:
    assert run(2, run_unwritten, transport) == [[], []]


OVERWRITES: dict[str, Write] = {
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(3),
    "copy_": lambda p: p.copy_(fixed(30, 41)),
    "normal_": lambda p: p.normal_(),
    "kaiming_uniform_": init.kaiming_uniform_,
    "orthogonal_": init.orthogonal_,
    "out of mm": lambda p: torch.mm(fixed(30, 3), fixed(3, 41), out=p.data),
    "out of add": lambda p: torch.add(fixed(30, 41), 1, out=p.data),
    "data": lambda p: setattr(p, "data", fixed(30, 41)),
    "view of all": lambda p: p.view(-1).copy_(fixed(1230)),
}
UPDATES: dict[str, Write] = {
    "mul_": lambda p: p.mul_(2),
    "a part": lambda p: p[:3].zero_(),
    "an index": lambda p: _set(p, torch.tensor([1]), 0.0),
    "read": lambda p: p.sum(),
    "operand": lambda p: torch.zeros(30, 41).add_(p),
}


def run_unwritten(transport: str) -> list[str]:
    wrong = []
    for name, write in (OVERWRITES | UPDATES).items():
        with torch.device("meta"):
            model = nn.Linear(41, 30)
        zp.shard(model, {"transport": transport})
        with torch.no_grad():
            try:
                write(model.weight)
                raised = False
                model.weight.sum()
            except zp.errors.UninitializedPageError as error:
                raised = True
                if "weight" not in str(error):
                    wrong.append(f"{name}: the error does not name the parameter")
        if raised != (name in UPDATES):
            wrong.append(f"{name}: raised {raised}")
    return wrong
