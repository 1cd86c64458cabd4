"""K61: methods of PEFT on a sharded base, without anything of DeepSpeed's: what plain PEFT does, step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropage as zp
from tests.harness import run
from tests.scenarios.beside import averaged_backward, plain_copy, same, same_parameters
from zeropage.construct import pagers_of

pytest.importorskip("transformers")
tqdm = pytest.importorskip("tqdm").tqdm
peft = pytest.importorskip("peft")

from tests.integrations.programs import peft_parts as parts  # noqa: E402  (needs both)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning"),  # peft still hands them over
    pytest.mark.filterwarnings("ignore:.*rank_pattern keys did not match.*:RuntimeWarning"),  # AdaLoRA, when it loads
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]


# -- ways to come to an adapter on a sharded base


def _in_init(method: str, config: dict[str, Any]) -> nn.Module:
    """The base is made in `zp.init`; the adapter comes afterwards, and is paged as it is registered."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with zp.init(config):
            base = parts.base(method)
    return parts.attach(base, method)


def _shard_first(method: str, config: dict[str, Any]) -> nn.Module:
    return parts.attach(zp.shard(_plain_base(method), config), method)


def _shard_last(method: str, config: dict[str, Any]) -> nn.Module:
    return zp.shard(parts.attach(_plain_base(method), method), config)


WAYS: dict[str, Callable[[str, dict[str, Any]], nn.Module]] = {
    "init": _in_init,
    "shard, attach": _shard_first,
    "attach, shard": _shard_last,
}


def _plain_base(method: str) -> nn.Module:
    return plain_copy(lambda: parts.base(method))


# -- the life of an adapter


def _life(method: str, way: str, transport: str, folder: Path) -> None:
    config = {"transport": transport, "timeout_s": 30}
    plain = parts.attach(_plain_base(method), method)
    paged = WAYS[way](method, config)
    engine = zp.Engine(paged, parts.optimizer(paged), config)
    assert all(zp.is_paged(p) for p in paged.parameters())
    same_parameters(plain, paged)

    _train(plain, engine, method)
    same_parameters(plain, paged)
    _same_logits(plain, paged, "trained")
    with plain.disable_adapter(), paged.disable_adapter():
        _same_logits(plain, paged, "without the adapter")

    rank = dist.get_rank()
    paged.save_pretrained(folder / "adapter", is_main_process=rank == 0)
    paged.save_pretrained(folder / f"own {rank}")
    plain.save_pretrained(folder / f"plain {rank}")
    dist.barrier()
    _loads(folder, method, config)

    if method in parts.MERGED:
        _merges(plain, paged)
    engine.close()
    dist.barrier()


def _train(plain: Any, engine: zp.Engine, method: str) -> None:
    optimizer = parts.optimizer(plain)
    rank = dist.get_rank()
    for step in range(parts.STEPS):
        averaged_backward(plain.parameters(), lambda r, s=step: parts.loss(plain, s, r))
        parts.allocate(plain, method, step)
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(parts.loss(engine, step, rank))
        parts.allocate(engine.module, method, step)
        engine.step()


def _same_logits(plain: nn.Module, paged: nn.Module, what: str) -> None:
    same(parts.logits(plain), parts.logits(paged), what)


def _loads(folder: Path, method: str, config: dict[str, Any]) -> None:
    """Plain PEFT reads the folders as it reads its own, over a plain base; and they go over a sharded one."""
    expected = _logits_of(_plain_base(method), folder / f"plain {dist.get_rank()}")
    for adapter in ("adapter", f"own {dist.get_rank()}"):
        same(expected, _logits_of(_plain_base(method), folder / adapter), adapter)
    sharded = zp.shard(_plain_base(method), config)
    same(expected, _logits_of(sharded, folder / "adapter"), "over a sharded base")
    dist.barrier()  # nobody lets go of it while another rank still reads it


def _logits_of(base: nn.Module, folder: Path) -> Tensor:
    return parts.logits(peft.PeftModel.from_pretrained(base, folder))


def _merges(plain: Any, paged: Any) -> None:
    for model in (plain, paged):
        model.merge_adapter()
    same_parameters(plain, paged)
    _same_logits(plain, paged, "merged")
    for model in (plain, paged):
        model.unmerge_adapter()
    same_parameters(plain, paged)
    tqdm.monitor_interval = 0  # merging starts its thread, which would outlive this case
    plain, paged = plain.merge_and_unload(), paged.merge_and_unload()
    assert not isinstance(paged, peft.PeftModel)
    assert all(zp.is_paged(p) for p in paged.parameters())
    same_parameters(plain, paged)
    _same_logits(plain, paged, "merged and unloaded")


@pytest.mark.parametrize("way", [way if way == "init" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
@pytest.mark.parametrize("method", parts.METHODS)
def test_a_method_does_on_a_sharded_base_what_it_does_on_a_plain_one(method: str, way: str, tmp_path: Path) -> None:
    run(2, _life, method, way, "shared", tmp_path)


@pytest.mark.parametrize("method", ["LoRA", "DoRA", "LoRA and whole modules", "prompt tuning from words"])
def test_over_messages_too(method: str, tmp_path: Path) -> None:
    run(2, _life, method, "shard, attach", "collective", tmp_path)


def _attaches(transport: str) -> int:
    base = zp.shard(_plain_base("LoRA"), {"transport": transport, "timeout_s": 30})
    parts.attach(base, "LoRA")
    [pager] = pagers_of(base)
    dist.barrier()
    return pager.counters.faults


@pytest.mark.parametrize("transport", ["shared", "collective"])
def test_attaching_plain_lora_gathers_nothing_of_the_base(transport: str) -> None:
    assert run(2, _attaches, transport) == [0, 0]
