"""Weights of one code an element, FP8 or INT8, with scales beside them for blocks, rows or all of them.

DeepSeek (arXiv:2412.19437, 3.3) stores `weight_scale_inv` for blocks of 128 x 128, from the top left corner, the last
ones cut by the edge. It multiplies: it is the inverse of what the weight was multiplied by. Others write
`weight_scale` for each row or for the whole matrix.
"""

from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxserve.weights.schemes.weight import Parts, Stored, Weight, floats
from pallas_kernels.formats import FP8_BLOCK, FP8_CHANNEL, INT8_CHANNEL, Format, QTensor

CODES = {np.dtype(jnp.float8_e4m3fn): "e4m3", np.dtype(jnp.float8_e5m2): "e5m2", np.dtype(np.int8): "int8"}
KNOWN = {(f.codes, f.block, f.scale): f for f in (FP8_BLOCK, FP8_CHANNEL, INT8_CHANNEL)}
SCALES = ("_scale_inv", "_scale")
ZEROS = "_zero_point"


def fp8(stored: Stored) -> Mapping[str, Weight]:
    """Every FP8 weight; a `weight_block_size` that the config names must be that of the scales."""
    return dict(coded_weights(stored, stored.settings.get("weight_block_size")))


def coded_weights(stored: Stored, block: Sequence[int] | None = None) -> Iterator[tuple[str, Weight]]:
    """(name, weight) of all tensors of codes; those without a scale are refused."""
    for name in stored.names:
        kind = CODES.get(stored.dtype(name))
        if kind is None or name.endswith((*SCALES, ZEROS)):
            continue
        scale = next((end for end in SCALES if name + end in stored.names), None)
        if scale is None:
            raise stored.refuse(
                "a weight of codes without scales",
                tensor=name,
                expected=name + SCALES[0],
                found="nothing of that name",
            )
        stored.check_converted(name.removesuffix(".weight"))
        yield name, _coded(stored, name, scale, kind, block)


def _coded(stored: Stored, name: str, scale: str, kind: str, block: Sequence[int] | None) -> Weight:
    shape, byte = stored.shape(name), stored.dtype(name + scale) == np.uint8
    parts = {"": name, scale: name + scale} | ({ZEROS: name + ZEROS} if name + ZEROS in stored.names else {})
    shared = _block(stored, name, name + scale, block)
    grid = tuple(-(-n // b) if b else 1 for n, b in zip(shape[-2:], shared, strict=True))
    format = Format(
        f"{'int8' if kind == 'int8' else 'fp8'}_{shared[0]}x{shared[1]}", kind, shared,
        scale=jnp.uint8 if byte else jnp.float32, zeros=ZEROS in parts,
    )  # fmt: skip
    format = format if format.zeros else KNOWN.get((kind, shared, format.scale), format)

    def unpack(parts: Parts) -> QTensor:
        scales = parts[scale] if byte else floats(parts[scale])
        zeros = parts[ZEROS].reshape(*shape[:-2], *grid) if ZEROS in parts else None
        return QTensor(parts[""], scales.reshape(*shape[:-2], *grid), zeros, format=format)

    return Weight(parts, shape, unpack)


def _block(stored: Stored, name: str, scale: str, block: Sequence[int] | None) -> tuple[int, int]:
    """How many rows and columns of the weight share a scale, 0 for all; told by the shape of the scales."""
    *stack, f, d = stored.shape(name)
    outer, found = tuple(stack), stored.shape(scale)
    if block and found == (*outer, -(-f // block[0]), -(-d // block[1])):
        return block[0], block[1]
    if found in (outer, (*outer, 1), (*outer, 1, 1)):  # () of a matrix alone
        return 0, 0
    if found in ((*outer, f), (*outer, f, 1)):
        return 1, 0
    if found[:-1] == (*outer, f) and d % found[-1] == 0:
        return 1, d // found[-1]
    raise stored.refuse(
        "scales of a shape that fits no way of sharing them", tensor=scale,
        expected=f"one, {f} rows, rows by groups of columns" + (f", or blocks of {block}" if block else ""),
        found=list(found),
    )  # fmt: skip
