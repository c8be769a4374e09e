"""ring_attention on TPU: one kernel a step of the ring, which sends the keys on while it attends to them.

At every step each device starts one remote copy of the keys it holds to its neighbour, folds them into the softmax
of its queries, and waits for the copy only when the maths is done. Keys alternate between the two slots of one
buffer. The state of the softmax lies in HBM between steps and is read and written behind the products. Only pairs
(tile of queries, block of keys) of which something is seen are visited; XLA lists them from the places, and the
list is prefetched.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chip, context_parts, tuning
from pallas_kernels.op import Unfit
from pallas_kernels.ring_attention import tpu_body
from pallas_kernels.ring_attention.layout import lowest
from pallas_kernels.ring_attention.tpu_body import LANES, Static

COLLECTIVE = 8  # names the barrier: no other kernel that may run at the same time has this number


class Blocks(NamedTuple):
    """How the work is cut."""

    rows: int  # query rows of a tile: tokens times heads of one kv head
    keys: int  # of a block
    at_once: int  # query rows multiplied together


class State(NamedTuple):
    """The softmax so far, tile by tile: [parts, tokens * heads, ...] float32."""

    stats: Array  # [..., 128]: largest score (base 2) in the lower half of the lanes, weight in the upper
    sums: Array  # [..., V]


def ring_attention(
    q, kv, q_places, kv_places, starts, *,
    scale, axis_name, latent=None, window=None, soft_cap=None, sinks=None, blocks=None,
):  # fmt: skip
    """See `reference.ring_attention`. A multiple of 128 queries and keys on every device; heads of 64 or whole 128s."""
    (_, n, h), (s, k, w) = q.shape, kv.shape
    _check(q, kv, latent)
    devices = lax.axis_size(axis_name)
    static, parts = sizes(
        q, kv, scale=scale, axis_name=axis_name, latent=latent, soft_cap=soft_cap, blocks=blocks
    )
    q_rows = _rows_of(q, static, parts)
    if static.key != h:
        q_rows = jnp.pad(q_rows, ((0, 0), (0, 0), (0, static.key - h)))
    q_info = jnp.stack([q_places, lowest(q_places, starts, window)], axis=1)
    everyones = lax.all_gather(kv_places, axis_name)
    me = lax.axis_index(axis_name).astype(jnp.int32)
    nothing = jnp.where(jnp.arange(LANES) < LANES // 2, np.float32(context_parts.NOTHING), np.float32(0))
    state = State(
        jnp.broadcast_to(nothing, (*q_rows.shape[:2], LANES)),
        jnp.zeros((*q_rows.shape[:2], static.sums), jnp.float32),
    )

    def turn(i, carry):
        places = everyones[lax.rem(me - i + devices, devices)]
        scalars = jnp.stack([me, i % 2, (i < devices - 1).astype(jnp.int32)])
        return step(static, scalars, q_rows, q_info, places, *carry)

    slots = jnp.broadcast_to(kv.transpose(1, 0, 2), (2, k, s, w))
    state, _ = lax.fori_loop(0, devices, turn, (state, slots))
    # All lanes of a half are equal; picking one of them would turn the whole array around in memory.
    top, weight = (jnp.max(half, axis=-1) for half in jnp.split(state.stats, 2, axis=-1))
    out = state.sums[..., -(h if latent is None else latent) :] / jnp.maximum(weight, 1e-30)[..., None]
    lse = context_parts.log_sum_exp(top / np.float32(tpu_body.LOG2E), weight)
    out, lse = _tokens_of(out, static, n), _tokens_of(lse, static, n)
    if sinks is not None:
        out, lse = context_parts.with_sinks(out, lse, sinks)
    return out.astype(q.dtype), lse


def _check(q, kv, latent) -> None:
    """Refuse what the tiles of the chip do not fit."""
    (t, _, h), (s, k, w) = q.shape, kv.shape
    if q.dtype != kv.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        raise Unfit(f"queries are {q.dtype} and keys are {kv.dtype}; both must be bfloat16 or both float32")
    if t % LANES or s % LANES:
        raise Unfit(f"{t} queries and {s} keys on a device: use multiples of {LANES} (zigzag's `multiple`)")
    if latent is None and (w % LANES or w != 2 * h):
        raise Unfit(f"head size {h}: keys and values of a token must fill whole rows of 128; use 64 or 128s")
    if latent is not None and (w != h or k != 1 or latent % LANES or w % 64):
        raise Unfit(
            f"latents of {latent} in rows of {w}, queries of {h}: use a multiple of {LANES} and one kv head"
        )


def _rule(latent: bool) -> dict[str, int]:
    """Long streams through the matrix unit; the sums of a tile and the scores of a chunk fit in VMEM."""
    return {"rows": 1024, "keys": 512 if latent else 1024, "at_once": 256}


def sizes(
    q, kv, *, scale: float, axis_name: str, latent: int | None, soft_cap: float | None = None,
    blocks: Mapping[str, int] | None,
) -> tuple[Static, int]:  # fmt: skip
    """Every size of one step, and how many parts the heads are cut into: those of one kv head, or fewer."""
    (t, n, h), (s, k, w) = q.shape, kv.shape
    key = {"tokens": t, "keys": s, "heads": n // k, "width": w}
    found = blocks or tuning.nearest("ring_attention", chip.ambient(), key) or _rule(latent is not None)
    most = max(1, found["rows"] // LANES)
    heads = _divisor(n // k, most)
    tokens = LANES * _divisor(t // LANES, most // heads)
    keys = LANES * _divisor(s // LANES, found["keys"] // LANES)
    at_once = LANES * _divisor(heads * tokens // LANES, found["at_once"] // LANES)
    whole = h % LANES != 0 and latent is None  # narrow heads: [q | 0] against the whole row
    return Static(
        scale=scale, soft_cap=soft_cap, axis_name=axis_name, heads=heads, tokens=tokens, keys=keys,
        at_once=at_once, kv_heads=k,
        key=w if whole else h, value=0 if whole or latent is not None else h, sums=w if whole else latent or h,
        blocks=s // keys,
    ), n // heads  # fmt: skip


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`, and at least 1."""
    return max(x for x in range(1, number + 1) if number % x == 0 and (x <= most or x == 1))


def _rows_of(q: Array, s: Static, parts: int) -> Array:
    """[T, N, H] -> [parts, tokens * heads, H]: head by head, 128 tokens each."""
    t, _, h = q.shape
    q = q.reshape(t // LANES, LANES, parts, s.heads, h).transpose(2, 0, 3, 1, 4)
    return q.reshape(parts, -1, h)


def _tokens_of(rows: Array, s: Static, n: int) -> Array:
    """The inverse of `_rows_of`, with or without a last axis."""
    rest = rows.shape[2:]
    rows = rows.reshape(n // s.heads, -1, s.heads, LANES, *rest)
    return rows.transpose(1, 3, 0, 2, *range(4, rows.ndim)).reshape(-1, n, *rest)


def _pairs(s: Static, q_info: Array, places: Array) -> tuple[Array, Array]:
    """(codes, how many): tile * blocks + block of every pair of which something is seen, doubled, plus 1 if not all is.

    At least one, so that the copy is made.
    """
    q = q_info.reshape(-1, s.tokens, 2)
    place, low = q[..., 0], q[..., 1]
    k = places.reshape(-1, s.keys)
    nobody = np.int32(2**30)
    first, last = jnp.min(jnp.where(k >= 0, k, nobody), axis=1), jnp.max(k, axis=1)
    earliest = jnp.min(jnp.where(place >= 0, low, nobody), axis=1)
    some = (earliest[:, None] <= last[None]) & (first[None] <= jnp.max(place, axis=1)[:, None])
    all_ = (jnp.max(low, axis=1)[:, None] <= jnp.min(k, axis=1)[None]) & (
        last[None] <= jnp.min(place, axis=1)[:, None]
    )
    some = some.reshape(-1)
    at = jnp.nonzero(some, size=some.size + 1, fill_value=0)[0].astype(jnp.int32)
    codes = 2 * at + jnp.where(all_.reshape(-1)[at], 0, 1).astype(jnp.int32)
    return codes, jnp.maximum(jnp.sum(some, dtype=jnp.int32), 1)


def step(s: Static, scalars: Array, q: Array, q_info: Array, places: Array, state: State, slots: Array):
    """(the state after the keys in one slot, the slots with the neighbour's keys in the other)."""
    parts, rows = q.shape[0], s.heads * s.tokens
    here = chip.ambient()
    cores = here.cores if parts % here.cores == 0 else 1
    codes, count = _pairs(s, q_info, places)
    if codes.size * 4 > here.smem_bytes // 2:
        raise Unfit(f"{codes.size} pairs of queries and keys fill the scalar memory; use larger blocks")
    each = parts // cores

    def tile(core, part, pair, _, codes):
        return core * each + part, codes[pair] // 2 // s.blocks, 0

    def block(core, part, pair, scalars, codes):
        return scalars[1], (core * each + part) * s.kv_heads // parts, codes[pair] // 2 % s.blocks, 0

    state_specs = [pl.BlockSpec((1, rows, LANES), tile), pl.BlockSpec((1, rows, s.sums), tile)]
    arrays = (*state, slots)
    stats, sums, slots = pl.pallas_call(
        functools.partial(tpu_body.body, s),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, each, count),
            in_specs=[
                pl.BlockSpec((1, rows, s.key), tile),
                pl.BlockSpec((s.tokens, 2), lambda *at: tile(*at)[1:]),
                pl.BlockSpec((1, 1, s.keys), lambda *at: (block(*at)[2], 0, 0)),
                *state_specs,
                pl.BlockSpec((1, 1, s.keys, slots.shape[-1]), block),
            ],
            out_specs=[*state_specs, pl.BlockSpec(memory_space=pltpu.HBM)],
            scratch_shapes=tpu_body.scratch(s),
        ),
        input_output_aliases={5: 0, 6: 1, 7: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=here.vmem_bytes * 7 // 8,
            collective_id=COLLECTIVE,
            has_side_effects=True,
        ),
        name="ring_attention",
    )(scalars, codes, q, q_info, places.reshape(-1, 1, s.keys), *arrays)
    return State(stats, sums), slots
