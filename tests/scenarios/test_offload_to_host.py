"""Offload to the host: on a lane that makes every copy as late as it may, training is that of plain torch to the bit.

No device is needed: the stand-in takes host memory for one, and tells what would go wrong there (`harness.lanes`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.lanes import Hazard, StandInLane, standing_in
from tests.harness.models import build_mlp, mean_square, mlp_batch
from tests.harness.training import (
    Record,
    Training,
    adamw,
    assert_same_records,
    train_plain,
    train_sharded,
)
from zeropage.construct import pagers_of
from zeropage.hosted import HostedTransport
from zeropage.memory.host import holders
from zeropage.pager import Pager
from zeropage.relay import OrderedTransport

TRANSPORTS = [(1, "local"), (2, "shared"), (2, "collective")]
TINY_BUDGET = 1 << 11  # the middle layer and little else: frames are used again all the time


def _training(world: int, transport: str, **settings: Any) -> Training:
    accumulate, engine, init = settings.pop("accumulate", 1), settings.pop("engine", True), settings.pop("init", False)
    clip = settings.get("clip_grad_norm")
    batches = partial(_batch, settings.get("precision"))
    config = {"transport": transport, "offload": {"parameters": "host"}} | settings
    config |= {"accumulate": accumulate} if engine else {}
    return Training(
        build=build_mlp, batches=batches, world=world, steps=4, accumulate=accumulate, clip=clip, optimizer=adamw,
        optimizer_first=False, scheduler=None, loss=mean_square, before_step=None, inspect=_look, config=config,
        engine=engine, init=init, call_engine=True,
    )  # fmt: skip


def _batch(precision: str | None, step: int, micro: int, rank: int) -> torch.Tensor:
    dtype = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return mlp_batch(step, micro, rank).to(dtype)


@dataclass(frozen=True)
class Seen:
    calls: dict[str, int]
    kind: str
    wasted: int
    evictions: int
    used_ahead: int
    pinned: int
    shards: int
    allocators: dict[str, int]


def _look(model: nn.Module, engine: zp.Engine | None) -> Seen:
    (pager,) = pagers_of(model)
    lane = pager.lane
    assert isinstance(lane, StandInLane)
    counters = pager.counters
    return Seen(
        dict(lane.calls), type(pager.transport).__name__, counters.readahead_wasted, counters.evictions,
        counters.readahead_used, sum(lane.pinned),
        sum(zp.local(parameter).nbytes for parameter in model.parameters()),
        {} if engine is None else dict(engine.memory().allocators),
    )  # fmt: skip


def _with_stand_in(training: Training) -> Record:
    with standing_in():
        return train_sharded(training)


def _assert_same(training: Training, *, exact: bool = True) -> list[Seen]:
    ranks = run(training.world, _with_stand_in, training)
    seen = [record.extra for record in ranks]
    assert_same_records(train_plain(training), ranks, tolerance=0.0 if exact else 1e-6)
    return seen


@pytest.mark.parametrize(("world", "transport"), TRANSPORTS)
@pytest.mark.parametrize("readahead", [True, False])
def test_training_is_that_of_plain_torch(world: int, transport: str, readahead: bool) -> None:
    """Every frame comes over the lane, and is used again; gradients go the other way."""
    for seen in _assert_same(_training(world, transport, readahead=readahead, resident_bytes=TINY_BUDGET)):
        assert seen.kind == "HostedTransport"
        assert seen.evictions > 10 and seen.calls["fill"] > 10 and seen.calls["retire"] > 0
        assert seen.calls["fetch"] == 6 * 4, "a gradient for each of six parameters and four steps"
        assert (seen.used_ahead > 0) == readahead
        if transport != "shared":  # whose mappings are of all ranks' slices
            assert seen.pinned == seen.shards, "to the byte: see K31"
        assert seen.allocators == {"stand-in allocated": 1}


@pytest.mark.parametrize(("world", "transport"), TRANSPORTS)
def test_with_everything_kept_there_is_one_copy_a_step(world: int, transport: str) -> None:
    """What stays between forward and backward is not copied twice."""
    for seen in _assert_same(_training(world, transport, resident_bytes=1 << 20, readahead=False)):
        assert seen.calls["fill"] == 6 * 4 + 6, "four steps, and the values looked at in the end"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("world", "transport"), TRANSPORTS)
def test_narrow_parameters_with_accumulation(world: int, transport: str, precision: str) -> None:
    scale = {"loss_scale": {"initial": 8.0}} if precision == "fp16" else {}
    _assert_same(
        _training(world, transport, precision=precision, accumulate=2, resident_bytes=TINY_BUDGET, **scale),
        exact=transport != "collective",
    )


@pytest.mark.parametrize(("world", "transport"), TRANSPORTS)
def test_made_under_init(world: int, transport: str) -> None:
    _assert_same(_training(world, transport, init=True, resident_bytes=TINY_BUDGET))


@pytest.mark.parametrize(("world", "transport"), TRANSPORTS)
def test_a_bare_optimizer_steps_on_the_host_too(world: int, transport: str) -> None:
    for seen in _assert_same(_training(world, transport, engine=False, resident_bytes=TINY_BUDGET)):
        assert seen.calls["fetch"] == 6 * 4


def test_clipping() -> None:
    _assert_same(_training(2, "shared", clip_grad_norm=0.1, resident_bytes=TINY_BUDGET), exact=False)


@pytest.mark.parametrize(("world", "transport"), TRANSPORTS)
def test_everything_else_reads_and_writes_as_usual(world: int, transport: str) -> None:
    run(world, _reads_and_writes, transport)


def _reads_and_writes(transport: str) -> None:
    plain = build_mlp()
    with standing_in() as lanes:
        model = build_mlp()
        model.load_state_dict(plain.state_dict())
        zp.shard(model, {"transport": transport, "offload": {"optimizer": "host"}, "resident_bytes": TINY_BUDGET})
        with torch.no_grad():
            for network in (plain, model):
                network.first.weight.mul_(2.0).add_(torch.ones(17, 7))
                network.second.weight[1:3] = 7.0
                network.third.bias.copy_(torch.arange(7.0))
        with zp.gather(model.second.bias, writer=0):
            if model.second.bias._node.page.pager.transport.rank == 0:
                model.second.bias.data.fill_(3.0)
        plain.second.bias.data.fill_(3.0)
        _assert_equal(plain, model)
        x = mlp_batch(0, 0, 0)
        mean_square(plain, x).backward()
        mean_square(model, x).backward()
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(zp.full(other.grad), one.grad, msg=lambda text, name=name: f"{name}: {text}")
        model.first.weight._node.page.pager.transport.meet("all have read their gradients")
        mean_square(model, x).backward()  # adds to sums that were just read
        mean_square(plain, x).backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(zp.full(other.grad), one.grad)
        model.first.weight._node.page.pager.transport.meet("all have read all")
    (lane,) = lanes
    assert lane.calls["fill"] > 0


def _assert_equal(plain: nn.Module, model: nn.Module) -> None:
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one.detach(), zp.full(other)), name


def test_checkpoints(tmp_path: Any) -> None:
    run(2, _save_and_load, str(tmp_path))


def _save_and_load(folder: str) -> None:
    with standing_in():
        losses = []
        for resumed in (False, True):
            torch.manual_seed(0)
            model = build_mlp()
            engine = zp.Engine(
                model, adamw(list(model.parameters())), {"offload": {"parameters": "host"}, "precision": "bf16"}
            )
            if resumed:
                engine.load(folder)
            for step in range(2 if resumed else 4):
                if not resumed and step == 2:
                    engine.save(folder)
                loss = mean_square(engine, _batch("bf16", step + 2 * resumed, 0, 0))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            engine.close()
    assert losses[2:4] == losses[4:]


# -- what the stand-in catches


def _hosted(lane: StandInLane, **settings: Any) -> nn.Module:
    with standing_in([lane]):
        return zp.shard(build_mlp(), {"offload": {"parameters": "host"}, "resident_bytes": TINY_BUDGET} | settings)


def _steps(model: nn.Module, count: int = 3) -> float:
    loss = torch.zeros(())
    for step in range(count):
        loss = mean_square(model, mlp_batch(step, 0, 0))
        loss.backward()
    return loss.item()


def test_a_frame_that_is_reused_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pager that forgets to tell the lane that it is done with a frame."""
    _steps(_hosted(StandInLane()))

    def forgetful(pager: Pager, memory: torch.Tensor) -> None:
        assert holders(memory) == 1
        pager._free.setdefault((memory.dtype, memory.device, memory.numel()), []).append(memory)

    monkeypatch.setattr(Pager, "_recycle", forgetful)
    with pytest.raises(Hazard, match="may still read"):
        _steps(_hosted(StandInLane()))


def test_a_frame_that_is_read_too_early_is_caught() -> None:
    """A pager that does not ask the lane for what it reads."""

    class Forgetful(StandInLane):
        def ready(self, flight: Any) -> None: ...

    assert _steps(_hosted(Forgetful())) != _steps(_hosted(Forgetful())), "it is NaN"


def test_a_slice_that_is_written_too_early_is_caught() -> None:
    """A transport that opens writes while copies read."""

    class Forgetful(StandInLane):
        def drain(self) -> None: ...

    with pytest.raises(Hazard, match="changed while a copy"):
        model = _hosted(Forgetful())
        page = model.second.weight._node.page
        frame = torch.empty(page.layout.numel)
        arrival = page.pager.transport.fetch([(page.store, frame)])
        with torch.no_grad():
            model.second.weight.add_(1.0)
        arrival.wait()


def test_what_is_on_its_way_is_not_touched_by_a_write() -> None:
    """The same with a lane that is asked: the copy is made before the write."""
    model = _hosted(StandInLane())
    page = model.second.weight._node.page
    before = zp.full(model.second.weight).flatten()
    frame = torch.empty(page.layout.numel)
    arrival = page.pager.transport.fetch([(page.store, frame)])
    with torch.no_grad():
        model.second.weight.add_(1.0)
    arrival.wait()
    assert torch.equal(frame, before)


# -- what is wired


def test_parameters_that_stay_on_a_device_keep_their_transport() -> None:
    with standing_in() as lanes:
        model = zp.shard(build_mlp())
        pager = model.first.weight._node.page.pager
        assert isinstance(pager.transport, OrderedTransport) and not isinstance(pager.transport, HostedTransport)
        assert pager.lane is lanes[0]


def test_over_collective_the_lane_orders_what_threads_do() -> None:
    for seen in run(2, _ordered):
        assert json.loads(seen) == {"fill": 0, "same": True, "handed": True, "taken": True}


def _ordered() -> str:
    with standing_in() as lanes:
        plain, model = build_mlp(), build_mlp()
        model.load_state_dict(plain.state_dict())
        zp.shard(model, {"transport": "collective", "resident_bytes": TINY_BUDGET})
        plain.load_state_dict({name: zp.full(p) for name, p in model.named_parameters()})
        same = _steps(model) == _steps(plain)
        model.first.weight._node.page.pager.transport.meet("all have read all")
        calls = lanes[0].calls
        handed, taken = calls["hand_over"], calls["take_over"]
        return json.dumps({"fill": calls["fill"], "same": same, "handed": handed > 20, "taken": taken > 20})
