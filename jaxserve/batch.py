"""The step's batch: the new tokens of all sequences laid end to end, with no phases.

The host packs everything into one int32 array, so that a step costs one copy to the device; the step unpacks
it and derives what follows from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.buckets import Bucket
from jaxserve.sampling.knobs import KNOB_WIDTH, pack_knobs, unpack_knobs
from jaxserve.sampling.params import SamplingParams

UNSAMPLED = -1  # stands for the token that the step before is still sampling
UNSCORED = -1  # a row whose next token's log-probability nobody asked for


@dataclass(frozen=True)
class Row:
    """One sequence's part in a step."""

    tokens: Sequence[int]  # new ones; UNSAMPLED at the end if need be
    kv_len: int  # tokens of the sequence up to and including these
    pages: Sequence[int]
    slot: int
    samples: bool  # whether the last row's logits give the sequence's next token
    params: SamplingParams
    seed: int = 0
    n_out: int = 0  # tokens that the sequence sampled before this step
    targets: Sequence[int] = field(
        default=()
    )  # the token after each new one, where prompt log-probabilities are due
    group: int = 0  # of devices, which have pages and slots of their own


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """What a model sees of a step; T new tokens of B sequences, each with up to P cache pages.

    A prompt, a chunk of one, a running sequence: each is a sequence with some new tokens.
    """

    tokens: Array  # [T] int32
    positions: Array  # [T] int32: place of each token in its sequence
    places: Array  # [T] int32: page * page_size + offset where its keys and values go; padding goes to page 0
    q_starts: Array  # [B+1] int32: sequence b's new tokens are rows q_starts[b]:q_starts[b+1]
    kv_lens: Array  # [B] int32: tokens of the sequence up to and including its new ones
    page_table: Array  # [B, P] int32

    @property
    def spread(self) -> bool:
        """Whether these are some rows of one prompt; the places are then those of all its rows (`jaxserve.spread`)."""
        return len(self.places) != len(self.tokens)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reads:
    """What the step's sampler sees besides the logits."""

    rows: Array  # [B] int32: the row of each sequence's last new token
    slots: Array  # [B] int32
    valid: Array  # [B] bool: sequences that sample
    targets: Array  # [T] int32: the token after each row, or UNSCORED


def flat_size(bucket: Bucket) -> int:
    """Length of the packed array."""
    t, b, p = bucket.tokens, bucket.seqs, bucket.pages
    return 2 * t + b * (4 + p + KNOB_WIDTH) + 1


def pack(rows: Sequence[Row], bucket: Bucket) -> np.ndarray:
    """One int32 array with all of a step; rows beyond these are padding."""
    t, b, p = bucket.tokens, bucket.seqs, bucket.pages
    tokens, targets = np.zeros(t, np.int32), np.full(t, UNSCORED, np.int32)
    q_starts, kv_lens = np.zeros(b + 1, np.int32), np.zeros(b, np.int32)
    slots, valid, table = np.zeros(b, np.int32), np.zeros(b, np.int32), np.zeros((b, p), np.int32)
    at = 0
    for i, row in enumerate(rows):
        end = at + len(row.tokens)
        tokens[at:end] = row.tokens
        targets[at : at + len(row.targets)] = row.targets
        q_starts[i + 1], kv_lens[i], slots[i], valid[i] = end, row.kv_len, row.slot, row.samples
        table[i, : len(row.pages)] = row.pages
        at = end
    q_starts[len(rows) + 1 :] = at
    knobs = pack_knobs([(r.params, r.seed, r.n_out) for r in rows], b)
    return np.concatenate([tokens, targets, q_starts, kv_lens, slots, valid, table.ravel(), knobs])


def unpack(flat: Array, bucket: Bucket, page_size: int, last_token: Array):
    """(Batch, Reads, Knobs) inside jit; `last_token[slot]` fills in what was UNSAMPLED when the step was packed."""
    t, b, p = bucket.tokens, bucket.seqs, bucket.pages
    sizes = (t, t, b + 1, b, b, b, b * p, b * KNOB_WIDTH)
    ends = np.cumsum(sizes)
    tokens, targets, q_starts, kv_lens, slots, valid, table, knobs = (
        flat[end - size : end] for end, size in zip(ends, sizes, strict=True)
    )
    row = jnp.arange(t, dtype=jnp.int32)
    real = row < q_starts[-1]
    owner = jnp.sum((row[:, None] >= q_starts[None, 1:]).astype(jnp.int32), axis=1)
    owner = jnp.minimum(owner, b - 1)
    positions = jnp.where(real, kv_lens[owner] - q_starts[owner + 1] + row, 0)
    page_table = table.reshape(b, p)
    places = page_table[owner, positions // page_size] * page_size + positions % page_size
    tokens = jnp.where(tokens == UNSAMPLED, last_token[slots[owner]], tokens)
    batch = Batch(tokens, positions, jnp.where(real, places, row % page_size), q_starts, kv_lens, page_table)
    last_rows = jnp.maximum(q_starts[1:] - 1, 0)
    return batch, Reads(last_rows, slots, valid != 0, targets), unpack_knobs(knobs, b)
