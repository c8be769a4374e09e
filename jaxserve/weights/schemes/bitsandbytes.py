"""bitsandbytes: NF4 and FP4 in blocks of the flattened matrix, and LLM.int8's rows.

A 4-bit code is looked up in `quant_map` (NF4: arXiv:2305.14314, appendix E) and multiplied by its block's `absmax`,
which with double quantisation is a code itself: nested_quant_map[code] * nested_absmax + the nested offset. The high
nibble is the first element. LLM.int8 (arXiv:2208.07339) is code * SCB / 127, one SCB a row.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxserve.weights.schemes.weight import Parts, Stored, Weight, floats
from pallas_kernels.formats import INT8_CHANNEL, QTensor

ABSMAX, MAP, NESTED, NESTED_MAP = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")


def bitsandbytes(stored: Stored) -> Mapping[str, Weight]:
    """Every 4-bit and 8-bit weight."""
    found = {}
    for name, parts in stored.find(".weight", ".SCB"):
        codes = parts[".weight"]
        if len(parts) > 1:
            f, d = stored.shape(codes)
            stored.check_shape(parts[".SCB"], (f,), (f, 1))
            found[codes] = Weight(parts, (f, d), _int8)
        elif stored.dtype(codes) in (np.uint8, np.int8):
            found[codes] = _four_bits(stored, codes)
        if codes in found:
            stored.check_converted(name)
    return found


def _int8(parts: Parts) -> QTensor:
    scales = floats(parts[".SCB"]).reshape(-1, 1) / np.float32(127)
    return QTensor(parts[".weight"], scales, format=INT8_CHANNEL)


def _four_bits(stored: Stored, name: str) -> Weight:
    ends = ("", ABSMAX, MAP, NESTED, NESTED_MAP, *STATES)
    parts = {end: name + end for end in ends if name + end in stored.names}
    at = next((end for end in STATES if end in parts), None)
    if at is None or ABSMAX not in parts or MAP not in parts:
        raise stored.refuse(
            "codes without what they mean",
            tensor=name,
            expected=f"{ABSMAX}, {MAP} and {STATES[0]}",
            found=", ".join(parts),
        )
    state = json.loads(stored.checkpoint.read(parts[at]).tobytes())
    shape = tuple(state["shape"])
    if int(np.prod(stored.shape(name))) * 2 != int(np.prod(shape)):
        raise stored.refuse(
            "codes do not fill the weight",
            tensor=name,
            expected=f"{int(np.prod(shape))} of 4 bits",
            found=stored.shape(name),
        )
    return Weight(parts, shape, partial(_looked_up, state), low_bit=False)


def _looked_up(state: Mapping[str, Any], parts: Parts) -> np.ndarray:
    absmax = parts[ABSMAX]
    if NESTED in parts:
        coarse = np.repeat(floats(parts[NESTED]), state["nested_blocksize"])[: absmax.size]
        offset = np.float32(state.get("nested_offset", 0))
        absmax = floats(parts[NESTED_MAP])[absmax] * coarse + offset
    codes = parts[""].reshape(-1).view(np.uint8)
    pairs = np.stack([codes >> np.uint8(4), codes & np.uint8(15)], axis=-1).reshape(-1)
    values = floats(parts[MAP])[pairs]
    return (values * np.repeat(floats(absmax), state["blocksize"])[: values.size]).reshape(state["shape"])
