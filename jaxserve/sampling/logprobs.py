"""Log-probabilities of tokens under the model, before any penalty or temperature, and the likeliest others."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.sampling.params import MAX_LOGPROBS

_CHUNK = 128


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
    largest = jnp.max(logits, axis=-1)
    norm = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1))
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


def largest(x: Float[Array, "B V"], k: int) -> tuple[Float[Array, "B K"], Int32[Array, "B K"]]:
    """As lax.top_k, but it looks only into the k chunks of a row with the largest maxima: they hold the answer."""
    size, vocab_size = x.shape
    chunks = -(-vocab_size // _CHUNK)
    if chunks <= k:
        return jax.lax.top_k(x, k)
    x = jnp.pad(x, ((0, 0), (0, chunks * _CHUNK - vocab_size)), constant_values=-jnp.inf)
    x = x.reshape(size, chunks, _CHUNK)
    picked = jnp.sort(
        jax.lax.top_k(jnp.max(x, axis=-1), k)[1], axis=-1
    )  # sorted, so that ties keep their order
    x = jnp.take_along_axis(x, picked[:, :, None], axis=1).reshape(size, k * _CHUNK)
    values, at = jax.lax.top_k(x, k)
    return values, jnp.take_along_axis(picked, at // _CHUNK, axis=1) * _CHUNK + at % _CHUNK
