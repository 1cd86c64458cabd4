"""Saving and loading an engine through `torch.distributed.checkpoint`."""

from zeropage.checkpoint.elastic import LoadResult, load_checkpoint, save_checkpoint

__all__ = ["LoadResult", "load_checkpoint", "save_checkpoint"]
