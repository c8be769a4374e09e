"""Decoder-only transformers with grouped-query attention: Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, OLMo 2 and 3."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxserve.batch import Batch
from jaxserve.layers.linear import linear, linear_f32
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.over_layers import over_layers
from jaxserve.layers.rope import rotate, rotations
from jaxserve.models.config import ModelConfig
from pallas_kernels.page_write import page_write
from pallas_kernels.paged_attention import paged_attention
from sharding.params import Param

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
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


def params(c: ModelConfig) -> Tree:
    """Every weight of the model."""
    embed = (c.vocab_size, c.hidden_size), ("vocab", None)
    tree: Tree = {
        "embed": Param(*embed, c.prefix + "embed_tokens.weight"),
        "layers": [_layer_params(c, f"{c.prefix}layers.{i}.") for i in range(c.num_layers)],
        "norm": Param((c.hidden_size,), (None,), c.prefix + "norm.weight"),
    }
    if not c.tied:
        tree["head"] = Param(*embed, c.prefix.removesuffix("model.") + "lm_head.weight")
    return tree


def _layer_params(c: ModelConfig, at: str) -> Tree:
    d, f, q, kv = c.hidden_size, c.ffn_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    attn, mlp = at + "self_attn.", at + "mlp."
    tree = {
        "q": Param((q, d), ("heads", None), attn + "q_proj.weight"),
        "k": Param((kv, d), ("kv_heads", None), attn + "k_proj.weight"),
        "v": Param((kv, d), ("kv_heads", None), attn + "v_proj.weight"),
        "o": Param((d, q), (None, "heads"), attn + "o_proj.weight"),
        "gate": Param((f, d), ("ffn", None), mlp + "gate_proj.weight"),
        "up": Param((f, d), ("ffn", None), mlp + "up_proj.weight"),
        "down": Param((d, f), (None, "ffn"), mlp + "down_proj.weight"),
    }
    for name, source in NORMS[c.norms].items():
        tree[name] = Param((d,), (None,), at + source + ".weight")
    if c.qk_norm == "head":
        tree["q_norm"] = Param((c.head_dim,), (None,), attn + "q_norm.weight")
        tree["k_norm"] = Param((c.head_dim,), (None,), attn + "k_norm.weight")
    if c.qk_norm == "all":
        tree["q_norm"] = Param((q,), ("heads",), attn + "q_norm.weight")
        tree["k_norm"] = Param((kv,), ("kv_heads",), attn + "k_norm.weight")
    if c.qkv_bias:
        tree["q_bias"] = Param((q,), ("heads",), attn + "q_proj.bias")
        tree["k_bias"] = Param((kv,), ("kv_heads",), attn + "k_proj.bias")
        tree["v_bias"] = Param((kv,), ("kv_heads",), attn + "v_proj.bias")
    if c.o_bias:
        tree["o_bias"] = Param((d,), (None,), attn + "o_proj.bias")
    if c.mlp_bias:
        tree["gate_bias"] = Param((f,), ("ffn",), mlp + "gate_proj.bias")
        tree["up_bias"] = Param((f,), ("ffn",), mlp + "up_proj.bias")
        tree["down_bias"] = Param((d,), (None,), mlp + "down_proj.bias")
    return tree


def cache_shape(c: ModelConfig, page_size: int) -> tuple[int, int, int]:
    """One layer's page: keys and values side by side. There is one such array of pages per layer."""
    return (c.kv_heads, page_size, 2 * c.head_dim)


def forward(
    c: ModelConfig, params: Tree, batch: Batch, pool: Any, collect: bool = False
) -> tuple[Array, Any, dict[str, Array]]:
    """(hidden states [T, D] after the last norm, the pool with this step's keys and values, what happened inside).

    Inside a mixture of experts: "expert_loads" [mixture layers, E], the rows that each expert got. `collect` adds
    "embed" [T, D], and over layers [L, T, D] "attention" and "mlp" (what the sub-blocks computed, before a norm of
    theirs and the sum) and "layers" (what each layer handed on).
    """
    x_TD = jnp.take(params["embed"], batch.tokens, axis=0, mode="clip")
    if c.embed_scale != 1:
        x_TD = x_TD * jnp.asarray(c.embed_scale, x_TD.dtype)
    block = partial(_block, c, collect)
    turns = rotations(c.ropes, batch.positions)
    page_size = jax.tree.leaves(pool)[0].shape[-2]
    last_TD, pool, inside = over_layers(
        block, x_TD, params["layers"], pool, page_size, batch, _per_layer(c), turns
    )
    return _norm(c, last_TD, params["norm"]), pool, {"embed": x_TD, **inside} if collect else inside


def logits(c: ModelConfig, params: Tree, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
    """The next token's unnormalised log-probabilities, float32."""
    logits_RV = linear_f32(hidden, params["embed" if c.tied else "head"])
    return _soft_cap(logits_RV, c.logits_soft_cap)


def _per_layer(c: ModelConfig) -> dict[str, np.ndarray]:
    """What differs between layers of one structure; what does not stays a constant of the program."""
    varying = {"window": c.windows, "rope": c.layer_ropes}
    return {name: np.asarray(v, np.int32) for name, v in varying.items() if len(set(v)) > 1}


def _block(c: ModelConfig, collect: bool, x, w: Tree, pages, batch: Batch, varies, turns):
    """One layer: x [T, D] plus attention plus feed-forward."""
    turn = turns[varies["rope"]] if "rope" in varies else turns[c.layer_ropes[0]]
    window = varies.get("window", c.windows[0])
    attended, pages = _attention(c, w, _norm(c, x, w.get("attn_in")), pages, batch, window, turn)
    x = x + _norm(c, attended, w.get("attn_out"))
    fed = _mlp(c, w, _norm(c, x, w.get("mlp_in")))
    x = x + _norm(c, fed, w.get("mlp_out"))
    return x, pages, {"attention": attended, "mlp": fed, "layers": x} if collect else {}


def _attention(c: ModelConfig, w: Tree, x, pages, batch: Batch, window, turn):
    q, k = linear(x, w["q"], w.get("q_bias")), linear(x, w["k"], w.get("k_bias"))
    v = linear(x, w["v"], w.get("v_bias"))
    if c.qk_norm == "all":
        q, k = _norm(c, q, w["q_norm"]), _norm(c, k, w["k_norm"])
    q_TNH = q.reshape(-1, c.heads, c.head_dim)
    k_TKH, v_TKH = k.reshape(-1, c.kv_heads, c.head_dim), v.reshape(-1, c.kv_heads, c.head_dim)
    if c.qk_norm == "head":
        q_TNH, k_TKH = _norm(c, q_TNH, w["q_norm"]), _norm(c, k_TKH, w["k_norm"])
    q_TNH, k_TKH = rotate(q_TNH, turn), rotate(k_TKH, turn)
    if c.query_growth:
        beta, length = c.query_growth
        growth_T = 1 + beta * jnp.log1p(jnp.floor(batch.positions.astype(jnp.float32) / length))
        q_TNH = q_TNH * growth_T.astype(q_TNH.dtype)[:, None, None]
    pages = page_write(pages, jnp.concatenate([k_TKH, v_TKH], axis=-1), batch.places)
    out_TNH = paged_attention(
        q_TNH,
        pages,
        batch.page_table,
        batch.q_starts,
        batch.kv_lens,
        scale=c.attention_scale,
        window=None if isinstance(window, int) and window == 0 else window,
        soft_cap=c.attention_soft_cap,
    )
    return linear(out_TNH.reshape(-1, c.heads * c.head_dim), w["o"], w.get("o_bias")), pages


def _mlp(c: ModelConfig, w: Tree, x):
    gate_TF = ACTIVATIONS[c.activation](linear(x, w["gate"], w.get("gate_bias")))
    return linear(gate_TF * linear(x, w["up"], w.get("up_bias")), w["down"], w.get("down_bias"))


def _norm(c: ModelConfig, x, weight):
    return x if weight is None else rms_norm(x, weight, c.norm_eps, c.norm_offset)


def _soft_cap(x, cap: float | None):
    return x if cap is None else cap * jnp.tanh(x / cap)
