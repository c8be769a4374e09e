"""expert_exchange on TPU: every piece of rows is one remote copy, and all of them start before any is waited for.

The sender knows where each piece belongs, so rows land sorted in the receiver's memory and nobody moves them again.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chip
from pallas_kernels.expert_exchange.routes import Routes, routes
from pallas_kernels.op import Unfit

LANES = 128
COLLECTIVE = 7  # names the barrier: no other kernel that may run at the same time has this number


def expert_exchange(rows, counts, *, axis_name, max_rows, back=False):
    """See `reference.expert_exchange`. Rows of 128 values or a multiple of it."""
    row = rows.shape[1:]
    if not row or row[-1] % LANES or len(row) > 2:
        raise Unfit(f"rows of shape {row}: the chip copies whole lines of {LANES} values; pad the row")
    if 16 * counts.size > chip.ambient().smem_bytes // 2:
        raise Unfit(f"{counts.shape} counts fill the scalar memory")
    lines = rows.reshape(rows.shape[0], -1, LANES)
    route, received = routes(counts, axis_name, rows.shape[0], max_rows, back)
    out = launch(route, lax.axis_index(axis_name).astype(jnp.int32), lines, axis_name, max_rows)
    return out.reshape(max_rows, *row), received


def launch(route: Routes, me: Array, lines: Array, axis_name, max_rows: int) -> Array:
    """What device `me` does: `lines` [T, lines, 128] to where `route` says, and the others' into the result."""
    count = route.count[me]
    totals = jnp.stack([me, jnp.sum(count, dtype=jnp.int32), jnp.sum(route.count[:, me], dtype=jnp.int32)])
    scalars = (totals, route.begin[me].reshape(-1), count.reshape(-1), route.place[me].reshape(-1))
    return pl.pallas_call(
        partial(_body, axis_name, *count.shape),
        out_shape=jax.ShapeDtypeStruct((max_rows, *lines.shape[1:]), lines.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR],
        ),
        compiler_params=pltpu.CompilerParams(collective_id=COLLECTIVE, has_side_effects=True),
        name="expert_exchange",
    )(*scalars, lines)


def _body(
    axis_name, devices: int, groups: int, totals, begin, count, place, rows, out, sent, arrived, entered
):
    me = totals[0]

    def peer(step):
        device = lax.rem(me + step, devices)  # everyone starts with its neighbour, not all with the first
        return device, {axis_name: device}

    def each_peer(act) -> None:
        lax.fori_loop(1, devices, lambda step, _: act(peer(step)[1]), None)

    # Nobody writes into a device that has not entered, and nobody leaves before all have: else a fast device's next
    # call could be counted in a slow one's barrier of this call.
    barrier = pltpu.get_barrier_semaphore()
    each_peer(lambda where: pl.semaphore_signal(barrier, device_id=where))
    pl.semaphore_wait(barrier, devices - 1)
    each_peer(lambda where: pl.semaphore_signal(entered, device_id=where))

    def send(i, _):
        device, where = peer(i // groups)
        at = device * groups + lax.rem(i, groups)

        @pl.when(count[at] > 0)
        def _():
            pltpu.make_async_remote_copy(
                rows.at[pl.ds(begin[at], count[at])],
                out.at[pl.ds(place[at], count[at])],
                sent,
                arrived,
                device_id=where,
            ).start()

    lax.fori_loop(0, devices * groups, send, None)

    def wait(total, array, semaphore) -> None:
        @pl.when(total > 0)
        def _():
            all_of_it = array.at[pl.ds(0, total)]
            pltpu.make_async_copy(all_of_it, all_of_it, semaphore).wait()

    wait(totals[1], rows, sent)
    wait(totals[2], out, arrived)
    pl.semaphore_wait(entered, devices - 1)
