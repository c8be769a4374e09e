"""A Hugging Face config from the metadata of a GGUF file."""

import math
from typing import Any

import numpy as np
from gguf.constants import LlamaFileType

from jaxserve.errors import CheckpointError
from jaxserve.weights.gguf_header import Header
from jaxserve.weights.gguf_names import ARCHITECTURES, Architecture

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of every released model
DTYPES = {
    LlamaFileType.ALL_F32: "float32",
    LlamaFileType.MOSTLY_F16: "float16",
}
GEMMA_27B_LAYERS = (46, 62)  # Gemma 2 and 3 27B scale queries by width per head, which GGUF does not say


class Metadata:
    """Typed look-ups below one architecture's prefix; a value of the wrong kind is refused by its key."""

    def __init__(self, values: dict[str, Any], arch: str, path: str):
        self._values, self._arch, self._path = values, arch, path

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._find(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # stated per layer
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise self._wrong(key, "a count", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._find(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, "a number", value)
        # Metadata holds float32; the shortest decimal with the same float32 is what the original config said.
        return float(str(np.float32(value)))

    def optional(self, key: str) -> Any:
        return self._values.get(f"{self._arch}.{key}", self._values.get(key))

    def layer_types(self, layers: int, full_every: int) -> list[str]:
        """Which layers see a window only: listed in the file, or every layer but each `full_every`-th."""
        windowed = self.optional("attention.sliding_window_pattern")
        if not isinstance(windowed, list):
            full_every = self.integer("attention.sliding_window_pattern", full_every)
            windowed = [bool(full_every and (i + 1) % full_every) for i in range(layers)]
        if len(windowed) != layers or not all(type(flag) is bool for flag in windowed):
            raise self._wrong("attention.sliding_window_pattern", f"{layers} flags", windowed)
        return ["sliding_attention" if flag else "full_attention" for flag in windowed]

    def _find(self, key: str, default: Any) -> Any:
        value = self.optional(key)
        if value is None and default is None:
            raise self._wrong(key, "a value", "none")
        return default if value is None else value

    def _wrong(self, key: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(
            f"the GGUF metadata key {self._arch}.{key} is unusable",
            file=self._path, expected=expected, found=str(found)[:100],
        )  # fmt: skip


def architecture(header: Header, path: str) -> Architecture:
    """The family of models the file says it holds."""
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            "unsupported GGUF architecture",
            file=path,
            expected=f"one of {', '.join(ARCHITECTURES)}",
            found=str(name),
        )
    return ARCHITECTURES[name]


def synthesize(header: Header, path: str, rope_factors: np.ndarray | None) -> dict[str, Any]:
    """The config.json the model had before it became GGUF, as far as a runtime needs it.

    `rope_factors` are the values of the tensor rope_freqs.weight: what each rotary frequency is divided by.
    """
    family = architecture(header, path)
    meta = Metadata(header.metadata, header.metadata["general.architecture"], path)
    if meta.optional("expert_count"):
        raise CheckpointError(
            "mixture-of-experts GGUF files are not supported",
            file=path,
            found=f"{meta.optional('expert_count')} experts",
        )
    heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
    if not heads or (hidden % heads and meta.optional("attention.key_length") is None):
        raise CheckpointError(
            "heads do not divide the width", file=path, found=f"{heads} heads, width {hidden}"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError("the file has no embedding", tensor="token_embd.weight", file=path)
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.class_name],
        "torch_dtype": DTYPES.get(meta.optional("general.file_type"), "bfloat16"),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": meta.integer("attention.key_length", hidden // heads),
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(meta, rope_factors),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "hidden_act": "silu",
    }
    _check_head(meta, config, path)
    for key in ("bos_token_id", "eos_token_id", "padding_token_id"):
        token = header.metadata.get(f"tokenizer.ggml.{key}")
        if token is not None:
            config[key.replace("padding", "pad")] = token
    return config | FAMILY_KEYS[family.model_type](meta, config)


def _check_head(meta: Metadata, config: dict[str, Any], path: str) -> None:
    """Values as wide as keys, and rotary over the whole head: what every listed family has."""
    for key in ("attention.value_length", "rope.dimension_count"):
        width = meta.integer(key, config["head_dim"])
        if width != config["head_dim"]:
            raise CheckpointError(
                f"unsupported {key}",
                file=path,
                expected=f"the head width {config['head_dim']}",
                found=str(width),
            )


def rope_scaling(meta: Metadata, factors: np.ndarray | None) -> dict[str, Any] | None:
    """`rope_scaling` of a Hugging Face config, or None when frequencies are plain."""
    kind = meta.optional("rope.scaling.type")
    if factors is not None:
        return _scaling_from_factors(meta, factors)
    if kind in (None, "none"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.number("rope.scaling.factor")}
    if meta.optional("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length")
    renamed = {
        "attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
    }  # fmt: skip
    for key, name in renamed.items():
        if meta.optional(f"rope.scaling.{key}") is not None:
            scaling[name] = meta.number(f"rope.scaling.{key}")
    return scaling


def _scaling_from_factors(meta: Metadata, factors: np.ndarray) -> dict[str, Any]:
    """Llama 3's scaling if these are its factors, else the factors themselves, in the shape of LongRoPE."""
    head_dim = 2 * factors.size
    frequencies = meta.number("rope.freq_base", 10000.0) ** -(np.arange(0, head_dim, 2) / head_dim)
    for length in (1 << bits for bits in range(5, 21)):
        llama3 = LLAMA3 | {"factor": float(factors.max()), "original_max_position_embeddings": length}
        if np.allclose(factors, llama3_factors(frequencies, llama3), rtol=1e-4):
            return llama3
    listed = factors.astype(float).tolist()
    length = meta.integer("context_length")
    return {
        "rope_type": "longrope", "short_factor": listed, "long_factor": listed, "attention_factor": 1.0,
        "original_max_position_embeddings": length, "factor": 1.0,
    }  # fmt: skip


def llama3_factors(frequencies: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """What Llama 3.1 divides rotary frequencies by: 1 for fast ones, `factor` for slow ones, between in between."""
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _llama(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Mistral's models are `llama` in GGUF too; a window tells those that need it."""
    window = meta.integer("attention.sliding_window", 0)
    if not window:
        return {"mlp_bias": False}
    return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}


def _qwen(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_sliding_window": False, "sliding_window": None}


def _gemma(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    large = config["num_hidden_layers"] in GEMMA_27B_LAYERS
    soft_caps = {
        key: None if meta.optional(key) is None else meta.number(key)
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    return soft_caps | {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": meta.integer("attention.sliding_window"),
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
        ),
    }


def _gemma3(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(meta, config) | {
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10000.0),
        "layer_types": meta.layer_types(config["num_hidden_layers"], full_every=6),
    }


def _olmo2(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 is `olmo2` in GGUF with a window on some layers."""
    window = meta.integer("attention.sliding_window", 0)
    if not window:
        return {}
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": meta.layer_types(config["num_hidden_layers"], full_every=4),
    }


FAMILY_KEYS = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma2": _gemma,
    "gemma3_text": _gemma3,
    "olmo2": _olmo2,
}
