"""The device side of ring_attention on TPU: a tile of queries meets a block of keys, and the copy runs behind it."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MASKED = -1e30
LOG2E = math.log2(math.e)


class Static(NamedTuple):
    """Every size of one step."""

    scale: float
    soft_cap: float | None
    axis_name: str
    heads: int  # query heads of a tile, all of one kv head
    tokens: int  # of a tile
    keys: int  # of a block
    at_once: int  # query rows multiplied together
    kv_heads: int
    key: int  # a row's first columns, multiplied with the queries
    value: int  # where a row's value begins
    sums: int  # columns of the value
    blocks: int  # of keys on a device


class Refs(NamedTuple):
    """The memory of one pair."""

    scalars: Any  # [3]: this device's place in the ring, the slot of this step's keys, whether they go on
    codes: Any  # [pairs + 1]: of the pairs, in the order of the tiles
    q: Any  # [1, rows, key]: head by head, 128 tokens each
    q_info: Any  # [tokens, 2]: place, and place of the first key that it sees
    places: Any  # [1, 1, keys]
    old_stats: Any  # [1, rows, 128]
    old_sums: Any  # [1, rows, sums]
    kv: Any  # [1, 1, keys, W]
    stats: Any  # like old_stats
    sums: Any  # like old_sums
    slots: Any  # [2, K, S, W] in HBM, where kv is fetched from
    top: Any  # [rows, 128]: largest score, the same in every lane
    weight: Any  # [rows, 128]: sum of exp2(score - top), one partial sum a lane
    scores: Any  # [2, at_once, keys]: of the chunk being folded and of the next
    sent: Any
    arrived: Any


def scratch(s: Static) -> list:
    """Memory of the kernel, in the order of `Refs` from `top` on."""
    rows = s.heads * s.tokens
    return [
        pltpu.VMEM((rows, LANES), jnp.float32),
        pltpu.VMEM((rows, LANES), jnp.float32),
        pltpu.VMEM((2, s.at_once, s.keys), jnp.float32),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA,
    ]


def body(s: Static, *refs) -> None:
    """One grid step: one pair."""
    r = Refs(*refs)
    core, part, pair = (pl.program_id(i) for i in range(3))
    last = pair + 1 == pl.num_programs(2)
    sends = (core == 0) & (r.scalars[2] == 1)
    pl.when(sends & (part == 0) & (pair == 0))(lambda: _start(s, r))
    code = r.codes[pair]
    tile = code // 2 // s.blocks
    pl.when((pair == 0) | (tile != r.codes[jnp.maximum(pair - 1, 0)] // 2 // s.blocks))(lambda: _load(r))
    lax.cond(code % 2 == 1, lambda: _attend(s, r, True), lambda: _attend(s, r, False))
    pl.when(last | (tile != r.codes[pair + 1] // 2 // s.blocks))(lambda: _save(r))
    pl.when(sends & (part + 1 == pl.num_programs(1)) & last)(lambda: _copy(s, r).wait())


def _copy(s: Static, r: Refs):
    """This step's keys into the right neighbour's other slot."""
    right, slot = lax.rem(r.scalars[0] + 1, lax.axis_size(s.axis_name)), r.scalars[1]
    return pltpu.make_async_remote_copy(
        r.slots.at[slot], r.slots.at[1 - slot], r.sent, r.arrived, device_id={s.axis_name: right}
    )


def _start(s: Static, r: Refs) -> None:
    """Tell the left neighbour that it may write here, wait for the right one to say so, and send.

    The left one cannot enter its next step before it has heard from here, so one counter is enough.
    """
    devices = lax.axis_size(s.axis_name)
    left = lax.rem(r.scalars[0] + devices - 1, devices)
    barrier = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(barrier, device_id={s.axis_name: left})
    pl.semaphore_wait(barrier, 1)
    _copy(s, r).start()


def _load(r: Refs) -> None:
    """The softmax of this tile as the step before left it."""
    stats = r.old_stats[0]
    r.top[...] = jnp.broadcast_to(stats[:, :1], stats.shape)
    lane = lax.broadcasted_iota(jnp.int32, stats.shape, 1)
    r.weight[...] = jnp.where(lane == LANES - 1, stats, 0.0)
    r.sums[...] = r.old_sums[...]


def _save(r: Refs) -> None:
    weight = jnp.sum(r.weight[...], axis=1, keepdims=True)
    lane = lax.broadcasted_iota(jnp.int32, r.top.shape, 1)
    r.stats[0] = jnp.where(lane < LANES // 2, r.top[...], weight)


def _attend(s: Static, r: Refs, masked: bool) -> None:
    """Fold the block into the tile's softmax, `at_once` rows at a time.

    The next chunk's product goes to the matrix unit while this chunk's exponentials are computed.
    """
    steps = s.heads * s.tokens // s.at_once

    def rows(i):
        return pl.ds(pl.multiple_of(i * s.at_once, s.at_once), s.at_once)

    def scores(i) -> Array:
        return _dot(r.q[0, rows(i)], r.kv[0, 0, :, : s.key], contract=1)

    def two(i, _):
        for parity in (0, 1):
            now = 2 * i + parity
            r.scores[1 - parity] = scores(jnp.minimum(now + 1, steps - 1))
            _fold(s, r, masked, now, rows(now), r.scores[parity])

    r.scores[0] = scores(0)
    lax.fori_loop(0, steps // 2, two, None)
    if steps % 2:
        _fold(s, r, masked, steps - 1, rows(steps - 1), r.scores[0])


def _fold(s: Static, r: Refs, masked: bool, chunk, rows, scores: Array) -> None:
    """One step of the online softmax, in base 2."""
    if s.soft_cap is None:
        scores = scores * np.float32(s.scale * LOG2E)
    else:
        scores = np.float32(s.soft_cap * LOG2E) * jnp.tanh(scores * np.float32(s.scale / s.soft_cap))
    if masked:
        seen = _seen(s, r, chunk)
        scores = jnp.where(seen, scores, MASKED)
    old = r.top[rows]
    top = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp2(scores - _wide(top, s.keys))
    if masked:
        weights = jnp.where(seen, weights, 0.0)
    shrink = jnp.exp2(old - top)
    r.top[rows] = top
    r.weight[rows] = r.weight[rows] * shrink + sum(weights[:, i : i + LANES] for i in range(0, s.keys, LANES))
    values = r.kv[0, 0, :, s.value : s.value + s.sums]
    found = _dot(weights.astype(values.dtype), values, contract=0)
    r.sums[0, rows] = r.sums[0, rows] * _wide(shrink, s.sums) + found


def _seen(s: Static, r: Refs, chunk) -> Array:
    """Which keys of the block each row of the chunk sees; rows are 128 tokens of one head after another's."""
    keys = r.places[0]
    seen = []
    for i in range(s.at_once // LANES):
        slab = (chunk * (s.at_once // LANES) + i) // s.heads
        info = r.q_info[pl.ds(pl.multiple_of(slab * LANES, LANES), LANES)]
        seen.append((info[:, :1] >= keys) & (info[:, 1:] <= keys))
    return jnp.concatenate(seen, axis=0)


def _dot(x: Array, y: Array, contract: int) -> Array:
    """Rows of `x` times dimension `contract` of `y`, summed in float32."""
    precision = lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return lax.dot_general(
        x, y, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _wide(x: Array, lanes: int) -> Array:
    """[R, 128], the same in every lane -> [R, lanes]."""
    return x if lanes == LANES else jnp.concatenate([x] * (lanes // LANES), axis=1)
