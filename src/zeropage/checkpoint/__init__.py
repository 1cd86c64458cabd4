"""Saving and loading an engine through `torch.distributed.checkpoint`, and reading what DeepSpeed has saved."""

from zeropage.checkpoint.deepspeed import Converted, convert_deepspeed, opened
from zeropage.checkpoint.elastic import LoadResult, load_checkpoint, save_checkpoint

__all__ = ["Converted", "LoadResult", "convert_deepspeed", "load_checkpoint", "opened", "save_checkpoint"]
