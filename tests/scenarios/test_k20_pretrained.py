"""K20: `from_pretrained` inside `zp.init()` pages each weight as it comes, and reports the truth."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import zeropage as zp
from tests.harness import run
from tests.harness.allocations import allocations
from tests.scenarios.beside import everywhere, plain_copy

pytest.importorskip("transformers")

SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}


def _model(kind: str, labels: int = 3) -> Any:
    import transformers

    if kind == "llama":
        return transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(vocab_size=31, num_key_value_heads=2, num_labels=labels, pad_token_id=0, **SIZES)
        )
    if kind == "bert":
        return transformers.BertForSequenceClassification(
            transformers.BertConfig(vocab_size=31, num_labels=labels, **SIZES)
        )
    text = transformers.CLIPTextConfig(vocab_size=31, projection_dim=8, eos_token_id=2, **SIZES)
    vision = transformers.CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=8, **SIZES)
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)
    )


GONE = {
    "llama": ("model.layers.0.mlp.up_proj.weight", "model.norm.weight"),
    "bert": ("bert.encoder.layer.0.output.dense.bias", "bert.pooler.dense.weight"),
    "clip": ("text_model.encoder.layers.0.mlp.fc1.bias", "vision_model.post_layernorm.weight"),
}
RENAMED = {
    "llama": "model.layers.1.self_attn.q_proj.weight",
    "bert": "bert.encoder.layer.1.attention.self.query.weight",
    "clip": "vision_model.encoder.layers.1.mlp.fc2.weight",
}


def _prepare(kind: str, folder: Path) -> None:
    """Two keys are gone, one is renamed."""
    plain_copy(lambda: _model(kind)).save_pretrained(folder)
    path = folder / "model.safetensors"
    state = load_file(path)
    for key in GONE[kind]:
        del state[key]
    state["zz." + RENAMED[kind]] = state.pop(RENAMED[kind])
    save_file(state, path, metadata={"format": "pt"})


def _load(kind: str, folder: Path, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """With another number of labels: the head does not fit (CLIP has none)."""
    labels = {} if kind == "clip" else {"num_labels": 5}
    torch.manual_seed(11)
    model, info = type(_model(kind)).from_pretrained(
        folder, output_loading_info=True, ignore_mismatched_sizes=True, **labels, **options
    )
    return model, {key: sorted(map(str, value)) for key, value in info.items()}


def _pretrained(transport: str, kind: str, folder: Path, options: dict[str, Any]) -> None:
    plain, told = _load(kind, folder, options)
    state = torch.get_rng_state()
    with zp.init({"transport": transport}):
        model, info = _load(kind, folder, options)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn but what is missing"
    assert info == told, "the report is that of the unsharded model"
    assert set(info["missing_keys"]) >= {*GONE[kind], RENAMED[kind]}
    assert info["unexpected_keys"] == ["zz." + RENAMED[kind]]
    assert len(info["mismatched_keys"]) == {"llama": 1, "bert": 2, "clip": 0}[kind]
    assert all(zp.is_paged(parameter) for parameter in model.parameters())
    dist.barrier()
    got = model.state_dict()
    for name, value in plain.state_dict().items():
        full = zp.full(got[name])
        assert (full.dtype, full.shape) == (value.dtype, value.shape), name
        assert torch.equal(full, value), name  # also what is missing: it is drawn from the same seed
        others = [torch.empty_like(full) for _ in range(dist.get_world_size())]
        dist.all_gather(others, full.contiguous())
        assert all(torch.equal(other, full) for other in others), name
    dist.barrier()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": torch.bfloat16},
    "low memory": {"low_cpu_mem_usage": True},
    "not low memory": {"low_cpu_mem_usage": False, "torch_dtype": torch.bfloat16},
}


FAST = [("shared", "llama", "plain")]


@pytest.mark.parametrize(
    ("transport", "kind", "options"),
    [
        pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
        for case in itertools.product(["shared", "collective"], ["llama", "bert", "clip"], OPTIONS)
    ],
)
def test_from_pretrained(transport: str, kind: str, options: str, tmp_path: Path) -> None:
    _prepare(kind, tmp_path)
    run(2, _pretrained, transport, kind, tmp_path, OPTIONS[options])


# -- loaders that go through a set


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcdef":
            setattr(self, name, nn.Parameter(torch.empty(5, 3)))


def _in_any_order(transport: str) -> None:
    rank = dist.get_rank()
    with zp.init({"transport": transport}):
        with torch.device("meta"):
            model = _Wide()
        for name in ("abcdef", "fbdeca", "cdabfe")[rank]:
            setattr(model, name, nn.Parameter(torch.full((5, 3), float(ord(name) + rank))))
    for name in "abcdef":
        parameter = getattr(model, name)
        assert zp.is_paged(parameter) and parameter._node.page.name == name
        assert torch.equal(zp.full(parameter), torch.full((5, 3), float(ord(name)))), "the first rank's values"
    dist.barrier()
    with pytest.raises(zp.errors.DivergenceError, match=f"gave values to _Wide.{'ab'[rank > 0]}"):
        with zp.init({"transport": transport}):
            with torch.device("meta"):
                model = _Wide()
            setattr(model, "ab"[rank > 0], nn.Parameter(torch.zeros(5, 3)))
    dist.barrier()


@everywhere
def test_any_order(transport: str, world: int) -> None:
    run(world, _in_any_order, transport)


MANY = 3_600  # half of them wait at once: more than a meeting could tell


def _many_in_opposite_orders() -> None:
    rank = dist.get_rank()
    with zp.init({"transport": "shared"}):
        with torch.device("meta"):
            model = nn.ParameterList(nn.Parameter(torch.empty(2)) for _ in range(MANY))
        for place in range(MANY):
            index = place if rank == 0 else MANY - 1 - place
            model[index] = nn.Parameter(torch.full((2,), float(index)))
    for index, parameter in enumerate(model):
        assert zp.is_paged(parameter) and parameter._node.page.name == str(index)
        assert zp.full(parameter).tolist() == [index, index]
    dist.barrier()


@pytest.mark.slow
def test_thousands_in_opposite_orders() -> None:
    run(2, _many_in_opposite_orders)


# -- the same through load_safetensors, from a model on the meta device


def _from_meta(transport: str, kind: str, folder: Path) -> None:
    whole = plain_copy(lambda: _model(kind)).state_dict()
    plain, _ = _load(kind, folder, {})
    with zp.init({"transport": transport}), torch.device("meta"):
        model = type(plain)(plain.config)
    with pytest.raises(zp.errors.CheckpointError, match=r"does not fit the model"):
        zp.load_safetensors(model, folder)
    found = zp.load_safetensors(model, folder, strict=False)
    heads = {"llama": ["score.weight"], "bert": ["classifier.weight", "classifier.bias"], "clip": []}[kind]
    assert set(found.missing_keys) == {*GONE[kind], RENAMED[kind], *heads}
    assert found.unexpected_keys == ["zz." + RENAMED[kind]] and found.mismatched_keys == heads
    for name, value in model.state_dict().items():
        if name in found.missing_keys:
            assert zp.full(value).isfinite().all(), name
        else:
            assert torch.equal(zp.full(value), whole[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bert", "clip"])
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_load_safetensors_reports_the_same(transport: str, kind: str, tmp_path: Path) -> None:
    _prepare(kind, tmp_path)
    run(2, _from_meta, transport, kind, tmp_path)


def _whole_from_meta(transport: str, kind: str, folder: Path) -> None:
    """With the tables that no file holds: rotary frequencies, numbers of positions."""
    plain = type(_model(kind)).from_pretrained(folder).eval()
    with torch.device("meta"):
        model = type(plain)(plain.config)
    zp.shard(model, {"transport": transport})
    assert zp.load_safetensors(model, folder).missing_keys == []
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    tokens = torch.arange(2, 14).view(2, 6)
    inputs = {"input_ids": tokens} | ({"pixel_values": torch.ones(2, 3, 8, 8)} if kind == "clip" else {})
    for got, right in zip(model.eval()(**inputs).to_tuple(), plain(**inputs).to_tuple(), strict=True):
        if isinstance(right, torch.Tensor):
            assert torch.equal(got, right)


@pytest.mark.parametrize("kind", ["llama", pytest.param("bert", marks=pytest.mark.slow), "clip"])
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_a_whole_model_from_meta(transport: str, kind: str, tmp_path: Path) -> None:
    plain_copy(lambda: _model(kind)).save_pretrained(tmp_path)
    run(2, _whole_from_meta, transport, kind, tmp_path)


# -- memory


def _big(**options: Any) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, **options
    )
    return transformers.LlamaForCausalLM(config)


LARGEST = 512 * 256 * 4


def _peak(transport: str, folder: Path) -> tuple[int, int, int]:
    import transformers

    with allocations() as used, zp.init({"transport": transport}):
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
    mapped = (folder / "model.safetensors").stat().st_size  # by the safetensors library, counted in full
    shards = 0 if transport == "shared" else sum(zp.local(p).nbytes for p in model.parameters())
    expected = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(zp.full(parameter), expected[name]), name
    dist.barrier()
    return used.peak - mapped, shards, sum(p.nbytes for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_memory(transport: str, tmp_path: Path) -> None:
    plain_copy(_big).save_pretrained(tmp_path)
    for peak, shards, total in run(2, _peak, transport, tmp_path):
        assert total > 6 * LARGEST
        # pages on the meta device have memory too, which nothing ever touches
        assert peak <= 2 * shards + LARGEST + 65536, f"{peak:,} with shards of {shards:,} and tensors up to {LARGEST:,}"
