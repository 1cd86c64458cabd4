"""Checkpoints of an engine, with DeepSpeed's folders and names around zeropage's format.

    save_dir/latest                                           the tag that is loaded by default
    save_dir/zero_to_fp32.py                                  makes one fp32 state dict out of it
    save_dir/global_step10/.metadata, __0_0.distcp, ...       the checkpoint (see `zeropage.Engine.save`)
    save_dir/global_step10/zero_pp_rank_0_mp_rank_00_*.pt     small files under the names that programs look for

The small files hold counters and the client state, for programs that open them; loading does not need them.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeropage.checkpoint.contents import pack
from zeropage.checkpoint.verdict import one_verdict
from zeropage.deepspeed.answers import EngineAnswers
from zeropage.deepspeed.logs import logger
from zeropage.engine import Engine
from zeropage.errors import CheckpointError, ConfigError

__all__ = ["clone_tensors_for_torch_save", "load_checkpoint", "model_file", "optim_file", "save_checkpoint"]

_OURS = "zeropage.deepspeed"  # the key of what the face keeps beside the user's client state
_PICKLED = "zeropage.pickled"  # a client state with objects of the user's own classes
_SCRIPT = '''#!/usr/bin/env python
"""Make one fp32 state dict out of this checkpoint: python zero_to_fp32.py . OUTPUT_FOLDER"""

from zeropage.deepspeed.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


@dataclass(slots=True)
class _OfRank:
    """The client state of one rank, kept where data loaders keep their position: for each rank by itself."""

    values: dict[str, Any]
    loaded: dict[str, Any] | None = field(default=None, init=False)

    def state_dict(self) -> dict[str, Any]:
        return _storable(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = _restored(state_dict)


def save_checkpoint(
    engine: EngineAnswers,
    save_dir: Path,
    tag: str,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> None:
    """See `DeepSpeedEngine.save_checkpoint`."""
    inner = engine.zeropage_engine
    scheduler = inner.lr_scheduler
    ours = {
        "progress": inner.progress(),
        "micro_steps": engine.micro_steps,
        "global_samples": engine.global_samples,
        "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
    }
    inner.save(
        save_dir,
        tag,
        {_OURS: ours, **_storable(client_state)},
        trainable_only=exclude_frozen_parameters,
        latest=save_latest,
        data_loader=_OfRank(dict(client_state)),
    )
    transport = inner.pagers[0].transport
    with one_verdict(transport, f"write the small files of {tag}"):
        _write_small_files(engine, save_dir / tag, ours, client_state, transport.rank, transport.world)
        if transport.rank == 0:
            script = save_dir / "zero_to_fp32.py"
            script.write_text(_SCRIPT)
            script.chmod(0o755)


def load_checkpoint(
    engine: EngineAnswers,
    load_dir: Path,
    tag: str | None,
    *,
    strict: bool,
    optimizer_states: bool,
    lr_scheduler_states: bool,
    module_only: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """See `DeepSpeedEngine.load_checkpoint`."""
    inner = engine.zeropage_engine
    found = _find(inner, load_dir, tag)
    if found is None:
        return None, None
    of_rank = _OfRank({})
    weights_only = module_only or not optimizer_states
    scheduler = inner.lr_scheduler
    with _same_random_numbers():
        inner.lr_scheduler = scheduler if lr_scheduler_states else None
        try:
            result = inner.load(load_dir, found, weights_only=weights_only, strict=strict, data_loader=of_rank)
        finally:
            inner.lr_scheduler = scheduler
    client_state = dict(result.client_state)
    ours = client_state.pop(_OURS, None)
    of_deepspeed = client_state.pop("deepspeed_lr_scheduler", None)
    if not module_only:
        if weights_only:
            inner.global_step = result.global_step
            if ours is not None:
                inner.restore_progress(ours["progress"])
        state = of_deepspeed if ours is None else ours["lr_scheduler"] if weights_only else None
        if lr_scheduler_states and scheduler is not None and state is not None:
            scheduler.load_state_dict(state)
        engine.micro_steps = 0 if ours is None else int(ours["micro_steps"])
        batch = engine.train_batch_size()
        engine.global_samples = engine.global_steps * batch if ours is None else int(ours["global_samples"])
    path = load_dir / found / model_file(engine.zero_optimization_stage(), 0)
    return str(path if path.exists() else path.parent), of_rank.loaded or _restored(client_state)


def _find(inner: Engine, load_dir: Path, tag: str | None) -> str | None:
    """The tag to load; None, with a warning on all ranks, where a rank finds nothing (DeepSpeed goes on then)."""
    pointer = load_dir / "latest"
    if tag is None and pointer.is_file():
        tag = pointer.read_text().strip()
    there = tag is not None and (load_dir / tag).is_dir()
    answers = inner.pagers[0].transport.meet("look for a checkpoint", (tag or "").encode() if there else b"")
    if all(answers):
        return answers[0].decode()
    if tag is None:
        logger.warning("there is no file %s; nothing is loaded. Name a tag, or the folder that was saved to.", pointer)
    else:
        logger.warning("there is no checkpoint %s; nothing is loaded", load_dir / tag)
    return None


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """DeepSpeed's load leaves generators alone; programs that resume set them themselves."""
    states = torch.get_rng_state(), random.getstate()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


# -- the client state


def _storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """As it is, or pickled where it holds more than numbers, strings, tensors, lists and dicts."""
    try:
        pack(dict(values))
    except CheckpointError:
        buffer = io.BytesIO()
        torch.save(dict(values), buffer)
        return {_PICKLED: torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)}
    return dict(values)


def _restored(values: Mapping[str, Any]) -> dict[str, Any]:
    """(Pickles are executed when they are loaded, as in DeepSpeed: load checkpoints that you trust.)"""
    if _PICKLED not in values:
        return dict(values)
    loaded = torch.load(io.BytesIO(values[_PICKLED].numpy().tobytes()), weights_only=False)
    assert isinstance(loaded, dict)
    return loaded


# -- small files


def model_file(stage: int, rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"


def optim_file(rank: int, *, bf16: bool) -> str:
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _write_small_files(
    engine: EngineAnswers,
    folder: Path,
    ours: Mapping[str, Any],
    client_state: Mapping[str, Any],
    rank: int,
    world: int,
) -> None:
    stage = engine.zero_optimization_stage()
    about = {
        "ds_config": engine.config,
        "ds_version": "zeropage",
        "zeropage": "weights and optimizer state are in the *.distcp files beside this one; load them with "
        "engine.load_checkpoint, torch.distributed.checkpoint or zero_to_fp32.py",
    }
    if stage == 3 or rank == 0:
        model = {
            "module": {},
            "optimizer": None,
            "lr_scheduler": ours["lr_scheduler"],
            "skipped_steps": engine.skipped_steps,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "dp_world_size": world,
            "mp_world_size": 1,
            **about,
            **client_state,
        }
        torch.save(model, folder / model_file(stage, rank))
    optim = {"optimizer_state_dict": {"zero_stage": stage, "partition_count": world}, **about}
    torch.save(optim, folder / optim_file(rank, bf16=engine.bfloat16_enabled()))


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """`item` with every tensor in it cloned to `device`, so that `torch.save` writes no larger storage along."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device) if device is not None else item.detach().clone()
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item


def check_no_loader(custom_load_fn: Any) -> None:
    if custom_load_fn is not None:
        raise ConfigError("custom_load_fn is not supported; load into engine.module with torch, under zp.gather")
