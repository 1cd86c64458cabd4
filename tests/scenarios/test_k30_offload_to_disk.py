"""Parameters and optimizer states on disk: the numbers are those of plain torch, and a bad disk is told and survived.

Buffers are smaller than the largest tensor in nearly all cases: the least that a rank streams is 4,096 elements.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn, optim

import zeropage as zp
from tests.harness import assert_same_training, run
from tests.operators.test_optimizers import ELEMENTWISE
from tests.scenarios.test_full_disk import _leave, _small_disk
from zeropage.config import Config
from zeropage.construct import Space
from zeropage.errors import ConfigError, OffloadError

TINY = 1  # bytes for buffers: the least that is possible is taken
BOTH = {"parameters": "disk", "optimizer": "disk"}
STATES = {"optimizer": "disk"}
WEIGHTS = {"parameters": "disk"}
IN, OUT = 301, 97
ALL = list(ELEMENTWISE)
SOME = [
    "AdamW fused",
    "SGD nesterov",
    "Adagrad",
]  # with a state from its constructor, and one that begins as a gradient

transports = pytest.mark.parametrize("transport", ["shared", "collective"])


class _Odd(nn.Module):
    """A matrix of several pieces whatever the buffers, no size divisible by anything, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(IN, OUT)
        self.conv = nn.Conv1d(1, 3, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(OUT), requires_grad=False)
        self.idle = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(x)) * self.scale + self.frozen.to(x.dtype)
        return self.conv(hidden.unsqueeze(1))


def _build() -> nn.Module:
    return _Odd()


def _batch(step: int, micro: int = 0, rank: int = 0) -> Tensor:
    return torch.randn(4, IN, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def _offload(folder: Path, where: dict[str, str], buffer_bytes: int = TINY) -> dict[str, Any]:
    return {"offload": {**where, "folder": str(folder), "buffer_bytes": buffer_bytes}}


def _loss(model: Any, step: int) -> Tensor:
    found: Tensor = model(_batch(step)).float().square().mean()
    return found


def _values(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Weights and states by name, whole."""
    found: dict[str, Any] = {name: zp.full(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = zp.full(value) if isinstance(value, Tensor) else value
    return found


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    wrong = [f"{key} is only on one side" for key in found.keys() ^ expected.keys()]
    for key in found.keys() & expected.keys():
        one, other = torch.as_tensor(found[key]), torch.as_tensor(expected[key])
        if one.dtype != other.dtype or not torch.equal(one, other):
            wrong.append(f"{key} differs")
    return wrong


# -- the numbers


def _with_optimizers(folder: Path, transport: str, where: dict[str, str], names: list[str]) -> dict[str, list[str]]:
    """Train, save, load into another model, go on: as plain torch without a break. All ranks have one batch."""
    wrong = {}
    for number, name in enumerate(names):
        make = ELEMENTWISE[name]
        config = {"transport": transport, **_offload(folder / "disk", where)}
        torch.manual_seed(3)
        plain = _build()
        reference = make(list(plain.parameters()))
        for step in range(4):
            reference.zero_grad()
            _loss(plain, step).backward()
            reference.step()
        for steps in (range(2), range(2, 4)):
            torch.manual_seed(3 + steps.start)
            model = _build()
            optimizer = make(list(model.parameters()))
            with zp.Engine(model, optimizer, config) as engine:
                if steps.start:
                    engine.load(folder / str(number))
                for step in steps:
                    engine.backward(_loss(engine, step))
                    engine.step()
                engine.save(folder / str(number))
                found = _differences(_values(model, optimizer), _values(plain, reference)) if steps.start else []
                if found:
                    wrong[name] = found
    return wrong


@transports
@pytest.mark.parametrize("names", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize(
    "where",
    [
        pytest.param(BOTH, id="both"),
        pytest.param(STATES, id="states", marks=pytest.mark.slow),
        pytest.param(WEIGHTS, id="weights", marks=pytest.mark.slow),
    ],
)
def test_elementwise_optimizers_as_plain_torch(
    where: dict[str, str], names: list[str], transport: str, tmp_path: Path
) -> None:
    for wrong in run(2, _with_optimizers, tmp_path, transport, where, names, timeout=240):
        assert wrong == {}


@pytest.mark.parametrize(("transport", "world"), [("local", 1), ("shared", 2), ("collective", 2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("buffer_bytes", [TINY, 64 << 20], ids=["tiny", "large"])
def test_the_same_training(world: int, transport: str, precision: str, buffer_bytes: int, tmp_path: Path) -> None:
    assert_same_training(
        _build,
        _batch_in_bf16 if precision == "bf16" else _batch,
        world=world,
        transport=transport,
        accumulate=2,
        config={"precision": precision, **_offload(tmp_path, BOTH, buffer_bytes)},
        scheduler=partial(optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    )
    assert list(tmp_path.iterdir()) == []


def _batch_in_bf16(step: int, micro: int, rank: int) -> Tensor:
    return _batch(step, micro, rank).bfloat16()


def _beside_memory(folder: Path, transport: str, precision: str) -> list[str]:
    """Each rank has batches of its own."""
    results = []
    for offload in ({}, _offload(folder, BOTH)):
        torch.manual_seed(0)
        model = _build()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        config = {"transport": transport, "precision": precision, "clip_grad_norm": 0.1, **offload}
        with zp.Engine(model, optimizer, config) as engine:
            for step in range(4):
                x = _batch(step, 0, dist.get_rank()).to(model.wide.weight.dtype)
                engine.backward(engine(x).float().square().mean())
                engine.step()
            results.append(_values(model, optimizer))
    return _differences(*results)


@transports
@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_as_in_memory(world: int, transport: str, precision: str, tmp_path: Path) -> None:
    assert run(world, _beside_memory, tmp_path, transport, precision) == [[]] * world


@transports
def test_made_on_the_disk(transport: str, tmp_path: Path) -> None:
    """Under `init` every parameter goes to the disk as it is made."""
    assert_same_training(_build, _batch, transport=transport, init=True, config={"seed": 0, **_offload(tmp_path, BOTH)})


# -- reading and writing what is there


def _edits(folder: Path, transport: str) -> list[str]:
    torch.manual_seed(0)
    model = _build()
    config = {"transport": transport, "resident_bytes": 0, **_offload(folder / "disk", BOTH)}
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    zp.shard(model, config)
    optimizer = optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    engine = zp.Engine(model, optimizer)
    with zp.gather(model, writer=1):
        if dist.get_rank() == 1:
            with torch.no_grad():
                model.wide.weight[5:9, 3] = 7.0
    expected["wide.weight"][5:9, 3] = 7.0
    with torch.no_grad():
        model.wide.bias.mul_(2.0).add_(model.frozen)
    expected["wide.bias"].mul_(2.0).add_(expected["frozen"])
    with torch.no_grad():
        torch.nn.init.normal_(model.idle, generator=torch.Generator().manual_seed(9))
    torch.nn.init.normal_(expected["idle"], generator=torch.Generator().manual_seed(9))
    model.conv.bias.data = torch.arange(3.0)
    expected["conv.bias"] = torch.arange(3.0)
    engine.backward(_loss(engine, 0))  # the learning rate is zero
    engine.step()
    low, high = model.wide.weight._node.page.bounds
    wrong = _differences({name: zp.full(p) for name, p in model.named_parameters()}, expected)
    wrong += _differences({name: zp.full(v) for name, v in model.state_dict().items()}, expected)
    if not torch.equal(zp.local(model.wide.weight), expected["wide.weight"].flatten()[low:high]):
        wrong.append("local slice")
    memory = engine.memory().by_device
    if memory["disk"] < 4 * 3 * (high - low) or memory["cpu"] >= memory["disk"]:
        wrong.append(f"memory {memory}")
    zp.export(model, folder / "export")
    dist.barrier()
    wrong += _differences(load_file(next((folder / "export").glob("*.safetensors"))), expected)
    engine.close()
    return wrong


@transports
def test_edits_and_reads(transport: str, tmp_path: Path) -> None:
    assert run(2, _edits, tmp_path, transport) == [[], []]


def _twins() -> tuple[nn.Module, optim.AdamW, nn.Module, optim.AdamW]:
    """Two models of the same values, each with its optimizer: one to stay plain, one to shard."""
    torch.manual_seed(0)
    plain, model = _build(), _build()
    model.load_state_dict(plain.state_dict())
    return plain, optim.AdamW(plain.parameters(), lr=1e-2), model, optim.AdamW(model.parameters(), lr=1e-2)


def _states_assigned(folder: Path, transport: str) -> list[str]:
    """`load_state_dict` brings states into memory; the next step takes them to the disk."""
    plain, reference, model, optimizer = _twins()
    _loss(plain, 0).backward()
    reference.step()
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    engine = zp.Engine(model, optimizer, {"transport": transport, **_offload(folder, STATES)})
    engine.backward(_loss(engine, 1))
    engine.step()
    reference.zero_grad()
    _loss(plain, 1).backward()
    reference.step()
    wrong = _differences(_values(model, optimizer), _values(plain, reference))
    if engine.memory().by_device["disk"] < 2 * 4 * zp.local(model.wide.weight).numel():
        wrong.append("states stayed in memory")
    engine.close()
    return wrong


@transports
def test_states_that_were_loaded_by_torch(transport: str, tmp_path: Path) -> None:
    assert run(2, _states_assigned, tmp_path, transport) == [[], []]


# -- what cannot be


def test_optimizers_that_need_whole_tensors_are_refused(tmp_path: Path) -> None:
    model = _build()
    with pytest.raises(ConfigError, match="Rprop may not take"):
        zp.Engine(model, optim.Rprop(model.parameters()), _offload(tmp_path, STATES))


def test_parameters_on_a_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in host memory"):
        Space(Config.of(_offload(tmp_path, BOTH)), None, torch.device("cuda"))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match=r"offload\.folder .*file.* cannot be written"):
        zp.shard(_build(), _offload(tmp_path / "file" / "folder", BOTH))


def test_step_hooks_are_refused(tmp_path: Path) -> None:
    model = _build()
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: None)
    with zp.Engine(model, optimizer, _offload(tmp_path, STATES)) as engine:
        engine.backward(_loss(engine, 0))
        with pytest.raises(ConfigError, match="step hooks"):
            engine.step()


def test_a_step_without_an_engine_is_refused(tmp_path: Path) -> None:
    model = zp.shard(_build(), _offload(tmp_path, STATES))
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    _loss(model, 0).backward()
    with pytest.raises(ConfigError, match=r"step through zp\.Engine"):
        optimizer.step()


# -- a disk that is full or fails


def _fills_up(transport: str, disk: Path, elsewhere: Path) -> list[str]:
    """No room for the states that the first step makes; there is later."""
    told: list[str] = []
    first = dist.get_rank() == 0
    results = []
    for offload in ({}, _offload(disk / "run", STATES)):
        torch.manual_seed(0)
        model = _build()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        engine = zp.Engine(model, optimizer, {"transport": transport, "accumulate": 2, **offload})
        engine.backward(_loss(engine, 0))
        engine.step()
        engine.backward(_loss(engine, 1))
        if offload:
            if first:
                _leave(disk, 15)  # enough for some of what both ranks want
            dist.barrier()
            for _ in range(2):
                try:
                    engine.step()
                except OffloadError as error:
                    told.append(str(error))
                engine.save(elsewhere)
            if first:
                (disk / "filler").unlink()
            dist.barrier()
        assert engine.step().applied
        results.append(_values(model, optimizer))
        engine.close()
    return told + _differences(*results)


@transports
def test_a_full_disk_stops_a_step_before_anything_is_changed(transport: str, tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk") as disk:
        one, other = run(2, _fills_up, transport, disk, tmp_path / "saved")
    assert one == other and len(one) == 2
    for text in one:
        assert str(disk / "run") in text and "No space left" in text and "bytes for" in text and "make room" in text


def _does_not_fit(transport: str, disk: Path) -> list[str]:
    if dist.get_rank() == 0:
        _leave(disk, 20)
    dist.barrier()
    model = _build()
    try:
        zp.shard(model, {"transport": transport, **_offload(disk / "run", WEIGHTS)})
    except OffloadError as error:
        return [str(error), str(any(zp.is_paged(p) for p in model.parameters()))]
    return []


@transports
def test_a_model_that_does_not_fit_stays_as_it_was(transport: str, tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk") as disk:
        for text, paged in run(2, _does_not_fit, transport, disk):
            assert str(disk / "run") in text and "are free" in text
            assert paged == "False"


@contextmanager
def _no_writes_beyond(nbytes: int) -> Iterator[None]:
    """The kernel refuses to write beyond so many bytes of any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _fails_midway(transport: str, folder: Path, where: dict[str, str]) -> list[str]:
    plain, reference, model, optimizer = _twins()
    engine = zp.Engine(model, optimizer, {"transport": transport, **_offload(folder / "run", where)})
    for step in range(2):
        reference.zero_grad()
        _loss(plain, step).backward()
        reference.step()
    engine.backward(_loss(engine, 0))
    engine.step()
    engine.save(folder / "saved")
    told = []
    engine.backward(_loss(engine, 1))
    with _no_writes_beyond(40_000 if dist.get_rank() == 1 else resource.RLIM_INFINITY):
        try:
            engine.step()
        except OffloadError as error:
            told.append(str(error))
    for what in (engine.step, partial(engine.save, folder / "never")):
        engine.backward(_loss(engine, 1))
        try:
            what()
        except OffloadError as error:
            told.append(str(error))
    engine.load(folder / "saved")
    engine.backward(_loss(engine, 1))
    engine.step()
    told += _differences(_values(model, optimizer), _values(plain, reference))
    engine.close()
    return told


@transports
@pytest.mark.parametrize("where", [STATES, BOTH], ids=["states", "both"])
def test_a_disk_that_fails_midway(transport: str, where: dict[str, str], tmp_path: Path) -> None:
    """Only one rank's; no rank goes on with what is partly new, until a checkpoint is loaded."""
    one, other = run(2, _fails_midway, transport, tmp_path, where)
    assert one == other and len(one) == 3
    assert "rank 1" in one[0] and str(tmp_path / "run") in one[0] and "bytes at byte" in one[0]
    assert all("oad a checkpoint" in text for text in one)
    assert not (tmp_path / "never").exists()


# -- a folder with others in it


def _two_jobs(transport: str, folder: Path) -> list[str]:
    engines = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = _build()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        engines.append(
            (model, optimizer, zp.Engine(model, optimizer, {"transport": transport, **_offload(folder, BOTH)}))
        )
    for step in range(3):
        for _, _, engine in engines:
            engine.backward(_loss(engine, step))
            engine.step()
    wrong = []
    for seed, (model, optimizer, _) in enumerate(engines):
        torch.manual_seed(seed)
        plain = _build()
        reference = optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(3):
            reference.zero_grad()
            _loss(plain, step).backward()
            reference.step()
        wrong += _differences(_values(model, optimizer), _values(plain, reference))
    dist.barrier()
    wrong.append(str(len(list(folder.iterdir()))))
    dist.barrier()
    return wrong


@transports
def test_two_jobs_in_one_folder(transport: str, tmp_path: Path) -> None:
    assert run(2, _two_jobs, transport, tmp_path) == [["4"], ["4"]]
    assert list(tmp_path.iterdir()) == []


def _killed(folder: str) -> None:
    model = _build()
    engine = zp.Engine(model, optim.AdamW(model.parameters()), _offload(Path(folder), BOTH))
    engine.backward(_loss(engine, 0))
    engine.step()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_what_a_killed_program_left_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.txt").write_text("not zeropage's")
    alive = zp.shard(_build(), _offload(tmp_path, WEIGHTS))
    process = multiprocessing.get_context("spawn").Process(target=_killed, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob("zeropage-*"))) == 2
    caplog.clear()
    with caplog.at_level(logging.WARNING, "zeropage"):
        model = zp.shard(_build(), _offload(tmp_path, WEIGHTS))
    assert ["was left by a program that died" in message for message in caplog.messages] == [True]
    assert len(list(tmp_path.glob("zeropage-*"))) == 2
    zp.full(alive.wide.weight)
    zp.full(model.wide.weight)
    del alive, model
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# -- memory

LAYERS, WIDTH = 24, 1024
STATE_BYTES = (2 + 4 + 3 * 4) * LAYERS * WIDTH * WIDTH  # weights, masters, and three states of AdamW with amsgrad
LIMIT = STATE_BYTES // 3
_M_MMAP_THRESHOLD = -3


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(x @ layer)
        return x


def _train_under_a_limit(folder: str, where: dict[str, str], limit: int) -> None:
    """Exit with 0 if the kernel gives the memory that is needed: `limit` bytes beyond what there is before."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 256 * 1024)  # blocks that are freed are given back
    warm = nn.Linear(3, 3)
    warm(torch.ones(1, 3)).sum().backward()
    optim.AdamW(warm.parameters(), amsgrad=True).step()  # what torch loads at the first step is not the model's
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    before = 1024 * int(status["VmData"].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (before + limit, before + limit))
    offload = _offload(Path(folder) / "disk", where, 8 << 20) if where else {}
    with torch.device("meta"):
        model = _Deep()
    zp.shard(model, {"resident_bytes": 0, "precision": "bf16", "reduce_dtype": "bf16", **offload})
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            layer.fill_(1.0 / WIDTH).add_(1e-4 * index)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    engine = zp.Engine(model, optimizer)
    for step in range(3):
        engine.backward(engine(torch.full((2, WIDTH), 0.1 * (step + 1)).bfloat16()).float().square().mean())
        engine.step()
        if where and step == 1:
            engine.save(Path(folder) / "saved")
            engine.load(Path(folder) / "saved")
    sums = [float(zp.full(layer).double().sum()) for layer in model.layers]
    (Path(folder) / f"sums-{bool(where)}").write_text(repr(sums))


def _exit_code_of(folder: Path, where: dict[str, str], limit: int) -> int | None:
    process = multiprocessing.get_context("spawn").Process(
        target=_train_under_a_limit, args=(str(folder), where, limit)
    )
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.slow
def test_a_model_trains_whose_states_are_three_times_the_memory(tmp_path: Path) -> None:
    assert _exit_code_of(tmp_path, {}, LIMIT) != 0
    assert _exit_code_of(tmp_path, {}, 4 * STATE_BYTES) == 0
    assert _exit_code_of(tmp_path, BOTH, LIMIT) == 0
    assert (tmp_path / "sums-True").read_text() == (tmp_path / "sums-False").read_text()
