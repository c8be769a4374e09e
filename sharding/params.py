"""The declaration of a weight: its shape, what its axes mean, and where a checkpoint keeps it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Cut:
    """A part of a stored tensor, where several weights are kept in one."""

    axis: int
    length: int  # of that axis in the stored tensor
    take: slice


@dataclass(frozen=True)
class Param:
    """One array of a model; sharding, memory plan, initialisation and loading all follow from it.

    The loader reshapes a tensor to `stored_shape` and does nothing else unless `swapped` or `cut` say so: a linear
    layer stays [out, in] as stored. Several sources are stacked, in order, along the leading axes whose product
    is their number.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # each dimension's: heads, kv_heads, ffn, vocab, experts, layers or None
    source: str | tuple[str, ...]  # the tensor's name in the checkpoint
    optional: bool = False  # may be absent in the checkpoint: the leaf is None then
    swapped: bool = False  # stored as [..., in, out]
    cut: Cut | None = None  # this much of the tensor, once the axes are in the order they have here
    picked: tuple[int, ...] = ()  # of each tensor's first axis, in this order; () is all of it
    dtype: str | None = None  # kept so whatever the model's dtype is
    pad: tuple[int, ...] = ()  # zeros at the end of each axis of a part, which no checkpoint stores

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), f"{self.source}: shape {self.shape}, axes {self.axes}"
        assert isinstance(self.source, str) or len(self.source) in self._products, (
            f"no leading axes of {self.shape} hold {len(self.source)} sources"
        )

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what one source gives."""
        if isinstance(self.source, str):
            return self.shape
        return self.shape[self._products.index(len(self.source)) + 1 :]

    @property
    def _pad(self) -> tuple[int, ...]:
        return self.pad or (0,) * len(self.part_shape)

    @property
    def _products(self) -> list[int]:
        return [math.prod(self.shape[: n + 1]) for n in range(len(self.shape))]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that each tensor has in the checkpoint, up to splitting and merging neighbouring axes."""
        shape = [n - more for n, more in zip(self.part_shape, self._pad, strict=True)]
        if self.cut:
            shape[self.cut.axis] = self.cut.length
        if self.picked:
            shape[0] = max(self.picked) + 1
        if self.swapped:
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)

    def of(self, tensor: Any) -> Any:
        """What a stored tensor (numpy) gives this weight: a view if it can be."""
        tensor = tensor.reshape(self.stored_shape)
        if self.swapped:
            tensor = tensor.swapaxes(-1, -2)
        if self.cut:
            axis = self.cut.axis % tensor.ndim
            tensor = tensor[(slice(None),) * axis + (self.cut.take,)]
        if self.picked:
            tensor = tensor[list(self.picked)]
        return np.pad(tensor, [(0, more) for more in self._pad]) if self.pad else tensor


def stack_layers(layers: Sequence[Any]) -> list[Any]:
    """Neighbouring layers of equal structure as one tree each: every weight is one array [L, ...], read into place.

    The last tree's L are "layers", which pipeline stages divide; layers of other structure before them are not divided.
    """
    *runs, last = [list(run) for _, run in groupby(layers, key=_structure)]
    return [*(_stacked(run, None) for run in runs), _stacked(last, "layers")]


def _stacked(layers: Sequence[Any], axis: str | None) -> Any:
    return jax.tree.map(lambda *params: _stack(axis, params), *layers)


def _structure(layer: Any) -> Any:
    """Equal for layers that can be stacked: the same weights in the same shapes."""
    leaves, tree = jax.tree.flatten(layer)
    return tree, [
        replace(leaf, source="" if isinstance(leaf.source, str) else ("",) * len(leaf.source))
        for leaf in leaves
    ]


def _stack(axis: str | None, params: tuple[Param, ...]) -> Param:
    sources = tuple(name for p in params for name in ([p.source] if isinstance(p.source, str) else p.source))
    first = params[0]
    return replace(first, shape=(len(params), *first.shape), axes=(axis, *first.axes), source=sources)
