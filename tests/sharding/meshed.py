"""Models run on meshes of simulated devices, their weights and pages divided as the rules say."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxserve.models import ModelConfig, model_for
from jaxserve.topology import model_sizes
from sharding.mesh import Topology
from sharding.rules import param_shardings, spec
from tests.jaxserve.models.running import Run, golden_params


def mesh_for(config: ModelConfig, topology: Topology) -> Mesh:
    return topology.mesh(model_sizes(config))


def golden_params_on(mesh: Mesh, arch: str, config: ModelConfig) -> Any:
    shardings = param_shardings(mesh, model_for(config).params(config))
    return jax.tree.map(jax.device_put, golden_params(arch, config), shardings)


@dataclass
class MeshRun(Run):
    """A `Run` of which every device does its part. Enter `jax.set_mesh(run.mesh)` around its steps."""

    mesh: Mesh = None  # type: ignore[assignment]

    def __post_init__(self):
        super().__post_init__()
        pages = jax.tree.leaves(self.pool)[0]
        axes = (None, *self.model.cache_axes(self.config))
        where = NamedSharding(self.mesh, spec(self.mesh, pages.shape, axes))
        self.pool = jax.tree.map(lambda x: jax.device_put(jnp.copy(x), where), self.pool)
