"""A Hugging Face config read field by field: every value checked, and none that changes the maths overlooked."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import ConfigError

# What some decoder reads, with the values that mean "nothing special". A model that does not read one of these
# is refused unless it is absent, null or neutral: silently ignoring it would compute another model.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,), "qkv_bias": (False,), "use_qkv_bias": (False,), "mlp_bias": (False,),
    "use_bias": (False,), "lm_head_bias": (False,), "qk_layernorm": (False,), "use_qk_norm": (False,),
    "clip_qkv": (), "use_sliding_window": (False,), "sliding_window": (), "layer_types": (),
    "sliding_window_pattern": (), "_sliding_window_pattern": (), "attention_chunk_size": (),
    "attn_logit_softcapping": (), "final_logit_softcapping": (), "query_pre_attn_scalar": (),
    "rope_local_base_freq": (), "no_rope_layers": (), "no_rope_layer_interval": (), "alibi": (False,),
    "use_bidirectional_attention": (False,), "is_causal": (True,), "embedding_multiplier": (1,),
    "residual_multiplier": (1,), "attention_multiplier": (1,), "logits_scaling": (1,), "logit_scale": (1,),
    "scale_emb": (1,), "scale_depth": (1,), "parallel_residual": (False,), "attn_temperature_tuning": (False,),
    "kv_lora_rank": (), "index_topk": (), "shared_expert_intermediate_size": (0,), "n_shared_experts": (0,),
    "swiglu_limit": (), "rope_interleave": (False,),
    "num_experts": (0, 1), "num_local_experts": (0, 1), "n_routed_experts": (0, 1),
    "quantization_config": (), "compression_config": (),
}  # fmt: skip


class Fields:
    """Typed look-ups in a config.json, over the defaults of its family; `name` is the model_type, for messages."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], name: str):
        self._values, self._defaults, self.name = values, defaults, name
        self._read: set[str] = set()

    def get(self, key: str) -> Any:
        """The value as it stands (an explicit null too), else the family's default, else None."""
        self._read.add(key)
        return self._values[key] if key in self._values else self._defaults.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a whole number above 0", value)
        return value

    def whole(self, key: str) -> int:
        """A count that may be 0, as null and absence are."""
        value = self.get(key)
        return 0 if value is None or (value == 0 and value is not False) else self.count(key)

    def number(self, key: str, default: float | int | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.wrong(key, "a number above 0", value)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value not in (None, True, False):
            raise self.wrong(key, "true or false", value)
        return bool(value)

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """What `choices` calls the value."""
        value = self.get(key)
        value = default if value is None else value
        if value not in choices:
            raise self.wrong(key, f"one of {', '.join(choices)}", value)
        return choices[value]

    def listed(self, key: str, length: int) -> Sequence[Any] | None:
        """A list with an entry per layer at least."""
        value = self.get(key)
        if value is not None and (not isinstance(value, list | tuple) or len(value) < length):
            raise self.wrong(key, f"a list with an entry for each of {length} layers", value)
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "an object", value)
        return value or {}

    def refuse_unread(self) -> None:
        """ConfigError for a field that changes the maths of some decoder and was not asked for here."""
        for key in NEUTRAL.keys() - self._read:
            value = self._values.get(key)
            if value is None or value in NEUTRAL[key] or self._is_plain(key, value):
                continue
            if key in ("quantization_config", "compression_config"):
                method = value.get("quant_method", "unknown") if isinstance(value, Mapping) else value
                raise ConfigError(
                    f"{self.name}: weights quantised with {method} ({key}) are not supported yet; "
                    "use the unquantised checkpoint, or a GGUF"
                )
            raise ConfigError(
                f"{self.name}: {key}={value!r} is not part of this architecture as implemented here, and ignoring it "
                f"would change the answers; supported is {key} absent"
                + "".join(f" or {neutral!r}" for neutral in NEUTRAL[key])
            )

    def _is_plain(self, key: str, value: Any) -> bool:
        return key == "layer_types" and set(value) == {"full_attention"}

    def wrong(self, key: str, expected: str, found: Any) -> ConfigError:
        shown = "nothing" if found is None else repr(found)
        return ConfigError(f"{self.name}: config.json should say {key} as {expected}, but says {shown}")
