"""Models: `ModelConfig.from_hf` says what a checkpoint is, `model_for` gives the functions that compute it."""

from types import ModuleType

from jaxserve.models import decoder
from jaxserve.models.config import ModelConfig

__all__ = ["ModelConfig", "model_for"]


def model_for(config: ModelConfig) -> ModuleType:
    """The structure of this model: `params`, `forward`, `logits` and `cache_shape`."""
    return decoder
