"""What a decoder is, in numbers: everything that its maths depends on, and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import Rope
from jaxserve.models.hf import read
from jaxserve.models.sizes import Latent, Mixture


@dataclass(frozen=True)
class ModelConfig:
    """Hashable and static under jit; made from a Hugging Face config by `from_hf`."""

    name: str  # model_type
    vocab_size: int
    hidden_size: int
    ffn_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_model_len: int  # longest sequence served, in tokens
    windows: tuple[int, ...]  # per layer: keys a query sees, itself included; 0 for all
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]  # per layer: which of `ropes`
    norm_eps: float
    norms: str = "pre"  # where a block normalises: "pre" its inputs, "post" its outputs, or "both"
    norm_offset: float = 0.0  # added to norm weights (Gemma)
    qk_norm: str | None = None  # of queries and keys: over each "head", or over "all" heads together
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"  # of the gate: "silu" or "gelu_tanh"
    embed_scale: float = 1.0
    attention_scale: float = 1.0
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    query_growth: tuple[float, float] | None = (
        None  # (beta, length): queries times 1 + beta ln(1 + position // length)
    )
    sinks: bool = False  # a logit per head that joins each softmax and is no key's
    latent: Latent | None = None  # attention among latents; None: grouped queries
    mixture: Mixture | None = None  # of experts, in some layers
    tied: bool = False  # the output layer is the embedding
    prefix: str = "model."  # of tensor names in the checkpoint
    dtype: str = field(default="float32", compare=False)  # of the checkpoint's weights

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def alike(self) -> int:
        """How many of the last layers have weights of the same shapes: DeepSeek's first ones have no experts."""
        kinds = self.mixture.layers if self.mixture else (False,) * self.num_layers
        return next((n for n, kind in enumerate(reversed(kinds)) if kind != kinds[-1]), self.num_layers)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], max_model_len: int | None = None) -> "ModelConfig":
        """The model that a config.json describes, in its older or its v5 style.

        `max_model_len` None serves what the config and its rope scaling are made for; more than that is refused.
        ConfigError for an unknown model_type, a field that cannot be honoured, or a value out of range.
        """
        return cls(**read(hf, max_model_len))

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.name}: num_key_value_heads={self.kv_heads} does not divide num_attention_heads={self.heads}"
            )
