"""Where the arrays of a step live when it runs on many devices: weights, cache pages, sampler state, batch."""

from dataclasses import dataclass, fields
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.expert_loads import ExpertLoads
from jaxserve.models import ModelConfig
from jaxserve.pool import pool_shardings
from jaxserve.sampling.state import SlotState
from sharding.mesh import BATCH, CONTEXT, TENSOR, size
from sharding.rules import batch_axes, only, param_shardings, present, step_axes

VOCAB_WIDE = ("marks", "bias")  # of the sampler's state: a column for each token of the vocabulary


@dataclass(frozen=True)
class Placement:
    """Shardings for `Step`. Each of the `groups` of devices has sequences, pages and slots of its own."""

    mesh: Mesh
    params: Any  # a tree of NamedSharding, like the weights
    pool: Any  # a NamedSharding for all pages, or a tree of them like the pool
    state: SlotState  # of NamedSharding
    flat: NamedSharding

    @property
    def groups(self) -> int:
        return size(self.mesh, BATCH)

    @property
    def context(self) -> int:
        """Groups that compute a long prompt together."""
        return size(self.mesh, (CONTEXT,))

    @property
    def everywhere(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    @property
    def spans_processes(self) -> bool:
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    def inside(self, shardings: Any) -> Any:
        """The specs of a tree of shardings for a `shard_map` over stages and groups."""
        axes = step_axes(self.mesh)
        return jax.tree.map(lambda s: only(s.spec, axes), shardings)


def placement(
    mesh: Mesh, config: ModelConfig, params: Any, *, stacked: bool, cache_dtype: str = "auto"
) -> Placement:
    """The placement of a model whose weights are the tree of `Param` `params`; `stacked` as its pool will be.

    `cache_dtype` is that of `EngineConfig`: pages in low bits have scales beside them.
    """
    batch = batch_axes(mesh) or None
    vocab = present(mesh, TENSOR) or None
    specs = {f.name: P(batch, vocab) if f.name in VOCAB_WIDE else P(batch) for f in fields(SlotState)}
    rows: dict[str, Any] = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    everywhere = NamedSharding(mesh, P())
    rows["expert_loads"] = None if config.mixture is None else ExpertLoads(everywhere, everywhere)
    return Placement(
        mesh=mesh,
        params=param_shardings(mesh, params),
        pool=pool_shardings(mesh, config, cache_dtype, stacked=stacked),
        state=SlotState(**rows),
        flat=NamedSharding(mesh, P(batch)),
    )
