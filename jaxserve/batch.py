"""The step's batch: the new tokens of all sequences laid end to end, with no phases."""

from dataclasses import dataclass

import jax
from jax import Array


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
