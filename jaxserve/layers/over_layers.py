"""Run a block over all layers, whether each has its own weights or they are in stacks: model code does not know."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxserve.batch import Batch
from pallas_kernels.formats import QTensor

IN_STACK = "experts"  # weights of this name are read by kernels, as those in low bits are


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InStack:
    """A layer's weight that is left in the stack: a kernel reads it there, where its slice would be a copy."""

    stack: Any  # Array or QTensor [L, ...]
    layer: Any  # int32 []


def over_layers(
    block: Callable[..., tuple[Array, Any, dict[str, Any]]],
    x: Array,
    layers: Sequence[Any],
    pool: Any,
    page_size: int,
    batch: Batch,
    data: dict[str, np.ndarray],
    *shared: Any,
) -> tuple[Array, Any, dict[str, Any]]:
    """(x after the last layer, the pool, what `block` returned third, each name stacked over the layers that have it).

    `block(x, layer, pages, batch, datum, *shared) -> (x, pages, out)`; `datum` is the layer's row of `data`.

    With a tuple of pools, one a layer, `layers` are looped over; the block is traced once for layers of equal
    structure. With one stacked pool, `layers` are stacks [L, ...] of neighbouring layers (`stack_layers`), each of
    which is scanned: the fast form where XLA does not copy a layer's slice.
    """
    if type(pool) in (list, tuple):
        return _loop(block, x, layers, pool, batch, data, shared)
    return _scan(block, x, layers, pool, page_size, batch, data, shared)


def _loop(block, x, layers, pool, batch, data, shared):
    block = jax.jit(block)  # inside another jit this compiles nothing: it traces and lowers once
    pool, outs = list(pool), []
    for i, layer in enumerate(layers):
        datum = {name: jnp.asarray(values[i]) for name, values in data.items()}
        x, pool[i], out = block(x, layer, pool[i], batch, datum, *shared)
        outs.append(out)
    return x, tuple(pool), _joined(outs, jnp.stack)


def _scan(block, x, stacks, pool, page_size, batch, data, shared):
    count, pages = jax.tree.leaves(pool)[0].shape[:2]
    # The stack of pools is one pool whose layer i begins at page i * pages: it stays in place in the carry.
    whole = jax.tree.map(lambda x: x.reshape(count * pages, *x.shape[2:]), pool)
    outs, first = [], 0
    for stack in stacks:
        stay, sliced = _parted(stack)
        step = partial(_layer, block, stay, first, pages, page_size, batch, shared)
        last = first + jax.tree.leaves(stack)[0].shape[0]
        rows = {name: jnp.asarray(values[first:last]) for name, values in data.items()}
        numbers = jnp.arange(first, last, dtype=jnp.int32)
        (x, whole), out = lax.scan(step, (x, whole), (sliced, rows, numbers))
        outs.append(out)
        first = last
    assert first == count, f"{first} layers of weights for {count} of cache"
    whole = jax.tree.map(lambda x, stack: x.reshape(stack.shape), whole, pool)
    return x, whole, _joined(outs, jnp.concatenate)


def _layer(block, stay, begins, pages, page_size, batch, shared, carry, row):
    """One layer of a stack that begins at layer `begins`, on the pool of all layers."""
    x, whole = carry
    slices, datum, i = row
    here = replace(
        batch, page_table=batch.page_table + i * pages, places=batch.places + i * (pages * page_size)
    )
    x, whole, out = block(x, _together(stay, slices, i - begins), whole, here, datum, *shared)
    return (x, whole), out


def over_group(
    block: Callable[..., tuple[Array, Any, dict[str, Any]]],
    x: Array,
    layers: Any,
    pool: Any,
    page_size: int,
    batch: Batch,
    data: dict[str, Any],
    first: Array,
    count: int,
    begins: int,
    *shared: Any,
) -> tuple[Array, Any, dict[str, Any]]:
    """`over_layers` for `count` layers from `first` on, a number that the program is told: it serves any such group.

    With a tuple of pools, these and `layers` are those of the group alone. With one stacked pool, which is that of
    the whole model, `layers` is the stack that the group is in, which begins at layer `begins`.
    """
    if type(pool) in (list, tuple):
        near = {n: lax.dynamic_slice_in_dim(jnp.asarray(v), first, count) for n, v in data.items()}
        return _loop(block, x, layers, pool, batch, near, shared)
    every, pages = jax.tree.leaves(pool)[0].shape[:2]
    whole = jax.tree.map(lambda x: x.reshape(every * pages, *x.shape[2:]), pool)
    stay, sliced = _parted(layers)

    def step(carry, i):
        slices = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, i - begins, keepdims=False), sliced)
        datum = {name: jnp.asarray(values)[i] for name, values in data.items()}
        return _layer(block, stay, begins, pages, page_size, batch, shared, carry, (slices, datum, i))

    (x, whole), out = lax.scan(step, (x, whole), first + jnp.arange(count, dtype=jnp.int32))
    return x, jax.tree.map(lambda x, stack: x.reshape(stack.shape), whole, pool), out


def _parted(stack: Any) -> tuple[list[Any], Any]:
    """(what kernels read in the stack or None for each leaf, the same tree with None there instead)."""
    paths, tree = jax.tree.flatten_with_path(stack, is_leaf=_is_weight)
    stays = [isinstance(leaf, QTensor) or (_under_experts(path) and leaf.ndim > 3) for path, leaf in paths]
    stay = [leaf if stays else None for (_, leaf), stays in zip(paths, stays, strict=True)]
    sliced = [None if stays else leaf for (_, leaf), stays in zip(paths, stays, strict=True)]
    return stay, jax.tree.unflatten(tree, sliced)


def _together(stay: list[Any], slices: Any, layer: Array) -> Any:
    leaves, tree = jax.tree.flatten(slices, is_leaf=lambda x: x is None)
    return jax.tree.unflatten(
        tree,
        [leaf if kept is None else InStack(kept, layer) for kept, leaf in zip(stay, leaves, strict=True)],
    )


def _is_weight(leaf: Any) -> bool:
    return isinstance(leaf, QTensor) or leaf is None


def _under_experts(path: Any) -> bool:
    return any(getattr(key, "key", None) == IN_STACK for key in path)


def _joined(outs: list[dict[str, Any]], join: Callable[[list[Any]], Any]) -> dict[str, Any]:
    names = dict.fromkeys(name for out in outs for name in out)
    return {name: join([out[name] for out in outs if name in out]) for name in names}
