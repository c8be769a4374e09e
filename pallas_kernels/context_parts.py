"""A context attended in parts (of one kernel, of cores, of chips), put together exactly by log-sum-exps."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels import chip

NOTHING = -1e30  # log-sum-exp of a row that sees no key


def combine(outs: Float[Array, "X T N C"], lses: Float[Array, "X T N"]) -> tuple[Array, Array]:
    """Attention over the union of X sets of keys, from what each set gave: ([T, N, C], [T, N])."""
    top = jnp.max(lses, axis=0, keepdims=True)
    shares = jnp.exp(lses - top)
    weight = jnp.sum(shares, axis=0, keepdims=True)
    out = jnp.sum(outs.astype(jnp.float32) * (shares / weight)[..., None], axis=0)
    return out.astype(outs.dtype), (top + jnp.log(weight))[0]


def with_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """The same with one more score a head, which has no value: [T, N, C], [T, N] and [N]."""
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32)[None])
    return (out.astype(jnp.float32) * jnp.exp(lse - total)[..., None]).astype(out.dtype), total


def log_sum_exp(top: Array, weight: Array) -> Array:
    """Of scores of which the largest is `top`, and of which exp(score - top) sums to `weight`."""
    return jnp.where(weight > 0, top + jnp.log(jnp.maximum(weight, 1e-30)), NOTHING)


def for_cores(b: int, context: int, keys: int) -> int:
    """In how many parts to cut contexts of up to `context` keys, fetched `keys` at once, so that no core is idle.

    One where the chip's device has one core, where there are enough of the `b` sequences, or nothing to cut.
    """
    cores = chip.ambient().cores
    return cores if b < 2 * cores and context >= 2 * cores * keys else 1


def cut(parts: int, page_table: Array, first: Array, kv_lens: Array, page: int) -> tuple[Array, Array, Array]:
    """(page table, first, kv_lens) of `parts` * B sequences: all sequences' first parts, then their second ones."""
    b, width = page_table.shape
    each = -(-width // parts)
    table = jnp.pad(page_table, ((0, 0), (0, parts * each - width)))
    table = table.reshape(b, parts, each).swapaxes(0, 1).reshape(parts * b, each)
    begins = jnp.arange(parts, dtype=jnp.int32)[:, None] * (each * page)
    lens = jnp.clip(kv_lens[None] - begins, 0, each * page)
    return table, (first[None] - begins).reshape(-1), lens.reshape(-1)
