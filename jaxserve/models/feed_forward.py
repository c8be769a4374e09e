"""The feed-forward of a layer, dense or a mixture of experts: its weights and what it computes."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.batch import Batch
from jaxserve.layers.linear import linear, linear_f32
from jaxserve.layers.moe import experts, loads, route
from jaxserve.models.config import ModelConfig
from jaxserve.models.sizes import Mixture
from pallas_kernels.op import platform
from sharding.experts import mixture, to_slots
from sharding.params import Cut, Param

Tree = dict[str, Any]
LINES = 256  # what kernels take of a matrix at a time: 128 lanes, of two codes each in four bits
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


@dataclass(frozen=True)
class Names:
    """How a family's checkpoints call the weights of a mixture, after the layer's own name."""

    router: str
    experts: str  # what an expert's names begin with; {} is its number, without which all are one tensor
    gate: str
    up: str
    down: str


NAMES = {
    "llama": Names("mlp.gate", "mlp.experts.{}.", "gate_proj", "up_proj", "down_proj"),
    "mixtral": Names("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", "w1", "w3", "w2"),
    "gpt_oss": Names("mlp.router", "mlp.experts.", "gate_up_proj", "gate_up_proj", "down_proj"),
}


def params(c: ModelConfig, at: str, layer: int) -> Tree:
    """The weights of layer `layer`, whose names begin with `at`."""
    if c.mixture is None or not c.mixture.layers[layer]:
        return _dense_params(c, at + "mlp.", c.ffn_size, c.mlp_bias)
    m, d, names = c.mixture, c.hidden_size, NAMES[c.mixture.names]
    e, router = m.routing.experts, at + names.router
    tree: Tree = {
        "router": Param((e, d), (None, None), router + ".weight"),
        "experts": (_fused_params if m.names == "gpt_oss" else _expert_params)(c, m, at),
    }
    if m.biases:
        tree["router_bias"] = Param((e,), (None,), router + ".bias")
    if m.selection_bias:
        tree["selection_bias"] = Param((e,), (None,), router + ".e_score_correction_bias", dtype="float32")
    if m.shared_ffn_size:
        tree["shared"] = _dense_params(c, at + "mlp.shared_experts.", m.shared_ffn_size, False)
    return tree


def _dense_params(c: ModelConfig, at: str, f: int, bias: bool) -> Tree:
    d = c.hidden_size
    tree = {
        "gate": Param((f, d), ("ffn", None), at + "gate_proj.weight"),
        "up": Param((f, d), ("ffn", None), at + "up_proj.weight"),
        "down": Param((d, f), (None, "ffn"), at + "down_proj.weight"),
    }
    if bias:
        tree["gate_bias"] = Param((f,), ("ffn",), at + "gate_proj.bias")
        tree["up_bias"] = Param((f,), ("ffn",), at + "up_proj.bias")
        tree["down_bias"] = Param((d,), (None,), at + "down_proj.bias")
    return tree


def _in_lines(n: int) -> int:
    """A size of experts' matrices as kernels need it: 2880, as gpt-oss has it, becomes 3072 and the rest is zeros."""
    return n if platform() == "cpu" else -(-n // LINES) * LINES


def _expert_params(c: ModelConfig, m: Mixture, at: str) -> Tree:
    names, e, d, f = NAMES[m.names], m.slot_count, _in_lines(c.hidden_size), _in_lines(m.ffn_size)
    more_d, more_f = d - c.hidden_size, f - m.ffn_size

    def of_each(name: str) -> tuple[str, ...]:
        return tuple(f"{at}{names.experts.format(i)}{name}.weight" for i in m.slots or range(e))

    return {
        "gate": Param((e, f, d), ("experts", "ffn", None), of_each(names.gate), pad=(more_f, more_d)),
        "up": Param((e, f, d), ("experts", "ffn", None), of_each(names.up), pad=(more_f, more_d)),
        "down": Param((e, d, f), ("experts", None, "ffn"), of_each(names.down), pad=(more_d, more_f)),
    }


def _fused_params(c: ModelConfig, m: Mixture, at: str) -> Tree:
    """gpt-oss: all experts in one tensor, stored [in, out], gate and up in turns."""
    names, e, d, f = NAMES[m.names], m.slot_count, _in_lines(c.hidden_size), _in_lines(m.ffn_size)
    more_d, more_f, stored = d - c.hidden_size, f - m.ffn_size, 2 * m.ffn_size
    both, down = at + names.experts + names.gate, at + names.experts + names.down
    even, odd = Cut(1, stored, slice(0, stored, 2)), Cut(1, stored, slice(1, stored, 2))
    wide, flat = ("experts", "ffn", None), ("experts", "ffn")
    wide_pad, flat_pad = (0, more_f, more_d), (0, more_f)
    param = partial(Param, picked=m.slots)
    return {
        "gate": param((e, f, d), wide, both, swapped=True, cut=even, pad=wide_pad),
        "up": param((e, f, d), wide, both, swapped=True, cut=odd, pad=wide_pad),
        "down": param((e, d, f), ("experts", None, "ffn"), down, swapped=True, pad=(0, more_d, more_f)),
        "gate_bias": param((e, f), flat, both + "_bias", cut=even, pad=flat_pad),
        "up_bias": param((e, f), flat, both + "_bias", cut=odd, pad=flat_pad),
        "down_bias": param((e, d), ("experts", None), down + "_bias", pad=(0, more_d)),
    }


def feed_forward(c: ModelConfig, w: Tree, x: Array, batch: Batch, collect: bool) -> tuple[Array, Tree]:
    """(its output [T, D], what happened inside: "expert_loads" [E] and "device_loads" [X] of a mixture on X devices,
    "expert_drops" [] with a capacity).

    `collect` adds "router_logits" [T, E], "router_experts" and "router_weights" [T, k].
    """
    if c.mixture is None or "router" not in w:
        return _dense(c, w, x), {}
    m, real = c.mixture, jnp.arange(x.shape[0], dtype=jnp.int32) < batch.q_starts[-1]
    logits_TE = linear_f32(x, w["router"])  # exact products, float32 sums, whatever the dtype
    if "router_bias" in w:
        logits_TE = logits_TE + w["router_bias"].astype(jnp.float32)[None]
    ids, weights = route(m.routing, logits_TE, real, w.get("selection_bias"))
    sizes, slots = loads(ids, m.routing.experts), ids
    if "copies" in w:
        slots = to_slots(ids, w["copies"], m.slot_count)
    run = partial(experts, clamp=m.clamp)
    lines = jnp.pad(x, ((0, 0), (0, _in_lines(c.hidden_size) - c.hidden_size)))
    out, dropped, sent = mixture(
        run, lines, slots, weights, w["experts"], m.slot_count, capacity=m.capacity, fp8=m.fp8_dispatch
    )
    out = out[:, : c.hidden_size]
    if "shared" in w:
        out = out + _dense(c, w["shared"], x)
    inside = {"expert_loads": sizes, "device_loads": sent}
    if m.capacity is not None:
        inside["expert_drops"] = dropped
    if collect:
        inside |= {"router_logits": logits_TE, "router_experts": ids, "router_weights": weights}
    return out, inside


def _dense(c: ModelConfig, w: Tree, x: Array) -> Array:
    gate_TF = ACTIVATIONS[c.activation](linear(x, w["gate"], w.get("gate_bias")))
    return linear(gate_TF * linear(x, w["up"], w.get("up_bias")), w["down"], w.get("down_bias"))
