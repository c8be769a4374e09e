"""Configs that use what the golden checkpoints do not, on tiny random weights; transformers' logits are recorded.

`tests/golden/variants/logits.npz` was made with transformers 5.24 in float32 (eager attention) from the checkpoints
that `tiny_checkpoint(folder, **VARIANTS[name])` writes, for `PROMPT`.
"""

from typing import Any

PROMPT = [(17 * i * i + 5 * i + 3) % 62 + 2 for i in range(40)]
SIZES = {
    "vocab": 64,
    "layers": 3,
    "max_position_embeddings": 40,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def scaled(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **values}}


VARIANTS: dict[str, dict[str, Any]] = {
    name: SIZES | fields
    for name, fields in {
        "llama, biases": {"arch": "llama", "attention_bias": True, "mlp_bias": True},
        "llama, tied, no head_dim": {"arch": "llama", "tie_word_embeddings": True, "head_dim": None},
        "llama, linear rope": {"arch": "llama", **scaled("linear", factor=4.0)},
        "llama, dynamic rope": {
            "arch": "llama",
            "max_position_embeddings": 24,
            **scaled("dynamic", factor=2.0),
        },
        "llama, longrope beyond": {
            "arch": "llama",
            **scaled(
                "longrope",
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[1.0, 1.5, 2.5, 4.0],
                original_max_position_embeddings=16,
                factor=2.5,
            ),
        },
        "llama, yarn, not truncated": {
            "arch": "llama",
            **scaled("yarn", factor=4.0, original_max_position_embeddings=10, truncate=False, beta_fast=4),
        },
        "qwen2, windowed from layer 1": {"arch": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
        "qwen3, biases, mixed layers": {
            "arch": "qwen3",
            "attention_bias": True,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "ministral, mixed layers": {
            "arch": "ministral",
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "mistral, no window": {"arch": "mistral", "sliding_window": None},
        "smollm3, one layer without rope": {
            "arch": "smollm3",
            "no_rope_layer_interval": 2,
            "sliding_window": None,
        },
        "smollm3, windowed without rope": {
            "arch": "smollm3",
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
        },
        "gemma2, no caps": {
            "arch": "gemma2",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 5,
        },
        "gemma3, biases, final cap": {
            "arch": "gemma3_text",
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "sliding_window_pattern": 3,
        },
        "olmo2, biases": {"arch": "olmo2", "attention_bias": True},
    }.items()
}
