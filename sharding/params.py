"""The declaration of a weight: its shape, what its axes mean, and where a checkpoint keeps it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Param:
    """One array of a model; sharding, memory plan, initialisation and loading all follow from it.

    The loader's only rule is `tensor.reshape(shape)`: nothing is transposed, so a linear layer stays [out, in] as
    stored. A tuple of sources is stacked along a new leading axis, in order.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # "heads", "kv_heads", "ffn", "vocab", "experts" or None: one a dimension
    source: str | tuple[str, ...]  # the tensor's name in the checkpoint
    optional: bool = False  # may be absent in the checkpoint: the leaf is None then

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), f"{self.source}: shape {self.shape}, axes {self.axes}"


def stack_layers(layers: Sequence[Any]) -> Any:
    """One tree for layers of equal structure: each weight is one array [L, ...], read into place from L tensors."""

    def stack(*params: Param) -> Param:
        first = params[0]
        assert all((p.shape, p.axes) == (first.shape, first.axes) for p in params), f"{first.source} differs"
        sources = tuple(p.source for p in params if isinstance(p.source, str))
        assert len(sources) == len(params), f"{first.source} is a stack already"
        return Param((len(params), *first.shape), (None, *first.axes), sources, first.optional)

    return jax.tree.map(stack, *layers)
