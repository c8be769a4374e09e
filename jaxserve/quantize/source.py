"""A model's weights as the quantiser sees them: a layer at a time on the host, by the names of a checkpoint."""

from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxserve.weights import Checkpoint
from sharding.params import Param

Tree = dict[str, Any]


def read(params: Any, checkpoint: Checkpoint) -> Any:
    """The tree of `Param` as float32 arrays of the host; optional ones that are absent are left out."""
    if isinstance(params, dict):
        found = {name: read(value, checkpoint) for name, value in params.items()}
        return {name: value for name, value in found.items() if value is not None}
    names = set(checkpoint.names())
    if params.optional and not set(sources(params)) <= names:
        return None
    parts = [np.asarray(params.of(checkpoint.read(name)), np.float32) for name in sources(params)]
    return np.stack(parts).reshape(params.shape)


def sources(param: Param) -> tuple[str, ...]:
    return (param.source,) if isinstance(param.source, str) else param.source


def leaves(params: Any) -> dict[str, Param]:
    """Each weight of a layer by its path, "experts.gate" say."""
    paths = jax.tree.leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, Param))
    return {".".join(str(getattr(key, "key", key)) for key in path): leaf for path, leaf in paths}


def at(tree: Tree, path: str) -> Any:
    """The weight at a path, or None."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None  # type: ignore[assignment]
    return tree


def is_linear(path: str, param: Param) -> bool:
    """Whether a weight is a matrix, or a stack of them, that rows are multiplied by and nothing else.

    Routers choose, and are kept exact; parts of a tensor (gpt-oss' experts, the halves of latent attention's
    projections) stay with it.
    """
    whole = not param.cut and not param.swapped and "vocab" not in param.axes
    return whole and len(param.part_shape) == 2 and not path.endswith("router")


def matrices(param: Param, values: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(name in the checkpoint, values) of each tensor that a weight is made of."""
    parts = np.asarray(values).reshape(-1, *param.part_shape)
    return zip(sources(param), parts, strict=True)


def kept(params: Any, tree: Any, checkpoint: Checkpoint, dtype: str) -> dict[str, np.ndarray]:
    """The tensors of all weights that are not quantised, in `dtype` or what their `Param` asks for."""
    tensors = {}
    for path, param in leaves(params).items():
        values = at(tree, path)
        if values is None or is_linear(path, param):
            continue
        kind = np.dtype(getattr(ml_dtypes, param.dtype or dtype, param.dtype or dtype))
        if param.cut or param.swapped:
            tensors |= {name: checkpoint.read(name).astype(kind) for name in sources(param)}
        else:
            tensors |= {name: part.astype(kind) for name, part in matrices(param, values)}
    return tensors
