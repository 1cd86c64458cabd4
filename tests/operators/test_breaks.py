"""Thirteen ways in which real code broke the idea at first, each as a test of the cure.

Most run on one rank whose pages are gathered into poisoned frames, as on many; the comparison is always
with plain torch. What needs two ranks runs over shared memory and over collectives.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.operators.leaves import CONFIG, group_of_one

TRANSPORTS = ("shared", "collective")


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with group_of_one():
        yield


class Weights(nn.Module):
    """Parameters `w0`, `w1`, ... of the given shapes."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"w{index}", nn.Parameter(torch.randn(shape)))


def sharded(model: nn.Module, **settings: Any) -> nn.Module:
    return zp.shard(model, CONFIG | settings)


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The same model twice: plain, and sharded."""
    torch.manual_seed(0)
    plain = build()
    return plain, sharded(copy.deepcopy(plain))


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def assert_same_gradients(plain: nn.Module, paged: nn.Module) -> None:
    for (name, one), (_, other) in zip(plain.named_parameters(), paged.named_parameters(), strict=True):
        if one.grad is None:
            assert other.grad is None, name
        else:
            assert torch.equal(one.grad, zp.full(other.grad)), name


def assert_same_parameters(plain: nn.Module, paged: nn.Module) -> None:
    for (name, one), (_, other) in zip(plain.named_parameters(), paged.named_parameters(), strict=True):
        assert torch.equal(one.detach(), zp.full(other)), name


def all_paged(model: nn.Module) -> bool:
    return all(zp.is_paged(parameter) for parameter in model.parameters())


# -- 1. collectives on a weight: c10d's schemas do not say what is written, and return too early


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_1_collectives_on_a_weight(transport: str) -> None:
    for found in run(2, run_collectives, transport):
        assert found == []


def run_collectives(transport: str) -> list[str]:
    torch.manual_seed(0)
    values = torch.randn(300, 70)
    model = Weights((300, 70))
    with torch.no_grad():
        model.w0.copy_(values)
    zp.shard(model, {"transport": transport, "poison_frames": True, "resident_bytes": 0})
    wrong = []

    def check(what: str, found: Tensor, expected: Tensor) -> None:
        if not torch.equal(found, expected):
            wrong.append(what)

    dist.all_reduce(model.w0.data)
    check("all_reduce", zp.full(model.w0), values * 2)
    dist.all_reduce(model.w0.data, async_op=True).wait()
    check("all_reduce, async", zp.full(model.w0), values * 4)
    dist.broadcast(model.w0.data, 1)
    check("broadcast", zp.full(model.w0), values * 4)
    cast = model.w0.data.double()
    dist.all_reduce(cast)
    check("all_reduce of a cast", zp.full(cast), (values * 8).double())
    check("the parameter under the cast", zp.full(model.w0), values * 4)
    lists = [torch.empty(300, 70) for _ in range(2)]
    dist.all_gather(lists, model.w0.data)
    check("all_gather", torch.stack(lists), torch.stack([values * 4] * 2))
    group = dist.group.WORLD
    whole = torch.empty(600, 70)
    group._allgather_base(whole, model.w0.data).wait()
    check("all_gather_into_tensor", whole, torch.cat([values * 4] * 2))
    part = torch.empty(150, 70)
    group._reduce_scatter_base(part, model.w0.data).wait()
    check("reduce_scatter_tensor", part, (values * 8)[150 * dist.get_rank() :][:150])
    received = torch.empty(300, 70)
    work = dist.isend(model.w0.data, 1 - dist.get_rank())
    dist.recv(received, 1 - dist.get_rank())
    work.wait()
    check("send", received, values * 4)
    for what, call in (
        ("recv", lambda: dist.recv(model.w0.data, 1 - dist.get_rank())),
        ("scatter", lambda: dist.scatter(model.w0.data, lists if dist.get_rank() == 0 else None, 0)),
    ):
        try:
            call()
            wrong.append(f"{what} into a weight did not raise")
        except zp.errors.UnsupportedOperationError as error:
            if "w0" not in str(error):
                wrong.append(f"{what}: the error does not name the parameter")
    check("nothing written by what was refused", zp.full(model.w0), values * 4)
    return wrong


# -- 2. casts are copies


def test_2_a_cast_keeps_the_value_that_it_was_taken_from() -> None:
    plain, paged = pair(lambda: Weights((16, 16)))
    old, lazy = plain.w0.double(), paged.w0.double()
    with torch.no_grad():
        plain.w0.mul_(2)
        paged.w0.mul_(2)
    assert torch.equal(old, zp.full(lazy))
    assert torch.equal(plain.w0, zp.full(paged.w0))


def test_2_autocast_and_a_write_before_backward() -> None:
    plain, paged = pair(lambda: nn.Linear(16, 16))
    for model in (plain, paged):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs(4, 16)).float().sum()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        loss.backward()
    assert_same_gradients(plain, paged)


def test_2_writes_to_a_cast_are_private_and_seen_by_its_views() -> None:
    paged = sharded(Weights((4, 4)))
    before = zp.full(paged.w0)
    cast = paged.w0.detach().double()
    row = cast[1]
    cast.mul_(3)
    assert torch.equal(zp.full(row), before[1].double() * 3)
    row.zero_()
    assert zp.full(cast)[1].eq(0).all()
    assert torch.equal(zp.full(paged.w0), before)


def test_2_views_of_a_page_are_alive() -> None:
    paged = sharded(Weights((4, 4)))
    row, transposed = paged.w0.detach()[1], paged.w0.data.t()
    with torch.no_grad():
        paged.w0.fill_(3)
    assert row.eq(3).all() and transposed.eq(3).all()


def test_2_a_cast_from_before_an_engine_step_raises() -> None:
    paged = sharded(Weights((4, 4)))
    engine = zp.Engine(paged, torch.optim.SGD(paged.parameters(), 0.1))
    cast = paged.w0.double()
    engine.backward(paged.w0.sum())
    engine.step()
    with pytest.raises(zp.errors.StaleValueError, match="w0"):
        cast.sum()


# -- 3. hooks from before sharding


def test_3_hooks_and_attributes_survive() -> None:
    model = Weights((4, 4))
    calls: list[str] = []
    model.w0._no_weight_decay = True
    model.w0.register_hook(lambda gradient: gradient * 3)
    handle = model.w0.register_hook(lambda gradient: calls.append("removed"))
    model.w0.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    model.w0.sum().backward()
    sharded(model)
    assert torch.equal(zp.full(model.w0.grad), torch.full((4, 4), 3.0))
    assert model.w0._no_weight_decay
    handle.remove()
    calls.clear()
    model.w0.sum().backward()
    assert calls == ["accumulated"]
    assert torch.equal(zp.full(model.w0.grad), torch.full((4, 4), 6.0))


# -- 4. `p.data = t` re-points


def test_4_data_assigned_from_a_backup_and_swapped() -> None:
    plain, paged = pair(lambda: Weights((4, 4), (4, 4)))
    for model in (plain, paged):
        shadow = model.w0.detach().clone() * 2
        backup = model.w0.data
        model.w0.data = shadow
        middle = model.w0.detach().clone()
        model.w0.data = backup
        model.w0.data, model.w1.data = model.w1.data, model.w0.data
        assert torch.equal(middle, shadow)
        (model.w0 * model.w1.detach()).sum().backward()
    assert_same_parameters(plain, paged)
    assert_same_gradients(plain, paged)


def test_4_data_of_another_shape_or_dtype_with_a_graph_alive() -> None:
    plain, paged = pair(lambda: nn.Linear(4, 4))
    for model in (plain, paged):
        calls: list[int] = []
        model.weight.register_hook(lambda gradient, calls=calls: calls.append(1))
        identity = id(model.weight)
        loss = model(inputs(2, 4)).sum()
        loss.backward()
        model.double()
        model(inputs(2, 4).double()).sum().backward()
        assert id(model.weight) == identity and len(calls) == 2
        model.weight.grad = model.bias.grad = None
        model.weight.data = torch.ones(3, 4, dtype=torch.float64)
        model.bias.data = model.bias.data[:3].clone()
        model(inputs(2, 4).double()).sum().backward()
    assert all_paged(paged)
    assert_same_parameters(plain, paged)
    assert torch.equal(plain.weight.grad, zp.full(paged.weight.grad))


def test_4_a_part_of_a_flat_buffer_is_refused() -> None:
    paged = sharded(Weights((4, 4)))
    buffer = torch.zeros(32)
    with pytest.raises(zp.errors.UnsupportedOperationError, match="w0"):
        paged.w0.data = buffer[:16].view(4, 4)


# -- 5. parameters that become plain, or paged without an owner


def test_5_assigned_converted_and_derived_parameters_stay_paged() -> None:
    plain, paged = pair(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    state = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    for model in (plain, paged):
        model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
        torch.nn.utils.parametrizations.weight_norm(model[0])
        model.register_parameter("again", nn.Parameter(model[1].weight.data))
        (model(inputs(2, 4)) @ model.again).sum().backward()
    assert all_paged(paged)
    assert_same_gradients(plain, paged)
    assert_same_parameters(plain, paged)


def test_5_meta_and_to_empty() -> None:
    paged = sharded(nn.Linear(4, 4))
    before = id(paged.weight)
    paged.to_empty(device="cpu")
    assert all_paged(paged) and id(paged.weight) == before
    paged.reset_parameters()
    paged(inputs(2, 4)).sum().backward()
    assert paged.weight.grad is not None


def test_5_local_leaves_are_ordinary() -> None:
    paged = sharded(Weights((4, 4)))
    leaf = paged.w0.detach().requires_grad_()
    (leaf * leaf).sum().backward()
    assert torch.equal(zp.full(leaf.grad), zp.full(paged.w0) * 2)
    assert paged.w0.grad is None


def test_5_unfrozen_after_sharding() -> None:
    model = Weights((4, 4))
    model.w0.requires_grad_(False)
    sharded(model)
    model.w0.requires_grad_(True)
    model.w0.sum().backward()
    assert torch.equal(zp.full(model.w0.grad), torch.ones(4, 4))


# -- 6. operators that keep their argument, or return an alias of it that no schema declares


@pytest.mark.filterwarnings("ignore:.*quantized.*:UserWarning")
def test_6_kept_arguments_are_not_overwritten() -> None:
    plain, paged = pair(lambda: Weights((8, 8), (8,), (8, 8, 3, 3)))
    outputs = []
    for model in (plain, paged):
        quantized = torch.quantize_per_tensor(model.w0.detach(), 0.1, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantized, model.w1.detach())
        convolution = torch.ops.mkldnn_prepacked.conv2d_prepack(
            model.w2.detach(), model.w1.detach(), [1, 1], [1, 1], [1, 1], 1, [1, 8, 6, 6], "none"
        )
        for _ in range(3):  # frames come and go
            (model.w0.sum() + model.w1.sum() + model.w2.sum()).item()
        image = torch.quantize_per_tensor(inputs(2, 8), 0.1, 0, torch.quint8)
        outputs.append([
            torch.ops.quantized.linear(image, packed, 0.1, 0).dequantize(),
            torch.ops.mkldnn_prepacked.conv2d_run(inputs(1, 8, 6, 6), convolution),
        ])  # fmt: skip
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(zp.errors.UnsupportedOperationError, match="w0"):
        torch.empty(0).set_(paged.w0.detach())
    assert torch.empty(0).resize_as_(paged.w0.detach()).shape == (8, 8)


def test_6_undeclared_aliases_are_not_overwritten() -> None:
    library = torch.library.Library("zeropage_tests", "DEF")
    library.define("transposed(Tensor w) -> Tensor")
    library.impl("transposed", lambda w: w.t(), "CompositeExplicitAutograd")
    paged = sharded(Weights((4, 6)))
    before = zp.full(paged.w0)
    with torch.no_grad():
        alias = torch.ops.zeropage_tests.transposed(paged.w0)
        parts = torch.ops.aten.unsafe_split.Tensor(paged.w0, 2)
        flat = torch.ops.aten._unsafe_view.default(paged.w0, [24])
        for _ in range(3):
            paged.w0.sum().item()
    assert torch.equal(alias, before.t())
    assert torch.equal(zp.full(parts[1]), before[2:])
    assert torch.equal(zp.full(flat), before.view(24))


# -- 7. storage identity


def test_7_addresses_tell_parameters_apart_and_ties_together(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    sharded(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    addresses = {name: parameter.data_ptr() for name, parameter in named.items()}
    assert len(set(addresses.values())) == 3
    assert addresses["0.weight"] == addresses["2.weight"] == model[0].weight.untyped_storage().data_ptr()
    with torch.no_grad():
        model[0].weight.fill_(1)
    assert model[0].weight.data_ptr() == addresses["0.weight"]
    save_model(model, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == {"0.weight", "1.weight", "2.bias"}
    assert all(torch.equal(value, zp.full(named[name])) for name, value in saved.items())


def test_7_torch_save_keeps_ties_and_plain_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    sharded(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert not any(zp.is_paged(value) for value in state.values())
    assert state["0.weight"].data_ptr() == state["2.weight"].data_ptr() != state["1.weight"].data_ptr()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(type(parameter) is nn.Parameter for parameter in loaded.parameters())
    assert loaded[2].weight is loaded[0].weight
    assert_same_parameters(loaded, model)


# -- 8. raw pointers


def test_8_raw_pointers_give_values_or_errors() -> None:
    paged = sharded(Weights((4, 4)))
    values = zp.full(paged.w0)
    detached = paged.w0.detach()
    assert torch.equal(torch.from_dlpack(detached), values)
    assert np.array_equal(np.from_dlpack(detached), values.numpy())
    with pytest.raises(RuntimeError):
        torch.utils.dlpack.to_dlpack(detached)
    assert detached.data_ptr() != 0
    array = detached.numpy()
    assert np.array_equal(array, values.numpy())
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    assert np.array_equal(np.asarray(detached), values.numpy())
    assert detached.tolist() == values.tolist()
    with pytest.raises(RuntimeError):
        paged.w0.numpy()
    with pytest.raises(zp.errors.UnsupportedOperationError):
        detached.share_memory_()
    for refused in (lambda: detached.resize_(2), lambda: detached.set_(torch.ones(2)), lambda: detached.t_()):
        with pytest.raises(zp.errors.UnsupportedOperationError, match="w0"):
            refused()


# -- 9. torch.compile: a weight is a graph break, never a wrong number


def test_9_compiled_models_give_the_same_numbers() -> None:
    plain, paged = pair(lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)))
    for model in (plain, paged):
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            compiled(inputs(2, 4)).square().sum().backward()
    assert_same_gradients(plain, paged)
    torch._dynamo.reset()


def test_9_resident_parameters_compile_as_one_graph() -> None:
    plain, paged = pair(lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)))
    plain(inputs(2, 4)).square().sum().backward()
    with zp.resident(paged):
        torch.compile(paged, backend="eager", fullgraph=True)(inputs(2, 4)).square().sum().backward()
    assert_same_gradients(plain, paged)
    torch._dynamo.reset()


# -- 10. inference mode


def test_10_views_made_in_inference_mode_are_usable_in_training() -> None:
    plain, paged = pair(lambda: nn.Linear(4, 4))
    kept = []
    for model in (plain, paged):
        with torch.inference_mode():
            model(inputs(2, 4))
            views = [*model.weight.chunk(2), model.weight.t(), model.weight[1], model.weight.unsqueeze(0)]
            F.dropout(model.weight, 0.5, training=False)
            kept.append([*views, model.weight.view(16), model.weight.expand(2, 4, 4)])
        model(inputs(2, 4)).sum().backward()
    for one, other in zip(*kept, strict=True):
        assert torch.equal(one, zp.full(other))
        assert one.is_inference() == other.is_inference()
    assert_same_gradients(plain, paged)


@pytest.mark.parametrize("function", [F.silu, F.mish, F.gelu, F.dropout, F.layer_norm, F.rms_norm, F.softmax])
def test_10_composites_keep_their_kernels(function: Callable[..., Tensor]) -> None:
    plain, paged = pair(lambda: Weights((4, 16)))
    extra = {F.dropout: (0.5, False), F.layer_norm: ((16,),), F.rms_norm: ((16,),), F.softmax: (-1,)}
    results = []
    for model in (plain, paged):
        with torch.inference_mode():
            results.append(function(model.w0, *extra.get(function, ())).clone())
    assert torch.equal(results[0], zp.full(results[1]))


def test_10_an_argument_that_is_returned_is_not_a_frame() -> None:
    paged = sharded(Weights((4, 16)))
    before = zp.full(paged.w0)
    with torch.inference_mode():
        same = [
            F.dropout(paged.w0, 0.5, False), paged.w0.type_as(before), torch.atleast_3d(paged.w0),
            paged.w0.contiguous(), paged.w0.to(torch.float32), torch.feature_dropout(paged.w0, 0.5, False),
            torch.alpha_dropout(paged.w0, 0.5, False), paged.w0.expand_as(before), paged.w0.reshape(4, 16),
        ]  # fmt: skip
    assert all(zp.is_paged(tensor) for tensor in same)
    assert torch.equal(zp.full(paged.w0), before)


# -- 11. tied by storage


def test_11_parameters_that_share_storage_share_a_page() -> None:
    plain = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    plain[1].weight.data = plain[0].weight.data
    paged = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    paged[0].weight.data.copy_(plain[0].weight.data)
    paged[1].weight.data = paged[0].weight.data
    sharded(paged)
    for model in (plain, paged):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(inputs(2, 4)).square().sum().backward()
        optimizer.step()
    assert torch.equal(zp.full(paged[0].weight), zp.full(paged[1].weight))
    assert_same_parameters(plain, paged)


def test_11_a_partial_overlap_is_refused_before_anything_changes() -> None:
    buffer = torch.randn(24)
    model = Weights((4, 4), (4, 4))
    model.w0.data, model.w1.data = buffer[:16].view(4, 4), buffer[8:].view(4, 4)
    with pytest.raises(zp.errors.AdoptionError, match=r"w0.*w1"):
        sharded(model)
    assert not any(zp.is_paged(parameter) for parameter in model.parameters())


# -- 12. writes that pass by autograd


@pytest.mark.parametrize("with_engine", [False, True])
def test_12_backward_over_a_step_raises_as_in_torch(with_engine: bool) -> None:
    paged = sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(paged.parameters(), 0.1)
    step = zp.Engine(paged, optimizer).step if with_engine else optimizer.step
    loss = paged(inputs(2, 4)).square().sum()
    loss.backward(retain_graph=True)
    step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- 13. smaller ones


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_13_recurrent_nets(kind: type[nn.Module]) -> None:
    plain, paged = pair(lambda: kind(4, 5, num_layers=2, bidirectional=True))
    for model in (plain, paged):
        model(inputs(3, 2, 4))[0].square().sum().backward()
    assert all_paged(paged)
    assert_same_gradients(plain, paged)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def test_13_a_function_without_gradient() -> None:
    paged = sharded(Weights((4, 4)))
    NoGradient.apply(paged.w0).sum().backward()
    assert paged.w0.grad is None


def test_13_constructed_by_hand() -> None:
    paged = sharded(Weights((4, 4)))
    again = type(paged.w0)(paged.w0.data, requires_grad=False)
    assert zp.is_paged(again) and not again.requires_grad
    with pytest.raises(zp.errors.UnsupportedOperationError, match=r"zp\.shard"):
        type(paged.w0)(torch.ones(2))


def test_13_no_method_hides_one_of_torch() -> None:
    allowed = {
        "numpy", "tolist", "data_ptr", "untyped_storage", "storage", "share_memory_", "pin_memory", "grad", "data",
    }  # fmt: skip
    own = {name for name in vars(zp.PagedTensor) if not name.startswith("_")}
    assert own & set(dir(torch.Tensor)) <= allowed


def test_13_complex_weights() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.register_parameter("w0", nn.Parameter(torch.randn(4, 4, dtype=torch.complex64)))
        return model

    plain, paged = pair(build)
    for model in (plain, paged):
        product = model.w0.conj() @ model.w0.mH
        (product.real.sum() + model.w0.real.sum() + (model.w0.imag * 2).sum()).backward()
        model.pair = torch.view_as_real(model.w0.detach()), model.w0.detach().conj().resolve_conj()
    assert_same_gradients(plain, paged)
    for one, other in zip(plain.pair, paged.pair, strict=True):
        assert torch.equal(one, zp.full(other))


def test_13_dropped_models_are_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        model = sharded(nn.Linear(64, 64))
        model(inputs(2, 64)).sum().backward()
        page = weakref.ref(model.weight._node)
        frame = weakref.ref(model.weight._node.store)
        del model
        assert page() is None and frame() is None
    finally:
        gc.enable()


def test_13_one_operator_over_many_pages_holds_one_at_a_time() -> None:
    paged = sharded(Weights(*[(64, 64)] * 20))
    pager = paged.w0._node.pager
    norms = torch._foreach_norm([parameter.detach() for parameter in paged.parameters()])
    expected = torch._foreach_norm([zp.full(parameter) for parameter in paged.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(norms, expected, strict=True))
    assert pager.counters.peak_resident_bytes <= 4 * paged.w0._node.nbytes


def test_13_autograd_grad_is_local() -> None:
    plain, paged = pair(lambda: nn.Linear(4, 4))
    ours = torch.autograd.grad(paged(inputs(2, 4)).sum(), list(paged.parameters()))
    theirs = torch.autograd.grad(plain(inputs(2, 4)).sum(), list(plain.parameters()))
    assert all(torch.equal(zp.full(one), other) for one, other in zip(ours, theirs, strict=True))
    assert paged.weight.grad is None


def test_13_metadata_is_that_of_the_full_tensor() -> None:
    plain, paged = pair(lambda: Weights((4, 6, 3, 3)))
    plain.w0.data = plain.w0.data.contiguous(memory_format=torch.channels_last)
    paged.w0.data = paged.w0.data.contiguous(memory_format=torch.channels_last)
    for view in (
        lambda w: w, lambda w: w[1], lambda w: w[:, 2:], lambda w: w.permute(3, 1, 0, 2), lambda w: w.flatten(2),
        lambda w: w.detach().as_strided((2, 2), (1, 3), 5), lambda w: w.unsqueeze(0), lambda w: w[1, 2],
    ):  # fmt: skip
        one, other = view(plain.w0), view(paged.w0)
        assert (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())
        assert one.is_contiguous() == other.is_contiguous()
        assert torch.equal(one.detach(), zp.full(other))


def test_13_deepcopy_gives_an_independent_paged_copy() -> None:
    paged = sharded(nn.Linear(4, 4))
    paged.weight.mark = "kept"
    again = copy.deepcopy(paged)
    with torch.no_grad():
        paged.weight.zero_()
    assert all_paged(again) and again.weight.mark == "kept" and isinstance(again.weight, nn.Parameter)
    assert not zp.full(again.weight).eq(0).all()
    again(inputs(2, 4)).sum().backward()
    assert again.weight.grad is not None and paged.weight.grad is None
