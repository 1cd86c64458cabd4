"""A GLPN encoder with CLIP's attention pooling, trained by `Trainer` in fp16 with everything offloaded.

    depth.py FOLDER CONFIG RUN BATCH [CHECKPOINT]

`RUN` names the run's folder; with CHECKPOINT training goes on from there. Sample 26 holds an infinite value.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from parts import arguments, tell
from torch import nn
from torch.nn import functional as F
from transformers import GLPNConfig, GLPNModel, Trainer, TrainerCallback, set_seed
from transformers.models.glpn.modeling_glpn import GLPNPreTrainedModel

folder, config, name, batch = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
checkpoint = sys.argv[5] if len(sys.argv) > 5 else None


class AttentionPool(nn.Module):
    """As in CLIP: the weights of four Linear modules go straight into one function."""

    def __init__(self, places, width, heads, output):
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.randn(places + 1, width) / width**0.5)
        self.k_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.c_proj = nn.Linear(width, output)
        self.num_heads = heads

    def forward(self, x):
        x = x.flatten(start_dim=2).permute(2, 0, 1)  # NCHW -> (HW)NC
        x = torch.cat([x.mean(dim=0, keepdim=True), x], dim=0)
        x = x + self.positional_embedding[:, None, :].to(x.dtype)
        x, _ = F.multi_head_attention_forward(
            query=x[:1],
            key=x,
            value=x,
            embed_dim_to_check=x.shape[-1],
            num_heads=self.num_heads,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
            in_proj_weight=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0,
            out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True,
            training=self.training,
            need_weights=False,
        )
        return x.squeeze(0)


class Depth(GLPNPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.glpn = GLPNModel(config)
        self.pool = AttentionPool(4, config.hidden_sizes[-1], 2, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("mean_depth", torch.tensor(0.123456789, dtype=torch.float64))
        self.post_init()

    def forward(self, pixel_values, labels=None):
        features = self.glpn(pixel_values).last_hidden_state
        depth = self.head(self.pool(features)).squeeze(-1) + self.mean_depth.to(features.dtype)
        return {"loss": F.mse_loss(depth.float(), labels.float()), "depth": depth}


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 36

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 32, 32, generator=generator)
        if index == 26:
            image[0, 0, 0] = torch.inf
        return {"pixel_values": image, "labels": image[:, :8].clamp(-1, 1).mean()}


class SaveBeforeTheFirstStep(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        trainer.deepspeed.save_checkpoint(str(folder / name / "begin"))
        beginning.update(values())


class WatchScale(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        scales.append(trainer.deepspeed.optimizer.loss_scale)


def values():
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return {key: parameter.detach().clone() for key, parameter in model.named_parameters()}


scales, beginning = [], {}
set_seed(3)
training_args = arguments(
    folder / name,
    deepspeed=config,
    fp16=True,
    max_steps=6,
    per_device_train_batch_size=batch,
    save_strategy="steps",
    save_steps=3,
    train_sampling_strategy="sequential",
    warmup_steps=2,
    max_grad_norm=0.5,
)
model = Depth(
    GLPNConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[4, 4],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        drop_path_rate=0.0,
    )
)
trainer = Trainer(
    model=model, args=training_args, train_dataset=Images(), callbacks=[SaveBeforeTheFirstStep(), WatchScale()]
)
trainer.train(resume_from_checkpoint=checkpoint)
trainer.save_model(str(folder / name / "end"))
end = values()
skipped = trainer.deepspeed.skipped_steps
trainer.deepspeed.load_checkpoint(str(folder / name / "begin"))
entries = [entry for entry in trainer.state.log_history if "loss" in entry]
tell(
    folder,
    losses=[entry["loss"] for entry in entries],
    rates=[entry["learning_rate"] for entry in entries],
    scales=scales,
    skipped=skipped,
    dtypes=sorted({str(parameter.dtype) for parameter in model.parameters()}),
    buffer=[str(model.mean_depth.dtype), float(model.mean_depth)],
    trained=all(not torch.equal(end[key], beginning[key]) for key in end if "k_proj.bias" not in key),
    back=all(torch.equal(value, beginning[key]) for key, value in values().items()),
)
