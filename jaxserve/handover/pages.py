"""An engine's pages as rows, read and written on the engine's thread between two of its steps."""

import math
from collections.abc import Sequence as Listed
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.layer_groups import LayerGroup
from jaxserve.models import ModelConfig, model_for
from jaxserve.runner import DeviceRunner
from jaxserve.sequence import Sequence
from kv import Lease, wire
from kv.cache import KVCache


class EnginePages:
    """The pool of one engine. What is launched here runs after the steps launched before, and before later ones."""

    def __init__(self, engine: Engine, model: ModelConfig):
        if not isinstance(engine.runner, DeviceRunner):
            raise ConfigError("an engine of several processes cannot hand pages over yet; leave --role out")
        if not engine.config.enable_prefix_caching:
            raise ConfigError(
                "pages that come from elsewhere are found in the prefix cache; enable_prefix_caching"
            )
        if engine.config.prefill_context_parallel_size > 1:
            raise ConfigError("prompts spread over devices cannot be handed over yet; leave --role out")
        if engine.config.pipeline_parallel_size > 1:
            raise ConfigError("pages of pipeline stages cannot be handed over yet; leave --role out")
        self._runner, self._scheduler = engine.runner, engine.scheduler
        self.page_size = engine.config.block_size
        self._dtype = engine.config.kv_cache_dtype
        self.latent = model.latent is not None
        self._rope = model.latent.rope_dim if model.latent else 0
        self.layers = model.num_layers
        self.row = wire.row_shape(model_for(model).cache_shape(model, self.page_size), self.latent)
        placement = engine.runner.step.placement
        self._mesh = placement.mesh if placement else None
        self._heads = jax.tree.leaves(placement.pool)[0].spec[-3] if placement else None
        self.groups = engine.runner.layer_groups
        self._puts: dict[int, Any] = {}  # by the number of layers
        leaf = jax.tree.leaves(engine.runner.pool)[0]
        pages = leaf.shape[0] if type(engine.runner.pool) is tuple else leaf.shape[1]
        self._pages_each = pages // len(self._caches())
        row = self.row_form(self._dtype)
        self._row_bytes = math.prod(row.shape) * row.dtype.itemsize  # in one layer
        self._weights = sum(weight.nbytes for weight in jax.tree.leaves(engine.runner.params))

    def row_form(self, dtype: str) -> jax.ShapeDtypeStruct:
        """How a token's row of a layer travels in the cache's data type `dtype`."""
        return wire.row_form(self.row, dtype, self._rope)

    def warm(self) -> None:
        """Compile what moves blocks of every size in the cache's own data type; only the padding page changes."""
        for group in self.groups:
            for size in wire.SIZES:
                at = np.arange(size, dtype=np.int32) % self.page_size
                rows, _ = self._taken(group, at, self._dtype)
                rows = self.assembled([self.split(layer) for layer in rows])
                wire.checksums(rows)
                self.write(group, rows, at)

    def blocks(self, group: LayerGroup, start: int, end: int) -> list[tuple[int, int, int]]:
        """See `wire.blocks`: those of these layers."""
        most = wire.block_size(group.count * self._row_bytes, self._weights)
        return wire.blocks(start, end, most)

    def take(
        self, seq: Sequence, group: LayerGroup, start: int, count: int, rows: int, dtype: str
    ) -> tuple[list[Any], Any]:
        """(the layers' rows of these tokens, in pieces; checksums): copies, so the pages may change at once."""
        assert seq.lease is not None
        taken, sums = self._taken(group, self._places(seq.lease, seq.group, start, count, rows), dtype)
        return [self.split(layer) for layer in taken], sums

    def _taken(self, group: LayerGroup, places: np.ndarray, dtype: str) -> tuple[tuple[jax.Array, ...], Any]:
        pages, first = group.of_pool(self._runner.pool), np.int32(group.first)
        with self._within():
            return wire.take(pages, places, first, layers=group.count, latent=self.latent, dtype=dtype)

    def split(self, rows: jax.Array) -> list[jax.Array]:
        """One layer's rows as arrays on one device each, in the order of the heads."""
        if self._mesh is None:
            return [rows]
        spec = P() if self.latent else P(None, self._heads)
        spread = jax.device_put(rows, NamedSharding(self._mesh, spec))
        by_head = {
            shard.index[1].start or 0 if not self.latent else 0: shard.data
            for shard in spread.addressable_shards
        }
        return [by_head[head] for head in sorted(by_head)]

    def assembled(self, layers: Listed[Listed[Any]]) -> tuple[jax.Array, ...]:
        """The opposite of `split`, of any number of pieces, on this engine's devices."""
        device = self._mesh.local_devices[0] if self._mesh else jax.tree.leaves(self._runner.pool)[0].sharding
        whole = [jax.device_put(pieces, device) for pieces in layers]
        joined = [pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1) for pieces in whole]
        if self._mesh:
            spec = P() if self.latent else P(None, self._heads)
            joined = jax.device_put(joined, NamedSharding(self._mesh, spec))
        return tuple(joined)

    def write(self, group: LayerGroup, rows: tuple[jax.Array, ...], places: np.ndarray) -> None:
        """Put rows of these layers where they belong."""
        pool, first = self._runner.pool, np.int32(group.first)
        pages = group.of_pool(pool)
        if group.count not in self._puts:
            stays = jax.tree.map(lambda pages: pages.sharding, pages) if self._mesh else None
            self._puts[group.count] = jax.jit(wire.put, donate_argnums=0, out_shardings=stays)
        with self._within():
            self._runner.pool = group.joined(pool, self._puts[group.count](pages, rows, places, first))

    def reserve(self, tokens: list[int], salt: str) -> tuple[Lease, int] | None:
        """(pages for the full pages of a prompt, of which `lease.length` tokens are here; their group), or None."""
        caches = self._caches()
        leases = [cache.match(tokens, salt) for cache in caches]
        group = max(range(len(caches)), key=lambda g: (leases[g].length, caches[g].available))
        for other, (cache, lease) in enumerate(zip(caches, leases, strict=True)):
            if other != group:
                cache.release(lease)
        lease, cache = leases[group], caches[group]
        lease.asked = 0  # counted when the sequence itself looks
        room = cache.available - len(self._scheduler.running)
        full = len(tokens) // self.page_size
        if full - len(lease.pages) > room or not cache.grow(lease, full * self.page_size):
            cache.release(lease)
            return None
        return lease, group

    def write_block(
        self,
        held: tuple[Lease, int],
        layers: LayerGroup,
        start: int,
        count: int,
        rows: tuple[jax.Array, ...],
    ) -> None:
        """Put the rows of `count` tokens in the pages reserved for them; padding goes to page 0."""
        lease, group = held
        count = min(count, len(lease.pages) * self.page_size - start)
        self.write(layers, rows, self._places(lease, group, start, count, rows[0].shape[0]))

    def commit(self, held: tuple[Lease, int], tokens: list[int]) -> None:
        """All of it has arrived: the pages can be found from now on."""
        lease, group = held
        self._caches()[group].commit(lease, tokens, len(lease.pages) * self.page_size)

    def release(self, held: tuple[Lease, int]) -> None:
        lease, group = held
        self._caches()[group].release(lease)

    def counts(self) -> dict[str, int]:
        """Pages in all, and how many are free, held, and kept for later."""
        caches = self._caches()
        total = sum(cache.num_pages - 1 for cache in caches)
        free, used, cached = (sum(getattr(c, name) for c in caches) for name in ("free", "used", "cached"))
        return {"total": total, "free": free, "used": used, "cached": cached}

    def _caches(self) -> list[KVCache]:
        groups: list[Any] = getattr(self._scheduler, "groups", None) or [self._scheduler]
        return [group.cache for group in groups]

    def _places(self, lease: Lease, group: int, start: int, count: int, rows: int) -> np.ndarray:
        return wire.places(lease.pages, self.page_size, start, count, rows, group * self._pages_each)

    def _within(self) -> AbstractContextManager[Any]:
        return jax.set_mesh(self._mesh) if self._mesh else nullcontext()
