"""What changes the logits before a token is chosen: bias, allowed tokens, bad words, min_tokens and penalties."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.sampling.knobs import BAD_WORDS, BIAS, MIN_TOKENS, PENALTIES, Knobs
from jaxserve.sampling.state import SlotState


def shape(
    logits: Float[Array, "B V"], knobs: Knobs, state: SlotState, slots: Int32[Array, "B"]
) -> Float[Array, "B V"]:
    """The logits after everything that a row's flags name; rows without flags are bit-equal.

    Where bad words and min_tokens leave nothing of the allowed tokens, the row has the allowed tokens' raw
    logits again: a defined token is better than none.
    """

    def when(flag: int, change: Callable[[Array], Array], logits: Array) -> Array:
        needed = knobs.has(flag)
        return jax.lax.cond(
            jnp.any(needed), lambda x: jnp.where(needed[:, None], change(x), x), lambda x: x, logits
        )

    def bias(x: Array) -> Array:
        return x + rows(state.bias, slots)

    def no_bad_words(x: Array) -> Array:
        past, recent = rows(state.bad_past, slots), rows(state.recent, slots)
        matches = jnp.all((past < 0) | (past == recent[:, None]), axis=-1)
        return mask(x, jnp.where(matches, rows(state.bad_last, slots), -1))

    def no_stops(x: Array) -> Array:
        return mask(x, rows(state.stop_ids, slots))

    def only_allowed(x: Array) -> Array:
        return jnp.where(rows(state.bias, slots) == -jnp.inf, -jnp.inf, x)

    shaped = when(BIAS, bias, logits)
    shaped = when(BAD_WORDS, no_bad_words, shaped)
    shaped = when(MIN_TOKENS, no_stops, shaped)
    shaped = when(PENALTIES, lambda x: penalize(x, rows(state.marks, slots), knobs), shaped)
    nothing_left = jnp.max(shaped, axis=-1) == -jnp.inf
    return jax.lax.cond(
        jnp.any(nothing_left),
        lambda x: jnp.where(nothing_left[:, None], when(BIAS, only_allowed, logits), x),
        lambda x: x,
        shaped,
    )


def penalize(logits: Float[Array, "B V"], marks: Array, knobs: Knobs) -> Float[Array, "B V"]:
    """Repetition over prompt and output (CTRL, arXiv:1909.05858), presence and frequency over the output."""
    counts = (marks >> 1).astype(jnp.float32)
    repetition = jnp.where(marks != 0, knobs.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - knobs.frequency[:, None] * counts
    return logits - knobs.presence[:, None] * (counts > 0).astype(jnp.float32)


def mask(logits: Float[Array, "B V"], ids: Int32[Array, "B N"]) -> Float[Array, "B V"]:
    """-inf at each row's `ids`; negative ones are none."""
    size, vocab_size = logits.shape
    columns = jnp.where(ids < 0, vocab_size, ids)
    return logits.at[jnp.arange(size)[:, None], columns].set(-jnp.inf, mode="drop")


def rows(table: Array, slots: Int32[Array, "B"]) -> Array:
    """These slots' rows; a padding row may hold any slot."""
    return table.at[slots].get(mode="clip")
