"""A model over whole sequences at once, without an engine: what evaluation and calibration run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.batch import Batch
from jaxserve.models import ModelConfig, model_for
from jaxserve.pool import layer_pages


def forward(
    c: ModelConfig,
    params: Any,
    tokens: Any,
    *,
    sequences: int,
    collect: bool = False,
    cache: str | None = None,
) -> tuple[Array, dict[str, Array]]:
    """(hidden states [T, D] after the last norm, what happened inside) of equally long sequences end to end.

    Each has one cache page of its own, as long as it is, of the data type `cache` (a setting's name) or the weights'.
    """
    length = tokens.shape[0] // sequences
    pages = layer_pages(c, cache or params["embed"].dtype.name, length, (sequences + 1,))
    pool = tuple(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), pages) for _ in range(c.num_layers))
    hidden, _, inside = model_for(c).forward(
        c, params, _batch(tokens, sequences, length), pool, collect=collect
    )
    return hidden, inside


def _batch(tokens: Any, sequences: int, length: int) -> Batch:
    rows = np.arange(sequences * length, dtype=np.int32)
    return Batch(
        tokens=tokens,
        positions=jnp.asarray(rows % length),
        places=jnp.asarray(rows + length),  # page 0 is nobody's
        q_starts=jnp.arange(0, sequences * length + 1, length, dtype=jnp.int32),
        kv_lens=jnp.full(sequences, length, jnp.int32),
        page_table=jnp.arange(1, sequences + 1, dtype=jnp.int32)[:, None],
    )
