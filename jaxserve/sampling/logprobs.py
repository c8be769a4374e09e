"""Log-probabilities of tokens under the model, before any penalty or temperature, and the likeliest others."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.sampling.largest import largest
from jaxserve.sampling.params import MAX_LOGPROBS


def score(
    logits: Float[Array, "R V"], targets: Int32[Array, "R"]
) -> tuple[Float[Array, "R"], Int32[Array, "R"], Int32[Array, "R N"], Float[Array, "R N"]]:
    """(log-probability and rank of each target, ids and log-probabilities of the N = MAX_LOGPROBS likeliest)."""
    logprob, rank, norm = chosen(logits, targets)
    return logprob, rank, *alternatives(logits, norm)


def chosen(
    logits: Float[Array, "B V"], tokens: Int32[Array, "B"]
) -> tuple[Float[Array, "B"], Int32[Array, "B"], Float[Array, "B"]]:
    """(log-probability, rank, log of the sum of exponentials); rank is 1 + how many tokens are likelier."""
    peak = jnp.max(logits, axis=-1)
    norm = peak + jnp.log(jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1))
    logit = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + jnp.sum(logits > logit, axis=-1, dtype=jnp.int32)
    return logit[:, 0] - norm, rank, norm


def alternatives(
    logits: Float[Array, "B V"], norm: Float[Array, "B"]
) -> tuple[Int32[Array, "B N"], Float[Array, "B N"]]:
    """Ids and log-probabilities of the likeliest tokens, in order; id -1 where the vocabulary has fewer."""
    values, ids = largest(logits, min(MAX_LOGPROBS, logits.shape[1]))
    missing = ((0, 0), (0, MAX_LOGPROBS - ids.shape[1]))
    logprobs = jnp.pad(values - norm[:, None], missing, constant_values=-jnp.inf)
    return jnp.pad(ids, missing, constant_values=-1), logprobs
