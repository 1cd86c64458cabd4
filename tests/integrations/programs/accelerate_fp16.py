"""`zeropage.accelerate.Accelerator` in fp16: the norm is clipped, and all ranks skip a step that overflows on one.

accelerate_fp16.py FOLDER
"""

import sys
from pathlib import Path

import torch
from parts import tell
from torch import nn

import zeropage as zp
from zeropage.accelerate import Accelerator

OVERFLOWS = 1

folder = Path(sys.argv[1])
scale = {"initial": 256.0, "hysteresis": 1}
accelerator = Accelerator(zeropage_config={"precision": "fp16", "loss_scale": scale})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # which shows by how much the gradient was scaled
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, accelerator.num_processes, gamma=0.5)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
batches = torch.randn(24, 5, generator=torch.Generator().manual_seed(1)).split(3)

seen = {"norms": [], "skipped": [], "scales": [], "rates": []}
for step in range(4):
    loss = model(batches[2 * step + accelerator.process_index].half()).float().square().mean()
    if step == OVERFLOWS and accelerator.process_index == 1:
        loss.register_hook(lambda gradient: gradient * float("inf"))
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    seen["norms"].append(norm.item() if norm.isfinite() else None)
    seen["skipped"].append(accelerator.optimizer_step_was_skipped)
    seen["scales"].append(accelerator.engines[0].loss_scale)
    seen["rates"].append(scheduler.get_last_lr()[0])
values = {name: zp.full(parameter).float() for name, parameter in model.named_parameters()}
if accelerator.is_main_process:
    torch.save(values, folder / "end.pt")
accelerator.free_memory()
tell(folder, **seen)
