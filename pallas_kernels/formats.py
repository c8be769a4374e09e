"""Low-bit matrices, packed as checkpoints store them: `QTensor`, `quantise` and `dequantise`.

The same code runs on numpy arrays (a loader's, exact to the last subnormal) and on JAX arrays, inside jit too
(XLA on a CPU takes subnormals for zero).
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gguf_blocks
from pallas_kernels.elements import BITS, LARGEST, TOP_EXPONENT, decode, encode

E4M3_MAX, E2M1_MAX = LARGEST["e4m3"], LARGEST["e2m1"]


@dataclass(frozen=True)
class Format:
    """How a matrix [F, D] is stored: what a code is, and which codes share a scale."""

    name: str
    codes: str  # an element of `elements`, or a kind of `gguf_blocks`, which hold their scales
    block: tuple[int, int]  # rows and columns that share a scale; 0 is all of them
    scale: Any = jnp.float32  # dtype of the scales; uint8 is E8M0, a power of two
    zeros: bool = False  # a zero point beside every scale
    per_tensor: bool = False  # one more scale for the whole matrix

    @property
    def packed(self) -> bool:
        """Two codes a byte, the even column's in the low nibble."""
        return BITS.get(self.codes) == 4

    @property
    def bits(self) -> float:
        """Bits of memory per weight of a matrix that its blocks divide; scales of whole rows not counted."""
        if self.codes in gguf_blocks.BYTES:
            return 8 * gguf_blocks.BYTES[self.codes] / gguf_blocks.COLUMNS[self.codes]
        rows, columns = self.block
        scale = 8 * (jnp.dtype(self.scale).itemsize + self.zeros)
        return BITS[self.codes] + (scale / (rows * columns) if rows * columns else 0.0)


# FP8 (arXiv:2209.05433); blocks of 128 x 128 are DeepSeek-V3's (arXiv:2412.19437, 3.3).
FP8_BLOCK = Format("fp8_block", "e4m3", (128, 128))
FP8_CHANNEL = Format("fp8_channel", "e4m3", (1, 0))
FP8_TENSOR = Format("fp8_tensor", "e4m3", (0, 0))
E5M2_CHANNEL = Format("e5m2_channel", "e5m2", (1, 0))
E5M2_TENSOR = Format("e5m2_tensor", "e5m2", (0, 0))
INT8_CHANNEL = Format("int8_channel", "int8", (1, 0))
# OCP Microscaling formats 1.0: blocks of 32 with a power of two each.
MXFP8 = Format("mxfp8", "e4m3", (1, 32), scale=jnp.uint8)
MXFP8_E5M2 = Format("mxfp8_e5m2", "e5m2", (1, 32), scale=jnp.uint8)
MXFP6_E3M2 = Format("mxfp6_e3m2", "e3m2", (1, 32), scale=jnp.uint8)
MXFP6_E2M3 = Format("mxfp6_e2m3", "e2m3", (1, 32), scale=jnp.uint8)
MXFP4 = Format("mxfp4", "e2m1", (1, 32), scale=jnp.uint8)
NVFP4 = Format("nvfp4", "e2m1", (1, 16), scale=jnp.float8_e4m3fn, per_tensor=True)
GGUF = tuple(Format(kind, kind, (1, columns)) for kind, columns in gguf_blocks.COLUMNS.items())


def int4(group: int, *, zeros: bool = False, scale: Any = jnp.bfloat16) -> Format:
    """Codes of 0 to 15 about a zero point (8 unless `zeros`), one scale for `group` consecutive columns."""
    return Format(f"int4_{group}{'_zeros' if zeros else ''}", "int4", (1, group), scale, zeros)


FORMATS = {
    f.name: f
    for f in (
        FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, E5M2_CHANNEL, E5M2_TENSOR, INT8_CHANNEL,
        MXFP8, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, NVFP4,
        *(int4(group, zeros=zeros) for group in (32, 64, 128) for zeros in (False, True)),
    )
}  # fmt: skip


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "zeros", "tensor_scale"),
    meta_fields=("format", "axes"),
)
@dataclass(frozen=True)
class QTensor:
    """A matrix [F, D], output rows by input columns, or a stack of them, in its packed form.

    Every leaf has the stack's leading axes, so that slicing the leaves slices the matrix.
    """

    codes: (
        Any  # [..., F, D] FP8 or int8, [..., F, D * bits / 8] uint8 where codes share bytes, or GGUF's blocks
    )
    scales: Any = None  # [..., F / rows, D / columns], rounded up; None for GGUF's
    zeros: Any = None  # uint8 or int8, like `scales`
    tensor_scale: Any = None  # [...] float32
    format: Format = field(kw_only=True)
    axes: tuple[str | None, ...] = field(
        default=(), kw_only=True
    )  # what F and D are, where devices divide them

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix that this stands for."""
        if self.format.codes in gguf_blocks.BYTES:
            *outer, blocks, _ = self.codes.shape
            return (*outer, blocks * self.format.block[1])
        *outer, width = self.codes.shape
        return (*outer, width * 8 // BITS[self.format.codes])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes as stored, scales included."""
        leaves = jax.tree.leaves(self)
        return sum(int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for x in leaves)


def quantise(x, format: Format) -> QTensor:
    """`x` [..., F, D] in `format`, every code the nearest (ties to even), what is too large saturated.

    A block of zeros has scale 0, and one with a NaN or an infinity becomes NaN as a whole. Scales:
    FP8: max / 448 (E5M2: 57344). INT8: max / 127, INT4: max / 7.5, as GPTQ and AWQ have it; with zero points
    (max - min) over 255 or 15. MX (OCP Microscaling 1.0, 6.3): 2^(floor(log2 max) - exponent of the element's largest).
    NVFP4 (NVIDIA, "Introducing NVFP4"): tensor scale = max / (448 * 6), block scale = block max / 6 / tensor scale.
    """
    d, columns = x.shape[-1], format.block[1]
    if columns and d % columns and format.block[0] == 1:
        raise ValueError(
            f"{format.name} groups {columns} columns, and D={d} is no multiple; pad D with zeros"
        )
    xp = x.__array_namespace__()
    x = x.astype(np.float32)
    if format.codes in gguf_blocks.BYTES:
        return QTensor(gguf_blocks.encode(xp, x, format.codes), format=format)
    scales, zeros, tensor_scale = _scales(xp, _blocked(x, format), format)
    return encode_with(x, scales, zeros, tensor_scale, format)


def encode_with(x, scales, zeros, tensor_scale, format: Format) -> QTensor:
    """`x` [..., F, D] in `format` with these scales, however they were chosen."""
    xp, shape = x.__array_namespace__(), x.shape[-2:]
    step = _expand(block_steps(scales, tensor_scale, format), format, shape)
    ratio = xp.where(step > 0, x / xp.where(step > 0, step, np.float32(1)), np.float32(0))
    zero = None if zeros is None else _expand(zeros.astype(np.float32), format, shape)
    return QTensor(encode(xp, ratio, format.codes, zero), scales, zeros, tensor_scale, format=format)


def dequantise(w: QTensor, dtype: Any = np.float32):
    """The matrix [..., F, D] that `w` stands for: code times scale in float32, then rounded to `dtype`."""
    xp, shape = w.codes.__array_namespace__(), w.shape[-2:]
    if w.format.codes in gguf_blocks.BYTES:
        return gguf_blocks.decode(xp, w.codes, w.format.codes).astype(dtype)
    values = decode(xp, w.codes, w.format.codes)
    if w.zeros is not None:
        values = values - _expand(w.zeros.astype(np.float32), w.format, shape)
    elif w.format.codes == "int4":
        values = values - np.float32(8)
    step = block_steps(w.scales, w.tensor_scale, w.format)
    return (values * _expand(step, w.format, shape)).astype(dtype)


def _blocked(x, format: Format):
    """[..., F / rows, rows, D / columns, columns], padded with zeros where a block is cut by the edge."""
    *stack, f, d = x.shape
    rows, columns = format.block[0] or f, format.block[1] or d
    xp = x.__array_namespace__()
    x = xp.pad(x, [(0, 0)] * len(stack) + [(0, -f % rows), (0, -d % columns)])
    return x.reshape(*stack, -(-f // rows), rows, -(-d // columns), columns)


def _scales(xp, blocks, format: Format):
    """(scales, zero points or None, tensor scale or None) of blocks as `_blocked` gives them."""
    top = xp.max(xp.abs(blocks), axis=(-3, -1))
    finite = xp.all(xp.isfinite(blocks), axis=(-3, -1))  # XLA's maximum on a CPU may pass over a NaN
    tensor_scale = zeros = None
    if format.scale == jnp.uint8:
        exponent = (top.view(np.int32) >> np.int32(23)) - np.int32(TOP_EXPONENT[format.codes])
        exponent = xp.where(finite, xp.maximum(exponent, np.int32(0)), np.int32(255))
        return exponent.astype(np.uint8), None, None
    if format.per_tensor:
        most = xp.max(xp.where(finite, top, np.float32(0)), axis=(-2, -1))
        tensor_scale = most / _constant(most, E2M1_MAX * E4M3_MAX)
        by = xp.where(tensor_scale > 0, tensor_scale, np.float32(1))[..., None, None]
        scale = xp.minimum(top / _constant(top, E2M1_MAX) / by, np.float32(E4M3_MAX))
    elif format.zeros:
        high = xp.maximum(xp.max(blocks, axis=(-3, -1)), np.float32(0))
        low = xp.minimum(xp.min(blocks, axis=(-3, -1)), np.float32(0))
        low = xp.where(finite, low, np.float32(0))
        most, least, kind = (15.0, 0, np.uint8) if format.codes == "int4" else (255.0, -128, np.int8)
        scale = ((high - low) / _constant(high, most)).astype(format.scale)
        by = scale.astype(np.float32)
        zeros = xp.clip(xp.rint(-low / xp.where(by > 0, by, np.float32(1))), 0, most)
        zeros = (xp.where(finite, zeros, np.float32(0)) + np.float32(least)).astype(kind)
    else:
        scale = top / _constant(top, LARGEST[format.codes])
    scale = xp.where(finite, scale.astype(np.float32), np.float32(np.nan))
    return scale.astype(format.scale), zeros, tensor_scale


def _constant(like, value: float):
    """`value` for every element, kept from XLA, which would multiply by its rounded inverse instead of dividing."""
    full = like.__array_namespace__().full_like(like, value)
    return full if isinstance(full, np.ndarray) else jax.lax.optimization_barrier(full)


def block_steps(scales, tensor_scale, format: Format):
    """The scale of every block in float32."""
    xp = scales.__array_namespace__()
    if format.scale == jnp.uint8:  # E8M0 (OCP Microscaling 1.0, 5.4.1): 2^(byte - 127), 255 is NaN
        bits = scales.astype(np.int32) << np.int32(23)
        bits = xp.where(scales == 0, np.int32(1 << 22), bits)
        return xp.where(scales == 255, np.int32(0x7FC00000), bits).view(np.float32)
    step = scales.astype(np.float32)
    return step if tensor_scale is None else step * tensor_scale[..., None, None]


def _expand(step, format: Format, shape: tuple[int, ...]):
    """One value a block -> one an element."""
    (f, d), (rows, columns) = shape, format.block
    xp = step.__array_namespace__()
    if rows != 1:
        step = xp.repeat(step, rows or f, axis=-2)[..., :f, :]
    return step if columns == 0 else xp.repeat(step, columns, axis=-1)[..., :d]
