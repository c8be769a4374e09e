"""Weights that stay in their low bits on the device: a `Param` becomes a `QTensor` of what the checkpoint stores."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.errors import CheckpointError
from jaxserve.memory import elements
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.quantized import QuantizedCheckpoint
from pallas_kernels.elements import BITS
from pallas_kernels.formats import QTensor
from sharding.params import Param


def is_packable(param: Param, checkpoint: Checkpoint) -> bool:
    """Whether a weight is a matrix, or a stack of them, whose every source is stored in low bits and only multiplied.

    Rows of an embedding are looked up, and routers and the halves of latent attention's projections are used otherwise.
    """
    if not isinstance(checkpoint, QuantizedCheckpoint) or "vocab" in param.axes or param.optional:
        return False
    matrix = param.part_shape[-2:]
    return (
        all(
            checkpoint.packs(name, param.swapped)
            and checkpoint.shape(name)[-2:] == param.stored_shape[-2:]
            and len(checkpoint.shape(name)) == len(param.stored_shape)
            for name in sources(param)
        )
        and len(matrix) == 2
        and (param.cut is None or param.cut.axis == len(param.part_shape) - 2)
    )


def pack(param: Param, checkpoint: Checkpoint, sharding: NamedSharding | None = None) -> QTensor:
    """The weight on its devices; CheckpointError where dividing it would cut what shares a byte."""
    assert isinstance(checkpoint, QuantizedCheckpoint)
    names, outer = sources(param), param.shape[: len(param.shape) - len(param.part_shape)]

    @cache
    def part(number: int) -> QTensor:
        w = checkpoint.packed(names[number])
        assert w is not None, names[number]
        w = _rows(w, param.cut.take) if param.cut else w
        w = jax.tree.map(lambda leaf: leaf[list(param.picked)], w) if param.picked else w
        w = _padded(w, param.pad[-2:]) if any(param.pad) else w
        if number and w.format != part(0).format:
            raise CheckpointError(
                "weights of one stack are stored in different formats, which kernels cannot take",
                tensor=names[number], expected=part(0).format.name, found=w.format.name,
            )  # fmt: skip
        return w

    if sharding is None:
        parts = [part(number) for number in range(len(names))]
        whole = jax.tree.map(lambda *leaves: np.stack(leaves).reshape(*outer, *leaves[0].shape), *parts)
        packed = jax.device_put(whole if outer else parts[0])
    else:
        packed = _divided(part, outer, sharding, param)
    for name in names:
        checkpoint.release(name)
    return packed


def packed_bytes(param: Param, checkpoint: Checkpoint) -> int:
    """What it takes, all devices together."""
    stored = sum(checkpoint.nbytes(name) for name in sources(param)) // (2 if param.cut else 1)
    return stored * len(param.picked) // (max(param.picked) + 1) if param.picked else stored


def bytes_saved(params: Any, checkpoint: Checkpoint, dtype: Any, shardings: Any = None) -> int:
    """How much less memory of a device a tree of `Param` takes with `low_bit` than in `dtype`."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Param))
    wheres = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    saved = 0
    for param, where in zip(leaves, wheres, strict=True):
        if is_packable(param, checkpoint):
            here, all_of_it = elements(param.shape, where), math.prod(param.shape)
            plain = here * np.dtype(param.dtype or dtype).itemsize
            saved += plain - packed_bytes(param, checkpoint) * here // all_of_it
    return saved


def sources(param: Param) -> tuple[str, ...]:
    return (param.source,) if isinstance(param.source, str) else param.source


def reblocked(w: QTensor, rows: int, columns: int) -> QTensor:
    """The same values with blocks of these sizes, which divide those there are: each scale is repeated."""
    r, c = w.format.block
    if (r, c) == (rows, columns):
        return w

    grid = -(-w.shape[-2] // rows) if rows else 1, -(-w.shape[-1] // columns) if columns else 1

    def finer(leaf: Any) -> Any:
        for axis, (old, new) in ((-2, (r, rows)), (-1, (c, columns))):
            leaf = np.repeat(leaf, old // new, axis) if new else leaf
        return leaf[..., : grid[0], : grid[1]]

    format = replace(w.format, name=f"{w.format.name}_{rows}x{columns}", block=(rows, columns))
    zeros = None if w.zeros is None else finer(w.zeros)
    return QTensor(w.codes, finer(w.scales), zeros, w.tensor_scale, format=format)


def _rows(w: QTensor, take: slice) -> QTensor:
    """Some rows of every matrix, in a format whose rows have scales of their own."""
    assert w.format.block[0] == 1, w.format
    codes, scales = w.codes[..., take, :], w.scales[..., take, :]
    zeros = None if w.zeros is None else w.zeros[..., take, :]
    return QTensor(codes, scales, zeros, w.tensor_scale, format=w.format)


def _padded(w: QTensor, more: tuple[int, ...]) -> QTensor:
    """With rows and columns of zeros at its end: codes of 0 are zero in formats without zero points."""
    assert w.zeros is None, w.format
    (f, d), (rows, columns) = w.shape[-2:], w.format.block
    wide = (f + more[0], d + more[1])

    def grown(leaf: Any, to: tuple[int, int]) -> Any:
        outer = [(0, 0)] * (leaf.ndim - 2)
        return np.pad(leaf, [*outer, *((0, n - old) for n, old in zip(to, leaf.shape[-2:], strict=True))])

    grid = -(-wide[0] // rows) if rows else 1, -(-wide[1] // columns) if columns else 1
    codes = grown(w.codes, (wide[0], wide[1] * BITS[w.format.codes] // 8))
    return QTensor(codes, grown(w.scales, grid), None, w.tensor_scale, format=w.format)


def _divided(
    part: Callable[[int], QTensor], outer: tuple[int, ...], sharding: NamedSharding, param: Param
) -> QTensor:
    """A stack [*outer] of parts over the devices; blocks that a border would cut are divided first.

    Only parts that a device of this process has something of are asked for.
    """
    first = part(0)
    ndim = len(outer) + first.ndim
    spec: Sequence[Any] = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    ways = [math.prod(sharding.mesh.shape[name] for name in _names(entry)) for entry in spec[-2:]]
    (f, d), (rows, columns) = first.shape[-2:], first.format.block
    if d // ways[1] * BITS[first.format.codes] % 8:
        raise CheckpointError(
            f"{ways[1]} devices would share a byte of a weight; use fewer",
            tensor=sources(param)[0], expected="an even number of columns on each", found=f"{d} / {ways[1]}",
        )  # fmt: skip
    rows = math.gcd(rows, f // ways[0]) if ways[0] > 1 and rows else rows
    columns = math.gcd(columns, d // ways[1]) if ways[1] > 1 and columns else columns
    numbers = np.arange(math.prod(outer)).reshape(outer)

    def placed(name: str, entries: Sequence[Any]) -> Any:
        def leaf(number: int) -> np.ndarray:
            return np.asarray(getattr(reblocked(part(number), rows, columns), name))

        def piece(index: Any) -> np.ndarray:
            chosen = numbers[index[: len(outer)]]
            inner = index[len(outer) :]
            parts = np.stack([leaf(n)[inner] for n in chosen.ravel().tolist()])
            return parts.reshape((*chosen.shape, *parts.shape[1:]))

        where = NamedSharding(sharding.mesh, P(*entries))
        return jax.make_array_from_callback((*outer, *leaf(0).shape), where, piece)

    grid = (*spec[:-2], spec[-2] if rows else None, spec[-1] if columns else None)
    zeros = None if first.zeros is None else placed("zeros", grid)
    whole = None if first.tensor_scale is None else placed("tensor_scale", spec[:-2])
    format = reblocked(first, rows, columns).format
    return QTensor(
        placed("codes", spec), placed("scales", grid), zeros, whole, format=format, axes=param.axes[-2:]
    )


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
