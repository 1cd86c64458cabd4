"""Two models, each with an Accelerator and an engine of its own, trained in turn: the second one through the first.

    two_engines.py FOLDER MODE

MODE `uneven` ends with an epoch in which rank 0 has one batch more than the others, and a checkpoint.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from parts import tell
from torch import nn
from torch.utils.data import DataLoader

folder, mode = Path(sys.argv[1]), sys.argv[2]


def config(clipping):
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    }


def build(seed, wide):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, wide), nn.Tanh(), nn.Linear(wide, 5))


plugins = {
    "maker": DeepSpeedPlugin(hf_ds_config=config(0.0)),
    "judge": DeepSpeedPlugin(hf_ds_config=config(0.1)),
}
first = Accelerator(deepspeed_plugins=plugins)
second = Accelerator()
data = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
loader = DataLoader(data, batch_size=3)
maker = build(0, 17)
maker_optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)
maker, maker_optimizer, loader = first.prepare(maker, maker_optimizer, loader)
second.state.select_deepspeed_plugin("judge")
judge = build(1, 9)
judge_optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
judge, judge_optimizer = second.prepare(judge, judge_optimizer)

losses = []
for batch in loader:
    made = maker(batch)
    verdict = judge(made.detach()).square().mean()
    second.backward(verdict)
    judge_optimizer.step()
    judge_optimizer.zero_grad()
    loss = judge(made).square().mean() + (made - batch).square().mean()
    first.backward(loss)
    maker_optimizer.step()
    maker_optimizer.zero_grad()
    losses.append([verdict.item(), loss.item()])
states = {"maker": first.get_state_dict(maker), "judge": second.get_state_dict(judge)}
if first.is_main_process:
    torch.save(states, folder / "states.pt")

evaluated = []
with torch.no_grad():  # ranks may evaluate different numbers of batches
    for index in range(3 if first.is_main_process else 1):
        evaluated.append(maker(data[index : index + 3]).sum().item())
first.wait_for_everyone()
tell(folder, losses=losses, evaluated=evaluated)

if mode == "uneven":
    for batch in data.split(3)[: 3 if first.is_main_process else 2]:
        first.backward(maker(batch).square().mean())
        maker_optimizer.step()
    first.save_state(str(folder / "end"))
