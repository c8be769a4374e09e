"""From a Hugging Face config.json, in its older or its v5 style, to the fields of a ModelConfig."""

import logging
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import Rope, RopeSettings, reach, rope
from jaxserve.models.families import FAMILIES, FULL, SLIDING, WRAPPERS, Family
from jaxserve.models.fields import Fields
from jaxserve.models.mixture_families import MIXTURE_FAMILIES

log = logging.getLogger(__name__)
NO_ROPE = "no_rope"
KNOWN = FAMILIES | MIXTURE_FAMILIES


def read(hf: Mapping[str, Any], max_model_len: int | None) -> dict[str, Any]:
    """The fields of the ModelConfig that `hf` describes; see `ModelConfig.from_hf`."""
    name, prefix = hf.get("model_type"), "model."
    if name in WRAPPERS:
        prefix = "language_model.model."
        hf = _text_config(hf, WRAPPERS[name])
        name = hf["model_type"]
    if name not in KNOWN:
        raise ConfigError(
            f"model_type {name!r} is not supported; supported are {', '.join(sorted({*KNOWN, *WRAPPERS}))}"
        )
    family = KNOWN[name]
    f = Fields(hf, family.defaults, name)
    values = _sizes(f, family, max_model_len) | family.values(f)
    f.refuse_unread()
    return values | {"prefix": prefix}


def _text_config(outer: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The decoder's part of a multimodal config, with what is said once for the whole model."""
    shared = ("tie_word_embeddings", "quantization_config", "torch_dtype", "dtype")
    above = {key: outer[key] for key in shared if outer.get(key) is not None}
    return {"model_type": model_type} | above | dict(outer.get("text_config") or {})


def _sizes(f: Fields, family: Family, max_model_len: int | None) -> dict[str, Any]:
    count, heads, hidden = (
        f.count("num_hidden_layers"),
        f.count("num_attention_heads"),
        f.count("hidden_size"),
    )
    stated = f.get("head_dim")
    if family.head_dim:
        head_dim = family.head_dim(f)
    elif stated is None and hidden % heads:
        raise f.wrong("hidden_size", f"a multiple of num_attention_heads={heads}, or to say head_dim", hidden)
    else:
        head_dim = f.count("head_dim", hidden // heads)
    kinds, window = _kinds(f, family, count)
    return {
        "name": f.name,
        "vocab_size": f.count("vocab_size"),
        "hidden_size": hidden,
        "ffn_size": f.count("intermediate_size"),
        "heads": heads,
        "kv_heads": f.count("num_key_value_heads", heads),
        "head_dim": head_dim,
        "windows": tuple(window if kind == SLIDING else 0 for kind in kinds),
        "norm_eps": f.number("rms_norm_eps", 1e-6),
        "attention_scale": head_dim**-0.5,
        "tied": f.flag("tie_word_embeddings"),
        "dtype": f.get("dtype") or f.get("torch_dtype") or "float32",
        **_ropes(f, family, kinds, head_dim, max_model_len),
    }


def _kinds(f: Fields, family: Family, count: int) -> tuple[list[str], int]:
    """(FULL or SLIDING for each layer, keys that a windowed layer sees)."""
    if family.kinds is None:
        return [FULL] * count, 0
    kinds = family.kinds(f, count)
    if SLIDING not in kinds:
        f.get("sliding_window")  # read: it has no effect on full layers
        return kinds, 0
    return kinds, f.count("sliding_window")


def _ropes(
    f: Fields, family: Family, kinds: list[str], head_dim: int, max_model_len: int | None
) -> dict[str, Any]:
    settings = _rope_settings(f, family, head_dim)
    if family.rope_free:
        kinds = [
            NO_ROPE if free else kind
            for free, kind in zip(family.rope_free(f, len(kinds)), kinds, strict=True)
        ]
    default, limit = reach(settings[FULL])
    length = _length(f.name, max_model_len, default, limit)
    ropes: list[Rope] = []
    indices = {}
    for kind in sorted(set(kinds)):
        made = Rope((0.0,) * (settings[FULL].dim // 2)) if kind == NO_ROPE else rope(settings[kind], length)
        if made not in ropes:
            ropes.append(made)
        indices[kind] = ropes.index(made)
    if len({len(r.frequencies) for r in ropes}) > 1:
        raise f.wrong("partial_rotary_factor", "the same for every kind of layer", "different ones")
    return {
        "max_model_len": length,
        "ropes": tuple(ropes),
        "layer_ropes": tuple(indices[kind] for kind in kinds),
    }


def _rope_settings(f: Fields, family: Family, head_dim: int) -> dict[str, RopeSettings]:
    """The rope of full and of windowed layers, which newer configs write nested and older ones side by side."""
    old, new = f.mapping("rope_scaling"), f.mapping("rope_parameters")
    values = dict(old or new)
    nested = {kind: dict(values.pop(kind) or {}) for kind in (FULL, SLIDING) if kind in values}
    if nested and values:
        raise f.wrong("rope_parameters", f"{FULL} and {SLIDING} alone when nested", sorted(values))
    full = nested.get(FULL, nested.get(SLIDING, values))
    theta, part = f.number("rope_theta", 10000.0), f.number("partial_rotary_factor", 1.0)
    if family.local_theta:
        sliding = {"rope_theta": f.number(family.local_theta, theta)} | nested.get(SLIDING, {})
    else:
        sliding = nested.get(SLIDING, full)
    return {
        FULL: _one_rope(f, full, theta, part, head_dim),
        SLIDING: _one_rope(f, sliding, theta, part, head_dim),
    }


def _one_rope(f: Fields, values: dict[str, Any], theta: float, part: float, head_dim: int) -> RopeSettings:
    top = f.get("original_max_position_embeddings")  # Phi 3's place for it
    if top is not None:
        values = values | {"original_max_position_embeddings": top}
    if values.get("llama_4_scaling_beta") is not None and f.name == "ministral3":
        values = {key: value for key, value in values.items() if key != "llama_4_scaling_beta"}
    own = Fields(values, {}, f.name)
    dim = int(head_dim * own.number("partial_rotary_factor", part))
    if dim < 2 or dim % 2 or dim > head_dim:
        raise f.wrong("partial_rotary_factor", f"an even part of head_dim={head_dim}", dim)
    return RopeSettings(
        values, own.number("rope_theta", theta), dim, f.count("max_position_embeddings"), f.name
    )


def _length(name: str, asked: int | None, default: int, limit: int) -> int:
    """Tokens of the longest sequence, given what was asked and what the config allows."""
    if asked is None:
        return default
    if asked > limit:
        raise ConfigError(
            f"max_model_len={asked} is beyond the {limit} positions that {name} is configured for "
            "(max_position_embeddings and rope_scaling in config.json), where its answers degrade; "
            f"use at most {limit}, or a rope_scaling in config.json that reaches further"
        )
    if asked > default:
        log.warning(
            "max_model_len=%d is beyond max_position_embeddings=%d of %s and relies on its rope_scaling",
            asked, default, name,
        )  # fmt: skip
    return asked
