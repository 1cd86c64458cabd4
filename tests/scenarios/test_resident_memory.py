"""Loading, saving and giving away take one slice buffer and one tensor a rank, as the kernel counts it: four ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropage as zp
from tests.fixtures.make_deepspeed import FOLDER
from tests.harness import run
from tests.harness.resident import Resident, resident
from tests.scenarios.beside import plain_copy
from zeropage.checkpoint import convert_deepspeed
from zeropage.checkpoint.deepspeed_files import load_file

MB = 1 << 20
BUFFER = 64 * MB
TENSOR = 32 * MB
LAYERS = 10
SLACK = 16 * MB  # the interpreter's and torch's own
BOUND = BUFFER + TENSOR + SLACK

pytestmark = pytest.mark.slow
transports = pytest.mark.parametrize("transport", ["shared", "collective"])
worlds = pytest.mark.parametrize("world", [4])


class _Stack(nn.Module):
    """Tensors of 32 MB, of which the model has ten times as much."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.empty(2048, 4096).fill_(i)) for i in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (x @ layer)[:, :2048] * 1e-3
        return x


def _blank() -> nn.Module:
    with torch.device("meta"):
        return _Stack()


def _check_values(model: nn.Module) -> None:
    for index, layer in enumerate(model.layers):
        local = zp.local(layer)
        assert bool((local == float(index)).all())
    dist.barrier()


def _weights_in_and_out(transport: str, folder: Path, dtype: str | None) -> dict[str, Resident]:
    model = zp.shard(_blank(), {"transport": transport})
    with resident() as loaded:
        zp.load_safetensors(model, folder / "in")
    _check_values(model)
    with resident() as exported:
        zp.export(model, folder / "out", dtype=dtype)
    dist.barrier()
    return {"load_safetensors": loaded, "export": exported}


@transports
@worlds
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_weights_in_and_out(transport: str, world: int, dtype: str | None, tmp_path: Path) -> None:
    zp.export(_Stack(), tmp_path / "in", max_shard_size=100 * MB)
    for found in run(world, _weights_in_and_out, transport, tmp_path, dtype, timeout=300):
        for what, memory in found.items():
            assert memory.extra <= BOUND, f"{what}: {memory}"
        assert found["load_safetensors"].after > found["load_safetensors"].before, "something was counted"


def _checkpoints(transport: str, folder: Path, wait: bool) -> dict[str, Resident]:
    model = _Stack()
    engine = zp.Engine(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0), {"transport": transport})
    engine.backward(engine(torch.ones(1, 2048)).mean())
    engine.step()
    with resident() as saved:
        engine.save(folder, wait=wait)
        engine.save(folder, tag="again", keep=1)
    with resident() as loaded:
        engine.load(folder)
    _check_values(model)
    engine.close()
    return {"save": saved, "load": loaded}


@transports
@worlds
@pytest.mark.parametrize("wait", [True, False])
def test_checkpoints(transport: str, world: int, wait: bool, tmp_path: Path) -> None:
    for found in run(world, _checkpoints, transport, tmp_path, wait, timeout=300):
        for what, memory in found.items():
            assert memory.extra <= BOUND, f"{what}: {memory}"


def _offline(folder: Path) -> Resident:
    with resident() as exported:
        zp.export(folder / "saves", folder / "out")
    return exported


def _saves(transport: str, folder: Path) -> None:
    engine = zp.Engine(_Stack(), None, {"transport": transport})
    engine.save(folder)
    engine.close()


@worlds
def test_an_export_of_a_checkpoint(world: int, tmp_path: Path) -> None:
    run(world, _saves, "shared", tmp_path / "saves", timeout=300)
    (memory,) = run(1, _offline, tmp_path, timeout=300)
    assert memory.extra <= BOUND, memory


# -- from_pretrained


def _llama(width: int = 2048) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=width, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=16
    )
    return transformers.LlamaForCausalLM(config)


def _from_pretrained(transport: str, folder: Path) -> tuple[Resident, int]:
    import transformers

    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers reads some tensors ahead otherwise
    with zp.init({"transport": transport}):  # imports
        transformers.LlamaForCausalLM.from_pretrained(folder / "small")
    with resident() as loaded, zp.init({"transport": transport}):
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
    shards = sum(zp.local(p).nbytes for p in model.parameters())
    dist.barrier()
    return loaded, shards


@transports
@worlds
def test_from_pretrained(transport: str, world: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    plain_copy(_llama).save_pretrained(tmp_path)
    plain_copy(lambda: _llama(32)).save_pretrained(tmp_path / "small")
    ranks = run(world, _from_pretrained, transport, tmp_path, timeout=300)
    total = sum(shards for _, shards in ranks)
    assert sum(memory.after - memory.before for memory, _ in ranks) >= 0.9 * total > 300 * MB
    for rank, (memory, shards) in enumerate(ranks):
        # in one shared memory the first rank writes, and so is charged with, everybody's shards
        shards = total if transport == "shared" and rank == 0 else shards
        assert memory.peak - memory.before <= shards + BOUND, memory


# -- from DeepSpeed


def _enlarge(small: Path, large: Path) -> None:
    """Files that DeepSpeed wrote on two ranks, with larger tensors in their places and none of its own objects."""
    large.mkdir(parents=True)
    model = dict(load_file(small / "mp_rank_00_model_states.pt").values)
    shapes = {f"layers.{i}": torch.Size([2048, 4096]) for i in range(LAYERS)}
    model |= {
        "module": {name: torch.full(shape, float(i)).bfloat16() for i, (name, shape) in enumerate(shapes.items())},
        "buffer_names": [],
        "param_shapes": [shapes],
        "ds_config": {},
    }
    torch.save(model, large / "mp_rank_00_model_states.pt")
    whole = torch.cat([torch.full((shape.numel(),), float(i)) for i, shape in enumerate(shapes.values())])
    for rank, part in enumerate(whole.chunk(2)):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = dict(load_file(small / name).values["optimizer_state_dict"])
        (old,) = state["base_optimizer_state"]["state"].values()
        moments = {"step": old["step"], "exp_avg": part + 100, "exp_avg_sq": part + 200}
        state |= {
            "loss_scaler": None,
            "zero_stage": 1,
            "base_optimizer_state": {**state["base_optimizer_state"], "state": {0: moments}},
            "single_partition_of_fp32_groups": [part.clone()],
            "param_alignment_paddings": [[0] * LAYERS],
            "param_slice_mappings": [],
        }
        torch.save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}, large / name)


def _imports(folder: Path) -> Resident:
    with resident() as imported:
        convert_deepspeed(folder / "theirs", folder / "ours", "large")
    return imported


def _loads_theirs(transport: str, folder: Path) -> Resident:
    model = _Stack().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    engine = zp.Engine(model, optimizer, {"transport": transport, "precision": "bf16"})
    engine.load(folder / "ours")
    with resident() as loaded:
        engine.load(folder / "theirs", "large")
    _check_values(model)
    for index, parameter in enumerate(model.parameters()):
        moments = engine.optimizer.state[parameter]
        assert bool((zp.local(moments["exp_avg"]) == index + 100.0).all())
    engine.close()
    return loaded


@worlds
def test_a_checkpoint_of_deepspeed(world: int, tmp_path: Path) -> None:
    """Its conversion by one process, and the load that converts first (on rank 0)."""
    _enlarge(FOLDER / "stage1-fp32" / "global_step3", tmp_path / "theirs" / "large")
    (memory,) = run(1, _imports, tmp_path, timeout=300)
    assert memory.extra <= BOUND, memory
    for memory in run(world, _loads_theirs, "shared", tmp_path, timeout=300):
        assert memory.extra <= BOUND, memory
