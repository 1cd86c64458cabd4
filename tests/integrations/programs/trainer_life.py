"""`Trainer` with a DeepSpeed configuration: everything that it does in the life of a model."""

import gc
import json
import sys
from pathlib import Path

import deepspeed
import torch
from parts import arguments, llama, losses, tell, tokens
from transformers import LlamaForCausalLM, Trainer

folder = Path(sys.argv[1])
DS = json.loads(Path(sys.argv[2]).read_text()) | {"bf16": {"enabled": "auto"}}

seen = {}


def trainer(name, model=None, **changes):
    made = Trainer(
        model=llama() if model is None else model,
        args=arguments(folder / name, deepspeed=json.loads(json.dumps(DS)), **changes),
        train_dataset=tokens(24),
        eval_dataset=tokens(10, seed=1),
    )
    gc.collect()
    return made


def full(parameter):
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


# evaluate first; the Trainer would go on with the engine of the evaluation, which it has destroyed
before = trainer("before")
seen["before"] = before.evaluate()["eval_loss"]
try:
    before.train()
except Exception as error:
    seen["said"] = str(error)
after = trainer("after", before.model)
after.train()
seen["after evaluation"] = losses(after)
seen["configured optimizer"] = ["optimizer" in each.deepspeed.config for each in (before, after)]

# train with accumulation, evaluate, predict, save
one = trainer("one", gradient_accumulation_steps=4)
one.train()
seen["accumulated"] = losses(one)
seen["norms"] = [entry["grad_norm"] for entry in one.state.log_history if "grad_norm" in entry]
seen["after"] = one.evaluate()["eval_loss"]
predicted = one.predict(tokens(7, seed=2))
seen["predicted"] = predicted.predictions.shape
seen["predicted sum"] = float(predicted.predictions.astype("float64").sum())
one.save_model(str(folder / "model"))

# activation checkpointing, both kinds
for reentrant in (True, False):
    each = trainer(
        f"checkpointing {reentrant}",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    each.train()
    seen[f"reentrant {reentrant}"] = losses(each)

# checkpoints, and on from the middle
whole = trainer("whole", save_strategy="steps", save_steps=2, max_steps=5, warmup_steps=2)
whole.train()
seen["whole"] = losses(whole)
whole.save_model(str(folder / "whole/end"))
resumed = trainer("whole", max_steps=5, warmup_steps=2)
resumed.train(resume_from_checkpoint=str(folder / "whole/checkpoint-2"))
seen["resumed"] = losses(resumed)[-3:]
resumed.save_model(str(folder / "resumed"))

# a larger vocabulary for a model that was never whole
resizing = arguments(folder / "resized", deepspeed=json.loads(json.dumps(DS)))
grown = LlamaForCausalLM.from_pretrained(folder / "model")
old = {name: full(p) for name, p in grown.named_parameters()}
grown.resize_token_embeddings(37)
seen["rows"] = [list(grown.get_input_embeddings().weight.shape), grown.config.vocab_size]
seen["all sharded"] = all(hasattr(parameter, "ds_id") for parameter in grown.parameters())
new = {name: full(p) for name, p in grown.named_parameters()}
seen["old rows kept"] = all(torch.equal(new[name][: len(value)], value) for name, value in old.items())
seen["new rows"] = [new[name][31:].tolist() for name in ("model.embed_tokens.weight", "lm_head.weight")]
wider = [{key: value + 6 for key, value in row.items()} for row in tokens(24)]
larger = Trainer(model=grown, args=resizing, train_dataset=wider)
larger.train()
larger.save_model(str(folder / "resized/end"))
seen["new rows trained"] = not torch.equal(full(grown.lm_head.weight)[31:], new["lm_head.weight"][31:])

# bf16: parameters are cast, buffers are not
half = trainer("half", bf16=True, use_cpu=True)
half.train()
seen["bf16"] = losses(half)
seen["dtypes"] = sorted({str(p.dtype) for p in half.model.parameters()})
seen["buffer"] = half.model.model.rotary_emb.inv_freq.tolist()
seen["buffer dtype"] = str(half.model.model.rotary_emb.inv_freq.dtype)

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
