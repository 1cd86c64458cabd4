"""`deepspeed.utils`, `deepspeed.comm`, the accelerator and activation checkpointing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.harness.models import MLP, Block, build_mlp, mlp_batch
from tests.integrations.deepspeed_cases import Beside, engine_of, loss_of, rank
from tests.scenarios.beside import averaged_backward, plain_copy, same, same_parameters
from zeropage.deepspeed import checkpointing, comm, groups, utils
from zeropage.deepspeed.accelerator import get_accelerator
from zeropage.errors import ConfigError

# -- safe_get and safe_set


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _get(transport: str) -> None:
    """Against plain torch, in fp32."""
    beside = Beside()
    zp.shard(beside.model, {"transport": transport})
    engine = engine_of(beside.model, beside.make)
    beside.step([(0, 0)])
    weight = beside.model.second.weight
    assert utils.safe_get_full_grad(weight) is None
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
    engine.backward(loss_of(engine, 0, 0, rank()))
    engine.step()
    averaged_backward(beside.plain.parameters(), lambda r: loss_of(beside.plain, 1, 0, r))
    engine.backward(loss_of(engine, 1, 0, rank()))
    for plain, parameter in zip(beside.plain.parameters(), beside.model.parameters(), strict=True):
        low, high = parameter._node.page.bounds
        assert torch.equal(utils.safe_get_full_fp32_param(parameter), plain)
        assert torch.equal(utils.safe_get_full_grad(parameter), plain.grad)
        assert torch.equal(utils.safe_get_local_fp32_param(parameter), plain.detach().flatten()[low:high])
        assert torch.equal(utils.safe_get_local_grad(parameter), plain.grad.flatten()[low:high])
        for key in ("exp_avg", "exp_avg_sq"):
            state = beside.optimizer.state[plain][key]
            assert torch.equal(utils.safe_get_full_optimizer_state(parameter, key), state)
            assert torch.equal(utils.safe_get_local_optimizer_state(parameter, key), state.flatten()[low:high])
        assert utils.safe_get_full_optimizer_state(parameter, "no such") is None
    assert utils.safe_get_full_fp32_param(nn.Parameter(torch.ones(2).half())).dtype == torch.float32
    engine.destroy()


@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_get(transport: str) -> None:
    run(2, _get, transport)


def _set(local: bool, transport: str) -> None:
    """Values, gradients and states are halved on both sides; the steps after that agree."""
    beside = Beside()
    zp.shard(beside.model, {"transport": transport})
    engine = engine_of(beside.model, beside.make)
    for step in range(3):
        averaged_backward(beside.plain.parameters(), lambda r, s=step: loss_of(beside.plain, s, 0, r))
        engine.backward(loss_of(engine, step, 0, rank()))
        for plain, parameter in zip(beside.plain.parameters(), beside.model.parameters(), strict=True):
            with torch.no_grad():
                plain.mul_(0.5)
                plain.grad.mul_(0.5)
                if step:
                    beside.optimizer.state[plain]["exp_avg"].mul_(0.5)
            if local:
                utils.safe_set_local_fp32_param(parameter, utils.safe_get_local_fp32_param(parameter) / 2)
                utils.safe_set_local_grad(parameter, utils.safe_get_local_grad(parameter) / 2)
            else:
                utils.safe_set_full_fp32_param(parameter, utils.safe_get_full_fp32_param(parameter) / 2)
                utils.safe_set_full_grad(parameter, utils.safe_get_full_grad(parameter) / 2)
            same(plain.grad, parameter.grad)
            if step and local:
                value = utils.safe_get_local_optimizer_state(parameter, "exp_avg")
                utils.safe_set_local_optimizer_state(parameter, value / 2, "exp_avg")
            elif step:
                value = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
                utils.safe_set_full_optimizer_state(parameter, value / 2, "exp_avg")
        with torch.no_grad():  # visible at once
            same(beside.plain(mlp_batch(9, 0, rank())), engine(mlp_batch(9, 0, rank())))
        beside.optimizer.step()
        beside.optimizer.zero_grad()
        engine.step()
        same_parameters(beside.plain, beside.model)
    engine.destroy()


@pytest.mark.parametrize("transport", ["shared", "collective"])
@pytest.mark.parametrize("local", [False, True])
def test_set(local: bool, transport: str) -> None:
    run(2, _set, local, transport)


def _masters() -> None:
    """In bf16 masters are set and read in fp32, and the 16-bit weights follow; as after a step."""
    model = plain_copy(build_mlp)
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = engine_of(model, _adamw, bf16={"enabled": True})
    for name, parameter in model.named_parameters():
        assert torch.equal(utils.safe_get_full_fp32_param(parameter), exact[name]), "not the rounded values"
        value = exact[name] + 1 / 3
        utils.safe_set_full_fp32_param(parameter, value)
        assert torch.equal(utils.safe_get_full_fp32_param(parameter), value)
        assert torch.equal(zp.full(parameter), value.bfloat16())
    x = mlp_batch(0, 0, rank()).bfloat16()
    engine.backward(engine(x).square().mean())
    gradient = utils.safe_get_full_grad(model.first.weight)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient.bfloat16(), zp.full(model.first.weight.grad))
    utils.safe_set_full_grad(model.first.weight, gradient / 3)
    assert torch.equal(utils.safe_get_full_grad(model.first.weight), gradient / 3)
    before = {name: utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    engine.step()
    for name, parameter in model.named_parameters():
        step = (utils.safe_get_full_fp32_param(parameter) - before[name]).abs()
        assert 0 < step.max() < 0.02, "a step of Adam from the values that were set"
        assert torch.equal(zp.full(parameter), utils.safe_get_full_fp32_param(parameter).bfloat16())
    engine.destroy()


def test_masters() -> None:
    run(2, _masters)


def _vectorized() -> None:
    beside = Beside()
    engine = engine_of(beside.model, beside.make)
    beside.model.third.bias.requires_grad_(False)
    beside.plain.third.bias.requires_grad_(False)
    averaged_backward(beside.plain.parameters(), lambda r: loss_of(beside.plain, 0, 0, r))
    engine.backward(loss_of(engine, 0, 0, rank()))
    utils.safe_update_full_grad_vectorized(list(beside.model.parameters()), lambda grad, p: grad.sign() * p.numel())
    for plain in beside.plain.parameters():
        if plain.grad is not None:
            plain.grad = plain.grad.sign() * plain.numel()
    beside.optimizer.step()
    engine.step()
    same_parameters(beside.plain, beside.model)
    engine.destroy()


def test_vectorized_update() -> None:
    run(2, _vectorized)


def _refusals() -> None:
    model = plain_copy(build_mlp)
    engine = engine_of(model, _adamw)
    weight = model.first.weight
    wrong: list[Callable[[], None]] = [
        lambda: utils.safe_set_full_fp32_param(weight, torch.ones(3)),
        lambda: utils.safe_set_full_grad(weight, torch.ones(3)),
        lambda: utils.safe_set_full_optimizer_state(weight, torch.ones(17, 7), "exp_avg"),
        lambda: utils.safe_set_local_grad(weight, utils.safe_get_local_fp32_param(weight)),
        lambda: utils.safe_set_local_fp32_param(weight, torch.ones(3)),
        lambda: utils.safe_set_local_fp32_param(nn.Parameter(torch.ones(3)), torch.ones(3)),
    ]
    for call in wrong:
        with contextlib.suppress(ConfigError):
            call()
            raise AssertionError(call)
    engine.destroy()


def test_what_cannot_be_set() -> None:
    run(2, _refusals)


# -- leaf modules, loaders, logs


def test_leaf_modules() -> None:
    """DeepSpeed's return values and errors; nothing depends on the mark."""
    model = nn.Sequential(MLP(), nn.Sequential(MLP(), Block()))
    assert utils.set_z3_leaf_modules(model, [MLP]) == [model[0], model[1][0]]
    assert utils.get_z3_leaf_modules(model) == [model[0], model[1][0]]
    assert utils.z3_leaf_module(model[0]) and not utils.z3_leaf_module(model)
    assert utils.unset_z3_leaf_modules(model, ["MLP"]) == [model[0], model[1][0]]
    assert utils.set_z3_leaf_modules(model, [f"{Block.__module__}.Block"]) == [model[1][1]]
    assert utils.set_z3_leaf_modules_by_name(model, ["0", "x"], raise_if_not_found=False) == ([model[0]], ["x"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["1.0"], flag=False) == ([model[1][0]], [])
    assert utils.get_z3_leaf_modules(model) == [model[0], model[1][1]]
    utils.set_z3_leaf_module(model[0], False)
    assert not utils.z3_leaf_module(model[0]) and not utils.z3_leaf_parameter(model[0].first.weight)
    with pytest.raises(ValueError, match="No modules of type"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])
    assert utils.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False) == []
    for by in (utils.set_z3_leaf_modules_by_name, utils.set_z3_leaf_modules_by_suffix):
        with pytest.raises(ValueError, match="absent"):
            by(model, ["absent"])


def test_repeating_loader() -> None:
    loader = utils.RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    assert iter(loader) is loader


def test_on_device() -> None:
    with utils.OnDevice(dtype=torch.float16, device="meta"):
        model = nn.Linear(3, 3)
    assert (model.weight.dtype, model.weight.device.type) == (torch.float16, "meta")
    with utils.OnDevice(dtype=torch.float16, enabled=False):
        assert nn.Linear(3, 3).weight.device.type == "cpu"
    assert torch.get_default_dtype() == torch.float32


def test_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="zeropage.deepspeed"):
        utils.log_dist("told by all", ranks=[-1])
    assert "told by all" in caplog.text
    level = utils.logger.level
    utils.set_log_level_from_string("warning")
    assert utils.logger.level == 30
    utils.logger.setLevel(level)
    with pytest.raises(ValueError, match="loud"):
        utils.set_log_level_from_string("loud")


# -- comm, groups, accelerator


def _comm() -> None:
    comm.init_distributed("nccl", auto_mpi_discovery=False, timeout=timedelta(seconds=60))  # there is one already
    assert comm.is_initialized() and (comm.get_rank(), comm.get_world_size()) == (rank(), 2)
    value = torch.tensor([float(rank() + 1)])
    comm.all_reduce(value, op=comm.ReduceOp.SUM, prof=True, log_name="sum")
    assert value.item() == 3.0
    parts = [torch.zeros(1), torch.zeros(1)]
    comm.all_gather(parts, torch.tensor([float(rank())]))
    assert [part.item() for part in parts] == [0.0, 1.0]
    whole = torch.zeros(2)
    comm.all_gather_into_tensor(whole, torch.tensor([float(rank())]), debug="here")
    assert whole.tolist() == [0.0, 1.0]
    comm.barrier()
    assert comm.get_all_ranks_from_group() == [0, 1]
    pair = comm.new_group([0, 1])
    assert comm.get_global_rank(pair, 1) == 1 and comm.get_world_size(pair) == 2
    weight = zp.shard(nn.Linear(2, 2)).weight
    comm.broadcast(weight, src=1)  # a sharded one, as any tensor
    assert groups.get_data_parallel_world_size() == 2 and groups.get_model_parallel_world_size() == 1
    with contextlib.suppress(ConfigError):
        groups._get_sequence_parallel_group()
        raise AssertionError("there is none")
    with contextlib.suppress(ConfigError):
        comm.initialize_mesh_device((1, 2), ("data_parallel", "sequence_parallel"))
        raise AssertionError("two ranks for one sequence")


def test_comm() -> None:
    run(2, _comm)


def _own_group(launched: bool) -> tuple[int, int]:
    if not launched:
        import os

        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    assert not comm.is_initialized() and comm.get_world_size() == 1
    with contextlib.suppress(ConfigError):
        comm.init_distributed(dist_init_required=False)
        raise AssertionError("none may be started")
    comm.init_distributed(distributed_port=29500, verbose=False)
    total = torch.ones(1)
    comm.all_reduce(total)
    found = comm.get_rank(), int(total)
    comm.destroy_process_group()
    return found


def test_a_group_from_the_launchers_variables() -> None:
    assert run(2, _own_group, True, process_group=False) == [(0, 2), (1, 2)]


def test_a_group_without_a_launcher() -> None:
    assert run(1, _own_group, False, process_group=False) == [(0, 1)]


def test_accelerator() -> None:
    device = get_accelerator()
    assert device is get_accelerator()
    if torch.cuda.is_available():
        assert device.communication_backend_name() == "nccl"
    else:
        assert device.current_device_name() == "cpu" and device.device_count() == 1
        assert device.communication_backend_name() == "gloo"
    assert device.is_available() and torch.float32 in device.supported_dtypes()
    state = device.get_rng_state()
    drawn = torch.rand(3, device=device.current_device_name())
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=device.current_device_name()), drawn)
    device.synchronize()
    assert device.total_memory() > 0 and device.memory_allocated() >= 0


# -- activation checkpointing


class _Checkpointed(nn.Module):
    def __init__(self, through: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)])
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.through == "checkpoint":
                x = checkpointing.checkpoint(block, x)
            elif self.through == "function":
                made: list[Tensor] = []
                checkpointing.CheckpointFunction.apply(block, made, x)
                (x,) = made
            else:
                x = block(x)
        return x


def _checkpointed(through: str, on_host: bool) -> None:
    """With dropout, and inputs that need no gradient: the same numbers as without."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=on_host, profile=False)
    assert checkpointing.is_configured()
    made = []
    for kind in ("nothing", through):
        model = plain_copy(lambda k=kind: _Checkpointed(k))
        engine = engine_of(model, sgd)
        torch.manual_seed(rank())
        for step in range(2):
            engine.backward(loss_of(engine, step, 0, rank()))
            engine.step()
            checkpointing.reset()
        made.append([zp.full(p) for p in model.parameters()])
        engine.destroy()
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


@pytest.mark.parametrize("through", ["checkpoint", "function"])
@pytest.mark.parametrize("on_host", [False, True])
def test_checkpointing(through: str, on_host: bool) -> None:
    run(2, _checkpointed, through, on_host)


def test_random_states_by_name() -> None:
    torch.manual_seed(0)
    checkpointing.model_parallel_cuda_manual_seed(7)
    tracker = checkpointing.get_cuda_rng_tracker()
    before = torch.rand(1)
    with tracker.fork():
        first = torch.rand(1)
    with tracker.fork():
        second = torch.rand(1)
    checkpointing.model_parallel_cuda_manual_seed(7)
    assert torch.equal(torch.rand(1), before)
    with checkpointing.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(2), torch.cat([first, second]))
    with pytest.raises(Exception, match="already exists"):
        tracker.add("model-parallel-rng", 3)
    assert dist.is_available() and math.isfinite(float(before))
