"""Tiny random models made on the fly: a checkpoint as Hugging Face would write it, and a byte-level tokenizer."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxserve.models import ModelConfig, model_for
from sharding.params import Param

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(arch: str = "llama", vocab: int = 320, layers: int = 2, **fields: Any) -> dict[str, Any]:
    """A config.json of a model with some thousand weights; `fields` go in as they are."""
    return {
        "architectures": [arch.removesuffix("_text").capitalize() + "ForCausalLM"],
        "model_type": arch,
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None if arch in ("llama", "olmo2") else 16,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 256,
        "eos_token_id": 257,
    } | fields


def tiny_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under their checkpoint names, scaled so that logits spread over a few units."""
    rng = np.random.default_rng(seed)
    leaves = jax.tree.leaves(model_for(config).params(config), is_leaf=lambda leaf: isinstance(leaf, Param))
    tensors = {}
    for leaf in leaves:
        names = (leaf.source,) if isinstance(leaf.source, str) else leaf.source
        tensors |= {
            name: _draw(rng, name, leaf.stored_shape, config) for name in names if name not in tensors
        }
    return tensors


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], config: ModelConfig) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return (1 - config.norm_offset + 0.1 * values).astype(np.float32)
    if len(shape) == 1:
        return values / 10
    return values * np.float32(1.5 / shape[-1] ** 0.5)


def tiny_checkpoint(
    directory: Path | str,
    arch: str = "llama",
    *,
    vocab: int = 320,
    layers: int = 2,
    seed: int = 0,
    tokenizer: bool = False,
    **fields: Any,
) -> Path:
    """`directory` with config.json and model.safetensors of a random model, and its tokenizer files if asked."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    hf = tiny_config(arch, vocab, layers, **fields)
    (directory / "config.json").write_text(json.dumps(hf, indent=1))
    save_file(
        tiny_weights(ModelConfig.from_hf(hf), seed),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    if tokenizer:
        tiny_tokenizer(directory)
    return directory


def tiny_tokenizer(directory: Path | str, vocab: int = 256 + len(SPECIAL)) -> None:
    """Token i < 256 is byte i, then the special ones, then words up to `vocab`: tokenizer.json and two configs."""
    directory = Path(directory)
    entries = {letter: i for i, letter in enumerate(_byte_letters())}
    if vocab > 256 + len(SPECIAL):
        entries |= {token: 256 + i for i, token in enumerate(SPECIAL)}
        entries |= {f"word{i}": i for i in range(256 + len(SPECIAL), vocab)}
    made = Tokenizer(models.BPE(vocab=entries, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (directory / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 256, "eos_token_id": [257, 259]})
    )


def _byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
