"""GGUF blocks to float32, with the `gguf` package's own arithmetic, spread over the cores."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantize_rows

from jaxserve.weights.arrays import aligned_empty

CHUNK = 1 << 16  # values at a time: enough to outweigh Python, few enough to stay in a core's cache
PLAIN = {  # stored as they are
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.I8: np.dtype(np.int8),
    GGMLQuantizationType.I16: np.dtype(np.int16),
    GGMLQuantizationType.I32: np.dtype(np.int32),
    GGMLQuantizationType.I64: np.dtype(np.int64),
}


def is_known(kind: GGMLQuantizationType) -> bool:
    """Whether the installed `gguf` package can dequantise this type."""
    block_bytes = GGML_QUANT_SIZES[kind][1]
    try:
        dequantize_rows(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def dequantize(
    blocks: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...], pool: ThreadPoolExecutor
) -> np.ndarray:
    """The values of contiguous `blocks` (uint8) as float32 of `shape`, computed by the threads of `pool`."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    out = aligned_empty((math.prod(shape),), np.dtype(np.float32))
    rows = blocks.reshape(-1, block_bytes)
    step = max(1, CHUNK // block)

    def part(start: int) -> None:
        # One row per call: the package works row by row, and short rows cost more than the arithmetic.
        row = rows[start : start + step].reshape(1, -1)
        out[start * block : (start + step) * block] = dequantize_rows(row, kind)[0]

    list(pool.map(part, range(0, len(rows), step)))
    return out.reshape(shape)
