"""top-p: the winner of the draw among the nucleus, without finding where the nucleus ends."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.sampling.largest import highest


def nucleus_winner(
    race: Float[Array, "B V"],
    mass: Float[Array, "B V"],
    winner: Int32[Array, "B"],
    top_p: Float[Array, "B"],
) -> Int32[Array, "B"]:
    """The first in the race among the nucleus (Holtzman et al., arXiv:1904.09751), given the first of all.

    The nucleus is the smallest set of the likeliest tokens with top_p of the mass, and all that tie with its
    least likely: a token belongs to it if those likelier than it have less than top_p. If the first of all
    belongs, it is the answer. If not, nothing as unlikely as it does, and the race is run again among likelier
    tokens. That takes two looks at the vocabulary, seldom more than three times; a threshold takes a dozen.
    """
    target = top_p * jnp.sum(mass, axis=-1)

    def likelier(winner: Array) -> Array:
        return mass > jnp.take_along_axis(mass, winner[:, None], axis=1)

    def belongs(winner: Array) -> Array:
        before = jnp.sum(jnp.where(likelier(winner), mass, 0), axis=-1)
        return (top_p >= 1) | (before < target) | (before == 0)

    def again(state: tuple[Array, Array]) -> tuple[Array, Array]:
        winner, settled = state
        winner = jnp.where(settled, winner, highest(jnp.where(likelier(winner), race, 0))[1])
        return winner, settled | belongs(winner)

    state = (winner, belongs(winner))
    return jax.lax.while_loop(lambda state: ~jnp.all(state[1]), again, state)[0]
