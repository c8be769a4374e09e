"""The device side of paged_attention on TPU: one grid step, which is one pair of a tile and a sequence."""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention import tpu_many, tpu_one, tpu_walk
from pallas_kernels.paged_attention.tpu_walk import Call, Pairs, Refs, Static


def scratch(s: Static, dtype, cache) -> list:
    """Memory of the kernel beside its inputs and results."""
    return tpu_walk.scratch(s, cache, tpu_one.state(s) if s.rows == 1 else tpu_many.state(s, dtype))


def lse_shape(s: Static, tiles: int) -> tuple[int, ...]:
    """Log-sum-exps of `tiles` tiles: the rows of a head, at_once to a line."""
    return tiles, 1, s.kv_heads * s.chunks, -(-s.at_once // tpu_walk.LANES) * tpu_walk.LANES


def body(s: Static, scalars: int, *refs) -> None:
    """One grid step: one pair of this core's share."""
    (shares, options, table, *columns), rest = refs[:scalars], list(refs[scalars:])
    absent = {1: not s.form.sinks, 2: not s.form.tree, 4: not s.form.scaled, 8: not s.form.scaled}
    for place in (place for place, missing in absent.items() if missing):
        rest.insert(place, None)
    core, step = pl.program_id(0), pl.program_id(1)
    c = Call(s, Refs(*rest), Pairs(*columns), options[0], options[1], table, shares[core + 1])
    pairs, pair, form = c.pairs, shares[core] + step, tpu_one if s.rows == 1 else tpu_many

    @pl.when(step == 0)
    def _():
        tpu_walk.start(c, pair)

    @pl.when(pair < c.last)
    def _():
        @pl.when((step == 0) | (pairs.tile[pair] != pairs.tile[jnp.maximum(pair - 1, 0)]))
        def _():
            form.begin(c)

        form.attend(c, pair)

        @pl.when((pair + 1 == c.last) | (pairs.tile[pair] != pairs.tile[pair + 1]))
        def _():
            form.finish(c)
