"""Run a block over all layers, whether their weights are a sequence or a stack: model code does not know."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxserve.batch import Batch


def over_layers(
    block: Callable[..., tuple[Array, Array, Any]],
    x: Array,
    layers: Any,
    pool: Any,
    batch: Batch,
    data: dict[str, np.ndarray],
    *shared: Any,
) -> tuple[Array, Any, Any]:
    """(x after the last layer, the pool, what `block` returned third, stacked over layers).

    `block(x, layer, pages, batch, datum, *shared) -> (x, pages, out)`; `datum` is the layer's row of `data`.

    A list or tuple of layers, each with its own pages, is looped over; the block is traced once for layers of
    equal structure. A tree of stacked arrays [L, ...], with a stacked pool, is scanned: the fast form where XLA
    does not copy a layer's slice.
    """
    if isinstance(layers, list | tuple):
        return _loop(block, x, layers, pool, batch, data, shared)
    return _scan(block, x, layers, pool, batch, data, shared)


def _loop(block, x, layers, pool, batch, data, shared):
    block = jax.jit(block)  # inside another jit this compiles nothing: it traces and lowers once
    pool, outs = list(pool), []
    for i, layer in enumerate(layers):
        datum = {name: jnp.asarray(values[i]) for name, values in data.items()}
        x, pool[i], out = block(x, layer, pool[i], batch, datum, *shared)
        outs.append(out)
    return x, tuple(pool), jax.tree.map(lambda *a: jnp.stack(a), *outs)


def _scan(block, x, layers, pool, batch, data, shared):
    count, pages, _, page_size, _ = pool.shape
    # The stack of pools is one pool whose layer i begins at page i * pages: it stays in place in the carry.
    whole = pool.reshape(count * pages, *pool.shape[2:])

    def step(carry, row):
        x, whole = carry
        layer, datum, i = row
        here = replace(
            batch,
            page_table=batch.page_table + i * pages,
            places=batch.places + i * (pages * page_size),
        )
        x, whole, out = block(x, layer, whole, here, datum, *shared)
        return (x, whole), out

    rows = (layers, {k: jnp.asarray(v) for k, v in data.items()}, jnp.arange(count, dtype=jnp.int32))
    (x, whole), outs = lax.scan(step, (x, whole), rows)
    return x, whole.reshape(pool.shape), outs
