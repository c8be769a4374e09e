"""Which device of a ring holds which token: in stripes, so that every device has the same work at every step."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

PLACES = 1 << 24  # of a sequence: its token at position p is at place sequence * PLACES + p
NOWHERE = -1  # place of a row that is nobody's


class Layout(NamedTuple):
    """What each of X devices holds, [X, T] int32 each."""

    rows: np.ndarray  # which of all new tokens laid end to end; NOWHERE: padding
    places: np.ndarray  # of the token
    starts: np.ndarray  # place of the first token of its sequence


def lowest(places, starts, window):
    """Place of the first key that each query sees, of a sequence that begins at `starts`."""
    if window is None:
        return starts
    return jnp.where(jnp.asarray(window) > 0, jnp.maximum(starts, places - window + 1), starts)


def zigzag(
    new: Sequence[int], devices: int, *, first: Sequence[int] | None = None, multiple: int = 128
) -> Layout:
    """Sequences of `new` tokens, from position `first` on (0 if not given), over the devices of a ring.

    A late token sees more than an early one, so each sequence is cut into 2X stripes of a multiple of `multiple`
    tokens, and device d holds stripes d and 2X - 1 - d of each. At most 127 sequences of 16 million tokens.
    """
    if len(new) >= 1 << 7:
        raise ValueError(f"{len(new)} sequences in one ring; at most 127")
    columns, before = [], 0
    for b, (count, begin) in enumerate(zip(new, first or [0] * len(new), strict=True)):
        stripe = -(-count // (2 * devices * multiple)) * multiple
        stripes = np.arange(2 * devices * stripe, dtype=np.int32).reshape(2 * devices, stripe)
        mine = np.concatenate([stripes[:devices], stripes[: devices - 1 : -1]], axis=1)
        real = mine < count
        columns.append(
            (
                np.where(real, before + mine, NOWHERE),
                np.where(real, b * PLACES + begin + mine, NOWHERE),
                np.full_like(mine, b * PLACES),
            )
        )
        before += count
    return Layout(*(np.concatenate(parts, axis=1).astype(np.int32) for parts in zip(*columns, strict=True)))
