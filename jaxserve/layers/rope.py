"""Rotary position embedding, with every scaling of it that Hugging Face configs name.

Frequencies are numbers of a model's config, found once in float64. Two scalings depend on how long a sequence gets
(dynamic NTK, LongRoPE). Transformers looks at the batch that happens to run, so the same prompt would give other
tokens beside a longer one, and keys cached early would be turned otherwise than later ones. Here the longest
length that is served decides, for all sequences alike: at most the native length gives the native frequencies.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class Rope:
    """Pair i of a head's channels, (i, i + len(frequencies)), turns by `frequencies[i]` radians a position.

    Channels beyond the pairs pass through. Frequencies of zero make a layer without positions.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0  # cos and sin are multiplied by it


@dataclass(frozen=True)
class RopeSettings:
    """The `rope_parameters` (once `rope_scaling`) of a Hugging Face config, and what they refer to."""

    values: Mapping[str, Any]
    theta: float
    dim: int  # channels of a head that turn
    max_positions: int  # the config's max_position_embeddings
    model: str  # for messages

    @property
    def kind(self) -> str:
        kind = self.values.get("rope_type") or self.values.get("type") or "default"
        return "longrope" if kind == "su" else kind  # its name before the paper had one

    @property
    def native(self) -> float:
        """Positions the model was pretrained on."""
        return self.number("original_max_position_embeddings", self.max_positions)

    def number(self, key: str, default: float | int | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise ConfigError(f"{self.model}: {self.kind} rope needs a positive number {key}, not {value!r}")
        return float(value)

    def numbers(self, key: str) -> np.ndarray:
        values = np.asarray(self.values.get(key, ()), np.float64)
        if values.shape != (self.dim // 2,):
            raise ConfigError(
                f"{self.model}: {self.kind} rope needs {self.dim // 2} numbers {key}, not {values.size}"
            )
        return values

    def plain(self) -> np.ndarray:
        """Frequencies without scaling (Su et al., 2021)."""
        return self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)


def rope(settings: RopeSettings, length: int) -> Rope:
    """The rotary embedding that a config asks for, in a server of sequences up to `length`."""
    scaling = _scaling(settings)
    unknown = set(settings.values) - scaling.keys - COMMON_KEYS
    if unknown:
        raise ConfigError(
            f"{settings.model}: {settings.kind} rope does not know {', '.join(sorted(unknown))}; "
            f"its settings are {', '.join(sorted(scaling.keys)) or 'none'}"
        )
    frequencies, magnitude = scaling.compute(settings, length)
    return Rope(tuple(frequencies.tolist()), magnitude)


def reach(settings: RopeSettings) -> tuple[int, int]:
    """(length served by default, longest one that the scaling is made for), in tokens.

    Linear and dynamic scaling do not tell whether max_position_embeddings counts before or after scaling, so the
    default is the careful reading and the limit the generous one.
    """
    _scaling(settings)
    longest = settings.max_positions
    if settings.kind == "yarn":
        longest = max(longest, round(settings.native * _yarn_factor(settings)))
        return longest, longest
    if settings.kind in ("linear", "dynamic"):
        return longest, max(longest, round(longest * settings.number("factor")))
    return longest, longest


def _default(s: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    return s.plain(), 1.0


def _linear(s: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Positions interpolated (Chen et al., 2023)."""
    return s.plain() / s.number("factor"), 1.0


def _dynamic(s: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """NTK-aware base, grown with the length beyond the native one (bloc97 and emozilla, 2023)."""
    factor, times = s.number("factor"), max(length, s.max_positions) / s.max_positions
    base = s.theta * (factor * times - (factor - 1)) ** (s.dim / (s.dim - 2))
    return base ** -(np.arange(0, s.dim, 2, dtype=np.float64) / s.dim), 1.0


def _yarn_factor(s: RopeSettings) -> float:
    return s.number("factor", s.max_positions / s.native)


def _yarn(s: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Slow pairs interpolated, fast ones kept, a ramp between; sharper attention (Peng et al., 2023)."""
    factor = _yarn_factor(s)

    def pair_turning(turns: float) -> float:
        return s.dim * math.log(s.native / (turns * 2 * math.pi)) / (2 * math.log(s.theta))

    low, high = pair_turning(s.number("beta_fast", 32)), pair_turning(s.number("beta_slow", 1))
    if s.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, s.dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(s.dim // 2, dtype=np.float64) - low) / (high - low), 0, 1)
    frequencies = s.plain() * (1 - ramp) + s.plain() / factor * ramp
    if s.values.get("attention_factor") is not None:
        return frequencies, s.number("attention_factor")
    if s.values.get("mscale") and s.values.get("mscale_all_dim"):
        both = (
            yarn_magnitude(factor, s.number("mscale")),
            yarn_magnitude(factor, s.number("mscale_all_dim")),
        )
        return frequencies, both[0] / both[1]
    return frequencies, yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, scale: float) -> float:
    """How much sharper attention is for a context stretched `factor` times: what cos and sin are multiplied by."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _llama3(s: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Slow pairs slowed by `factor`, fast ones kept, by turns within the native length (Llama 3.1)."""
    low, high = s.number("low_freq_factor"), s.number("high_freq_factor")
    turns = s.native * s.plain() / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return s.plain() * (keep + (1 - keep) / s.number("factor")), 1.0


def _longrope(s: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """A searched factor for each pair, one set up to the native length and one beyond (Ding et al., 2024)."""
    factors = s.numbers("long_factor" if length > s.native else "short_factor")
    if s.values.get("attention_factor") is not None:
        magnitude = s.number("attention_factor")
    else:
        factor = s.number("factor", s.max_positions / s.native)
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(s.native))
    return s.plain() / factors, magnitude


@dataclass(frozen=True)
class Scaling:
    """How one `rope_type` computes (frequencies, magnitude), and the settings it reads."""

    compute: Callable[[RopeSettings, int], tuple[np.ndarray, float]]
    keys: frozenset[str] = frozenset()


COMMON_KEYS = frozenset({
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings",
    "max_position_embeddings", "finetuned",
})  # fmt: skip
SCALINGS = {
    "default": Scaling(_default),
    "linear": Scaling(_linear, frozenset({"factor"})),
    "dynamic": Scaling(_dynamic, frozenset({"factor"})),
    "yarn": Scaling(
        _yarn,
        frozenset(
            {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        ),
    ),
    "llama3": Scaling(_llama3, frozenset({"factor", "low_freq_factor", "high_freq_factor"})),
    "longrope": Scaling(_longrope, frozenset({"factor", "attention_factor", "short_factor", "long_factor"})),
}


def _scaling(settings: RopeSettings) -> Scaling:
    if settings.kind not in SCALINGS:
        raise ConfigError(
            f"{settings.model}: rope_type {settings.kind!r} is not supported; known are {', '.join(SCALINGS)}"
        )
    return SCALINGS[settings.kind]


def rotations(ropes: tuple[Rope, ...], positions: Int[Array, "T"]) -> Float[Array, "ropes 2 T pairs"]:
    """cos and sin of every position under every rope, float32."""
    frequencies = np.asarray([r.frequencies for r in ropes], np.float32)
    magnitudes = np.asarray([r.magnitude for r in ropes], np.float32)[:, None, None]
    angles = positions.astype(jnp.float32)[None, :, None] * frequencies[:, None, :]
    return jnp.stack([jnp.cos(angles) * magnitudes, jnp.sin(angles) * magnitudes], axis=1)


def rotate(x: Float[Array, "T N H"], rotation: Float[Array, "2 T pairs"]) -> Float[Array, "T N H"]:
    """Each pair of channels (i, i + pairs) turned by its angle; in float32."""
    cos_T1P, sin_T1P = rotation[0][:, None], rotation[1][:, None]
    pairs = rotation.shape[-1]
    wide = x.astype(jnp.float32)
    a, b = wide[..., :pairs], wide[..., pairs : 2 * pairs]
    turned = [a * cos_T1P - b * sin_T1P, b * cos_T1P + a * sin_T1P, wide[..., 2 * pairs :]]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
