"""Where the arrays of a step live when it runs on many devices: weights, cache pages, sampler state, batch."""

from dataclasses import dataclass, fields
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.models import ModelConfig, model_for
from jaxserve.sampling.state import SlotState
from sharding.mesh import BATCH, CONTEXT, TENSOR, size
from sharding.rules import batch_axes, only, param_shardings, present, spec

VOCAB_WIDE = ("marks", "bias")  # of the sampler's state: a column for each token of the vocabulary


@dataclass(frozen=True)
class Placement:
    """Shardings for `Step`. Each of the `groups` of devices has sequences, pages and slots of its own."""

    mesh: Mesh
    params: Any  # a tree of NamedSharding, like the weights
    pool: NamedSharding
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
        """The specs of a tree of shardings for a `shard_map` over the groups."""
        axes = batch_axes(self.mesh)
        return jax.tree.map(lambda s: only(s.spec, axes), shardings)


def placement(mesh: Mesh, config: ModelConfig, params: Any, *, stacked: bool) -> Placement:
    """The placement of a model whose weights are the tree of `Param` `params`; `stacked` as its pool will be."""
    batch = batch_axes(mesh) or None
    lead = (None, batch) if stacked else (batch,)
    axes = model_for(config).cache_axes(config)
    pages = spec(mesh, model_for(config).cache_shape(config, 16), axes)
    vocab = present(mesh, TENSOR) or None
    specs = {f.name: P(batch, vocab) if f.name in VOCAB_WIDE else P(batch) for f in fields(SlotState)}
    rows: dict[str, Any] = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return Placement(
        mesh=mesh,
        params=param_shardings(mesh, params),
        pool=NamedSharding(mesh, P(*lead, *pages)),
        state=SlotState(**rows),
        flat=NamedSharding(mesh, P(batch)),
    )
