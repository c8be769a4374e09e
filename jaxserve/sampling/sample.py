"""The sampler: one token for each row of a step, chosen on the device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.sampling.draw import draw
from jaxserve.sampling.knobs import ALTERNATIVES, LOGPROB, SHAPING, Knobs
from jaxserve.sampling.largest import highest
from jaxserve.sampling.logprobs import alternatives, chosen
from jaxserve.sampling.params import MAX_LOGPROBS
from jaxserve.sampling.penalties import shape
from jaxserve.sampling.state import SlotState, record


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What a step chose; log-probabilities are set for rows that asked, ranks count from 1."""

    tokens: Array  # i32 [B]
    logprob: Array  # f32 [B]
    rank: Array  # i32 [B]
    top_ids: Array  # i32 [B, MAX_LOGPROBS], likeliest first
    top_logprobs: Array  # f32 [B, MAX_LOGPROBS]
    finite: Array  # bool [B]: False when the row's logits hold NaN or +inf, or nothing but -inf


def sample(
    logits: Float[Array, "B V"],
    knobs: Knobs,
    state: SlotState,
    slots: Int32[Array, "B"],
    valid: Bool[Array, "B"],
) -> tuple[Sampled, SlotState]:
    """Choose a token for each row, and note it in the slots of the valid rows.

    What no valid row asks for does not run. A row's token depends on its own logits, knobs and slot only. A row
    that is not `finite` still has some token of the vocabulary.
    """
    knobs = knobs.of_use(valid)
    peak, likeliest = highest(logits)
    elaborate = jnp.any(knobs.has(SHAPING) | (knobs.temperature > 0))
    tokens = jax.lax.cond(elaborate, _choose, lambda *_: likeliest, logits, knobs, state, slots)
    logprobs = _logprobs(logits, tokens, knobs)
    return Sampled(tokens, *logprobs, jnp.isfinite(peak)), record(state, tokens, knobs, slots, valid)


def _choose(logits: Array, knobs: Knobs, state: SlotState, slots: Array) -> Array:
    logits = jax.lax.cond(jnp.any(knobs.has(SHAPING)), shape, lambda x, *_: x, logits, knobs, state, slots)
    greedy = knobs.temperature == 0
    likeliest = jax.lax.cond(
        jnp.any(greedy), lambda x: highest(x)[1], lambda x: jnp.zeros(x.shape[0], jnp.int32), logits
    )
    drawn = jax.lax.cond(jnp.all(greedy), lambda *_: likeliest, draw, logits, knobs)
    return jnp.where(greedy, likeliest, drawn)


def _logprobs(logits: Array, tokens: Array, knobs: Knobs) -> tuple[Array, Array, Array, Array]:
    size = logits.shape[0]
    nothing = jnp.zeros(size, jnp.float32)
    logprob, rank, norm = jax.lax.cond(
        jnp.any(knobs.has(LOGPROB)),
        chosen,
        lambda *_: (nothing, jnp.zeros(size, jnp.int32), nothing),
        logits,
        tokens,
    )
    top_ids, top_logprobs = jax.lax.cond(
        jnp.any(knobs.has(ALTERNATIVES)),
        alternatives,
        lambda *_: (
            jnp.full((size, MAX_LOGPROBS), -1, jnp.int32),
            jnp.zeros((size, MAX_LOGPROBS), jnp.float32),
        ),
        logits,
        norm,
    )
    return logprob, rank, top_ids, top_logprobs
