"""Checkpoints: open safetensors, GGUF or a converted folder, load what a model asks for, convert once for fast starts."""

from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.load import load
from jaxserve.weights.open import open_checkpoint

__all__ = ["Checkpoint", "load", "open_checkpoint"]
