"""A model over whole sequences at once, without an engine: what evaluation and calibration run."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.batch import Batch
from jaxserve.models import ModelConfig, model_for


def forward(
    c: ModelConfig, params: Any, tokens: Any, *, sequences: int, collect: bool = False
) -> tuple[Array, dict[str, Array]]:
    """(hidden states [T, D] after the last norm, what happened inside) of equally long sequences end to end.

    Each has one cache page of its own, as long as it is.
    """
    model, length = model_for(c), tokens.shape[0] // sequences
    shape = (sequences + 1, *model.cache_shape(c, length))
    pool = tuple(jnp.zeros(shape, params["embed"].dtype) for _ in range(c.num_layers))
    hidden, _, inside = model.forward(c, params, _batch(tokens, sequences, length), pool, collect=collect)
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
