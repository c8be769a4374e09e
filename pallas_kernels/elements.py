"""What one low-bit code stands for: encoding and decoding of elements, and how their codes share bytes.

Minifloats: E4M3 and E5M2 (arXiv:2209.05433), E2M1, E3M2 and E2M3 (OCP Microscaling 1.0, 5.3). Rounding is to nearest,
ties to even; what is too large becomes the largest value. The same code runs on numpy and on JAX arrays.
"""

import jax.numpy as jnp
import numpy as np

FP8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
SMALL = {
    "e2m1": (2, 1),
    "e3m2": (3, 2),
    "e2m3": (2, 3),
}  # bits of exponent and of mantissa; no infinity, no NaN
BITS = {"e4m3": 8, "e5m2": 8, "int8": 8, "int4": 4, "e2m1": 4, "e3m2": 6, "e2m3": 6}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0, "e3m2": 28.0, "e2m3": 7.5, "int8": 127.0, "int4": 7.5}
TOP_EXPONENT = {"e4m3": 8, "e5m2": 15, "e2m1": 2, "e3m2": 4, "e2m3": 2}  # of the largest value


def encode(xp, x, kind: str, zero=None):
    """Codes [..., D * bits / 8] of float32 values [..., D], which are already divided by their scales.

    `zero` is the code of 0 where it is not the middle one. NaN becomes 0 where the element has none.
    """
    if kind in FP8:
        return xp.clip(x, -LARGEST[kind], LARGEST[kind]).astype(FP8[kind])
    x = xp.where(xp.isnan(x), np.float32(0), x)
    if kind == "int8":
        low = np.float32(-127 if zero is None else -128)
        return xp.clip(xp.rint(x) + (np.float32(0) if zero is None else zero), low, 127).astype(np.int8)
    if kind == "int4":
        x = xp.rint(x) + (np.float32(8) if zero is None else zero)
        return pack(xp.clip(x, 0, 15).astype(np.uint8), 4)
    return pack(small_codes(xp, x, kind), BITS[kind])


def decode(xp, codes, kind: str):
    """Values of codes as float32 [..., D]; of integers without a zero point taken off."""
    if kind in FP8 or kind == "int8":
        return codes.astype(np.float32)
    codes = unpack(xp, codes, BITS[kind])
    if kind == "int4":
        return codes.astype(np.float32)
    return xp.asarray(values(kind))[codes.astype(np.int32)]


def values(kind: str) -> np.ndarray:
    """What each code of a small float stands for; its highest bit is the sign."""
    exponent_bits, mantissa_bits = SMALL[kind]
    codes = np.arange(2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes % 2**mantissa_bits / 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    sizes = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    return np.concatenate([sizes, -sizes]).astype(np.float32)


def small_codes(xp, x, kind: str):
    """One uint8 for each element of a small float."""
    exponent_bits, mantissa_bits = SMALL[kind]
    lowest = 2 - 2 ** (exponent_bits - 1)  # exponent of the smallest normal number
    size = xp.minimum(xp.abs(x), np.float32(LARGEST[kind]))
    exponent = xp.maximum((size.view(np.int32) >> np.int32(23)) - np.int32(127), np.int32(lowest))
    steps = ((np.int32(127 + mantissa_bits) - exponent) << np.int32(23)).view(np.float32)
    # Codes are in order of size, so a mantissa that rounds up to 2 carries into the exponent by itself.
    code = ((exponent - np.int32(lowest)) << np.int32(mantissa_bits)) + xp.rint(size * steps).astype(np.int32)
    sign = xp.signbit(x).astype(np.int32) << np.int32(exponent_bits + mantissa_bits)
    return (code | sign).astype(np.uint8)


def pack(codes, bits: int):
    """uint8 codes of 4 or 6 bits without gaps, the first in the lowest bits."""
    if bits == 4:
        return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    xp = codes.__array_namespace__()
    a, b, c, d = (codes[..., i::4] for i in range(4))
    triples = [
        a | (b << np.uint8(6)),
        (b >> np.uint8(2)) | (c << np.uint8(4)),
        (c >> np.uint8(4)) | (d << np.uint8(2)),
    ]
    return xp.stack(triples, axis=-1).reshape(*codes.shape[:-1], -1)


def unpack(xp, packed, bits: int):
    """The inverse of `pack`."""
    if bits == 4:
        codes = [packed & np.uint8(15), packed >> np.uint8(4)]
    else:
        x, y, z = (packed[..., i::3] for i in range(3))
        codes = [
            x,
            (x >> np.uint8(6)) | (y << np.uint8(2)),
            (y >> np.uint8(4)) | (z << np.uint8(4)),
            z >> np.uint8(2),
        ]
        codes = [code & np.uint8(63) for code in codes]
    return xp.stack(codes, axis=-1).reshape(*packed.shape[:-1], -1)
