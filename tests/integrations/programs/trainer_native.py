"""`zeropage.transformers.Trainer`: no DeepSpeed configuration. The only program here that names zeropage.

trainer_native.py FOLDER
"""

import sys
from pathlib import Path

import torch
from parts import arguments, llama, losses, tell, tokens
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import zeropage as zp
from zeropage.transformers import Trainer

folder = Path(sys.argv[1])
seen = {}


def trainer(name, model=None, zeropage_config=None, **changes):
    return Trainer(
        model=llama() if model is None else model,
        args=arguments(folder / name, use_cpu=True, **changes),
        train_dataset=tokens(24),
        eval_dataset=tokens(10, seed=1),
        zeropage_config=zeropage_config,
    )


# evaluate first, then train with accumulation and clipping, evaluate, predict, save
one = trainer("one", gradient_accumulation_steps=4, max_grad_norm=0.3)
seen["before"] = one.evaluate()["eval_loss"]
one.train()
seen["accumulated"] = losses(one)
seen["norms"] = [entry["grad_norm"] for entry in one.state.log_history if "grad_norm" in entry]
seen["after"] = one.evaluate()["eval_loss"]
predicted = one.predict(tokens(7, seed=2)).predictions
seen["predicted"] = predicted.shape
seen["predicted sum"] = float(predicted.astype("float64").sum())
one.save_model(str(folder / "model"))
seen["sharded"] = all(zp.is_paged(parameter) for parameter in one.model.parameters())
seen["wrapped"] = one.model_wrapped is not one.model

# a model that was never whole, through zp.init; activation checkpointing
set_seed(0)
with zp.init():
    model = LlamaForCausalLM(LlamaConfig(**llama().config.to_diff_dict()))
model.load_state_dict(llama().state_dict())
each = trainer("init", model, gradient_checkpointing=True)
each.train()
seen["init"] = losses(each)

# checkpoints, and on from the middle
whole = trainer("whole", llama(attention_dropout=0.1), save_strategy="steps", save_steps=2, max_steps=5, warmup_steps=2)
whole.train()
seen["whole"] = losses(whole)
whole.save_model(str(folder / "whole/end"))
resumed = trainer("whole", llama(attention_dropout=0.1), max_steps=5, warmup_steps=2)
resumed.train(resume_from_checkpoint=str(folder / "whole/checkpoint-2"))
seen["resumed"] = losses(resumed)[-3:]
resumed.save_model(str(folder / "resumed"))

# the same over messages, as between hosts
far = trainer("far", zeropage_config={"transport": "collective"}, save_strategy="steps", save_steps=2, max_steps=5)
far.train()
seen["far"] = losses(far)
seen["far evaluated"] = far.evaluate()["eval_loss"]
nearer = trainer("far", zeropage_config={"transport": "collective"}, max_steps=5)
nearer.train(resume_from_checkpoint=str(folder / "far/checkpoint-2"))
seen["far resumed"] = losses(nearer)[-3:]
nearer.save_model(str(folder / "far/end"))

# on from a checkpoint of the ordinary Trainer
other = trainer("other", max_steps=5)
other.train(resume_from_checkpoint=str(folder / "plain/checkpoint-2"))
seen["from a plain one"] = losses(other)[-3:]

# LoRA on a base that was never whole, and the adapter that is saved
set_seed(0)
with zp.init():
    base = LlamaForCausalLM.from_pretrained(folder / "model")
lora = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))
tuned = trainer("lora", lora, save_strategy="steps", save_steps=4)
frozen = {name: zp.full(p) for name, p in lora.named_parameters() if not p.requires_grad}
tuned.train()
seen["lora"] = losses(tuned)
seen["frozen kept"] = all(torch.equal(zp.full(p), frozen[n]) for n, p in lora.named_parameters() if n in frozen)
tuned.save_model(str(folder / "adapter"))
seen["lora after"] = tuned.evaluate()["eval_loss"]

# 16 bits with masters in fp32
for precision in ("bf16", "fp16"):
    half = trainer(precision, zeropage_config={"precision": precision})
    half.train()
    seen[precision] = losses(half)
    seen[precision + " dtypes"] = sorted({str(p.dtype) for p in half.model.parameters()})
    buffer = half.model.model.rotary_emb.inv_freq
    seen[precision + " buffer"] = [str(buffer.dtype), buffer.tolist()]

# the best of them at the end
best = trainer(
    "best", save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
    learning_rate=0.5, max_steps=2, lr_scheduler_type="constant", save_total_limit=2,
)  # fmt: skip
best.train()
seen["best"] = best.state.best_metric
seen["of each step"] = [entry["eval_loss"] for entry in best.state.log_history if "eval_loss" in entry]
seen["evaluated at the end"] = best.evaluate()["eval_loss"]

tell(folder, **seen)
