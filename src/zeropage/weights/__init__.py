"""Weights in and out: Hugging Face's safetensors files, each rank reading and writing its own slices."""

from zeropage.weights.exporting import export
from zeropage.weights.loading import LoadedWeights, load_safetensors

__all__ = ["LoadedWeights", "export", "load_safetensors"]
