"""What the programs and their plain counterparts share: a tiny model, data, and the arguments of a Trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def llama(**changes: Any) -> LlamaForCausalLM:
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))


def tokens(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Samples of 9 tokens."""
    drawn = torch.randint(1, SIZES["vocab_size"], (count, 9), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in drawn]


def arguments(folder: str | Path, **changes: Any) -> TrainingArguments:
    settings = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 5,
    }
    return TrainingArguments(str(folder), **{**settings, **changes})


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def tell(folder: str | Path, **facts: Any) -> None:
    """Leave what this rank has seen where the test looks."""
    Path(folder, f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(facts))
