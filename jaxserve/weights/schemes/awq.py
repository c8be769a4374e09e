"""AutoAWQ's INT4: `qweight` [D, F / 8], eight output columns an int32, with zero points and scales of groups of inputs.

Codes lie in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits (the "gemm" version; AWQ is arXiv:2306.00978).
A weight is (code - zero) * scale.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from jaxserve.weights.schemes.weight import (
    Parts,
    Stored,
    Weight,
    group_size,
    kept_dtype,
    pack_pairs,
    unpack_bits,
)
from pallas_kernels.formats import QTensor, int4

CODES, ZEROS, SCALES = ".qweight", ".qzeros", ".scales"
PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of column i among the eight of an int32


def awq(stored: Stored) -> Mapping[str, Weight]:
    """Every linear layer's weight [F, D]."""
    stored.require("bits", 4)
    stored.require("version", None, "gemm", "GEMM")
    found = {}
    for module, parts in stored.find(CODES, ZEROS, SCALES):
        d, packed = stored.shape(parts[CODES])
        stored.check_parts(parts, ZEROS, SCALES)
        groups = stored.shape(parts[SCALES])[0]
        stored.check_shape(parts[SCALES], (groups, packed * 8))
        stored.check_shape(parts[ZEROS], (groups, packed))
        stored.check_converted(module)
        group = group_size(stored, parts[SCALES], groups, d)
        found[module + ".weight"] = Weight(parts, (packed * 8, d), partial(_unpack, group))
    return found


def _unpack(group: int, parts: Parts) -> QTensor:
    scales = np.ascontiguousarray(parts[SCALES].T)
    codes, zeros = pack_pairs(_columns(parts[CODES]).T), _columns(parts[ZEROS]).T.copy()
    return QTensor(codes, scales, zeros, format=int4(group, zeros=True, scale=kept_dtype(scales)))


def _columns(words: np.ndarray) -> np.ndarray:
    """[n, F / 8] int32 -> [n, F] codes, in order."""
    return unpack_bits(words, 4).reshape(len(words), -1, 8)[:, :, PLACES].reshape(len(words), -1)
