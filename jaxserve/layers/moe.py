"""Mixture of experts: which experts a token goes to, and what these make of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxserve.layers.over_layers import InStack
from pallas_kernels.grouped_matmul import grouped_matmul


@dataclass(frozen=True)
class Routing:
    """How a router chooses `top` of its `experts` for a token, and how much each counts.

    Softmax scores made to sum to one after the choice are the softmax of the chosen logits alone (gpt-oss). Experts in
    groups (DeepSeek-V2, arXiv:2405.04434, 2.2.2): only those of the best `top_groups` groups may be chosen.
    """

    experts: int
    top: int
    scores: str = "softmax"  # of logits: "softmax" over all experts, or "sigmoid" of each
    groups: int = 1
    top_groups: int = 1
    group_score: int = 1  # a group's score is the sum of so many of its best
    normalised: bool = False  # weights are divided by their sum
    scale: float = 1.0  # and then multiplied by this


SCORES: dict[str, Callable[[Array], Array]] = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


def route(
    r: Routing,
    logits: Float[Array, "T E"],
    real: Bool[Array, "T"],
    selection_bias: Float[Array, "E"] | None = None,
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """(ids of each token's experts, best first; their weights, float32).

    `selection_bias` sways the choice and not the weights (Wang et al., 2024, arXiv:2408.15664). Rows that are not
    `real` go to expert E, which there is none of, with weight 0.
    """
    scores_TE = SCORES[r.scores](logits.astype(jnp.float32))
    choice_TE = scores_TE if selection_bias is None else scores_TE + selection_bias[None].astype(jnp.float32)
    if r.top_groups < r.groups:
        choice_TE = _only_best_groups(r, choice_TE)
    _, ids = lax.top_k(choice_TE, r.top)
    weights = jnp.take_along_axis(scores_TE, ids, axis=1)
    if r.normalised:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return (
        jnp.where(real[:, None], ids, r.experts),
        jnp.where(real[:, None], weights * r.scale, jnp.float32(0)),
    )


def _only_best_groups(r: Routing, choice_TE: Array) -> Array:
    choice_TGX = choice_TE.reshape(-1, r.groups, r.experts // r.groups)
    best, _ = lax.top_k(choice_TGX, min(r.group_score, choice_TGX.shape[2]))
    _, kept = lax.top_k(jnp.sum(best, axis=-1), r.top_groups)
    keep_TG = jnp.any(kept[:, :, None] == jnp.arange(r.groups, dtype=kept.dtype)[None, None], axis=1)
    return jnp.where(keep_TG[:, :, None], choice_TGX, -jnp.inf).reshape(choice_TE.shape)


def loads(ids: Int[Array, "T k"], experts: int) -> Int[Array, "E"]:
    """How many rows each expert gets; those of expert E and beyond, which there is none of, count nowhere."""
    return jnp.zeros(experts, jnp.int32).at[ids.reshape(-1)].add(1, mode="drop")


def gated(gate: Array, up: Array, clamp: tuple[float, float] | None = None) -> Array:
    """silu(gate) * up; `clamp` (limit, alpha), gpt-oss' own: both limited, (up + 1) * gate * sigmoid(alpha gate)."""
    if clamp is None:
        return jax.nn.silu(gate) * up
    limit, alpha = clamp
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def experts(
    x: Float[Array, "R D"],
    group_sizes: Int[Array, "E"],
    w: dict[str, Any],
    clamp: tuple[float, float] | None = None,
) -> Float[Array, "R D"]:
    """What each expert makes of its rows: the first `group_sizes[0]` are expert 0's, and so on.

    `w`: "gate" and "up" [E, F, D], "down" [E, D, F], as arrays, QTensors or InStack of one; maybe "gate_bias",
    "up_bias" [E, F] and "down_bias" [E, D]. Rows after the last group give zeros.
    """
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    owners = jnp.searchsorted(jnp.cumsum(group_sizes), rows, side="right", method="compare_all")

    def product(rows: Array, name: str) -> Array:
        out = _multiply(rows, w[name], group_sizes)
        bias = w.get(name + "_bias")
        if bias is None:
            return out
        return out + jnp.take(bias.astype(out.dtype), owners, axis=0, mode="fill", fill_value=0)

    return product(gated(product(x, "gate"), product(x, "up"), clamp), "down")


def _multiply(x: Array, w: Any, group_sizes: Array) -> Array:
    if isinstance(w, InStack):
        return grouped_matmul(x, w.stack, group_sizes, layer=w.layer)
    return grouped_matmul(x, w, group_sizes)
