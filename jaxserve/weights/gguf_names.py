"""GGUF architectures: what they call the tensors of Hugging Face, and what their converter changed in them."""

from dataclasses import dataclass

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_NORMS = POST_NORMS | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
UNUSED = ("rope_freqs.weight",)  # read for the config's rope_scaling, not a weight of the model


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp's converter wrote one family of models."""

    model_type: str
    class_name: str
    norms: dict[str, str]
    interleaved_rope: bool = False  # rows of q and k are reordered so that rotated pairs are neighbours
    norm_offset: float = 0.0  # what was added to every norm weight


LLAMA = Architecture("llama", "LlamaForCausalLM", PRE_NORMS, interleaved_rope=True)
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", PRE_NORMS),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", PRE_NORMS),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", GEMMA_NORMS, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", GEMMA_NORMS, norm_offset=1.0),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", POST_NORMS),
}


def hugging_face_name(name: str, norms: dict[str, str]) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name of no listed model."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    renamed = (BLOCK | norms).get(part)
    if not stem.startswith("blk.") or not block.isdecimal() or renamed is None:
        return None
    return f"model.layers.{block}.{renamed}.{kind}"
