"""From settings and a model to the topology that they ask for."""

from jaxserve.models import ModelConfig
from sharding.mesh import ModelSizes


def model_sizes(c: ModelConfig) -> ModelSizes:
    """What of the model can be divided over devices."""
    return ModelSizes(c.name, c.heads, c.kv_heads, c.ffn_size, c.vocab_size, c.num_layers)
