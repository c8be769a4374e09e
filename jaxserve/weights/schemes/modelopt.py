"""NVIDIA ModelOpt: NVFP4 as `weight` (pairs of E2M1), `weight_scale` (E4M3, groups of 16) and `weight_scale_2`, or FP8.

Both scales multiply (https://github.com/NVIDIA/TensorRT-Model-Optimizer, unified Hugging Face checkpoints).
"""

from collections.abc import Mapping

import numpy as np

from jaxserve.weights.schemes.fp8 import coded_weights
from jaxserve.weights.schemes.weight import Parts, Stored, Weight, floats
from pallas_kernels.formats import NVFP4, QTensor

CODES, SCALE, WHOLE, SMOOTHED = ".weight", ".weight_scale", ".weight_scale_2", ".pre_quant_scale"


def modelopt(stored: Stored) -> Mapping[str, Weight]:
    """Every quantised weight; layers may be of both kinds."""
    algorithms = ("NVFP4", "FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "MIXED_PRECISION")
    stored.require("quant_algo", None, *algorithms)
    found = dict(coded_weights(stored, (128, 128)))
    for module, parts in stored.find(CODES, SCALE, WHOLE, SMOOTHED):
        name = parts[CODES]
        if stored.dtype(name) != np.uint8:
            continue
        if SMOOTHED in parts or SCALE not in parts or WHOLE not in parts:
            raise stored.refuse(
                "not NVFP4",
                tensor=name,
                expected=f"{SCALE} and {WHOLE} alone beside it",
                found=", ".join(parts),
            )
        f, half = stored.shape(name)
        stored.check_shape(parts[SCALE], (f, half * 2 // NVFP4.block[1]))
        stored.check_converted(module)
        found[name] = Weight(parts, (f, half * 2), _unpack)
    return found


def _unpack(parts: Parts) -> QTensor:
    return QTensor(parts[CODES], parts[SCALE], tensor_scale=floats(parts[WHOLE]).reshape(()), format=NVFP4)
