"""The header of a GGUF file: metadata and where each tensor lies, every number checked before it is used.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package has a reader too; it
makes a NumPy view of every token of the vocabulary (seconds per file) and trusts lengths and offsets.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jaxserve.errors import CheckpointError
from jaxserve.weights.mapped import MappedFile

MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
MAX_ALIGNMENT = 1 << 20
SCALARS = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}

Claim = tuple[str, tuple[int, ...], int, int]  # name, shape in NumPy's order, raw type, offset


@dataclass(frozen=True)
class TensorInfo:
    """One tensor; `shape` in NumPy's order (the file's reversed), `offset` from the start of the file."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """Metadata as Python values (strings, numbers, lists), and the tensors in file order."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(file: MappedFile) -> Header:
    """The header of a little-endian GGUF file, version 2 or 3; CheckpointError on a claim that does not hold."""
    cursor = _Cursor(file)
    magic, version = cursor.take(4), cursor.number("<u4")
    if magic != b"GGUF":
        raise CheckpointError("not a GGUF file", file=file.path, expected="the bytes GGUF", found=repr(magic))
    if version not in (2, 3):
        what = "a big-endian file" if version and not version & 0xFFFF else f"version {version}"
        raise CheckpointError(
            "unsupported GGUF version", file=file.path, expected="2 or 3, little-endian", found=what
        )
    tensor_count, pair_count = cursor.count(24, "<u8"), cursor.count(13, "<u8")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        if key in metadata:
            raise cursor.malformed(f"the key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.value_type())
    claims = [cursor.tensor_claim() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.malformed(f"alignment {alignment!r} is not a power of two up to {MAX_ALIGNMENT}")
    return Header(metadata, _place(file, claims, cursor.at, alignment))


def _place(file: MappedFile, claims: list[Claim], end: int, alignment: int) -> dict[str, TensorInfo]:
    """The claimed tensors as `TensorInfo`; they must follow each other without overlap or gap."""
    start = _round_up(end, alignment)
    at, tensors = start, {}
    for name, shape, raw_type, offset in claims:

        def refuse(problem: str, expected: object, found: object, name: str = name) -> CheckpointError:
            return CheckpointError(
                problem, tensor=name, file=file.path, expected=str(expected), found=str(found)
            )

        if name in tensors:
            raise refuse("a tensor occurs twice", "one", "two")
        try:
            kind = GGMLQuantizationType(raw_type)
        except ValueError:
            known = ", ".join(t.name for t in GGMLQuantizationType)
            raise refuse("unknown tensor type", f"one of {known}", f"type {raw_type}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise refuse(f"rows of {kind.name} are not whole blocks", f"a multiple of {block}", shape[-1])
        if start + offset != at:
            raise refuse("tensors overlap or leave a gap", f"offset {at - start}", offset)
        nbytes = math.prod(shape) // block * block_bytes
        if at + nbytes > file.size:
            raise refuse(
                "the file is truncated; download it again",
                f"{at + nbytes} bytes at least",
                f"{file.size} bytes",
            )
        tensors[name] = TensorInfo(kind, shape, at, nbytes)
        at = _round_up(at + nbytes, alignment)
    return tensors


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class _Cursor:
    """Reads values one after another; a length is believed only if that many bytes are left."""

    def __init__(self, file: MappedFile):
        self.file, self.at = file, 0

    def malformed(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"malformed GGUF header: {what}", file=self.file.path, found=f"at byte {self.at}"
        )

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.file.size - self.at:
            raise CheckpointError(
                "the file ends inside its header; download it again",
                file=self.file.path,
                expected=f"{self.at + nbytes} bytes at least",
                found=f"{self.file.size} bytes",
            )
        self.at += nbytes
        return self.file.read(self.at - nbytes, nbytes)

    def number(self, dtype: str) -> int:
        return int(np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0])

    def count(self, least: int, dtype: str) -> int:
        """A number of things of at least `least` bytes each, all of them still to come."""
        count = self.number(dtype)
        if count * least > self.file.size - self.at:
            raise self.malformed(f"{count} entries cannot fit in {self.file.size - self.at} bytes")
        return count

    def string(self) -> str:
        try:
            return self.take(self.count(1, "<u8")).decode()
        except UnicodeDecodeError:
            raise self.malformed("a string is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """An array of strings: hundreds of thousands in a vocabulary, so without a call per string."""
        data, at, found = self.file.view(self.at, self.file.size - self.at).data, 0, []
        length = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + length(data, at)[0]
                found.append(str(data[begin:at], "utf-8"))
        except (struct.error, UnicodeDecodeError, OverflowError) as why:
            raise self.malformed(f"an array of strings ends early or is not UTF-8 ({why})") from None
        self.take(at)
        return found

    def value_type(self) -> GGUFValueType:
        raw = self.number("<u4")
        try:
            return GGUFValueType(raw)
        except ValueError:
            raise self.malformed(f"value type {raw} is unknown") from None

    def value(self, kind: GGUFValueType, depth: int = 0) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return np.frombuffer(self.take(SCALARS[kind].itemsize), SCALARS[kind])[0].item()
        if depth == MAX_ARRAY_DEPTH:
            raise self.malformed("arrays nested too deep")
        kind = self.value_type()
        if kind in SCALARS:
            dtype = SCALARS[kind]
            return np.frombuffer(
                self.take(self.count(dtype.itemsize, "<u8") * dtype.itemsize), dtype
            ).tolist()
        count = self.count(8, "<u8")
        if kind == GGUFValueType.STRING:
            return self.strings(count)
        return [self.value(kind, depth + 1) for _ in range(count)]

    def tensor_claim(self) -> Claim:
        name, dims = self.string(), self.number("<u4")
        if not 1 <= dims <= MAX_DIMS:
            raise self.malformed(f"tensor {name!r} has {dims} dimensions, not 1 to {MAX_DIMS}")
        shape = tuple(self.number("<u8") for _ in range(dims))[::-1]
        if not 0 < math.prod(shape) < 1 << 48:
            raise self.malformed(f"tensor {name!r} has the impossible shape {shape}")
        return name, shape, self.number("<u4"), self.number("<u8")
