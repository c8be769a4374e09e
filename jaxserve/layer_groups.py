"""Neighbouring layers that one program computes, where a step is several programs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax


@dataclass(frozen=True)
class LayerGroup:
    """Layers first .. first + count - 1 of a model, all of the same structure."""

    first: int
    count: int
    run: int = 0  # which run of neighbours of the same structure they are in
    begins: int = 0  # the first layer of that run
    stacked: bool = False  # whether such a run is one array a weight, and all pages are one

    @property
    def program(self) -> tuple[int, int]:
        """Equal for groups that the same program computes."""
        return self.run, self.count

    def of_params(self, layers: Sequence[Any]) -> Any:
        """What `decoder.forward_group` reads of a model's layers; of a tree of their shardings the same part."""
        return layers[self.run] if self.stacked else tuple(layers[self.first : self.first + self.count])

    def of_pool(self, pool: Any) -> Any:
        """The arrays of pages that these layers are in; of one sharding for all pages just that."""
        return pool[self.first : self.first + self.count] if type(pool) is tuple else pool

    def joined(self, pool: Any, part: Any) -> Any:
        """The pool with `part` in the place of `of_pool`."""
        if type(pool) is not tuple:
            return part
        return (*pool[: self.first], *part, *pool[self.first + self.count :])


def layer_groups(layers: Sequence[Any], *, stacked: bool, pieces: int) -> list[LayerGroup]:
    """All layers of a model in about `pieces` groups of equal size, the last of a run smaller.

    A group is within one run of layers of the same structure. `layers` are their weights, one tree each or in stacks.
    """
    lengths = list(_lengths(layers, stacked))
    total, first, found = sum(lengths), 0, []
    for run, length in enumerate(lengths):
        size = -(-length // max(round(pieces * length / total), 1))
        found += [
            LayerGroup(first + at, min(size, length - at), run, first, stacked)
            for at in range(0, length, size)
        ]
        first += length
    return found


def _lengths(layers: Sequence[Any], stacked: bool) -> Iterator[int]:
    if stacked:
        yield from (jax.tree.leaves(stack)[0].shape[0] for stack in layers)
        return
    for _, run in groupby(layers, key=_structure):
        yield len(list(run))


def _structure(layer: Any) -> Any:
    leaves, tree = jax.tree.flatten(layer)
    return tree, [(leaf.shape, leaf.dtype) for leaf in leaves]
