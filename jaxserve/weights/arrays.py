"""Host arrays that JAX's CPU backend takes over without a copy, and dtype conversion into them."""

import math

import ml_dtypes
import numpy as np

ALIGNMENT = 64  # bytes; XLA:CPU copies a host array that starts anywhere else
CHUNK = 1 << 18  # elements converted at a time: the temporaries stay in the processor's cache


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that starts at a multiple of `ALIGNMENT`."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def is_aligned(array: np.ndarray) -> bool:
    """Whether JAX's CPU backend can use this memory as it is."""
    return array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0


def is_float(dtype: np.dtype) -> bool:
    """Floating point, the small types of ml_dtypes included."""
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def convert_into(out: np.ndarray, array: np.ndarray) -> bool:
    """Write `array` into the contiguous `out` of the same size, rounding to the nearest value of its dtype.

    False when a finite number became infinite, that is, when the dtype of `out` cannot hold the values.
    """
    source, target = array.reshape(-1), out.reshape(-1)
    assert np.may_share_memory(target, out) or not out.size
    narrower = (
        array.dtype != out.dtype
        and is_float(array.dtype)
        and (float(ml_dtypes.finfo(out.dtype).max) < float(ml_dtypes.finfo(array.dtype).max))
    )
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, source.size, CHUNK):
            part, result = source[start : start + CHUNK], target[start : start + CHUNK]
            np.copyto(result, part, casting="unsafe")
            if narrower and not np.isfinite(result).all() and np.isfinite(part[~np.isfinite(result)]).any():
                return False
    return True
