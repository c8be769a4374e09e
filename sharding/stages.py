"""Pipeline stages: each has some of the layers, and the rows of a step pass them one after the other, in microbatches.

Of M microbatches and N stages, stage s computes microbatch t - s in turn t of M + N - 1: it has nothing to do before
the first one arrives and after the last one left (GPipe, arXiv:1811.06965).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from sharding.mesh import STAGE

Counts = dict[str, Array]


def stage_count() -> int:
    """Stages that the code here is one of; 1 outside of a `shard_map` over them."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[STAGE] if STAGE in mesh.manual_axes else 1


def through_stages(
    work: Callable[[Array, Any, Int[Array, ""], Bool[Array, ""]], tuple[Array, Any, Counts]],
    x: Float[Array, "T D"],
    state: Any,
    rows: int,
) -> tuple[Float[Array, "T D"], Any, Counts]:
    """(`x` after the layers of all stages, on each of them; this stage's state; what it counted in all microbatches).

    A microbatch is the next `rows` of `x`. `work(x [rows, D], state, number, real)` is what this stage makes of
    microbatch `number`. Where it is not `real` there is none in this turn: `x` means nothing, and the state must stay
    as it is and the counts be zero.
    """
    stages, me, width = lax.axis_size(STAGE), lax.axis_index(STAGE), x.shape[1]
    count = -(-len(x) // rows)
    parts = jnp.pad(x, ((0, count * rows - len(x)), (0, 0))).reshape(count, rows, width)

    def turn(carry: tuple[Array, Any], now: Array) -> tuple[tuple[Array, Any], tuple[Array, Counts]]:
        arrived, state = carry
        number = now - me
        real, number = (number >= 0) & (number < count), jnp.clip(number, 0, count - 1)
        made, state, counts = work(jnp.where(me == 0, parts[number], arrived), state, number, real)
        arrived = lax.ppermute(made, STAGE, [(stage, stage + 1) for stage in range(stages - 1)])
        return (arrived, state), (made, counts)

    turns = jnp.arange(count + stages - 1, dtype=jnp.int32)
    (_, state), (made, counts) = lax.scan(turn, (jnp.zeros_like(parts[0]), state), turns)
    done = made[stages - 1 :].reshape(count * rows, width)[: len(x)]
    done = lax.psum(jnp.where(me == stages - 1, done, jnp.zeros_like(done)), STAGE)
    return done, state, jax.tree.map(lambda n: jnp.sum(n, axis=0, dtype=n.dtype), counts)


def own_layers(values: Array, shared: int, here: int) -> Array:
    """Of `values` [L, ...], one a layer, those of this stage: the `shared` first ones and `here` of its own."""
    own = lax.dynamic_slice_in_dim(values, shared + lax.axis_index(STAGE) * here, here)
    return jnp.concatenate([values[:shared], own])


def all_layers(values: Array) -> Array:
    """The stages' own `values` [here, ...], one after the other."""
    return lax.all_gather(values, STAGE, tiled=True)
