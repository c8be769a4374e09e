"""How well a model predicts a text, and how far it is from another one: perplexity, KL and agreement."""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.checkpoint_config import EvalConfig
from jaxserve.models import ModelConfig, model_for
from jaxserve.pool import cache_name
from jaxserve.text import load_tokenizer
from jaxserve.text_windows import windows
from jaxserve.weights import load, open_checkpoint
from jaxserve.whole import forward

ROWS = 128  # whose logits are in memory at a time


@dataclass(frozen=True)
class Evaluation:
    """Averages over the tokens of a text; the last three only beside a reference model."""

    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    kl: float | None = None  # nats a token, of the reference's distribution against the model's
    top1: float | None = None  # how often both find the same token likeliest

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Loaded:
    """A model and its weights, and the data type of its cache; None for that of the weights."""

    config: ModelConfig
    params: Any
    cache: str | None = None


def evaluate(config: EvalConfig, *, progress: bool = True) -> Evaluation:
    """Perplexity of a model on a text (see `windows`); the first token of each window is not predicted."""
    most = config.max_tokens and -(-config.max_tokens // config.context)
    pieces = windows(config.text, load_tokenizer(config.model), config.context, most)
    model = replace(
        loaded(config.model, config.dtype, progress), cache=cache_name(config.kv_cache_dtype, config.dtype)
    )
    if config.reference is None:
        return compare(model, pieces=pieces)
    same = config.reference == config.model
    reference = replace(model, cache=None) if same else loaded(config.reference, config.dtype, progress)
    return compare(model, reference, pieces=pieces)


def loaded(model: str, dtype: str = "float32", progress: bool = False) -> Loaded:
    """A checkpoint's model, on the default device."""
    checkpoint = open_checkpoint(model)
    config = ModelConfig.from_hf(checkpoint.config)
    return Loaded(config, load(model_for(config).params(config), checkpoint, dtype, progress=progress))


def compare(model: Loaded, reference: Loaded | None = None, *, pieces: np.ndarray) -> Evaluation:
    """The evaluation of `model` on windows of tokens [n, length]."""
    models = [model] if reference is None else [model, reference]
    run = [jax.jit(partial(_hidden, m.config, m.cache)) for m in models]
    measure = jax.jit(partial(_measure, [m.config for m in models]))
    sums = np.zeros(4)
    for tokens in pieces:
        hidden = [f(m.params, jnp.asarray(tokens)) for f, m in zip(run, models, strict=True)]
        targets = np.append(tokens[1:], -1)
        for start in range(0, len(tokens), ROWS):
            rows = slice(start, start + ROWS)
            parts = [h[rows] for h in hidden]
            sums += np.asarray(
                measure([m.params for m in models], parts, jnp.asarray(targets[rows])), np.float64
            )
    count = pieces.shape[0] * (pieces.shape[1] - 1)
    loss, reference_loss, kl, same = sums / count
    if reference is None:
        return Evaluation(count, math.exp(loss))
    return Evaluation(count, math.exp(loss), math.exp(reference_loss), float(kl), float(same))


def _hidden(config: ModelConfig, cache: str | None, params: Any, tokens: jax.Array) -> jax.Array:
    return forward(config, params, tokens, sequences=1, cache=cache)[0]


def _measure(
    configs: list[ModelConfig], params: list[Any], hidden: list[jax.Array], targets: jax.Array
) -> jax.Array:
    """Sums over rows with a target: both losses, KL and how often both agree."""
    logps = [
        jax.nn.log_softmax(model_for(c).logits(c, p, h), axis=-1)
        for c, p, h in zip(configs, params, hidden, strict=True)
    ]
    counts = targets >= 0
    at = jnp.maximum(targets, 0)[:, None]
    losses = [-jnp.take_along_axis(logp, at, axis=1)[:, 0] for logp in logps]
    mine, other = logps[0], logps[-1]
    kl = jnp.sum(jnp.exp(other) * (other - mine), axis=-1)
    same = (jnp.argmax(mine, axis=-1) == jnp.argmax(other, axis=-1)).astype(jnp.float32)
    values = jnp.stack([losses[0], losses[-1], kl, same])
    return jnp.sum(jnp.where(counts[None], values, jnp.float32(0)), axis=1)
