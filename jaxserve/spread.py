"""A step in which the devices of the context axis compute one prompt together; one of them keeps it and goes on."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.batch import Batch, Reads, Row
from jaxserve.buckets import Bucket
from jaxserve.sampling.knobs import KNOB_WIDTH, Knobs, pack_knobs, unpack_knobs
from sharding.context import local_positions, stripes

NOT_HERE = -1  # instead of the row of the prompt's last token


def spread_size(bucket: Bucket) -> int:
    """Length of one device's packed array."""
    return 2 * bucket.tokens + 5 + bucket.pages + KNOB_WIDTH


def pack_spread(row: Row | None, bucket: Bucket) -> np.ndarray:
    """The packed arrays of all devices for a whole prompt, one after the other; None is padding."""
    devices, t = bucket.spread, bucket.tokens
    parts, knobs = [], pack_knobs([] if row is None else [(row.params, row.seed, row.n_out)], 1)
    length = 0 if row is None else row.kv_len
    for device, positions in enumerate(stripes(length, devices, t)):
        tokens, targets = np.zeros(t, np.int32), np.full(t, -1, np.int32)
        table, owns = np.zeros(bucket.pages, np.int32), row is not None and row.group % devices == device
        last, slot = NOT_HERE, 0
        if row is not None:
            tokens[: len(positions)] = np.asarray(row.tokens)[positions]
            targets[: len(positions)] = np.asarray(row.targets)[positions]
            last = int(np.append(np.flatnonzero(positions == length - 1), NOT_HERE)[0])
            slot = row.slot
        if row is not None and owns:  # the others write what they see of it to page 0
            table[: len(row.pages)] = row.pages
        numbers = np.array(
            [length, len(positions), last, slot, owns and row is not None and row.samples], np.int32
        )
        parts += [tokens, targets, numbers, table, knobs]
    return np.concatenate(parts)


def unpack_spread(flat: Array, bucket: Bucket, page_size: int) -> tuple[Batch, Reads, Knobs, Array]:
    """(Batch, Reads, Knobs, whether the prompt's last row is here) inside jit.

    `places` has a place for each row of all devices, in order of position.
    """
    t = bucket.tokens
    ends = np.cumsum((t, t, 5, bucket.pages, KNOB_WIDTH))
    tokens, targets, numbers, table, knobs = jnp.split(flat, ends[:-1])
    length, count, last, slot, valid = numbers
    everyone = jnp.arange(bucket.spread * t, dtype=jnp.int32)
    page = jnp.take(table, everyone // page_size, mode="clip")
    places = jnp.where(everyone < length, page * page_size, 0) + everyone % page_size
    positions = local_positions(t)
    batch = Batch(
        tokens=tokens,
        positions=jnp.where(jnp.arange(t, dtype=jnp.int32) < count, positions, 0),
        places=places,
        q_starts=jnp.stack([jnp.zeros_like(count), count]),
        kv_lens=length[None],
        page_table=table[None],
    )
    reads = Reads(jnp.maximum(last, 0)[None], slot[None], valid[None] != 0, targets)
    return batch, reads, unpack_knobs(knobs, 1), last != NOT_HERE


def spread_rows(row: Row, bucket: Bucket) -> np.ndarray:
    """Where each token of a prompt is in the output of such a step."""
    first = row.group // bucket.spread * bucket.spread
    at = np.zeros(row.kv_len, np.int32)
    for device, positions in enumerate(stripes(row.kv_len, bucket.spread, bucket.tokens)):
        at[positions] = (first + device) * bucket.tokens + np.arange(len(positions), dtype=np.int32)
    return at
