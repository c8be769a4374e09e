"""From settings and a model to the topology that they ask for."""

import math

from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models import ModelConfig
from sharding.mesh import Misfit, ModelSizes, Topology


def mesh_for(config: EngineConfig, model: ModelConfig) -> Mesh | None:
    """The mesh that the settings ask for, None for one device; ConfigError with those that do if it does not fit."""
    try:
        topology = topology_for(config, model)
        return topology.mesh(model_sizes(model)) if topology.devices > 1 else None
    except Misfit as why:
        raise ConfigError(str(why)) from why


def topology_for(config: EngineConfig, model: ModelConfig) -> Topology:
    """How the settings divide the devices, whether that fits or not."""
    tensor, data = config.tensor_parallel_size, config.data_parallel_size
    ways = config.expert_parallel_size
    if ways is None:
        if not config.enable_expert_parallel:
            return Topology(data=data, tensor=tensor)
        ways = data * tensor
    sizes = model_sizes(model)
    found = {topology.expert_devices(sizes): topology for topology in _with_experts(data, tensor)}
    if ways not in found:
        if not sizes.experts:
            raise ConfigError(
                f"{model.name} has no experts to divide; leave enable_expert_parallel and expert_parallel_size out"
            )
        possible = ", ".join(str(n) for n in sorted(found) if n)
        raise ConfigError(
            f"the {sizes.experts} experts of {model.name} cannot be divided {ways} ways with "
            f"tensor_parallel_size={tensor} and data_parallel_size={data}; use expert_parallel_size of "
            f"{possible or 1}, or change the others"
        )
    return found[ways]


def _with_experts(data: int, tensor: int) -> list[Topology]:
    return [Topology(data // n, n, tensor) for n in range(1, data + 1) if data % n == 0]


def model_sizes(c: ModelConfig) -> ModelSizes:
    """What of the model can be divided over devices."""
    experts, ffn = 0, c.ffn_size
    if c.mixture is not None:
        experts = c.mixture.routing.experts
        ffn = math.gcd(ffn, c.mixture.ffn_size, c.mixture.shared_ffn_size)
    latent = c.latent is not None
    return ModelSizes(c.name, c.heads, c.kv_heads, ffn, c.vocab_size, c.num_layers, experts, latent)
