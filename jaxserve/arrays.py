"""The arrays that an engine keeps on its devices beside the weights, and what all of them take of a device's memory."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.memory import elements, params_bytes
from jaxserve.models import ModelConfig, model_for
from jaxserve.placement import Placement
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
        """Of a page in all layers."""
        where = self.placement and self.placement.pool
        return (
            elements(self._pool_shape(1), where)
            * self._itemsize
            * (1 if self.stacked else self.model.num_layers)
        )

    def pool(self, num_pages: int) -> Any:
        """Empty pages, so many for each group of devices; one array, or one a layer."""
        shape, dtype = self._pool_shape(num_pages), jnp.dtype(self.config.kv_cache_dtype)
        make = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=self.placement and self.placement.pool)
        return make() if self.stacked else tuple(make() for _ in range(self.model.num_layers))

    def state(self) -> SlotState:
        """The sampler's state before any sequence."""
        return jax.jit(self._new_state, out_shardings=self.placement and self.placement.state)()

    @property
    def _groups(self) -> int:
        return self.placement.groups if self.placement else 1

    @property
    def _itemsize(self) -> int:
        return jnp.dtype(self.config.kv_cache_dtype).itemsize

    def _new_state(self) -> SlotState:
        return new_state(self._groups * self.config.max_num_seqs, self.model.vocab_size)

    def _pool_shape(self, num_pages: int) -> tuple[int, ...]:
        page = model_for(self.model).cache_shape(self.model, self.config.block_size)
        layers = (self.model.num_layers,) if self.stacked else ()
        return (*layers, self._groups * num_pages, *page)
