"""What each model_type of Hugging Face means, as field values of the one decoder structure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.models.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
SILU = {"silu": "silu", "swish": "silu"}
GELU_TANH = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}


@dataclass(frozen=True)
class Family:
    """A model_type: what differs from plain Llama, and the values that its config.json may leave out."""

    values: Callable[[Fields], dict[str, Any]]
    kinds: Callable[[Fields, int], list[str]] | None = (
        None  # FULL or SLIDING for each layer; None: no windows
    )
    rope_free: Callable[[Fields, int], list[bool]] | None = None  # layers that know no positions
    local_theta: str | None = (
        None  # where a config has one rope, windowed layers turn by this theta, unscaled
    )
    head_dim: Callable[[Fields], int] | None = None  # of what rope turns, where a head has other parts too
    defaults: Mapping[str, Any] = field(default_factory=dict)


def listed_kinds(f: Fields, count: int) -> list[str] | None:
    kinds = f.listed("layer_types", count)
    if kinds is None:
        return None
    unknown = set(kinds) - {FULL, SLIDING}
    if unknown:
        raise f.wrong("layer_types", f"a list of {FULL} and {SLIDING}", sorted(map(str, unknown)))
    return list(kinds[:count])


def mistral_kinds(f: Fields, count: int) -> list[str]:
    return [FULL if f.get("sliding_window") is None else SLIDING] * count


def _ministral_kinds(f: Fields, count: int) -> list[str]:
    return listed_kinds(f, count) or mistral_kinds(f, count)


def _qwen_kinds(f: Fields, count: int) -> list[str]:
    on, first = (
        f.flag("use_sliding_window") and f.get("sliding_window") is not None,
        f.get("max_window_layers"),
    )
    kinds = listed_kinds(f, count)
    if kinds is None:
        first = count if first is None else first
        return [SLIDING if on and i >= first else FULL for i in range(count)]
    if SLIDING in kinds and not on:
        raise f.wrong(
            "use_sliding_window", "true with a sliding_window, as layer_types has windowed layers", False
        )
    return kinds


def _smollm3_kinds(f: Fields, count: int) -> list[str]:
    on = f.flag("use_sliding_window") and f.get("sliding_window") is not None
    kinds = listed_kinds(f, count)
    if kinds is None or not on:
        return [SLIDING if on and free else FULL for free in _rope_free(f, count)]
    return kinds


def _rope_free(f: Fields, count: int) -> list[bool]:
    every, turned = f.count("no_rope_layer_interval"), f.listed("no_rope_layers", count)
    if turned is None:
        return [(i + 1) % every == 0 for i in range(count)]
    return [not turns for turns in turned[:count]]


def _gemma2_kinds(f: Fields, count: int) -> list[str]:
    return listed_kinds(f, count) or every(2, count)


def _gemma3_kinds(f: Fields, count: int) -> list[str]:
    keys = ("sliding_window_pattern", "_sliding_window_pattern")
    patterns = [f.count(key) for key in keys if f.get(key) is not None]
    return listed_kinds(f, count) or every(patterns[0] if patterns else 6, count)


def _olmo3_kinds(f: Fields, count: int) -> list[str]:
    return listed_kinds(f, count) or every(4, count)


def every(full: int, count: int) -> list[str]:
    """Each `full`-th layer sees everything, the others a window."""
    return [SLIDING if (i + 1) % full else FULL for i in range(count)]


def biases(f: Fields) -> dict[str, Any]:
    bias = f.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def _llama(f: Fields) -> dict[str, Any]:
    return biases(f) | {"activation": f.choice("hidden_act", SILU, "silu"), "mlp_bias": f.flag("mlp_bias")}


def _mistral(f: Fields) -> dict[str, Any]:
    return {"activation": f.choice("hidden_act", SILU, "silu")}


def _ministral3(f: Fields) -> dict[str, Any]:
    scaling = f.mapping("rope_parameters") or f.mapping("rope_scaling")
    beta, length = scaling.get("llama_4_scaling_beta"), scaling.get("original_max_position_embeddings")
    growth = None if beta is None else (float(beta), float(length or f.count("max_position_embeddings")))
    return _mistral(f) | {"query_growth": growth}


def _qwen2(f: Fields) -> dict[str, Any]:
    f.get("attention_bias")  # Qwen 2 always has these and no others, whatever the field says
    return {"activation": f.choice("hidden_act", SILU, "silu"), "qkv_bias": True}


def _qwen3(f: Fields) -> dict[str, Any]:
    return biases(f) | {"activation": f.choice("hidden_act", SILU, "silu"), "qk_norm": "head"}


def _gemma(f: Fields) -> dict[str, Any]:
    if f.flag("use_bidirectional_attention"):
        raise f.wrong("use_bidirectional_attention", "false: only causal attention is supported", True)
    return biases(f) | {
        "activation": f.choice("hidden_activation", GELU_TANH, "gelu_pytorch_tanh"),
        "norms": "both",
        "norm_offset": 1.0,
        "embed_scale": float(f.count("hidden_size")) ** 0.5,
        "attention_scale": f.number("query_pre_attn_scalar") ** -0.5,
        "logits_soft_cap": f.optional_number("final_logit_softcapping"),
    }


def _gemma2(f: Fields) -> dict[str, Any]:
    return _gemma(f) | {"attention_soft_cap": f.optional_number("attn_logit_softcapping")}


def _gemma3(f: Fields) -> dict[str, Any]:
    return _gemma(f) | {"qk_norm": "head"}


def _olmo(f: Fields) -> dict[str, Any]:
    return biases(f) | {
        "activation": f.choice("hidden_act", SILU, "silu"),
        "norms": "post",
        "qk_norm": "all",
    }


GEMMA = {
    "head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True, "sliding_window": 4096,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
GEMMA3 = GEMMA | {
    "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip

FAMILIES = {
    "llama": Family(_llama),
    "mistral": Family(_mistral, mistral_kinds, defaults={"sliding_window": 4096}),
    "ministral": Family(_mistral, _ministral_kinds, defaults={"sliding_window": 4096}),
    "ministral3": Family(_ministral3, mistral_kinds),
    "qwen2": Family(_qwen2, _qwen_kinds, defaults={"sliding_window": 4096, "max_window_layers": 28}),
    "qwen3": Family(
        _qwen3, _qwen_kinds, defaults={"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128}
    ),
    "gemma2": Family(
        _gemma2, _gemma2_kinds,
        defaults=GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ),
    "gemma3_text": Family(_gemma3, _gemma3_kinds, local_theta="rope_local_base_freq", defaults=GEMMA3),
    "olmo2": Family(_olmo),
    "olmo3": Family(
        _olmo, _olmo3_kinds, local_theta="rope_theta", defaults={"sliding_window": 4096, "rope_theta": 5e5}
    ),
    "smollm3": Family(
        _llama, _smollm3_kinds, rope_free=_rope_free,
        defaults={"no_rope_layer_interval": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
}  # fmt: skip

# Multimodal configs whose decoder is described by their text_config, with the model_type it has when it says none.
WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
