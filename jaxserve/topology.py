"""From settings and a model to the topology that they ask for."""

import math
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.eplb import EplbConfig
from jaxserve.errors import ConfigError
from jaxserve.models import ModelConfig
from sharding.balance import place
from sharding.mesh import Misfit, ModelSizes, Topology, size
from sharding.rules import expert_axes


def mesh_for(config: EngineConfig, model: ModelConfig) -> Mesh | None:
    """The mesh that the settings ask for, None for the first device; ConfigError with what fits if it does not."""
    try:
        topology = topology_for(config, model)
        if config.nnodes > 1 and topology.devices != jax.device_count():
            raise Misfit(
                f"{topology} is for {topology.devices} devices, and the {config.nnodes} processes have "
                f"{jax.device_count()}; use all of them"
            )
        if topology.devices == 1 and not config.first_device:
            return None
        return topology.mesh(model_sizes(model), jax.devices()[config.first_device :])
    except Misfit as why:
        raise ConfigError(str(why)) from why


def with_dispatch(config: EngineConfig, model: ModelConfig, mesh: Mesh | None) -> ModelConfig:
    """The model with the settings of how rows get to experts on other devices; ConfigError if none do."""
    capacity, fp8 = config.expert_capacity_factor, config.expert_dispatch_dtype == "fp8"
    if capacity is None and not fp8:
        return model
    asked = f"expert_capacity_factor={capacity}" if capacity is not None else "expert_dispatch_dtype=fp8"
    if model.mixture is None or mesh is None or not expert_axes(mesh, model.mixture.routing.experts):
        raise ConfigError(
            f"{asked} has no effect: no experts of {model.name} are on other devices; use enable_expert_parallel, "
            "or leave it out"
        )
    if fp8 and model.hidden_size % 128:
        raise ConfigError(
            f"expert_dispatch_dtype=fp8 needs rows of a multiple of 128 values, and those of {model.name} have "
            f"{model.hidden_size}; leave it out"
        )
    return replace(model, mixture=replace(model.mixture, capacity=capacity, fp8_dispatch=fp8))


def with_slots(config: EngineConfig, model: ModelConfig, mesh: Mesh | None) -> ModelConfig:
    """The model with places for its experts, copies too, if they are to be balanced; ConfigError if they cannot."""
    if not config.enable_eplb:
        return model
    experts = model.mixture.routing.experts if model.mixture else 0
    ways = size(mesh, expert_axes(mesh, experts)) if mesh and experts else 1
    if model.mixture is None or ways == 1:
        raise ConfigError(
            f"enable_eplb has no effect: no experts of {model.name} are on other devices; use enable_expert_parallel, "
            "or leave it out"
        )
    if config.nnodes > 1:
        raise ConfigError(
            f"enable_eplb moves experts between the devices of one process, and nnodes={config.nnodes}; leave it out"
        )
    redundant = EplbConfig.of(config.eplb_config).num_redundant_experts
    most = experts * (ways - 1)
    able = [n for n in range(0, most + 1, ways) if size(mesh, expert_axes(mesh, experts + n)) == ways]
    if redundant not in able:
        near = sorted(sorted(able, key=lambda n: abs(n - redundant))[:3])
        raise ConfigError(
            f"num_redundant_experts={redundant} makes {experts + redundant} places for the {experts} experts of "
            f"{model.name}, which {ways} devices cannot have the same number of; use {', '.join(map(str, near))}"
        )
    slots = place(np.ones(experts), ways, (experts + redundant) // ways).slots.ravel()
    return replace(model, mixture=replace(model.mixture, slots=tuple(slots.tolist())))


def topology_for(config: EngineConfig, model: ModelConfig) -> Topology:
    """How the settings divide the devices, whether that fits or not."""
    tensor, data = config.tensor_parallel_size, config.data_parallel_size
    context, ways = config.prefill_context_parallel_size, config.expert_parallel_size
    stages = config.pipeline_parallel_size
    if stages > 1:
        _check_stages(config)
    if ways is None:
        if not config.enable_expert_parallel:
            return Topology(data=data, tensor=tensor, context=context, stage=stages)
        ways = data * tensor * context
    sizes = model_sizes(model)
    if not sizes.experts:
        raise ConfigError(
            f"{model.name} has no experts to divide; leave enable_expert_parallel and expert_parallel_size out"
        )
    able = [Topology(data // n, n, tensor, context, stages) for n in range(1, data + 1) if data % n == 0]
    found = {topology.expert_devices(sizes): topology for topology in able}
    if ways not in found:
        possible = ", ".join(str(n) for n in sorted(found) if n)
        raise ConfigError(
            f"the {sizes.experts} experts of {model.name} cannot be divided {ways} ways with "
            f"tensor_parallel_size={tensor} and data_parallel_size={data}; use expert_parallel_size of "
            f"{possible or 1}, or change the others"
        )
    return found[ways]


def _check_stages(config: EngineConfig) -> None:
    found = {
        "prefill_context_parallel_size": config.prefill_context_parallel_size > 1, "enable_eplb": config.enable_eplb,
    }  # fmt: skip
    if any(found.values()):
        names = " and ".join(name for name, there in found.items() if there)
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size} and {names} do not go together; leave one out"
        )


def model_sizes(c: ModelConfig) -> ModelSizes:
    """What of the model can be divided over devices."""
    experts, ffn = 0, c.ffn_size
    if c.mixture is not None:
        experts = c.mixture.routing.experts
        ffn = math.gcd(ffn, c.mixture.ffn_size, c.mixture.shared_ffn_size)
    latent = c.latent is not None
    return ModelSizes(c.name, c.heads, c.kv_heads, ffn, c.vocab_size, experts, latent, c.alike)
