"""Run a block over the layers of a pipeline stage, for one microbatch of the step's rows after the other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxserve.batch import Batch
from jaxserve.layers.over_layers import over_group
from sharding.stages import all_layers, own_layers, through_stages


def over_stages(
    block: Callable[..., tuple[Array, Any, dict[str, Any]]],
    x: Array,
    stacks: Sequence[Any],
    pool: Any,
    page_size: int,
    batch: Batch,
    data: dict[str, np.ndarray],
    shared: Callable[[Batch], Array],
    rows: int,
) -> tuple[Array, Any, dict[str, Any]]:
    """`over_layers` where the last of `stacks` is this stage's part of its layers, and all stages run those before it.

    The pool has a layer for each layer that is here; `data` is that of the whole model. `shared` makes of a batch what
    every layer is given. Microbatches have so many `rows`.
    """
    *before, mine = stacks
    counts = [jax.tree.leaves(stack)[0].shape[0] for stack in stacks]
    first, outs = sum(counts[:-1]), []
    local: Any = {name: own_layers(jnp.asarray(v), first, counts[-1]) for name, v in data.items()}
    begins = 0
    for stack, count in zip(before, counts, strict=False):
        x, pool, out = over_group(
            block, x, stack, pool, page_size, batch, local, jnp.int32(begins), count, begins, shared(batch)
        )
        begins += count
        outs.append(out)

    def work(x: Array, pool: Any, number: Array, real: Array) -> tuple[Array, Any, dict[str, Any]]:
        part = microbatch(batch, rows, number, real, page_size)
        return over_group(
            block, x, mine, pool, page_size, part, local, jnp.int32(first), counts[-1], first, shared(part)
        )

    x, pool, out = through_stages(work, x, pool, rows)
    outs.append({name: all_layers(values) for name, values in out.items()})
    names = dict.fromkeys(name for out in outs for name in out)
    return x, pool, {n: jnp.concatenate([out[n] for out in outs if n in out]) for n in names}


def microbatch(batch: Batch, rows: int, number: Array, real: Array, page_size: int) -> Batch:
    """Rows number * rows and following of a step, as a step of their own; padding only if they are not `real`.

    A border may cut a sequence: its rows in the earlier microbatch then see nothing of the later one's. With one token
    a sequence at most, sequences are cut as rows are, so that each stays in its row.
    """
    begin, row = number * rows, jnp.arange(rows, dtype=jnp.int32)
    starts, lens, table = batch.q_starts, batch.kv_lens, batch.page_table
    if len(batch.tokens) == len(lens):
        more = -len(lens) % rows
        starts = lax.dynamic_slice_in_dim(jnp.pad(starts, (0, more), mode="edge"), begin, rows + 1)
        lens = lax.dynamic_slice_in_dim(jnp.pad(lens, (0, more)), begin, rows)
        table = lax.dynamic_slice_in_dim(jnp.pad(table, ((0, more), (0, 0))), begin, rows)
    later = jnp.diff(jnp.maximum(starts - begin - rows, 0))
    starts = jnp.where(real, jnp.clip(starts - begin, 0, rows), 0)
    inside = row < starts[-1]
    at = jnp.minimum(begin + row, len(batch.tokens) - 1)
    return replace(
        batch,
        tokens=batch.tokens[at],
        positions=jnp.where(inside, batch.positions[at], 0),
        places=jnp.where(inside, batch.places[at], row % page_size),
        q_starts=starts,
        kv_lens=jnp.where(jnp.diff(starts) > 0, lens - later, 0),
        page_table=table,
    )
