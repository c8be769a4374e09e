"""Drawing a token: noise that depends on a row's seed and step alone, and the token it makes win."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from jaxserve.sampling.filters import keep_likely
from jaxserve.sampling.knobs import Knobs
from jaxserve.sampling.largest import highest
from jaxserve.sampling.nucleus import nucleus_winner


def draw(logits: Float[Array, "B V"], knobs: Knobs) -> Int32[Array, "B"]:
    """One token a row from its tempered, filtered distribution; rows of temperature 0 give no meaningful one.

    The token of the largest p / e, with independent exponential e, has probability p (the Gumbel-max trick).
    Unlike inverting a cumulative sum, it moves only if the winner's own margin does, so the small differences
    that a model has between batch shapes hardly ever change a token.
    """
    temperature = jnp.where(knobs.temperature > 0, knobs.temperature, 1.0)
    mass = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None])
    filtered = jnp.any((knobs.min_p > 0) | (knobs.top_k > 0))
    mass = jax.lax.cond(filtered, keep_likely, lambda x, _: x, mass, knobs)
    race = mass / exponential(noise(knobs, logits.shape[1]))
    winner = highest(race)[1]
    return jax.lax.cond(
        jnp.any(knobs.top_p < 1), nucleus_winner, lambda *_: winner, race, mass, winner, knobs.top_p
    )


def noise(knobs: Knobs, vocab_size: int) -> UInt32[Array, "B V"]:
    """Random bits for each token, from the row's seed, its n_out and the token id only.

    Threefry, with the seed as its key, folds in n_out; its two words key a 32-bit mixer over the token ids
    (three multiply-xorshift rounds). Threefry itself for every token takes twenty times as long on a CPU.
    """
    keys = jax.random.wrap_key_data(knobs.seed, impl="threefry2x32")
    words = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, knobs.n_out))
    bits = jax.lax.broadcasted_iota(jnp.uint32, (words.shape[0], vocab_size), 1)
    bits = bits * jnp.uint32(0x9E3779B9) + words[:, :1]
    bits = (bits ^ (bits >> 17)) * jnp.uint32(0xED5AD4BB) ^ words[:, 1:]
    bits = (bits ^ (bits >> 11)) * jnp.uint32(0xAC4C1B51)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x31848BAB)
    return bits ^ (bits >> 14)


def exponential(bits: UInt32[Array, "B V"]) -> Float[Array, "B V"]:
    """Exponential variates, never 0 or infinite; small ones, which win, keep all 32 bits' resolution."""
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))
