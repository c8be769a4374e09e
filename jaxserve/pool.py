"""The pool of cache pages: its arrays, plain or in low bits with scales beside them, and where they are on a mesh."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.models import ModelConfig, model_for
from pallas_kernels.int4_rows import PACKED
from pallas_kernels.pages import LOW_BITS, ScaledPages
from sharding.mesh import STAGE, size
from sharding.rules import batch_axes, present, spec

ALIASES = {"fp8": "fp8_e4m3"}


def cache_name(asked: str, dtype: str) -> str:
    """What a kv_cache_dtype means beside activations of `dtype`."""
    return dtype if asked == "auto" else ALIASES.get(asked, asked)


def layer_pages(c: ModelConfig, dtype: str, page_size: int, lead: tuple[int, ...]) -> Any:
    """Shapes of [*lead] pages of `dtype`, a setting's name: an array, or `ScaledPages` with a float32 scale each."""
    model, packed = model_for(c), LOW_BITS.get(dtype) == PACKED
    shape = (*lead, *model.cache_shape(c, page_size, packed))
    if dtype not in LOW_BITS:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    scales = (*lead, *model.cache_scales_shape(c, page_size, packed))
    return ScaledPages(
        jax.ShapeDtypeStruct(shape, jnp.dtype(LOW_BITS[dtype])), jax.ShapeDtypeStruct(scales, jnp.float32)
    )


def pool_shardings(mesh: Mesh, c: ModelConfig, dtype: str, *, stacked: bool) -> Any:
    """One sharding for all pages, or a tree of them like the pool where pages have scales.

    Each group of devices has pages of its own; kv heads are divided, and stacked layers over stages (`pool_layers`).
    """
    batch = batch_axes(mesh) or None
    lead = (present(mesh, (STAGE,)) or None, batch) if stacked else (batch,)
    model = model_for(c)
    values = NamedSharding(mesh, P(*lead, *spec(mesh, model.cache_shape(c, 16), model.cache_axes(c))))
    if dtype not in LOW_BITS:
        return values
    scales = spec(mesh, model.cache_scales_shape(c, 16), model.cache_scales_axes(c))
    layer = ScaledPages(values, NamedSharding(mesh, P(*lead, *scales)))
    return layer if stacked else (layer,) * c.num_layers


def pool_layers(mesh: Mesh | None, c: ModelConfig) -> int:
    """Layers of pages in all stages together: those that are not divided are in each of them."""
    stages = size(mesh, (STAGE,)) if mesh else 1
    return stages * (c.num_layers - c.alike) + c.alike


def zeros(shapes: Any) -> Any:
    """Empty arrays of these shapes, made where their shardings say."""
    make = {
        s: jax.jit(partial(jnp.zeros, s.shape, s.dtype), out_shardings=s.sharding)
        for s in jax.tree.leaves(shapes)
    }
    return jax.tree.map(lambda s: make[s](), shapes)
