"""Small Hugging Face models from configs: how to build each, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.models import generator

__all__ = ["ZOO", "HFLoss", "Kind"]

VOCABULARY = 61


def _tokens(g: torch.Generator, batch: int = 2, length: int = 10) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=g)


def _causal(g: torch.Generator) -> dict[str, Tensor]:
    tokens = _tokens(g)
    return {"input_ids": tokens, "labels": tokens}


def _seq2seq(g: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(g), "labels": _tokens(g, length=6)}


def _image(g: torch.Generator, size: int = 32) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(2, 3, size, size, generator=g),
        "labels": torch.randint(0, 3, (2,), generator=g),
    }


def _clip(g: torch.Generator) -> dict[str, Any]:
    return {
        "input_ids": _tokens(g), "pixel_values": torch.randn(2, 3, 32, 32, generator=g), "return_loss": True,
    }  # fmt: skip


def _whisper(g: torch.Generator) -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 40, generator=g), "labels": _tokens(g, length=6)}


def _audio(g: torch.Generator) -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(2, 800, generator=g), "labels": torch.randint(0, 3, (2,), generator=g),
    }  # fmt: skip


def _depth(g: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 3, 32, 32, generator=g), "labels": torch.rand(1, 32, 32, generator=g) + 0.1}


_TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = _TEXT | {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
_ENCODER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Kind:
    """An architecture: the names of its classes in transformers, its config, and what it can do."""

    model: str
    config: str
    settings: dict[str, Any] = field(hash=False)
    batch: Callable[[torch.Generator], dict[str, Any]] = _causal
    eager: bool = True  # whether it attends otherwise by default (sdpa), so that "eager" is another way
    checkpoints: tuple[bool, ...] = (True, False)  # the values of use_reentrant that plain torch can do
    generates: bool = False

    def build(self, attention: str | None = None, reentrant: bool | None = None) -> nn.Module:
        """The model in training mode, without dropout where the config has it."""
        import transformers

        config = getattr(transformers, self.config)(**self.settings)
        if attention is not None:
            config._attn_implementation = attention
        model = getattr(transformers, self.model)(config)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if reentrant is not None:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        return model.train()

    def batches(self, step: int, micro: int, rank: int) -> dict[str, Any]:
        return self.batch(generator(step, micro, rank))


class HFLoss:
    """The loss that the model itself computes, under bf16 autocast if asked."""

    def __init__(self, *, autocast: bool = False) -> None:
        self.autocast = autocast

    def __call__(self, model: Any, batch: dict[str, Any]) -> Tensor:
        torch.manual_seed(3)  # layer drop and masks draw alike on both sides
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return model(**batch).loss


ZOO: dict[str, Kind] = {
    "llama": Kind("LlamaForCausalLM", "LlamaConfig", _DECODER, generates=True),
    "gpt2": Kind(
        "GPT2LMHeadModel", "GPT2Config",
        _TEXT | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}, generates=True,
    ),
    "bert": Kind("BertForMaskedLM", "BertConfig", _TEXT | _ENCODER),
    "t5": Kind(
        "T5ForConditionalGeneration", "T5Config",
        _TEXT | {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
        _seq2seq, eager=False, generates=True,
    ),
    "vit": Kind(
        "ViTForImageClassification", "ViTConfig", _ENCODER | {"image_size": 32, "patch_size": 8, "num_labels": 3},
        _image,
    ),
    "clip": Kind(
        "CLIPModel", "CLIPConfig",
        {"text_config": _TEXT | _ENCODER | {"max_position_embeddings": 16},
         "vision_config": _ENCODER | {"image_size": 32, "patch_size": 8}, "projection_dim": 8}, _clip,
    ),
    "whisper": Kind(
        "WhisperForConditionalGeneration", "WhisperConfig",
        _TEXT | {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8,
                 "max_source_positions": 20, "max_target_positions": 16, "decoder_start_token_id": 1}, _whisper,
    ),
    "mixtral": Kind(
        "MixtralForCausalLM", "MixtralConfig", _DECODER | {"num_local_experts": 3, "num_experts_per_tok": 2}
    ),
    "qwen3-moe": Kind(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        _DECODER | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
    ),
    "gpt-oss": Kind(
        "GptOssForCausalLM", "GptOssConfig",
        _DECODER | {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4}, eager=False,
    ),
    "mamba": Kind(
        "MambaForCausalLM", "MambaConfig",
        _TEXT | {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "conv_kernel": 3}, eager=False,
    ),
    "deberta-v2": Kind(
        "DebertaV2ForMaskedLM", "DebertaV2Config",
        _TEXT | _ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
        eager=False, checkpoints=(False,),
    ),
    "wav2vec2": Kind(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config",
        _ENCODER | {"vocab_size": 20, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2),
                    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
                    "num_labels": 3, "classifier_proj_size": 8, "layerdrop": 0.0, "mask_time_prob": 0.0}, _audio,
    ),
    "glpn": Kind(
        "GLPNForDepthEstimation", "GLPNConfig",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3],
         "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8,
         "drop_path_rate": 0.0}, _depth, eager=False, checkpoints=(),
    ),
    "gemma-2": Kind(
        "Gemma2ForCausalLM", "Gemma2Config",
        _DECODER | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
        eager=False,
    ),
    "swinv2": Kind(
        "Swinv2ForImageClassification", "Swinv2Config",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4,
         "num_labels": 3, "drop_path_rate": 0.0}, _image, eager=False, checkpoints=(False,),
    ),
    "convnext": Kind(
        "ConvNextForImageClassification", "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3, "image_size": 32}, _image,
        eager=False, checkpoints=(),
    ),
    "resnet": Kind(
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3},
        _image,
        eager=False, checkpoints=(),
    ),
}  # fmt: skip
