"""`Trainer` for sharded models, without a DeepSpeed configuration.

    from zeropage.transformers import Trainer       # instead of: from transformers import Trainer

Needs `transformers` and `accelerate`. Start it with torchrun, or alone.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers

from zeropage.accelerate import Accelerator
from zeropage.config import Config
from zeropage.construct import ConfigLike
from zeropage.errors import ConfigError

__all__ = ["Trainer"]

_FOLDER = "zeropage"
_SCHEDULER = "scheduler.pt"


class Trainer(transformers.Trainer):
    """`transformers.Trainer` whose model is sharded, and whose steps, clipping and checkpoints are zeropage's.

    The model may be plain (it is sharded when training or evaluation begins), or sharded already: made under
    `zp.init`, so that it never was on one rank as a whole. Checkpoints load on any number of ranks; `save_model`
    writes what plain `from_pretrained` reads.

    Args:
        zeropage_config: see `zeropage.accelerate.Accelerator`; how a plain model is sharded, and the precision.
        arguments, options: as for `transformers.Trainer`.

    Raises:
        ConfigError: `deepspeed` or `fsdp` is set in the arguments, or a setting cannot be honoured.
    """

    def __init__(self, *arguments: Any, zeropage_config: ConfigLike = None, **options: Any) -> None:
        self._zeropage_config = Config.of(zeropage_config)
        super().__init__(*arguments, **options)

    # -- what the Trainer makes

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        if self.args.deepspeed or self.args.fsdp:
            raise ConfigError(
                "zeropage.transformers.Trainer shards by itself: leave deepspeed and fsdp out of the arguments, or use "
                "transformers.Trainer with them"
            )
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        self._accelerator_args = found
        return found

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer names the class of its accelerator; it gets another one with the same arguments."""
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(**self._accelerator_args, zeropage_config=self._zeropage_config)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    # -- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save weights as `save_pretrained` does (all ranks together); the first rank holds all of them meanwhile."""
        folder = self.args.output_dir if output_dir is None else output_dir
        state_dict = self.accelerator.get_state_dict(self.model)
        self._save(folder, state_dict=state_dict)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.save_engines(output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The engine loads weights with everything else, unless the checkpoint is another Trainer's."""
        if not _is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self.accelerator.load_engines(checkpoint)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, _SCHEDULER), weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if _is_ours(best):
            self.accelerator.load_engines(best, weights_only=True)
        else:
            super()._load_best_model()


def _is_ours(checkpoint: str) -> bool:
    return Path(checkpoint, _FOLDER).is_dir()
