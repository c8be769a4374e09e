"""What one device does in an op that spreads over devices, with all its numbers known, for bench.tpu_static.

Which rows go where follows from what all devices know together, and the static tool follows one device. So these
are the kernels of the ops alone, for device 0, between arguments that the op would have worked out.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bench.tpu_static.worker import make_mesh
from pallas_kernels.expert_exchange import cases as exchange_cases
from pallas_kernels.expert_exchange import reference as exchange_reference
from pallas_kernels.expert_exchange import routes
from pallas_kernels.expert_exchange import tpu as exchange_tpu
from pallas_kernels.ring_attention import cases as ring_cases
from pallas_kernels.ring_attention import reference as ring_reference
from pallas_kernels.ring_attention import tpu as ring_tpu
from pallas_kernels.ring_attention.layout import lowest

Blocks = Mapping[str, int] | None


def target(op: str, case: Any, blocks: Blocks) -> dict[str, Any]:
    """The kernel as a case of bench.tpu_static; every device gets the same arguments."""
    fn, args = (_exchange if op == "expert_exchange" else _ring_step)(case, blocks)
    mesh = make_mesh({case.axis: case.devices})
    place = NamedSharding(mesh, PartitionSpec())
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) if isinstance(x, jax.ShapeDtypeStruct) else x
        for x in args
    ]
    every = PartitionSpec()
    over = jax.shard_map(fn, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    return {"fn": over, "args": args, "jit": {"donate_argnums": ()}, "multi_device": True}


def cost(op: str, case: Any) -> tuple[int, int]:
    """(floating-point operations, bytes to and from HBM) of what `target` does."""
    if op == "expert_exchange":
        (rows, _), _ = case.shapes(jnp.bfloat16)
        return exchange_reference.cost(rows, case.counts()[0])
    return ring_reference.cost(*_own(case), latent=case.latent, window=case.window, devices=1)


def _exchange(case: exchange_cases.Case, _: Blocks) -> tuple[Callable, list]:
    (rows, _), options = case.shapes(jnp.bfloat16)
    t, max_rows = rows.shape[0] // case.devices, options["max_rows"]
    lines = jax.ShapeDtypeStruct(
        (t, int(np.prod(rows.shape[1:])) // exchange_tpu.LANES, exchange_tpu.LANES), rows.dtype
    )

    def call(counts, lines):
        route = routes.from_counts(counts, t, max_rows, case.back)
        return exchange_tpu.launch(route, counts[0, 0, 0] * 0, lines, case.axis, max_rows)

    counts = case.counts()
    return call, [counts.swapaxes(0, 1).copy() if case.back else counts, lines]


def _own(case: ring_cases.Case) -> list:
    """Device 0's arguments at the step after the first: the keys are its left neighbour's."""
    (q, kv, q_places, kv_places, starts), _ = case.shapes(jnp.bfloat16)
    each = [jax.ShapeDtypeStruct((x.shape[0] // case.devices, *x.shape[1:]), x.dtype) for x in (q, kv)]
    q_places, kv_places, starts = (x.reshape(case.devices, -1) for x in (q_places, kv_places, starts))
    return [*each, q_places[0], kv_places[-1], starts[0]]


def _ring_step(case: ring_cases.Case, blocks: Blocks) -> tuple[Callable, list]:
    q, kv, q_places, kv_places, starts = _own(case)
    static, parts = ring_tpu.sizes(
        q, kv, scale=1.0, axis_name=case.axis, latent=case.latent, soft_cap=case.soft_cap, blocks=blocks
    )
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    rows = q.shape[0] * static.heads
    state = (
        jax.ShapeDtypeStruct((parts, rows, ring_tpu.LANES), jnp.float32),
        jax.ShapeDtypeStruct((parts, rows, static.sums), jnp.float32),
    )
    slots = shape((2, kv.shape[1], kv.shape[0], kv.shape[2]))
    info = np.stack([q_places, np.asarray(lowest(q_places, starts, case.window))], axis=1)
    scalars = np.array([0, 1, 1], np.int32)

    def call(scalars, q, info, places, stats, sums, slots):
        return ring_tpu.step(static, scalars, q, info, places, ring_tpu.State(stats, sums), slots)

    return call, [scalars, shape((parts, rows, static.key)), info, kv_places, *state, slots]
