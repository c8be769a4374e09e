"""Checkpoints: open what there is, load what a model asks for, convert once for fast starts."""

from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.conversion import convert
from jaxserve.weights.loading import load
from jaxserve.weights.open import open_checkpoint

__all__ = ["Checkpoint", "convert", "load", "open_checkpoint"]
