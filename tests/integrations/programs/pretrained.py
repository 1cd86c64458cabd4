"""The third report: `HfDeepSpeedConfig`, `from_pretrained(ignore_mismatched_sizes=True)`, LoRA, `deepspeed.initialize`.

    pretrained.py FOLDER CASE...

Each case is a folder with a checkpoint in FOLDER; `wanted.json` there is the configuration of the model to make.
"""

import json
import mmap
import sys
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

import deepspeed
import torch
from parts import tell, tokens
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForSequenceClassification
from transformers.integrations import HfDeepSpeedConfig

folder = Path(sys.argv[1])
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "gradient_clipping": 1.0,
}


def full(parameter):
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def peak_of(profiler):
    """Most bytes allocated at once, mappings of files and of shared memory aside: of those, only what is touched costs.

    Mappings begin where a page of memory begins.
    """
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    events = []
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == "[memory]" and event.extra_fields.ptr % mmap.PAGESIZE:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    return max(accumulate(nbytes for _, nbytes in sorted(events, key=itemgetter(0))))


seen = {}
for name in sys.argv[2:]:
    dschf = HfDeepSpeedConfig(CONFIG)
    wanted = LlamaConfig(**json.loads((folder / name / "wanted.json").read_text()))
    torch.manual_seed(11)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, info = LlamaForSequenceClassification.from_pretrained(
            folder / name, config=wanted, ignore_mismatched_sizes=True, output_loading_info=True
        )
    peak = peak_of(profiler)
    found = {key: full(parameter) for key, parameter in model.named_parameters()}
    torch.save(found, folder / f"{name}-{deepspeed.comm.get_rank()}.pt")
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS"))
    engine, *_ = deepspeed.initialize(model=peft, config=CONFIG, model_parameters=peft.parameters())
    trainable = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    before = [full(parameter) for parameter in trainable]
    losses = []
    for step in range(3):
        rows = tokens(4, seed=step)[2 * deepspeed.comm.get_rank() :][:2]
        ids = torch.stack([row["input_ids"] for row in rows]).to(engine.device)
        loss = engine(input_ids=ids, labels=ids[:, 0] % 3).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    seen[name] = {
        "info": {key: sorted(str(each) for each in value) for key, value in info.items()},
        "peak": peak,
        "sharded": all(hasattr(parameter, "ds_id") for parameter in model.parameters()),
        "losses": losses,
        "trained": sum(not torch.equal(full(p), old) for p, old in zip(trainable, before, strict=True)),
        "trainable": len(trainable),
        "frozen kept": all(
            torch.equal(full(p), found[key.replace("base_model.model.", "").replace("base_layer.", "")])
            for key, p in peft.named_parameters() if "lora" not in key and "modules_to_save" not in key
            and "original_module" not in key
        ),
        "devices": sorted({parameter.device.type for parameter in peft.parameters()}),
        "buffer": str(model.model.rotary_emb.inv_freq.dtype),
    }  # fmt: skip
    engine.destroy()
    del engine, peft, model
tell(folder, **seen)
