"""What modules keep besides tensors (`get_extra_state`) is saved and loaded with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from zeropage.errors import CheckpointError


class Counting(nn.Linear):
    """Counts its calls, beside its weight."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4)
        self.kind, self.calls = kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        state = {"dict": {"calls": self.calls}, "tensor": torch.tensor([self.calls]), "none": None}
        return object() if self.kind == "object" else state[self.kind]

    def set_extra_state(self, state: Any) -> None:
        self.calls = -1 if state is None else state["calls"] if isinstance(state, dict) else int(state)


def _engine(kind: str | None, world: int) -> zp.Engine:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4) if kind is None else Counting(kind))
    return zp.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), {"transport": "shared" if world > 1 else "local"}
    )


def _saved(kind: str | None, folder: str, world: int) -> None:
    engine = _engine(kind, world)
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    engine.save(folder)


def _loaded(kind: str | None, folder: str, world: int) -> int:
    engine = _engine(kind, world)
    engine.load(folder)
    return getattr(engine.module[1], "calls", 0)


@pytest.mark.parametrize(("kind", "calls"), [("dict", 3), ("tensor", 3), ("none", -1)])
def test_it_comes_back_on_another_number_of_ranks(kind: str, calls: int, tmp_path: Path) -> None:
    run(2, _saved, kind, str(tmp_path), 2)
    assert run(1, _loaded, kind, str(tmp_path), 1) == [calls]


def _refused(saved: str | None, here: str | None, folder: str) -> None:
    _saved(saved, folder, 2)
    engine = _engine(here, 2)
    before = [zp.full(p) for p in engine.module.parameters()]
    name = "_extra_state is missing" if saved is None else "_extra_state is not in the model"
    with pytest.raises(CheckpointError, match=f"1.{name}"):
        engine.load(folder)
    assert all(torch.equal(zp.full(p), value) for p, value in zip(engine.module.parameters(), before, strict=True))
    engine.load(folder, strict=False)


@pytest.mark.parametrize(("saved", "here"), [(None, "dict"), ("dict", None)])
def test_a_model_that_has_none_or_other_ones_is_refused(saved: str | None, here: str | None, tmp_path: Path) -> None:
    run(2, _refused, saved, here, str(tmp_path))


def _unloadable(folder: str) -> None:
    with pytest.raises(CheckpointError, match="get_extra_state"):
        _saved("object", folder, 2)


def test_what_could_not_be_loaded_again_is_refused_at_once(tmp_path: Path) -> None:
    run(2, _unloadable, str(tmp_path))
    assert not list(tmp_path.glob("*/extra*"))


def _from_safetensors(folder: str) -> int:
    engine = _engine("tensor", 2)
    engine(torch.ones(2, 4))
    zp.export(engine.module, folder)
    other = _engine("tensor", 2)
    zp.load_safetensors(other.module, folder)
    return int(other.module[1].calls)


def test_tensors_among_it_go_through_safetensors(tmp_path: Path) -> None:
    assert run(2, _from_safetensors, str(tmp_path)) == [1, 1]
