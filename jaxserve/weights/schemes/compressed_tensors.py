"""compressed-tensors, as llm-compressor writes them; which format a layer has is told by its tensors.

weight_packed int32    INT4 or INT8 codes + 8 or + 128, eight or four columns an int32, lowest bits first; with
                       weight_scale [F, groups], weight_shape, and where there are any weight_zero_point
                       [F / 8, groups], packed along F, and weight_g_idx [D] (activation order)
weight_packed uint8    pairs of E2M1: NVFP4 with a weight_global_scale that divides, else MXFP4
weight                 FP8 or INT8 codes, see `fp8`
The layouts: https://github.com/vllm-project/compressed-tensors
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxserve.weights.schemes.fp8 import coded_weights
from jaxserve.weights.schemes.gptq import signed
from jaxserve.weights.schemes.weight import (
    Parts,
    Stored,
    Weight,
    floats,
    group_order,
    in_order,
    kept_dtype,
    pack_pairs,
    unpack_bits,
)
from pallas_kernels.formats import MXFP4, NVFP4, Format, QTensor, int4

FORMATS = (
    "pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip
CODES, SCALE, ZEROS, SHAPE = ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape"
GROUPS, GLOBAL = ".weight_g_idx", ".weight_global_scale"


def compressed_tensors(stored: Stored) -> Mapping[str, Weight]:
    """Every quantised weight, also where groups of layers have different formats."""
    stored.require("format", None, *FORMATS)
    sparsity = (stored.settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise stored.refuse("sparse weights are not supported", expected="dense ones", found=sparsity)
    found = dict(coded_weights(stored, _block(stored.settings)))
    for module, parts in stored.find(CODES, SCALE, ZEROS, SHAPE, GROUPS, GLOBAL):
        if SCALE not in parts:
            raise stored.refuse(
                "a part is missing", tensor=parts[CODES], expected=module + SCALE, found="nothing"
            )
        stored.check_converted(module)
        make = _integers if stored.dtype(parts[CODES]) == np.int32 else _fp4
        found[module + ".weight"] = make(stored, parts)
    return found


def _block(settings: Mapping[str, Any]) -> Sequence[int] | None:
    """The rows and columns that share a scale in the layers that are quantised in blocks."""
    groups = (settings.get("config_groups") or {}).values()
    return next((b for g in groups if (b := (g.get("weights") or {}).get("block_structure"))), None)


def _fp4(stored: Stored, parts: dict[str, str]) -> Weight:
    f, half = stored.shape(parts[CODES])
    format = NVFP4 if GLOBAL in parts else MXFP4
    stored.check_shape(parts[SCALE], (f, -(-half * 2 // format.block[1])))

    def unpack(parts: Parts) -> QTensor:
        whole = np.float32(1) / floats(parts[GLOBAL]).reshape(()) if GLOBAL in parts else None
        return QTensor(parts[CODES], parts[SCALE], tensor_scale=whole, format=format)

    return Weight(parts, (f, half * 2), unpack)


def _integers(stored: Stored, parts: dict[str, str]) -> Weight:
    if SHAPE not in parts:
        raise stored.refuse("a part is missing", tensor=parts[CODES], expected=SHAPE, found=", ".join(parts))
    f, d = (int(n) for n in stored.checkpoint.read(parts[SHAPE]))
    bits = next((b for b in (4, 8) if stored.shape(parts[CODES]) == (f, -(-d * b // 32))), None)
    groups = stored.shape(parts[SCALE])[-1]
    if bits is None:
        raise stored.refuse(
            f"codes of neither 4 nor 8 bits for a weight of {f} x {d}", tensor=parts[CODES],
            expected=[f, -(-d // 8)], found=list(stored.shape(parts[CODES])),
        )  # fmt: skip
    group = _group(stored, parts, d, groups)
    stored.check_shape(parts[SCALE], (f, groups))
    if ZEROS in parts:
        stored.check_shape(parts[ZEROS], (-(-f * bits // 32), groups))
    unpack = partial(_unpack, bits, group, (f, d))

    def columns(values: np.ndarray, parts: Parts) -> np.ndarray:
        values = values[:, :d]  # an odd column had a neighbour in its byte
        return in_order(values, parts[GROUPS]) if GROUPS in parts else values

    return Weight(parts, (f, d), unpack, columns=columns if GROUPS in parts or d % 2 else None)


def _group(stored: Stored, parts: dict[str, str], d: int, groups: int) -> int:
    """Columns that share a scale: one of the config's group sizes, or all."""
    schemes = [g.get("weights") or {} for g in (stored.settings.get("config_groups") or {}).values()]
    sizes = [s["group_size"] for s in schemes if s.get("group_size") not in (None, -1)]
    for size in (*sizes, d + d % 2):
        if -(-d // size) == groups:
            return size
    raise stored.refuse(
        f"a number of groups that fits no group_size of {sizes}",
        tensor=parts[SCALE],
        expected=-(-d // (sizes or [d])[0]),
        found=groups,
    )


def _unpack(bits: int, group: int, shape: tuple[int, int], parts: Parts) -> QTensor:
    f, d = shape
    codes, zeros = unpack_bits(parts[CODES], bits)[:, :d], None
    if GROUPS in parts:
        codes = codes[:, group_order(parts[GROUPS], group)]
    if d % 2 and bits == 4:
        codes = np.pad(codes, [(0, 0), (0, 1)])
    if ZEROS in parts:
        zeros = unpack_bits(parts[ZEROS].T, bits)[:, :f].T.copy()
    scales, asymmetric = parts[SCALE], ZEROS in parts
    if bits == 4:
        format = int4(group, zeros=asymmetric, scale=kept_dtype(scales))
        return QTensor(pack_pairs(codes), scales, zeros, format=format)
    format = Format(f"int8_{group}", "int8", (1, group), kept_dtype(scales), zeros=asymmetric)
    return QTensor(signed(codes), scales, None if zeros is None else signed(zeros), format=format)
