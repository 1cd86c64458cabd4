"""Methods of PEFT under `HfDeepSpeedConfig` and `deepspeed.initialize`, on a base from `from_pretrained`.

    peft_with_deepspeed.py FOLDER WHEN METHOD [METHOD ...]

WHEN: the adapter is attached "before" `deepspeed.initialize`, or "after" an engine ran the base alone.
"""

import os
import sys
from pathlib import Path

import deepspeed
import peft
from parts import tell
from peft_parts import MERGED, STEPS, allocate, attach, logits, loss, optimizer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

folder, when, methods = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
rank = int(os.environ["RANK"])
config = {
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "zero_allow_untested_optimizer": True,
}
deepspeed.init_distributed()
alive = HfDeepSpeedConfig(config)  # from_pretrained shards while it loads


def pretrained(method):
    return AutoModelForCausalLM.from_pretrained(folder / f"base {method}")


seen = {}
for method in methods:
    if when == "after":
        engine, *_ = deepspeed.initialize(model=pretrained(method), config=config)
        seen[f"{method} base"] = logits(engine).sum().item()
        model = attach(engine.module, method)
    else:
        model = attach(pretrained(method), method)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
    losses = []
    for step in range(STEPS):
        each = loss(engine, step, rank)
        losses.append(each.item())
        engine.backward(each)
        allocate(model, method, step)
        engine.step()
    out = {"trained": logits(model)}
    with model.disable_adapter():
        out["without"] = logits(model)
    model.save_pretrained(folder / when / method, is_main_process=rank == 0)
    deepspeed.comm.barrier()
    out["loaded"] = logits(peft.PeftModel.from_pretrained(pretrained(method), folder / when / method))
    if method in MERGED:
        model.merge_adapter()
        out["merged"] = logits(model)
        model.unmerge_adapter()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            model = model.merge_and_unload()
        out["unloaded"] = logits(model)
        model.save_pretrained(folder / when / f"{method} whole", is_main_process=rank == 0)
    save_file(out, folder / when / f"{method} {rank}.safetensors")
    seen[method] = losses
    engine.destroy()
tell(folder, **seen)
