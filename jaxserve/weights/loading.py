"""Fills a model's tree of `Param` from a checkpoint: each tensor read once, in file order, into its place."""

import logging
import time
from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.arrays import aligned_empty, convert_into, is_aligned, is_float
from jaxserve.weights.checkpoint import Checkpoint, missing_tensor, overflow
from jaxserve.weights.divided import Divided
from jaxserve.weights.packing import is_packable, pack, packed_bytes, sources
from jaxserve.weights.progress import Progress
from jaxserve.weights.quantized import QuantizedCheckpoint
from sharding.params import Param

log = logging.getLogger(__name__)
UNUSED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")  # buffers in old checkpoints

Uses = dict[str, list[tuple[int, int]]]  # tensor name to (leaf number, row of that leaf's stack)


@dataclass
class _Leaf:
    """A leaf on its way: `stack` is filled row by row when several tensors make one array."""

    param: Param
    stack: np.ndarray | None = None
    divided: Divided | None = None  # over several devices
    missing: set[int] = field(default_factory=set)


def load(
    params: Any,
    checkpoint: Checkpoint,
    dtype: Any,
    shardings: Any = None,
    *,
    low_bit: bool = False,
    progress: bool = True,
) -> Any:
    """The tree `params` with each `Param` a `jax.Array` of `dtype`, or None where an optional tensor is absent.

    With `shardings`, a tree like `params`, each device gets its part, and what no device of this process holds is
    not read. With `low_bit`, matrices that are stored so stay so, as a `QTensor` (see `packing`).
    Memory beyond the result: about one tensor. On CPU an array may be the mapped file itself. Values are
    rounded to nearest; CheckpointError if a tensor is missing, has another shape, or overflows `dtype`.
    """
    dtype = np.dtype(dtype)
    leaves, tree = jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Param))
    done: list[Any] = [None] * len(leaves)
    low = {i: p for i, p in enumerate(leaves) if low_bit and is_packable(p, checkpoint)}
    parts, uses = _plan(leaves, checkpoint, low)
    wheres = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    for part, where in zip(parts, wheres, strict=True):
        part.divided = where and Divided(part.param, where, np.dtype(part.param.dtype or dtype))
    _say_what_is_dequantised(checkpoint, low, dtype)
    total = sum(checkpoint.nbytes(name) for name in uses) + sum(
        packed_bytes(p, checkpoint) for p in low.values()
    )
    began = time.perf_counter()
    with Progress(total, visible=progress) as bar:
        for number, param in low.items():
            done[number] = pack(param, checkpoint, wheres[number])
            bar.advance(packed_bytes(param, checkpoint))
        for name in checkpoint.names():
            if name not in uses:
                continue
            wanted = any(_wants(parts[number], row) for number, row in uses[name])
            tensor, kept = checkpoint.read(name) if wanted else None, False
            for number, row in uses[name]:
                array = _place(parts[number], row, tensor, dtype, checkpoint, name)
                if isinstance(array, np.ndarray):
                    kept |= not array.flags.writeable  # the mapped file itself
                    array = _to_device(array)
                if array is not None:
                    done[number] = array
                    parts[number].stack = parts[number].divided = None
            if not kept:
                checkpoint.release(name)
            bar.advance(checkpoint.nbytes(name))
    seconds = time.perf_counter() - began
    log.info(
        "loaded %d tensors, %.1f MB, in %.1f s (%.0f MB/s) from %s",
        len(uses), total / 1e6, seconds, total / 1e6 / max(seconds, 1e-9), checkpoint.path,
    )  # fmt: skip
    _warn_of_unused(checkpoint, {*uses, *(name for param in low.values() for name in sources(param))})
    return jax.tree.unflatten(tree, done)


def _plan(leaves: list[Param], checkpoint: Checkpoint, low: Mapping[int, Param]) -> tuple[list[_Leaf], Uses]:
    """The leaves, and where each tensor goes; every name and shape is checked. `low` take theirs themselves."""
    parts: list[_Leaf] = []
    uses: Uses = defaultdict(list)
    names = set(checkpoint.names())
    for number, param in enumerate(leaves):
        parts.append(_Leaf(param, missing=set(range(len(sources(param))))))
        absent = [name for name in sources(param) if name not in names]
        if number in low or (absent and param.optional and len(absent) == len(sources(param))):
            continue
        if absent:
            raise missing_tensor(absent[0], names, checkpoint.path)
        for row, name in enumerate(sources(param)):
            _check(param, name, checkpoint)
            uses[name].append((number, row))
    return parts, uses


def _check(param: Param, name: str, checkpoint: Checkpoint) -> None:
    if not _only_regroups(checkpoint.shape(name), param.stored_shape):
        raise CheckpointError(
            "a tensor has the wrong shape; do config.json and weights belong together?",
            tensor=name, file=checkpoint.file(name), expected=str(list(param.stored_shape)),
            found=str(list(checkpoint.shape(name))),
        )  # fmt: skip
    if not is_float(checkpoint.dtype(name)):
        raise CheckpointError(
            "a weight is stored as integers: quantised in a way that is not supported",
            tensor=name, file=checkpoint.file(name), expected="a floating-point dtype",
            found=str(checkpoint.dtype(name)),
        )  # fmt: skip


def _only_regroups(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether reshaping merely splits or merges neighbouring axes: [6, 4] to (4, 6) would scramble values."""

    def borders(shape: tuple[int, ...]) -> set[int]:
        return {int(n) for n in np.cumprod(shape, dtype=object)} if shape else {1}

    a, b = borders(stored) | {1}, borders(wanted) | {1}
    return max(a) == max(b) and (a <= b or b <= a)


def _wants(leaf: _Leaf, row: int) -> bool:
    return leaf.divided is None or leaf.divided.wants(row)


def _place(
    leaf: _Leaf, row: int, tensor: np.ndarray | None, dtype: np.dtype, checkpoint: Checkpoint, name: str
) -> np.ndarray | jax.Array | None:
    """Put `tensor` where it belongs; the whole array once nothing is missing from it."""
    if leaf.divided is not None:
        if tensor is not None and not leaf.divided.put(row, leaf.param.of(tensor)):
            raise overflow(checkpoint, name, dtype)
        leaf.missing.discard(row)
        return None if leaf.missing else leaf.divided.array()
    assert tensor is not None, "only what is divided is not read"
    values, dtype = leaf.param.of(tensor), np.dtype(leaf.param.dtype or dtype)
    if isinstance(leaf.param.source, str):
        if values.dtype == dtype and is_aligned(values):
            return values
        out = whole = aligned_empty(leaf.param.shape, dtype)
    else:
        whole = leaf.stack if leaf.stack is not None else aligned_empty(leaf.param.shape, dtype)
        leaf.stack, out = whole, whole.reshape(-1, *leaf.param.part_shape)[row]
    if not convert_into(out, values):
        raise overflow(checkpoint, name, dtype)
    leaf.missing.discard(row)
    return None if leaf.missing else whole


def _to_device(array: np.ndarray) -> jax.Array:
    """On CPU the aligned array itself, elsewhere a copy that has arrived, so that the host's can go."""
    return jax.block_until_ready(jax.device_put(array, may_alias=True))


def _say_what_is_dequantised(checkpoint: Checkpoint, low: Mapping[int, Param], dtype: np.dtype) -> None:
    if isinstance(checkpoint, QuantizedCheckpoint):
        log.info(
            "%s stores weights as %s; %d arrays stay so, the others become %s",
            checkpoint.path, checkpoint.scheme, len(low), dtype,
        )  # fmt: skip


def _warn_of_unused(checkpoint: Checkpoint, uses: Container[str]) -> None:
    tied = checkpoint.config.get("tie_word_embeddings", False)
    unused = [
        name
        for name in checkpoint.names()
        if name not in uses and not name.endswith(UNUSED_SUFFIXES) and not (tied and name == "lm_head.weight")
    ]
    if unused:
        shown = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
        log.warning(
            "%d tensors of %s are not used by this architecture: %s", len(unused), checkpoint.path, shown
        )
