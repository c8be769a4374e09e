"""Decoder-only transformers: Llama, Mistral, Qwen, Gemma, OLMo, GLM, gpt-oss, DeepSeek, Kimi: values of one config.

A layer is attention (`grouped_query` or `latent`) and a feed-forward (dense or a mixture of experts), each
with norms before or after it.
"""

from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxserve.batch import Batch
from jaxserve.layers.linear import linear_f32
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.over_layers import over_group, over_layers
from jaxserve.layers.over_stages import over_stages
from jaxserve.layers.rope import rotations
from jaxserve.models import feed_forward, grouped_query, latent
from jaxserve.models.config import ModelConfig
from jaxserve.plan.cost import microbatch_rows
from sharding.kernels import embedding
from sharding.mesh import BATCH, size
from sharding.params import Param
from sharding.stages import stage_count

Tree = dict[str, Any]

NORMS = {  # what the norms of a block are called in checkpoints, by where they stand
    "pre": {"attn_in": "input_layernorm", "mlp_in": "post_attention_layernorm"},
    "post": {"attn_out": "post_attention_layernorm", "mlp_out": "post_feedforward_layernorm"},
    "both": {
        "attn_in": "input_layernorm",
        "attn_out": "post_attention_layernorm",
        "mlp_in": "pre_feedforward_layernorm",
        "mlp_out": "post_feedforward_layernorm",
    },
}


def params(c: ModelConfig) -> Tree:
    """Every weight of the model."""
    embed = (c.vocab_size, c.hidden_size), ("vocab", None)
    tree: Tree = {
        "embed": Param(*embed, c.prefix + "embed_tokens.weight"),
        "layers": [_layer_params(c, i) for i in range(c.num_layers)],
        "norm": Param((c.hidden_size,), (None,), c.prefix + "norm.weight"),
    }
    if not c.tied:
        tree["head"] = Param(*embed, c.prefix.removesuffix("model.") + "lm_head.weight")
    return tree


def _layer_params(c: ModelConfig, layer: int) -> Tree:
    at = f"{c.prefix}layers.{layer}."
    norms = {
        name: Param((c.hidden_size,), (None,), f"{at}{source}.weight")
        for name, source in NORMS[c.norms].items()
    }
    return norms | _attention(c).params(c, at + "self_attn.") | feed_forward.params(c, at, layer)


def _attention(c: ModelConfig) -> ModuleType:
    return grouped_query if c.latent is None else latent


def cache_shape(c: ModelConfig, page_size: int, packed: bool = False) -> tuple[int, int, int]:
    """One layer's page, `packed` if in 4 bits. There is one such array of pages per layer."""
    return _attention(c).cache_shape(c, page_size, packed)


def cache_axes(c: ModelConfig) -> tuple[str | None, ...]:
    """What the axes of `cache_shape` mean, as those of a `Param`."""
    return _attention(c).CACHE_AXES


def cache_scales_shape(c: ModelConfig, page_size: int, packed: bool = False) -> tuple[int, ...]:
    """The scales of one layer's page, where the cache is in low bits."""
    return _attention(c).cache_scales_shape(c, page_size, packed)


def cache_scales_axes(c: ModelConfig) -> tuple[str | None, ...]:
    """What the axes of `cache_scales_shape` mean."""
    return _attention(c).SCALES_AXES


def forward(
    c: ModelConfig, params: Tree, batch: Batch, pool: Any, collect: bool = False
) -> tuple[Array, Any, dict[str, Array]]:
    """(hidden states [T, D] after the last norm, the pool with this step's tokens, what happened inside).

    Inside a mixture of experts: "expert_loads" [mixture layers, E], the rows that each expert got, and
    "device_loads", those that each device with experts got. `collect` adds "embed" [T, D], and over layers
    [L, T, D] "attention" and "mlp" (what the sub-blocks computed, before a norm of theirs and the sum) and "layers"
    (what each layer handed on), and what a router saw and chose (`feed_forward`).
    """
    x_TD, block = embedded(c, params, batch), partial(_block, c, collect)
    page_size, _, data, turns = _along(c, batch, pool)
    if stage_count() > 1:
        rows = rows_at_once(c, len(x_TD), len(batch.kv_lens))
        last_TD, pool, inside = over_stages(
            block, x_TD, params["layers"], pool, page_size, batch, data,
            lambda part: rotations(c.ropes, part.positions), rows,
        )  # fmt: skip
    else:
        last_TD, pool, inside = over_layers(
            block, x_TD, params["layers"], pool, page_size, batch, data, turns
        )
    return normed(c, params, last_TD), pool, {"embed": x_TD, **inside} if collect else inside


def embedded(c: ModelConfig, params: Tree, batch: Batch) -> Float[Array, "T D"]:
    """What the first layer is given."""
    x_TD = embedding(params["embed"], batch.tokens)
    return x_TD if c.embed_scale == 1 else x_TD * jnp.asarray(c.embed_scale, x_TD.dtype)


def forward_group(
    c: ModelConfig,
    layers: Any,
    batch: Batch,
    pool: Any,
    x: Float[Array, "T D"],
    first: Array,
    *,
    count: int,
    begins: int,
) -> tuple[Array, Any, dict[str, Array]]:
    """`forward` through `count` layers from `first` on, without what is before and after (see `over_group`)."""
    page_size, batch, data, turns = _along(c, batch, pool)
    block = partial(_block, c, False)
    return over_group(block, x, layers, pool, page_size, batch, data, first, count, begins, turns)


def normed(c: ModelConfig, params: Tree, last: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """The hidden states, of what the last layer gave."""
    return _norm(c, last, params["norm"])


def _along(c: ModelConfig, batch: Batch, pool: Any) -> tuple[int, Batch, dict[str, np.ndarray], Array]:
    """What every layer is given beside its own: page size, batch, what differs between layers, rotations."""
    page_size = _attention(c).page_size(pool[0] if type(pool) in (list, tuple) else pool)
    return page_size, batch, _per_layer(c), rotations(c.ropes, batch.positions)


def rows_at_once(c: ModelConfig, tokens: int, seqs: int) -> int:
    """Rows of the microbatches in which a step passes pipeline stages on the ambient mesh; see `microbatch_rows`."""
    if c.mixture is None:
        return microbatch_rows(tokens, seqs)
    groups = size(jax.sharding.get_abstract_mesh(), BATCH)
    return microbatch_rows(tokens, seqs, groups * c.mixture.routing.top / c.mixture.routing.experts)


def logits(c: ModelConfig, params: Tree, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """The next token's unnormalised log-probabilities, float32."""
    logits_RV = linear_f32(hidden, params["embed" if c.tied else "head"])
    cap = c.logits_soft_cap
    return logits_RV if cap is None else cap * jnp.tanh(logits_RV / cap)


def _per_layer(c: ModelConfig) -> dict[str, np.ndarray]:
    """What differs between layers of one structure; what does not stays a constant of the program."""
    varying = {"window": c.windows, "rope": c.layer_ropes}
    return {name: np.asarray(v, np.int32) for name, v in varying.items() if len(set(v)) > 1}


def _block(c: ModelConfig, collect: bool, x, w: Tree, pages, batch: Batch, varies, turns):
    """One layer: x [T, D] plus attention plus feed-forward."""
    turn = turns[varies["rope"]] if "rope" in varies else turns[c.layer_ropes[0]]
    window = varies.get("window", c.windows[0])
    attend = _attention(c).attention
    attended, pages = attend(c, w, _norm(c, x, w.get("attn_in")), pages, batch, window, turn)
    x = x + _norm(c, attended, w.get("attn_out"))
    fed, inside = feed_forward.feed_forward(c, w, _norm(c, x, w.get("mlp_in")), batch, collect)
    x = x + _norm(c, fed, w.get("mlp_out"))
    return x, pages, {**inside, "attention": attended, "mlp": fed, "layers": x} if collect else inside


def _norm(c: ModelConfig, x, weight):
    return x if weight is None else rms_norm(x, weight, c.norm_eps, c.norm_offset)
