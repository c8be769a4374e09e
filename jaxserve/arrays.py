"""The arrays that an engine keeps on its devices beside the weights, and what all of them take of a device's memory."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxserve.config import EngineConfig
from jaxserve.expert_loads import no_loads
from jaxserve.memory import elements, params_bytes
from jaxserve.models import ModelConfig
from jaxserve.placement import Placement
from jaxserve.pool import layer_pages, pool_layers, zeros
from jaxserve.sampling.state import SlotState, new_state


@dataclass(frozen=True)
class Arrays:
    """Sizes in bytes are those on one device."""

    config: EngineConfig  # with no dtype left to "auto"
    model: ModelConfig
    params: Any  # a tree of Param
    stacked: bool  # whether layers are one array, or each has its own
    placement: Placement | None = None
    saved: int = 0  # bytes that weights which stay in low bits take less

    @property
    def sharing(self) -> int:
        """Devices of this process that are used."""
        return len(self.placement.mesh.local_devices) if self.placement else 1

    @property
    def weight_bytes(self) -> int:
        plain = params_bytes(self.params, self.config.dtype, self.placement and self.placement.params)
        return plain - self.saved

    @property
    def state_bytes(self) -> int:
        shapes = jax.tree.leaves(jax.eval_shape(self._new_state))
        wheres = jax.tree.leaves(self.placement.state) if self.placement else [None] * len(shapes)
        return sum(
            elements(x.shape, where) * x.dtype.itemsize for x, where in zip(shapes, wheres, strict=True)
        )

    @property
    def page_bytes(self) -> int:
        """Of a page in all layers, its scales included."""
        each = self.pool_shapes(1)
        return sum(elements(x.shape, x.sharding) * x.dtype.itemsize for x in jax.tree.leaves(each))

    def pool_shapes(self, num_pages: int) -> Any:
        """The pool's shapes and shardings, so many pages for each group of devices; one array, or one a layer."""
        layers = pool_layers(self.placement.mesh if self.placement else None, self.model)
        pages = self._groups * num_pages
        lead = (layers, pages) if self.stacked else (pages,)
        shapes = layer_pages(self.model, self.config.kv_cache_dtype, self.config.block_size, lead)
        shapes = shapes if self.stacked else (shapes,) * layers
        where = jax.tree.broadcast(self.placement.pool, shapes) if self.placement else shapes
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s if self.placement else None),
            shapes,
            where,
        )

    def pool(self, num_pages: int) -> Any:
        """The same as empty arrays."""
        return zeros(self.pool_shapes(num_pages))

    def state(self) -> SlotState:
        """The sampler's state before any sequence."""
        return jax.jit(self._new_state, out_shardings=self.placement and self.placement.state)()

    @property
    def _groups(self) -> int:
        return self.placement.groups if self.placement else 1

    def _new_state(self) -> SlotState:
        state = new_state(self._groups * self.config.max_num_seqs, self.model.vocab_size)
        mesh = self.placement.mesh if self.placement else None
        return replace(state, expert_loads=no_loads(self.model, mesh))
