"""Parts of checkpoint files read into their place, whoever wrote the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import zeropage as zp
from zeropage.checkpoint import parts
from zeropage.checkpoint.reading import SliceReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7, dtype=torch.bfloat16))


@pytest.fixture(params=["zeropage", "torch"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "torch":
        values = {f"model.{name}": value for name, value in _model().state_dict().items()}
        dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
        return tmp_path
    with zp.Engine(_model()) as engine:
        engine.save(tmp_path, tag="one")
    return tmp_path / "one"


def test_whole_tensors(saved: Path) -> None:
    wanted = {f"model.{name}": value for name, value in _model().state_dict().items()}
    found = {key: torch.full_like(value, 9) for key, value in wanted.items()}
    dcp.load(found, storage_reader=SliceReader(saved), no_dist=True)
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


@pytest.mark.parametrize(
    "offset, size", [((0, 0), (30, 40)), ((3, 0), (5, 40)), ((3, 7), (5, 20)), ((29, 39), (1, 1)), ((4, 2), (1, 38))]
)
def test_boxes(saved: Path, monkeypatch: pytest.MonkeyPatch, offset: tuple[int, int], size: tuple[int, int]) -> None:
    read = []
    plain = parts._read
    monkeypatch.setattr(parts, "_read", lambda file, room, place: (read.append(len(room)), plain(file, room, place)))
    reader = SliceReader(saved)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    key, found = "model.0.weight", torch.zeros(size)
    planner = DefaultLoadPlanner()
    planner.set_up_planner({key: found}, metadata, is_coordinator=True)
    zero, start = torch.Size([0, 0]), torch.Size(offset)
    item = ReadItem(
        LoadItemType.TENSOR, MetadataIndex(key), zero, MetadataIndex(key, zero, 0), start, torch.Size(size)
    )  # fmt: skip
    reader.read_data(LoadPlan([item]), planner).wait()
    low = _model()[0].weight[offset[0] :, offset[1] :]
    assert torch.equal(found, low[: size[0], : size[1]])
    if saved.name == "one":
        assert sum(read) == found.nbytes, "only what is wanted is read"
