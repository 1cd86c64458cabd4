"""`Trainer` with a DeepSpeed configuration: everything that it does in the life of a model."""

import gc
import json
import sys
from pathlib import Path

from parts import arguments, llama, losses, tell, tokens
from transformers import Trainer

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


# evaluate first, with a Trainer of its own
before = trainer("before")
seen["before"] = before.evaluate()["eval_loss"]

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
