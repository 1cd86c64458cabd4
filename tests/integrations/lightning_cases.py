"""What the tests of the Lightning strategy share: small modules, data, and one way to run a Trainer on each rank.

Rank r of two gets every second sample of a batch twice as large, so one process with that batch trains on the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import zeropage as zp
import zeropage.lightning  # registers the strategy

__all__ = [
    "QUIET", "Classifier", "Distillation", "Dropping", "Gan", "Numbers", "Outcome", "Recording", "full_state", "loader",
    "same_outcome", "train", "trainer_of",
]  # fmt: skip

# What Lightning advises (data loader workers, samplers, folders that exist), and what of torch it uses that is old.
QUIET = (
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:.*LeafSpec.*:",
    "ignore:.*exists and is not empty.*:",
    "ignore:The dirpath has changed from.*:",
    "ignore:.*multiple `ModelCheckpoint` callbacks.*:",
)


class Numbers(Dataset[Tensor]):
    """Sample i is always the same."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(7, generator=torch.Generator().manual_seed(index))


def loader(batch: int, ranks: int = 1) -> DataLoader[Tensor]:
    """In order: Lightning's own sampler would shuffle the training data of several ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    sampler = DistributedSampler(Numbers(), num_replicas=ranks, rank=rank, shuffle=False)
    return DataLoader(Numbers(), batch_size=batch // ranks, sampler=sampler)


class Recording(pl.LightningModule):
    """Keeps the losses of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def keep(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss


class Classifier(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3))

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).float().square().mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.keep(self.loss(batch))

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        half = self.dtype == torch.float16  # where the eps of Adam is nothing
        optimizer = (torch.optim.SGD if half else torch.optim.AdamW)(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Dropping(Classifier):
    """Random numbers in training: a resumed run has to go on with those of the interrupted one."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Dropout(0.5))


class Gan(Recording):
    """Manual optimization of two optimizers that take turns, one of them with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))
        self.critic = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: Tensor, index: int) -> None:
        made, judged = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(made)
        loss = self.keep(nn.functional.softplus(-self.critic(self.generator(batch))).mean())
        made.zero_grad()
        self.manual_backward(loss)
        made.step()
        self.untoggle_optimizer(made)

        self.toggle_optimizer(judged)
        fake = self.critic(self.generator(batch).detach())
        loss = self.keep(nn.functional.softplus(-self.critic(batch)).mean() + nn.functional.softplus(fake).mean())
        judged.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(judged, gradient_clip_val=0.05, gradient_clip_algorithm="value")
        judged.step()
        self.untoggle_optimizer(judged)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
            torch.optim.SGD(self.critic.parameters(), lr=1e-1, momentum=0.9),
        ]


class Distillation(Recording):
    """A frozen teacher in fp16 and a student that is trained: the first report."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3)).half().requires_grad_(False).eval()
        self.student = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))

    def loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch.half())
        return nn.functional.mse_loss(self.student(batch).float(), wanted.float())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.keep(self.loss(batch))

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


@dataclass
class Outcome:
    """What a run of a Trainer left."""

    losses: list[float]
    state: dict[str, Tensor]
    metrics: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


def same_outcome(expected: Outcome, got: Outcome, tolerance: float = 0.0) -> None:
    """Same names, dtypes, values and losses: to the bit, or within `tolerance`, absolute and relative."""
    assert expected.state.keys() == got.state.keys()
    for name, value in expected.state.items():
        assert got.state[name].dtype == value.dtype, name
        _close(value, got.state[name], tolerance, name)
    _close(torch.tensor(expected.losses), torch.tensor(got.losses), tolerance, "losses")


def _close(expected: Tensor, got: Tensor, tolerance: float, what: str) -> None:
    if tolerance == 0.0:
        assert torch.equal(expected, got), f"{what}: {expected} is not {got}"
    else:
        torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance, msg=what)


def full_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: zp.full(value).clone() for name, value in module.state_dict().items()}


def trainer_of(strategy: Any, devices: int, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return pl.Trainer(strategy=strategy, devices=devices, **settings | options)


def train(
    build: Callable[[], Recording],
    strategy: Any,
    devices: int,
    options: Mapping[str, Any] | None = None,
    *,
    ckpt_path: str | Path | None = None,
    then_save: str | Path | None = None,
    validate: bool = False,
    batch: int = 8,
) -> Outcome:
    """`Trainer.fit` of a module built from one seed, on batches of `batch` samples over all ranks."""
    torch.manual_seed(0)
    module = build()
    trainer = trainer_of(strategy, devices, **options or {})
    trainer.fit(module, loader(batch, devices), loader(batch, devices) if validate else None, ckpt_path=ckpt_path)
    if then_save is not None:
        trainer.save_checkpoint(then_save)
    return Outcome(module.losses, full_state(module), dict(trainer.callback_metrics))
