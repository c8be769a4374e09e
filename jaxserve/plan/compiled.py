"""The real step, compiled for devices that are not here, with shapes in place of arrays."""

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.arrays import Arrays
from jaxserve.buckets import Bucket
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models import ModelConfig, model_for
from jaxserve.placement import Placement, placement
from jaxserve.plan.collectives import Traffic, collectives
from jaxserve.plan.roofline import is_matrix
from jaxserve.saved_steps import save_step
from jaxserve.step import Step
from pallas_kernels.formats import Format, quantise
from sharding.params import Param, stack_layers


@dataclass(frozen=True)
class Deployment:
    """A model on a mesh, as the engine would lay it out."""

    config: EngineConfig
    model: ModelConfig
    mesh: Mesh
    params: Any  # a tree of Param
    weights: Any  # the same tree of shapes, a QTensor's for what is kept in low bits
    experts: Format | None  # of experts' weights; None for the model's dtype
    where: Placement
    arrays: Arrays


@dataclass(frozen=True)
class CompiledStep:
    """What the compiler says of one step; bytes are of one device."""

    bucket: Bucket
    seconds: float
    argument_bytes: int
    workspace_bytes: int
    program_bytes: int
    sent: list[Traffic]
    lowered: jax.stages.Lowered
    executable: jax.stages.Compiled

    @property
    def device_bytes(self) -> int:
        return self.argument_bytes + self.workspace_bytes + self.program_bytes

    def save(self, folder: Path) -> None:
        """For `jaxserve serve --load-compiled`."""
        save_step(folder, self.lowered, self.executable)


def deployment(
    config: EngineConfig, model: ModelConfig, mesh: Mesh, experts: Format | None, *, linears: bool = False
) -> Deployment:
    """The shapes of all that the engine would keep on this mesh, and where.

    `linears` says that linear layers are kept as experts are, as `packing.is_packable` has it: not the router, which
    no checkpoint stores so, and not what latent attention makes of a part of a matrix.
    """
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        params = model_for(model).params(model)
    params["layers"] = stack_layers(params["layers"])
    where = placement(mesh, model, params, stacked=True, cache_dtype=config.kv_cache_dtype)

    def shape(path: Any, param: Param, sharding: Any) -> Any:
        dtype = jnp.dtype(param.dtype or config.dtype)
        linear = linears and _is_linear(param) and path[-1].key != "router"
        if experts is None or not (linear or ("experts" in param.axes and is_matrix(param))):
            return jax.ShapeDtypeStruct(param.shape, dtype, sharding=sharding)
        format = _within_parts(experts, param, sharding) if linear else experts
        packed = jax.eval_shape(
            partial(quantise, format=format), jax.ShapeDtypeStruct(param.shape, jnp.float32)
        )
        packed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), packed)
        return replace(packed, axes=param.axes[-2:])

    weights = jax.tree.map_with_path(shape, params, where.params, is_leaf=lambda x: isinstance(x, Param))
    return Deployment(
        config, model, mesh, params, weights, experts, where, Arrays(config, model, params, True, where)
    )


def _is_linear(param: Param) -> bool:
    return len(param.part_shape) == 2 and param.cut is None and not {"vocab", "experts"} & {*param.axes}


def _within_parts(format: Format, param: Param, sharding: Any) -> Format:
    """The format with blocks that no border between devices cuts."""
    here, whole = sharding.shard_shape(param.shape)[-2:], param.shape[-2:]
    block = [math.gcd(b, n) if n < all_ else b for b, n, all_ in zip(format.block, here, whole, strict=True)]
    return format if tuple(block) == format.block else replace(format, block=tuple(block))


def compile_step(d: Deployment, bucket: Bucket, num_pages: int) -> CompiledStep:
    """ConfigError with the compiler's numbers if it does not fit the device."""
    pool, state = d.arrays.pool_shapes(num_pages), jax.eval_shape(d.arrays.state)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, d.where.state
    )
    began = time.perf_counter()
    with jax.sharding.use_abstract_mesh(d.mesh.abstract_mesh):
        lowered = Step(d.model, d.config.block_size, d.where).lower(d.weights, pool, state, bucket)
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as why:
        if "RESOURCE_EXHAUSTED" not in str(why):
            raise
        raise ConfigError(f"the step does not fit: {str(why).splitlines()[0]}") from why
    memory = executable.memory_analysis()
    assert memory is not None, "the TPU compiler always tells"
    return CompiledStep(
        bucket,
        time.perf_counter() - began,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        collectives(executable.as_text() or ""),
        lowered,
        executable,
    )
