"""GPTQ's INT4 and INT8: `qweight` [D * bits / 32, F], consecutive inputs in an int32, the first in the lowest bits.

`qzeros` [groups, F * bits / 32] holds each zero point less 1 (`checkpoint_format` "gptq"), or as it is ("gptq_v2").
`g_idx` [D] is the group of each input: with activation order (`desc_act`) those of a group do not lie together
(arXiv:2210.17323 and its reference code). A weight is (code - zero) * scale.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from jaxserve.weights.schemes.weight import (
    Parts,
    Stored,
    Weight,
    group_order,
    group_size,
    in_order,
    kept_dtype,
    pack_pairs,
    unpack_bits,
)
from pallas_kernels.formats import Format, QTensor, int4

CODES, ZEROS, SCALES, GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"


def gptq(stored: Stored) -> Mapping[str, Weight]:
    """Every linear layer's weight [F, D]."""
    stored.require("bits", 4, 8)
    stored.require("checkpoint_format", None, "gptq", "gptq_v2")
    bits = stored.settings["bits"]
    offset = 0 if stored.settings.get("checkpoint_format") == "gptq_v2" else 1
    found = {}
    for module, parts in stored.find(CODES, ZEROS, SCALES, GROUPS):
        rows, f = stored.shape(parts[CODES])
        d = rows * 32 // bits
        stored.check_parts(parts, ZEROS, SCALES)
        groups = stored.shape(parts[SCALES])[0]
        stored.check_shape(parts[SCALES], (groups, f))
        stored.check_shape(parts[ZEROS], (groups, f * bits // 32))
        if GROUPS in parts:
            stored.check_shape(parts[GROUPS], (d,))
        stored.check_converted(module)
        group = group_size(stored, parts[SCALES], groups, d)
        moved = bool(stored.settings.get("desc_act")) and GROUPS in parts
        unpack = partial(_unpack, bits, offset, group, moved)
        columns = (lambda values, parts: in_order(values, parts[GROUPS])) if moved else None
        found[module + ".weight"] = Weight(parts, (f, d), unpack, columns=columns)
    return found


def _unpack(bits: int, offset: int, group: int, moved: bool, parts: Parts) -> QTensor:
    scales = np.ascontiguousarray(parts[SCALES].T)
    codes = unpack_bits(np.ascontiguousarray(parts[CODES].T), bits)
    if moved:
        codes = codes[:, group_order(parts[GROUPS], group)]
    zeros = (unpack_bits(parts[ZEROS], bits).T + np.uint8(offset)) & np.uint8(2**bits - 1)
    kept = kept_dtype(scales)
    if bits == 4:
        return QTensor(pack_pairs(codes), scales, zeros, format=int4(group, zeros=True, scale=kept))
    format = Format(f"int8_{group}_zeros", "int8", (1, group), kept, zeros=True)
    return QTensor(signed(codes), scales, signed(zeros), format=format)


def signed(codes: np.ndarray) -> np.ndarray:
    """Codes of 0 to 255 as codes about zero, for zero points too: their difference stays."""
    return (codes ^ np.uint8(128)).view(np.int8)
