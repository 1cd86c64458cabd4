"""K15: safetensors files come straight from the slices; the same bytes from any number of ranks, or a checkpoint."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.allocations import allocations
from tests.harness.models import LM
from tests.scenarios.beside import everywhere, plain_copy
from zeropage.checkpoint import parts

PIECES = 1500  # bytes: several files


class Mixed(LM):
    """Tied weights, other strides, 16 bits, buffers of both kinds, no dimensions, no elements."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.image = nn.Conv2d(6, 10, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(11, 13).t())
        self.half = nn.Linear(17, 5, dtype=torch.bfloat16)
        self.norms = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(0.25))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def once(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Plain contiguous copies, tied weights under their first name."""
    return {name: value.detach().contiguous() for name, value in state.items() if name != "head.weight"}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _exports(transport: str, folder: Path) -> None:
    model = zp.shard(plain_copy(Mixed), {"transport": transport})
    engine = zp.Engine(model)
    zp.export(model, folder / "several", max_shard_size=PIECES)
    zp.export(model, folder / "one")
    zp.export(model, folder / "halves", dtype="bf16")
    engine.save(folder / "checkpoint")
    if dist.get_rank() == 0:  # needs nobody
        zp.export(folder / "checkpoint", folder / "offline", max_shard_size=PIECES)
        zp.export(folder / "checkpoint" / "step0", folder / "offline halves", dtype=torch.bfloat16)
    engine.close()


@everywhere
def test_same_bytes_from_any_number_of_ranks_and_from_a_checkpoint(transport: str, world: int, tmp_path: Path) -> None:
    run(world, _exports, transport, tmp_path)
    plain = plain_copy(Mixed)
    zp.export(plain, tmp_path / "plain", max_shard_size=PIECES)
    assert content(tmp_path / "plain") == content(tmp_path / "several") == content(tmp_path / "offline")
    assert content(tmp_path / "halves") == content(tmp_path / "offline halves")
    assert not list(tmp_path.glob(".*")), "nothing temporary is left"

    expected = once(plain.state_dict())
    read = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors")
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in expected.items())
    halves = safetensors.torch.load_file(tmp_path / "halves" / "model.safetensors")
    for name, value in expected.items():
        assert torch.equal(halves[name], value.bfloat16() if value.is_floating_point() else value), name

    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    for file in files:
        with safetensors.safe_open(tmp_path / "several" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            sizes = [opened.get_tensor(key).nbytes for key in opened.keys()]  # noqa: SIM118  (it is no mapping)
            assert sum(sizes) <= PIECES or len(sizes) == 1


def test_the_bytes_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    state = once(plain_copy(lambda: LM(tied=True)).state_dict())
    safetensors.torch.save_file(state, tmp_path / "theirs", metadata={"format": "pt"})
    zp.export(plain_copy(lambda: LM(tied=True)), tmp_path / "ours")
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("piece", [8, 100])
def test_pieces(piece: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors larger than a piece, of every kind, out and in again."""
    zp.export(plain_copy(Mixed), tmp_path / "whole", dtype="bf16")
    monkeypatch.setattr(parts, "PIECE", piece)
    for number, build in enumerate((Mixed, lambda: zp.shard(Mixed(), {"transport": "local"}))):
        zp.export(plain_copy(build), tmp_path / str(number), dtype="bf16")
        assert content(tmp_path / str(number)) == content(tmp_path / "whole")
        model = plain_copy(build, seed=4)
        zp.load_safetensors(model, tmp_path / "whole")
        for name, value in plain_copy(Mixed).state_dict().items():
            expected = value.bfloat16().to(value.dtype) if value.is_floating_point() else value
            assert torch.equal(zp.full(model.state_dict()[name]), expected), name


def test_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    model = plain_copy(lambda: LM(tied=True))
    (tmp_path / "config.json").write_text("{}")
    for size in (PIECES, 2 * PIECES, "5GB", PIECES):
        zp.export(model, tmp_path, size)
        names = set(content(tmp_path)) - {"config.json"}
        if size == "5GB":
            assert names == {"model.safetensors"}
        else:
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert names == {"model.safetensors.index.json", *index["weight_map"].values()}
    assert (tmp_path / "config.json").exists()


# -- errors


def _disk_full(folder: Path) -> str:
    """Rank 0 may not make files as large as needed; what was there stays."""
    model = zp.shard(plain_copy(Mixed), {"transport": "shared"})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(zp.errors.CheckpointError) as raised:
            zp.export(model, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(raised.value)


def _fails_late(folder: Path) -> str:
    """One rank cannot write a value, when files are there already."""
    model = zp.shard(plain_copy(Mixed), {"transport": "shared"})
    with torch.no_grad():
        model.norm.weight.fill_(1e6)
    with pytest.raises(zp.errors.CheckpointError) as raised:
        zp.export(model, folder, dtype="fp16")
    return str(raised.value)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [(_disk_full, "rank 0: .*cannot be written: .*File too large"), (_fails_late, "'norm.weight'.*beyond float16")],
)
def test_an_error_on_one_rank_is_one_on_all_and_the_old_export_stays(scenario, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    zp.export(plain_copy(lambda: LM(tied=False)), folder, PIECES)
    before = content(folder)
    told = run(2, scenario, folder)
    assert told[0] == told[1]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(told[0])
    assert content(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def _refused(folder: Path) -> list[str]:
    told = []
    with torch.device("meta"):
        blank = zp.shard(nn.Linear(3, 3), {"transport": "shared"})
    mixed = zp.shard(plain_copy(Mixed), {"transport": "shared"})
    rank = dist.get_rank()
    attempts = [
        (blank, folder / "blank", None),
        (mixed, folder / "dtypes", "bf16" if rank else None),
        (mixed, folder / "file", None),
    ]
    (folder / "file").touch()
    for model, target, dtype in attempts:
        with pytest.raises(zp.errors.CheckpointError) as raised:
            zp.export(model, target, dtype=dtype)
        told.append(str(raised.value))
    return told


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    for blank, dtypes, file in run(2, _refused, tmp_path):
        assert "'weight' has no values yet" in blank
        assert r"ranks [1] export other names" in dtypes
        assert "is not a folder" in file
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def _only_rank_zero(transport: str, folder: Path) -> str:
    model = zp.shard(plain_copy(Mixed), {"transport": transport, "timeout_s": 4.0})
    with pytest.raises((zp.errors.DivergenceError, zp.errors.PeerLostError)) as raised:
        if dist.get_rank() == 0:
            zp.export(model, folder)
        else:
            model.norm.weight.detach().zero_()
    return str(raised.value)


@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_on_one_rank_only_it_is_an_error_at_once(transport: str, tmp_path: Path) -> None:
    told = run(2, _only_rank_zero, transport, tmp_path / "export", timeout=20)
    assert all("export" in text and "zero_" in text for text in told)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["5 giants", "0", "-1", "TIB", ""])
def test_sizes_that_cannot_be(size: str, tmp_path: Path) -> None:
    with pytest.raises(zp.errors.ConfigError, match="max_shard_size"):
        zp.export(nn.Linear(1, 1), tmp_path, size)


@pytest.mark.parametrize("dtype", ["int8", "half a float", torch.int64])
def test_dtypes_that_cannot_be(dtype: object, tmp_path: Path) -> None:
    with pytest.raises(zp.errors.ConfigError, match="dtype"):
        zp.export(nn.Linear(1, 1), tmp_path, dtype=dtype)


# -- memory


WIDTH = 512
LAYERS = 8


def _peaks(transport: str, folder: Path) -> tuple[int, int]:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    engine = zp.Engine(model, None, {"transport": transport})
    with allocations() as live:
        zp.export(model, folder / "live")
    engine.save(folder / "checkpoint")
    dist.barrier()
    with allocations() as offline:
        if dist.get_rank() == 0:
            zp.export(folder / "checkpoint", folder / "offline")
    engine.close()
    return live.peak, offline.peak


@everywhere
def test_memory(transport: str, world: int, tmp_path: Path) -> None:
    """Slices are written from where they are; offline it takes one rank's part, and its serialised bytes."""
    part = WIDTH * WIDTH * 4 // world
    for live, offline in run(world, _peaks, transport, tmp_path):
        assert live <= 8192, f"{live:,}"
        assert offline <= 2 * part + 16384, f"{offline:,} with parts of {part:,}"
    assert content(tmp_path / "live") == content(tmp_path / "offline")
