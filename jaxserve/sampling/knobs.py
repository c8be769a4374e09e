"""Knobs: what each row of a step asks of the sampler, as numbers that travel in the step's flat array."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxserve.sampling.params import SamplingParams

# Bits of `flags`: the parts of the sampler that a row needs. A part that no row needs does not run.
PENALTIES = 1
BIAS = 2
BAD_WORDS = 4
MIN_TOKENS = 8
LOGPROB = 16
ALTERNATIVES = 32
SHAPING = PENALTIES | BIAS | BAD_WORDS | MIN_TOKENS  # what changes the logits before anything is chosen

# Six float32, then top_k, the seed's two words (low first), n_out and flags as int32.
_ROW = struct.Struct("<6fiqii")
KNOB_WIDTH = _ROW.size // 4
_NEUTRAL = _ROW.pack(0, 1, 0, 1, 0, 0, 0, 0, 0, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Knobs:
    """One entry a row; every leaf is [B]."""

    temperature: Array  # f32; 0 takes the most likely token
    top_p: Array  # f32; 1 keeps all
    min_p: Array  # f32; 0 keeps all
    repetition: Array  # f32; 1 is none
    presence: Array  # f32
    frequency: Array  # f32
    top_k: Array  # i32; 0 keeps all
    seed: Array  # u32 [B, 2], low word first
    n_out: Array  # i32; tokens the sequence has generated before this one
    flags: Array  # i32; the bits above

    def has(self, bits: int) -> Array:
        """Rows with any of these flags."""
        return (self.flags & bits) != 0

    def of_use(self, valid: Array) -> "Knobs":
        """The same, asking nothing for rows that are not valid, and of a greedy row no filters."""
        drawing = valid & (self.temperature > 0)
        return replace(
            self,
            flags=jnp.where(valid, self.flags, 0),
            temperature=jnp.where(drawing, self.temperature, 0),
            top_p=jnp.where(drawing, self.top_p, 1),
            min_p=jnp.where(drawing, self.min_p, 0),
            top_k=jnp.where(drawing, self.top_k, 0),
        )


def needs_admit(params: SamplingParams) -> bool:
    """Whether a request's slot must be filled by `admit` before its first token is sampled."""
    return bool(_state_flags(params)) or params.min_tokens > 0


def pack_knobs(rows: Sequence[tuple[SamplingParams, int, int] | None], size: int) -> np.ndarray:
    """int32 [size * KNOB_WIDTH] for (params, seed, tokens generated so far) of each row; None rows are neutral.

    Seeds are taken modulo 2**64, so a choice's `seed + index` may run over.
    """
    packed = [_NEUTRAL if row is None else _pack(*row) for row in rows]
    return np.frombuffer(b"".join(packed) + _NEUTRAL * (size - len(rows)), np.int32)


def unpack_knobs(flat: Int32[Array, "N"], size: int) -> Knobs:
    """The inverse of `pack_knobs`, inside jit."""
    words = flat.reshape(size, KNOB_WIDTH)
    floats = jax.lax.bitcast_convert_type(words[:, :6], jnp.float32)
    return Knobs(
        *(floats[:, i] for i in range(6)),
        top_k=words[:, 6],
        seed=jax.lax.bitcast_convert_type(words[:, 7:9], jnp.uint32),
        n_out=words[:, 9],
        flags=words[:, 10],
    )


def _pack(params: SamplingParams, seed: int, n_out: int) -> bytes:
    flags = _state_flags(params)
    if n_out < params.min_tokens:
        flags |= MIN_TOKENS
    if params.logprobs is not None or (params.best_of or 0) > params.n:  # best_of ranks by log-probability
        flags |= LOGPROB
    if params.logprobs:
        flags |= ALTERNATIVES
    return _ROW.pack(
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.top_k,
        (seed + 2**63) % 2**64 - 2**63,
        n_out,
        flags,
    )


def _state_flags(params: SamplingParams) -> int:
    flags = 0
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        flags |= PENALTIES
    if params.logit_bias or params.allowed_token_ids is not None:
        flags |= BIAS
    if params.bad_words:
        flags |= BAD_WORDS
    return flags
