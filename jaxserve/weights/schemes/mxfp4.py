"""gpt-oss' MXFP4: experts as `_blocks` [E, F, D / 32, 16] of pairs of E2M1 and `_scales` [E, F, D / 32] of E8M0.

The repository calls what they stand for `gate_up_proj` and `down_proj` and has it transposed, [E, D, F]; gate and up
are the even and odd columns F of the first.
"""

from collections.abc import Mapping

from jaxserve.weights.schemes.weight import Parts, Stored, Weight
from pallas_kernels.formats import MXFP4, QTensor

BLOCKS, SCALES = "_blocks", "_scales"


def mxfp4(stored: Stored) -> Mapping[str, Weight]:
    """Every weight in blocks, under its name in the unquantised repository and with the shape it has there."""
    found = {}
    for name, parts in stored.find(BLOCKS, SCALES):
        *outer, groups, half = stored.shape(parts[BLOCKS])
        if SCALES not in parts or half != 16:
            raise stored.refuse(
                "not MXFP4 blocks",
                tensor=parts[BLOCKS],
                expected=f"[..., 16] and {name}{SCALES}",
                found=[*outer, groups, half],
            )
        stored.check_shape(parts[SCALES], (*outer, groups))
        stored.check_converted(name)
        found[name] = Weight(parts, (*outer[:-1], groups * 32, outer[-1]), _unpack, swapped=True)
    return found


def _unpack(parts: Parts) -> QTensor:
    *outer, groups, half = parts[BLOCKS].shape
    return QTensor(parts[BLOCKS].reshape(*outer, groups * half), parts[SCALES], format=MXFP4)
