"""Trees of guesses under verification: a row sees its own ancestors among the sequence's new tokens."""

import jax.numpy as jnp
from jax import Array


def on_branch(tree: Array, key: Array, position: Array, first_new: Array) -> Array:
    """Whether rows at `position` with these bits may see the keys at `key`; causality is checked elsewhere.

    Keys before the sequence's first new token are seen by all, a row sees itself, and new token i if bit i is set.
    """
    guess, bits = jnp.broadcast_arrays(key - first_new, tree)
    bit = jnp.right_shift(bits, jnp.clip(guess, 0, 31)) & 1
    return (guess < 0) | (bit == 1) | (key == position)
