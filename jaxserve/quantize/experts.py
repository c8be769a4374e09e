"""What the experts of a mixture are multiplied by: the rows that the router sends to each, and what becomes of them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.layers.moe import gated
from jaxserve.quantize.observe import Inputs, inputs, summed

FEWEST = 16  # rows of a product: few shapes to compile
UNCORRELATED = 64  # rows without correlations that every expert is taken to have seen besides its own


def expert_inputs(
    experts: Mapping[str, Any], rows: Array, ids: Array, clamp: tuple[float, float] | None
) -> dict[str, list[Inputs]]:
    """The inputs of each expert's "gate", "up" and "down", of rows [T, D] with the experts `ids` [T, k] of each.

    `experts` are the weights [E, ...] as `layers.moe.experts` takes them.
    """
    rows_TD, chosen_Tk = np.asarray(rows, np.float32), np.asarray(ids)
    found: dict[str, list[Inputs]] = {"gate": [], "up": [], "down": []}
    for number in range(len(experts["gate"])):
        mine = rows_TD[(chosen_Tk == number).any(axis=1)]
        padded = np.zeros((max(FEWEST, 1 << (len(mine) - 1).bit_length()), rows_TD.shape[1]), np.float32)
        padded[: len(mine)] = mine
        weights = {name: values[number] for name, values in experts.items() if not name.startswith("down")}
        before, after = _through(padded, len(mine), weights, clamp)
        for name, values in (("gate", before), ("up", before), ("down", after)):
            found[name].append(inputs(values, len(mine)))
    return found


def steadied(x: Inputs | None) -> Inputs | None:
    """An expert's inputs with the less trust in correlations the fewer rows they were seen in; None for no rows."""
    if x is None or not x.count:
        return None
    diagonal = np.diag(np.diag(x.gram))
    return replace(x, gram=x.gram + diagonal * np.float32(UNCORRELATED / x.count))


@partial(jax.jit, static_argnames="clamp")
def _through(rows: Array, count: Any, w: Mapping[str, Array], clamp: tuple[float, float] | None) -> Any:
    """`summed` of the first `count` rows before and after an expert's gate and up."""

    def product(name: str) -> Array:
        out = jnp.matmul(rows, w[name].T, precision="highest")
        return out if f"{name}_bias" not in w else out + w[f"{name}_bias"][None]

    real = (jnp.arange(rows.shape[0]) < count)[:, None]
    hidden = jnp.where(real, gated(product("gate"), product("up"), clamp), jnp.float32(0))
    return summed(rows), summed(hidden)
