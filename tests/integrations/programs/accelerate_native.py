"""`zeropage.accelerate.Accelerator` in the loop of Accelerate's documentation.

    accelerate_native.py FOLDER PRECISION [STATE]

Trains four steps of two micro-batches, saving after the second; with STATE it goes on from there.
"""

import sys
from pathlib import Path

import torch
from parts import tell
from torch import nn
from torch.utils.data import DataLoader

import zeropage as zp
from zeropage.accelerate import Accelerator

folder, precision = Path(sys.argv[1]), sys.argv[2]
settings = {} if precision == "none" else {"precision": precision}
accelerator = Accelerator(gradient_accumulation_steps=2, zeropage_config=settings)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 17), nn.LayerNorm(17), nn.Tanh(), nn.Linear(17, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * accelerator.num_processes)
data = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
loader = DataLoader(data, batch_size=6 // accelerator.num_processes)
optimizer, model, loader, scheduler = accelerator.prepare(optimizer, model, loader, scheduler)  # in any order
first = 0
if len(sys.argv) > 3:
    accelerator.load_state(sys.argv[3])
    first = 4

seen = {"losses": [], "norms": [], "rates": []}
for number, batch in enumerate(loader):
    if number < first:
        continue
    with accelerator.accumulate(model):
        loss = model(batch.to(next(model.parameters()).dtype)).float().square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            seen["norms"].append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    seen["losses"].append(accelerator.gather(loss.detach()).mean().item())
    seen["rates"].append(scheduler.get_last_lr()[0])
    if number == 3:
        accelerator.save_state(str(folder / "state"))

try:
    plain = accelerator.prepare(torch.optim.SGD([zp.full(p).requires_grad_() for p in model.parameters()], lr=1.0))
    plain.step()
    accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0)
    seen["part"] = ""
except zp.errors.ConfigError as error:
    seen["part"] = str(error)
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save(state, folder / "end.pt")
seen["wrapped"] = type(model).__name__
seen["frames"] = accelerator.engines[0].memory().frames
accelerator.free_memory()
tell(folder, **seen)
