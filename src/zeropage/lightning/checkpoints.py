"""Lightning's checkpoints as folders in zeropage's format.

    last.ckpt/latest       `state`, or `weights` of a checkpoint with weights only
    last.ckpt/state/...    model, optimizers, and what Lightning wants to keep besides

Model and optimizers are written by each rank's slices. All the rest of Lightning's dictionary (loops, callbacks,
schedulers, hyper-parameters, what hooks have added) goes along as one value, so a checkpoint is published as a whole.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zeropage.checkpoint import LoadResult
from zeropage.engine import Engine
from zeropage.errors import CheckpointError

__all__ = ["load", "save"]

_ALL, _WEIGHTS = "state", "weights"
_REST = "lightning"


def save(engine: Engine, path: Path, checkpoint: Mapping[str, Any], left_out: list[str]) -> None:
    """Write `checkpoint`, whose tensors of model and optimizers are those of `engine` (all ranks together)."""
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    engine.save(
        path,
        tag=_WEIGHTS if engine.optimizer is None else _ALL,
        client_state={_REST: torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)},
        keep=1,
        leave_out=left_out,
    )


def load(engine: Engine, path: Path, *, weights: bool, strict: bool, safe: bool | None) -> dict[str, Any]:
    """Read model and optimizers into `engine` (only the model, if `weights`); returns the rest of the dictionary.

    Raises:
        CheckpointError: see `Engine.load`; or the optimizers are wanted and only weights were saved.
    """
    pointer = path / "latest"
    if not weights and pointer.exists() and pointer.read_text().strip() == _WEIGHTS:
        raise CheckpointError(
            f"{path} holds weights only (save_weights_only=True), so training cannot go on from it. Save whole "
            "checkpoints; or load the weights before fit: trainer.validate(model, ckpt_path=...)"
        )
    found: LoadResult = engine.load(path, weights_only=weights, strict=strict)
    if _REST not in found.client_state:
        raise CheckpointError(f"{path} was not written by Lightning: load it with zp.Engine(model).load() instead")
    rest: dict[str, Any] = torch.load(
        io.BytesIO(found.client_state[_REST].numpy().tobytes()), map_location="cpu", weights_only=safe
    )
    return rest
