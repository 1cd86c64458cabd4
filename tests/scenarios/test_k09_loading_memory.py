"""K09: loading reads each rank's own bytes; everything is checked before anything changes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.allocations import allocations
from tests.harness.models import LM, build_lm, build_tied_lm
from tests.scenarios.beside import everywhere, plain_copy, same
from tests.scenarios.test_k15_export import Mixed, once

WIDTH = 512
LAYERS = 10  # 10 MB


def _layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def _read_bytes() -> int:
    """Bytes that this process has asked files for."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def _load_counted(transport: str, folder: Path, dtype: torch.dtype | None) -> tuple[int, int, bool]:
    with torch.device("meta"):
        model = _layers() if dtype is None else _layers().to(dtype)
    zp.shard(model, {"transport": transport})
    with allocations() as used:
        before = _read_bytes()
        zp.load_safetensors(model, folder)
        count = _read_bytes() - before
    plain = plain_copy(_layers)
    right = all(
        torch.equal(zp.full(p), q if dtype is None else q.to(dtype))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    dist.barrier()
    return count, used.peak, right


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@everywhere
def test_a_rank_reads_its_slices_and_holds_a_piece(
    transport: str, world: int, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    model = plain_copy(_layers)
    total = sum(p.nbytes for p in model.parameters())
    zp.export(model, tmp_path, max_shard_size=total // 4)
    for count, peak, right in run(world, _load_counted, transport, tmp_path, dtype):
        assert right
        assert count <= total / world + 200_000, f"{count:,} bytes read of {total:,}"
        # without a conversion the bytes go straight into the shard; otherwise through a piece
        assert peak <= 4096 + (0 if dtype is None else WIDTH * WIDTH * 4 // world), f"{peak:,}"


def _load_mixed(transport: str, folder: Path) -> None:
    expected = plain_copy(Mixed).state_dict()
    with torch.device("meta"):
        blank = Mixed()
    written = plain_copy(Mixed, seed=5)
    written.scale.requires_grad_(False)
    for model in (zp.shard(blank, {"transport": transport}), zp.shard(written, {"transport": transport})):
        versions = {name: p._version for name, p in model.named_parameters()}
        missing, unexpected = zp.load_safetensors(model, folder)
        assert missing == unexpected == []
        assert model.head.weight is model.embedding.weight
        assert list(model.state_dict()) == list(expected)
        for name, value in model.state_dict().items():
            same(expected[name], value, name, exact=True)
        assert all(p._version > versions[name] for name, p in model.named_parameters())
    assert not any(p.is_meta for p in (*blank.parameters(), blank.norms.running_mean))


@everywhere
def test_every_kind_of_tensor(transport: str, world: int, tmp_path: Path) -> None:
    zp.export(plain_copy(Mixed), tmp_path, max_shard_size=1500)
    run(world, _load_mixed, transport, tmp_path)


def test_a_plain_model(tmp_path: Path) -> None:
    expected, model = plain_copy(Mixed), plain_copy(Mixed, seed=3)
    save_file(once(expected.state_dict()), tmp_path / "any.safetensors")
    zp.load_safetensors(model, tmp_path / "any.safetensors")
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    )


def test_backward_notices_that_a_saved_weight_was_loaded_over(tmp_path: Path) -> None:
    model = zp.shard(plain_copy(build_lm), {"transport": "local"})
    zp.export(model, tmp_path)
    loss = model(torch.zeros(1, 3, dtype=torch.long)).sum()
    zp.load_safetensors(model, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- what does not fit


def _drop(state: dict[str, torch.Tensor]) -> None:
    del state["norm.bias"]


def _lengthen(state: dict[str, torch.Tensor]) -> None:
    state["norm.bias"] = torch.zeros(7)


def _add(state: dict[str, torch.Tensor]) -> None:
    state["extra.weight"] = torch.zeros(2)


def _complex(state: dict[str, torch.Tensor]) -> None:
    state["norm.bias"] = torch.zeros(6, dtype=torch.complex64)


UNFIT = {
    "missing": (_drop, r"1 of the model's keys are not there \(norm\.bias\)"),
    "shape": (_lengthen, r"1 have another shape \(norm\.bias\)"),
    "unexpected": (_add, r"1 keys are not of the model \(extra\.weight\)"),
    "dtype": (_complex, r"'norm\.bias' is torch\.complex64"),
}


def _load_fails(transport: str, path: Path, other: Path | None) -> str:
    model = zp.shard(plain_copy(build_tied_lm, seed=2), {"transport": transport})
    before = {name: zp.full(value) for name, value in model.state_dict().items()}
    with pytest.raises(zp.errors.CheckpointError) as raised:
        zp.load_safetensors(model, other if other is not None and dist.get_rank() else path)
    assert all(torch.equal(zp.full(value), before[name]) for name, value in model.state_dict().items())
    return str(raised.value)


@pytest.mark.parametrize("wrong", UNFIT)
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_what_does_not_fit_changes_nothing(transport: str, wrong: str, tmp_path: Path) -> None:
    change, words = UNFIT[wrong]
    state = once(plain_copy(build_tied_lm).state_dict())
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    for told in run(2, _load_fails, transport, tmp_path, None):
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(told)


def test_a_damaged_file_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    whole, cut, shorter = (
        tmp_path / "whole.safetensors",
        tmp_path / "cut.safetensors",
        tmp_path / "b" / "whole.safetensors",
    )
    shorter.parent.mkdir()
    state = once(plain_copy(build_tied_lm).state_dict())
    save_file(state, whole)
    cut.write_bytes(whole.read_bytes()[:-1])
    told = run(2, _load_fails, "shared", whole, cut)
    assert told[0] == told[1] and told[0].startswith("rank 1: ") and "cut off" in told[0]
    save_file({**state, "norm.weight": state["norm.weight"].double()}, shorter)
    told = run(2, _load_fails, "shared", whole, shorter)
    assert told[0] == told[1] and "ranks [1] see other safetensors files" in told[0]


# -- what is missing


class _Norm(nn.Module):
    """Has parameters, and nobody to initialise them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


def _partly(transport: str, folder: Path) -> None:
    """Two keys are gone, one is renamed, one has another shape."""
    expected = plain_copy(build_lm)
    with torch.device("meta"):
        model = build_lm()
    zp.shard(model, {"transport": transport})
    torch.manual_seed(3)
    found = zp.load_safetensors(model, folder, strict=False)
    assert found.missing_keys == ["blocks.0.norm1.weight", "blocks.0.up.bias", "norm.bias", "head.weight"]
    assert found.unexpected_keys == ["norm.beta"]
    assert found.mismatched_keys == ["head.weight"]
    for name, value in model.state_dict().items():
        if name not in found.missing_keys:
            same(expected.state_dict()[name], value, name, exact=True)
    same(torch.ones(6), model.blocks[0].norm1.weight, exact=True)
    torch.manual_seed(3)
    up, head = nn.Linear(6, 17), nn.Linear(6, 17, bias=False)  # the modules that drew, in their order
    same(up.bias, model.blocks[0].up.bias, exact=True)
    same(head.weight, model.head.weight, exact=True)

    written = zp.shard(plain_copy(build_lm, seed=4), {"transport": transport})
    assert zp.load_safetensors(written, folder, strict=False) == found
    same(plain_copy(build_lm, seed=4).head.weight, written.head.weight, "what has values keeps them", exact=True)

    with torch.device("meta"):
        nobody = nn.Sequential(_Norm())
    zp.shard(nobody, {"transport": transport})
    with pytest.raises(zp.errors.CheckpointError, match=r"\['0\.gain'\] are not in the file and have no values"):
        zp.load_safetensors(nobody, folder, strict=False)
    with pytest.raises(zp.errors.UninitializedPageError):
        nobody[0].gain.sum()


@everywhere
def test_not_strict(transport: str, world: int, tmp_path: Path) -> None:
    state = once(plain_copy(build_lm).state_dict())
    state["head.weight"] = torch.zeros(17, 7)
    del state["blocks.0.norm1.weight"], state["blocks.0.up.bias"]
    state["norm.beta"] = state.pop("norm.bias")
    save_file(state, tmp_path / "model.safetensors")
    run(world, _partly, transport, tmp_path)


class _Rotary(nn.Module):
    """A weight in the file, and tables that are in no file."""

    def __init__(self, *, complete: bool) -> None:
        super().__init__()
        self.complete = complete
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("angles", torch.empty(3, dtype=torch.complex64), persistent=False)
        self.register_buffer("places", torch.empty(5, dtype=torch.long), persistent=False)
        self.register_buffer("mask", torch.empty(2, dtype=torch.bool), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        self.angles.copy_(torch.polar(torch.ones(3), torch.arange(3.0)))
        self.mask = torch.zeros(2, dtype=torch.bool)  # another object
        if self.complete:
            self.places.data.copy_(torch.arange(5))  # moves no version


def _with_tables(transport: str, folder: Path) -> None:
    with torch.device("meta"):
        model, partly = _Rotary(complete=True), _Rotary(complete=False)
    for one in (model, partly):
        zp.shard(one, {"transport": transport})
    assert zp.load_safetensors(model, folder).missing_keys == []
    same(torch.arange(4.0), model.weight, exact=True)
    for name, buffer in _Rotary(complete=True).named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    for _ in range(2):  # what was left out does not pass for filled the second time
        with TestCase().assertLogs("zeropage", "WARNING") as told:
            zp.load_safetensors(partly, folder)
        assert "the buffers places are on the meta device" in told.output[0]
        assert partly.places.is_meta and torch.equal(partly.angles, model.angles)
        same(torch.arange(4.0), partly.weight, exact=True)


@everywhere
def test_buffers_that_no_file_holds(transport: str, world: int, tmp_path: Path) -> None:
    save_file({"weight": torch.arange(4.0)}, tmp_path / "model.safetensors")
    run(world, _with_tables, transport, tmp_path)


def _breaks_in_the_middle(folder: Path) -> None:
    """The disk fails on rank 1 after the checks: an error on both, and pages do not pass for written."""
    with torch.device("meta"):
        model = LM(tied=False)
    zp.shard(model, {"transport": "shared"})
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("os.preadv", lambda *_: 0)
        with pytest.raises(zp.errors.CheckpointError, match=r"rank 1: .*half loaded; load it again"):
            zp.load_safetensors(model, folder)
    with pytest.raises(zp.errors.UninitializedPageError):
        model.norm.weight.sum()
    zp.load_safetensors(model, folder)
    same(plain_copy(build_lm).norm.weight, model.norm.weight, exact=True)


def test_a_disk_that_fails_later(tmp_path: Path) -> None:
    zp.export(plain_copy(build_lm), tmp_path)
    run(2, _breaks_in_the_middle, tmp_path)


def test_an_index_that_leads_elsewhere(tmp_path: Path) -> None:
    """(More of them in tests/unit/test_weights.py.)"""
    zp.export(plain_copy(build_lm), tmp_path)
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    for told in run(2, _load_fails, "shared", inner, None):
        assert "only files beside the index are read" in told


def test_a_header_that_claims_the_world(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    for told in run(2, _load_fails, "collective", tmp_path / "x.safetensors", None):
        assert "not a whole safetensors file" in told
