"""For `accelerate launch --use_deepspeed`: a raw loop with `Accelerator`, then a `Trainer`; neither names DeepSpeed."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from parts import arguments, llama, losses, tell, tokens
from torch.utils.data import DataLoader
from transformers import Trainer, get_linear_schedule_with_warmup

folder = Path(sys.argv[1])
seen = {}

# -- the loop of Accelerate's documentation

accelerator = Accelerator(gradient_accumulation_steps=2)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=20)
loader = DataLoader(tokens(20), batch_size=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def train(first=0):
    told = {"losses": [], "norms": [], "rates": [], "batches": 0}
    for number, batch in enumerate(loader):
        if number < first:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                told["norms"].append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        told["losses"].append(accelerator.gather(loss.detach()).tolist())
        told["rates"].append(scheduler.get_last_lr()[0])
        told["batches"] += 1
        if number == 1:
            accelerator.save_state(str(folder / "state"))
    return told


seen["loop"] = train()
state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(
    folder / "loop", is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
)
accelerator.load_state(str(folder / "state"))
seen["again"] = train(first=2)
model.eval()
with torch.no_grad():
    outputs = [accelerator.gather_for_metrics(model(**batch).logits.mean(dim=(1, 2))) for batch in loader]
seen["evaluated"] = torch.cat(outputs).tolist()
accelerator.free_memory()

# -- the Trainer

trainer = Trainer(
    model=llama(),
    args=arguments(folder / "trainer", gradient_accumulation_steps=2, max_grad_norm=0.5),
    train_dataset=tokens(24),
    eval_dataset=tokens(10, seed=1),
)
trainer.train()
seen["trainer"] = losses(trainer)
seen["engine"] = type(trainer.model_wrapped).__name__
seen["eval"] = trainer.evaluate()["eval_loss"]
trainer.save_model(str(folder / "trainer/end"))
tell(folder, **seen)
