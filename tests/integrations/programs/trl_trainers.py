"""Trainers of TRL, one after the other, each with its logs and the model that it saves.

    trl_trainers.py FOLDER CONFIG TRAINER [TRAINER ...]

CONFIG is a DeepSpeed configuration, or `-` for plain training in this process. The batch of a step is the same.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import load_dataset
from parts import tell
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import unwrap_model_for_generation

folder, config, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
plain = config == "-"
ranks = int(os.environ.get("WORLD_SIZE", "1"))
torch.set_num_threads(1)

# -- a model, its tokenizer and data, all on disk

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>"] + [f"w{i}" for i in range(40)]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

by_words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
by_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=by_words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
)


def sentence(start, count):
    return " ".join(f"w{(7 * start + 3 * j * (start + 1)) % 40}" for j in range(count))


def rows(kind, i):
    prompt = sentence(i, 3 + i % 3)
    return {
        "text": {"text": sentence(i, 5 + i % 6)},
        "prompts": {"prompt": prompt},
        "pairs": {
            "prompt": prompt,
            "chosen": " " + sentence(i + 1, 4 + i % 4),
            "rejected": " " + sentence(i + 5, 3 + i % 5),
        },
        "labelled": {"prompt": prompt, "completion": " " + sentence(i + 1, 4 + i % 4), "label": i % 3 != 0},
    }[kind]


def data(kind):
    return load_dataset("json", data_files=str(folder / f"{kind}.json"), split="train", cache_dir=str(folder / "cache"))


if os.environ.get("RANK", "0") == "0":
    for kind in ("text", "prompts", "pairs", "labelled"):
        (folder / f"{kind}.json").write_text("\n".join(json.dumps(rows(kind, i)) for i in range(16)))
    set_seed(1)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **SIZES, **special))
    made.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "ready").touch()
while not (folder / "ready").exists():
    pass
base = str(folder / "base")


# -- trainers


def settings(name, **changes):
    return {
        "output_dir": str(folder / name),
        "per_device_train_batch_size": 4 // ranks,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "bf16": False,
        "seed": 3,
        "deepspeed": None if plain else config,
        **changes,
    }


def lora(**changes):
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **changes)


def sft(name, model=base, args=None, **options):
    given = SFTConfig(**settings(name, max_length=16, **(args or {})))
    return SFTTrainer(model, given, train_dataset=data("text"), processing_class=tokenizer, **options)


def dpo(name, args=None, **options):
    given = DPOConfig(**settings(name, max_length=16, **(args or {})))
    return DPOTrainer(base, args=given, train_dataset=data("pairs"), processing_class=tokenizer, **options)


class Nudge(LogitsProcessor):
    """Makes greedy decoding differ between the samples of one prompt, and end at different lengths."""

    def __call__(self, input_ids, scores):
        row = torch.arange(len(scores)).unsqueeze(1) % 2
        return scores + 2 * torch.sin((input_ids.sum(1, keepdim=True) + row + 1) * torch.arange(scores.shape[1]))


class Sampled(LlamaForCausalLM):
    """Samples in a way that does not depend on a generator's state: the plain run draws the same."""

    def generate(self, *inputs, **options):
        return super().generate(*inputs, **options, logits_processor=LogitsProcessorList([Nudge()]))


def reward(completions, **columns):
    return [float(len(text.split()) - text.count("w1")) for text in completions]


ONLINE = {"num_generations": 2, "max_completion_length": 8, "generation_kwargs": {"do_sample": False}}


def grpo(name, args=None, **options):
    given = GRPOConfig(**settings(name, **ONLINE, **(args or {})))
    model = Sampled.from_pretrained(base)
    return GRPOTrainer(model, reward, args=given, train_dataset=data("prompts"), processing_class=tokenizer, **options)


def rloo(name):
    given = RLOOConfig(**settings(name, **ONLINE, beta=0.05))
    model = Sampled.from_pretrained(base)
    return RLOOTrainer(model, reward, args=given, train_dataset=data("prompts"), processing_class=tokenizer)


def kto(name):
    # the usual loss looks at pairs within the batch of a rank, so that it depends on how many ranks there are
    given = KTOConfig(**settings(name, max_length=16, loss_type="apo_zero_unpaired"))
    return KTOTrainer(base, args=given, train_dataset=data("labelled"), processing_class=tokenizer)


def rewarding(name):
    given = RewardConfig(**settings(name, max_length=16))
    return RewardTrainer(base, args=given, train_dataset=data("pairs"), processing_class=tokenizer)


TRAINERS = {
    "sft": sft,
    "sft-lora": lambda name: sft(name, peft_config=lora()),
    "sft-lora-head": lambda name: sft(name, peft_config=lora(modules_to_save=["lm_head"])),
    "dpo": dpo,
    "dpo-reference": lambda name: dpo(name, ref_model=AutoModelForCausalLM.from_pretrained(base)),
    "dpo-precomputed": lambda name: dpo(name, {"precompute_ref_log_probs": True}),
    "dpo-following": lambda name: dpo(name, {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    "dpo-lora": lambda name: dpo(name, peft_config=lora()),
    "dpo-lora-precomputed": lambda name: dpo(name, {"precompute_ref_log_probs": True}, peft_config=lora()),
    "grpo": lambda name: grpo(name, {"beta": 0.04}),
    "grpo-lora": lambda name: grpo(name, {"beta": 0.04}, peft_config=lora()),
    "grpo-ungathered": lambda name: grpo(name, {"ds3_gather_for_generation": False, "beta": 0.04}),
    "rloo": rloo,
    "kto": kto,
    "reward": rewarding,
}


def generated(trainer):
    """What an unwrapped model says after training. Each rank stops at a length of its own, and nobody waits for it."""
    given = tokenizer([sentence(3, 4)], return_tensors="pt")
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model, torch.no_grad():
        model.eval()
        said = model.generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            max_new_tokens=7 - 3 * int(os.environ.get("RANK", "0")),
            do_sample=False,
            synced_gpus=False,
        )
    return said[0].tolist()


def hand_over(trainer, file):
    """The walk over full, merged weights by which TRL fills an inference engine (vLLM)."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    backend = DistributedBackend(trainer.accelerator)
    engine = SimpleNamespace(model=model, _dist=backend, _fix_param_name_to_vllm=fixed_name)
    received = {}
    for name, parameter in VLLMGeneration._iter_named_params(engine):
        received[name] = torch.empty(parameter.shape, dtype=parameter.dtype).copy_(parameter)
    save_file(received, file)


def fixed_name(name, extra_prefixes=()):
    for prefix in extra_prefixes:
        name = name.replace(prefix, "")
    return name


seen = {}
for name in names:
    trainer = TRAINERS[name](name)
    trainer.train()
    seen[name] = {"logs": trainer.state.log_history, "generated": [] if name == "reward" else generated(trainer)}
    trainer.save_model(str(folder / name / "model"))
    hand_over(trainer, folder / name / f"handed{os.environ.get('RANK', '0')}.safetensors")
tell(folder, **seen)
