"""A small model, the methods of PEFT that are tried on it, and its data: for the plain run and the sharded one."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

VOCABULARY = 41
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
TARGETS = ["q_proj", "down_proj"]

LORA = {"r": 3, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
METHODS: dict[str, peft.PeftConfig] = {
    "LoRA": peft.LoraConfig(target_modules=TARGETS, **LORA),
    "DoRA": peft.LoraConfig(target_modules=TARGETS, use_dora=True, **LORA),
    "PiSSA": peft.LoraConfig(target_modules=TARGETS, init_lora_weights="pissa", **LORA),
    "OLoRA": peft.LoraConfig(target_modules=TARGETS, init_lora_weights="olora", **LORA),
    "LoRA and whole modules": peft.LoraConfig(
        target_modules=["v_proj"], modules_to_save=["lm_head", "embed_tokens"], **LORA
    ),
    "LoRA of an embedding": peft.LoraConfig(target_modules=["q_proj", "embed_tokens"], **LORA),
    "trainable tokens": peft.LoraConfig(
        target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, 7, 11]}, **LORA
    ),
    "LoRA of experts": peft.LoraConfig(
        target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"], **LORA
    ),
    "AdaLoRA": peft.AdaLoraConfig(
        target_modules=TARGETS, init_r=4, target_r=2, tinit=0, tfinal=1, deltaT=1, total_step=3, task_type="CAUSAL_LM"
    ),
    "IA3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    "prompt tuning from words": peft.PromptTuningConfig(
        num_virtual_tokens=5, prompt_tuning_init="SAMPLE_VOCAB", task_type="CAUSAL_LM"
    ),
    "prefix tuning": peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}
MERGED = {name for name in METHODS if "prompt" not in name and "prefix" not in name}
STEPS = 3


def base(method: str) -> nn.Module:
    if method == "LoRA of experts":
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2))
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def attach(model: nn.Module, method: str) -> Any:
    torch.manual_seed(2)
    return peft.get_peft_model(model, METHODS[method])


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model: Any, step: int, rank: int) -> torch.Tensor:
    batch = tokens(step, rank)
    return model(input_ids=batch, labels=batch).loss


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found = model(input_ids=tokens(99, 0)).logits
    model.train()
    return found


def allocate(model: Any, method: str, step: int) -> None:
    """AdaLoRA chooses ranks anew from the gradients."""
    if method == "AdaLoRA":
        model.base_model.update_and_allocate(step)
