"""Safetensors files, one or many, mapped into memory; every number in a header is checked before it is used.

The format: https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.checkpoint import missing_tensor, read_json
from jaxserve.weights.mapped import MappedFile

MAX_HEADER = 100_000_000  # bytes, the format's own limit
MAX_DIMS = 32
MAX_SIZE = 1 << 48  # beyond any file there is, within what NumPy can index
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; `offset` counts from the start of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsCheckpoint:
    """The tensors of `shards`, each file mapped once; `config` is the folder's config.json."""

    format = "safetensors"

    def __init__(
        self, path: str, shards: list[str], config: dict[str, Any], where: dict[str, str] | None = None
    ):
        """`where` maps tensor to shard file name, from an index; without it every tensor of every shard counts."""
        self.path, self.config = path, config
        self._places: dict[str, tuple[MappedFile, Entry]] = {}
        for shard in shards:
            file = MappedFile(shard)
            entries = read_header(file)
            wanted = None if where is None else {name for name, s in where.items() if s == Path(shard).name}
            for name in sorted((wanted or set()) - entries.keys()):
                raise CheckpointError(
                    "the index names a tensor its shard does not hold", tensor=name, file=shard
                )
            for name, entry in entries.items():
                if wanted is None and name in self._places:
                    raise CheckpointError(
                        "two shards hold the same tensor and no index says which counts",
                        tensor=name,
                        file=shard,
                    )
                if wanted is None or name in wanted:
                    self._places[name] = (file, entry)

    def names(self) -> Iterable[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place(name)[1].shape

    def dtype(self, name: str) -> np.dtype:
        return self._place(name)[1].dtype

    def nbytes(self, name: str) -> int:
        return self._place(name)[1].nbytes

    def file(self, name: str) -> str:
        return self._place(name)[0].path

    def read(self, name: str) -> np.ndarray:
        file, entry = self._place(name)
        file.prefetch(entry.offset, entry.nbytes)
        return file.view(entry.offset, entry.nbytes).view(entry.dtype).reshape(entry.shape)

    def release(self, name: str) -> None:
        file, entry = self._place(name)
        file.release(entry.offset, entry.nbytes)

    def _place(self, name: str) -> tuple[MappedFile, Entry]:
        if name not in self._places:
            raise missing_tensor(name, self._places, self.path)
        return self._places[name]


def read_index(index: Path) -> dict[str, str]:
    """The map of tensor name to shard file name in a `*.safetensors.index.json`, every shard there."""
    where = read_json(index, "it says which shard holds which tensor").get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(s, str) for s in where.values()):
        raise CheckpointError(
            "malformed index", file=str(index), expected='a "weight_map" of tensor names to file names'
        )
    for name, shard in where.items():
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                "the index names a shard outside its folder",
                tensor=name, file=str(index), expected="the name of a .safetensors file", found=shard,
            )  # fmt: skip
        if not (index.parent / shard).is_file():
            raise CheckpointError(
                "a shard is missing; is the download complete?",
                tensor=name, file=str(index.parent / shard), expected=f"the file {index.name} names",
                found="no such file",
            )  # fmt: skip
    return where


def read_header(file: MappedFile) -> dict[str, Entry]:
    """The tensors of a file in the order of their bytes; CheckpointError on any claim that does not hold."""
    if file.size < 8:
        raise CheckpointError(
            "not a safetensors file: too short",
            file=file.path,
            expected="at least 8 bytes",
            found=f"{file.size} bytes",
        )
    length = int.from_bytes(file.read(0, 8), "little")
    if not 2 <= length <= min(MAX_HEADER, file.size - 8):
        raise CheckpointError(
            "truncated, or not a safetensors file: its header would not fit",
            file=file.path,
            expected=f"a header of 2 to {min(MAX_HEADER, file.size - 8)} bytes",
            found=f"{length} bytes",
        )
    start, entries = 8 + length, {}
    for name, claim in _parse(file, length).items():
        if name != "__metadata__":
            entries[name] = _entry(file, name, claim, start)
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    at = start
    for name, entry in entries.items():
        if entry.offset != at:
            raise CheckpointError(
                "tensors overlap or leave a gap", tensor=name, file=file.path,
                expected=f"offset {at - start}", found=f"{entry.offset - start}",
            )  # fmt: skip
        at += entry.nbytes
    if at != file.size:
        raise CheckpointError(
            "bytes after the last tensor", file=file.path, expected=f"{at} bytes", found=f"{file.size} bytes"
        )
    return entries


def _parse(file: MappedFile, length: int) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        header = json.loads(file.read(8, length), object_pairs_hook=unique)
        if not isinstance(header, dict):
            raise ValueError(f"a {type(header).__name__}, not an object")
    except (ValueError, RecursionError) as why:
        raise CheckpointError("the header is not valid JSON", file=file.path, found=str(why)[:200]) from None
    return header


def _entry(file: MappedFile, name: str, claim: Any, start: int) -> Entry:
    """One line of the header as numbers that fit the file."""

    def refuse(problem: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(
            problem, tensor=name, file=file.path, expected=expected, found=str(found)[:200]
        )

    if not isinstance(claim, dict) or claim.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("malformed header entry", "dtype, shape and data_offsets", claim)
    shape, offsets = claim["shape"], claim["data_offsets"]
    dtype = DTYPES.get(claim["dtype"]) if isinstance(claim["dtype"], str) else None
    if dtype is None:
        raise refuse("unsupported dtype", f"one of {', '.join(DTYPES)}", claim["dtype"])
    if not _are_sizes(shape) or len(shape) > MAX_DIMS or math.prod(max(n, 1) for n in shape) >= MAX_SIZE:
        raise refuse("malformed shape", f"at most {MAX_DIMS} sizes of a possible tensor", shape)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse("malformed offsets", "[begin, end]", offsets)
    begin, end = offsets
    if start + end > file.size:
        raise refuse(
            "the file is truncated; download it again", f"{start + end} bytes at least", f"{file.size} bytes"
        )
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise refuse(
            "the bytes given do not match shape and dtype",
            f"{math.prod(shape) * dtype.itemsize} bytes for {claim['dtype']}{shape}", f"{end - begin} bytes",
        )  # fmt: skip
    return Entry(dtype, tuple(shape), start + begin, end - begin)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < MAX_SIZE for n in value)
