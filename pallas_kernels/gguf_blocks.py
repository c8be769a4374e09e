"""GGUF's blocks: scales and codes of 32 or 256 columns side by side in the same bytes, as llama.cpp lays them out.

A matrix is uint8 [..., F, D / columns, bytes]. Layouts and arithmetic: https://github.com/ggml-org/ggml, ggml-common.h
and ggml-quants.c; its rounding is half away from zero, not to even.
"""

import numpy as np

COLUMNS = {"q8_0": 32, "q4_0": 32, "q4_1": 32, "q4_k": 256, "q6_k": 256}
BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "q4_k": 144, "q6_k": 210}


def decode(xp, blocks, kind: str):
    """float32 [..., F, D] of blocks [..., F, D / columns, bytes]."""
    values = {"q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q4_k": _q4_k, "q6_k": _q6_k}[kind](xp, blocks)
    return values.reshape(*blocks.shape[:-2], -1)


def encode(xp, x, kind: str):
    """Blocks of float32 [..., F, D]; of the kinds with 256 columns there is no one right encoding, so none here."""
    if COLUMNS[kind] != 32:
        raise ValueError(f"{kind} is read and not written; use q8_0, q4_0 or q4_1")
    x = x.reshape(*x.shape[:-1], -1, 32)
    if kind == "q8_0":
        step = xp.max(xp.abs(x), axis=-1, keepdims=True) / np.float32(127)
        codes = _away(xp, x * _inverse(xp, step)).astype(np.int8).view(np.uint8)
        return xp.concatenate([_half_bytes(xp, step), codes], axis=-1)
    if kind == "q4_0":
        largest = xp.take_along_axis(x, xp.argmax(xp.abs(x), axis=-1, keepdims=True), axis=-1)
        step, low, head = largest / np.float32(-8), np.float32(-8), []
        codes = x * _inverse(xp, step) - low
    else:
        low = xp.min(x, axis=-1, keepdims=True)
        step, head = (xp.max(x, axis=-1, keepdims=True) - low) / np.float32(15), [_half_bytes(xp, low)]
        codes = (x - low) * _inverse(xp, step)
    codes = xp.clip(xp.trunc(codes + np.float32(0.5)), 0, 15).astype(np.uint8)
    pairs = codes[..., :16] | (codes[..., 16:] << np.uint8(4))
    return xp.concatenate([_half_bytes(xp, step), *head, pairs], axis=-1)


def _q8_0(xp, b):
    return _half(b, 0) * b[..., 2:].view(np.int8).astype(np.float32)


def _q4_0(xp, b):
    return _half(b, 0) * (_nibbles(xp, b[..., 2:]) - np.float32(8))


def _q4_1(xp, b):
    return _half(b, 0) * _nibbles(xp, b[..., 4:]) + _half(b, 2)


def _q4_k(xp, b):
    """Eight groups of 32 with scales and minima of 6 bits: d * scale * code - dmin * minimum."""
    low, high, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    six, two = np.uint8(63), np.uint8(48)
    scale = xp.concatenate([low & six, (rest & np.uint8(15)) | ((low >> np.uint8(2)) & two)], axis=-1)
    least = xp.concatenate([high & six, (rest >> np.uint8(4)) | ((high >> np.uint8(2)) & two)], axis=-1)
    codes = _nibbles(xp, b[..., 16:].reshape(*b.shape[:-1], 4, 32)).reshape(*b.shape[:-1], 8, 32)
    step, offset = _half(b, 0) * scale.astype(np.float32), _half(b, 2) * least.astype(np.float32)
    return step[..., None] * codes - offset[..., None]


def _q6_k(xp, b):
    """Sixteen groups of 16 with scales of 8 bits; four low bits of the codes apart from two high ones."""
    outer = b.shape[:-1]
    low = _nibbles(xp, b[..., :128].reshape(*outer, 2, 64)).reshape(*outer, 8, 32)
    high = b[..., 128:192].reshape(*outer, 2, 32)
    high = xp.stack([(high >> np.uint8(place)) & np.uint8(3) for place in (0, 2, 4, 6)], axis=-2)
    high = high.astype(np.float32).reshape(*outer, 8, 32)
    codes = (low + np.float32(16) * high - np.float32(32)).reshape(*outer, 16, 16)
    step = _half(b, 208) * b[..., 192:208].view(np.int8).astype(np.float32)
    return step[..., None] * codes


def _nibbles(xp, bytes):
    """[..., n] -> [..., 2 n] float32, the low nibbles first."""
    return xp.concatenate([bytes & np.uint8(15), bytes >> np.uint8(4)], axis=-1).astype(np.float32)


def _half(b, at: int):
    """The float16 at byte `at` of every block, as float32 [..., 1]."""
    low, high = b[..., at : at + 1].astype(np.uint16), b[..., at + 1 : at + 2].astype(np.uint16)
    return (low | (high << np.uint16(8))).view(np.float16).astype(np.float32)


def _half_bytes(xp, x):
    bits = x.astype(np.float16).view(np.uint16)
    return xp.concatenate([bits & np.uint16(255), bits >> np.uint16(8)], axis=-1).astype(np.uint8)


def _inverse(xp, step):
    return xp.where(step == 0, np.float32(0), np.float32(1) / xp.where(step == 0, np.float32(1), step))


def _away(xp, x):
    """To the nearest integer, halves away from zero."""
    size = xp.abs(x)
    whole = xp.floor(size)
    return xp.sign(x) * (whole + xp.floor(np.float32(2) * (size - whole)))
