"""Reads jaxserve's converted form: Orbax checkpoints of whole tensors, and a manifest that says what they must hold.

jaxserve.json   format version, source, dtype, and for every tensor its dtype, shape, part and CRC-32
config.json     with tokenizer and generation files as the source had them
weights/00000   an Orbax checkpoint (OCDBT) with the first tensors, weights/00001 the next, and so on
"""

import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore

from jaxserve.errors import CheckpointError
from jaxserve.weights.checkpoint import missing_tensor, read_config, read_json

MANIFEST = "jaxserve.json"
FORMAT = "jaxserve-checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Stored:
    """What the manifest says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    part: str  # folder below weights/
    crc32: int

    def check(self) -> None:
        """ValueError unless every field is of its type and the sizes are possible."""
        np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        sizes = all(type(n) is int and n >= 0 for n in self.shape)
        if not sizes or not self.part.isdecimal() or type(self.crc32) is not int:
            raise ValueError(f"malformed entry {self}")


def content_hash(tensors: dict[str, Stored]) -> str:
    """One digest of all names, dtypes, shapes and values, however they are divided into parts."""
    listed = [[name, t.dtype, list(t.shape), t.crc32] for name, t in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def write_manifest(folder: Path, source: str, dtype: str, tensors: dict[str, Stored]) -> None:
    """The last file of a conversion: without it a folder is not a checkpoint."""
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "dtype": dtype,
        "sha256": content_hash(tensors),
        "tensors": {name: asdict(stored) for name, stored in tensors.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


class OrbaxCheckpoint:
    """A converted folder; each tensor read is compared with its checksum: TensorStore fills lost chunks with zeros."""

    format = "orbax"

    def __init__(self, folder: Path):
        self.path, self.config = str(folder), read_config(folder)
        self._tensors = _read_manifest(folder / MANIFEST)
        for part in {stored.part for stored in self._tensors.values()}:
            if not (folder / "weights" / part / "manifest.ocdbt").is_file():
                raise CheckpointError(
                    "a part of the converted checkpoint is missing; convert it again",
                    file=str(folder / "weights" / part),
                    expected="an Orbax checkpoint",
                    found="nothing",
                )
        self._context = tensorstore.Context()

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> np.dtype:
        stored = self._stored(name).dtype
        return np.dtype(getattr(ml_dtypes, stored, stored))

    def nbytes(self, name: str) -> int:
        return int(np.prod(self.shape(name), dtype=np.int64)) * self.dtype(name).itemsize

    def file(self, name: str) -> str:
        return str(Path(self.path) / "weights" / self._stored(name).part)

    def read(self, name: str) -> np.ndarray:
        part = {"driver": "file", "path": f"{Path(self.file(name)).absolute()}/"}
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": part, "path": f"{name}/"}}
        try:
            store = tensorstore.open(spec, open=True, read=True, context=self._context).result()
            found = f"{store.dtype.name}{list(store.shape)}"
            array = store.read().result() if store.shape == self.shape(name) else None
        except Exception as why:  # TensorStore raises plain exceptions of several kinds
            raise self._damaged(name, "the tensor", str(why)) from why
        if array is None or array.dtype != self.dtype(name):
            raise self._damaged(name, f"{self.dtype(name)}{list(self.shape(name))}", found)
        if (crc := checksum(array)) != self._stored(name).crc32:
            raise self._damaged(name, f"CRC-32 {self._stored(name).crc32:08x}", f"{crc:08x}")
        return array

    def release(self, name: str) -> None:
        """Nothing stays mapped."""

    def _stored(self, name: str) -> Stored:
        if name not in self._tensors:
            raise missing_tensor(name, self._tensors, self.path)
        return self._tensors[name]

    def _damaged(self, name: str, expected: str, found: str) -> CheckpointError:
        return CheckpointError(
            "the converted checkpoint is damaged; convert it again",
            tensor=name,
            file=self.file(name),
            expected=expected,
            found=found,
        )


def checksum(array: np.ndarray) -> int:
    """CRC-32 of the values in C order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _read_manifest(file: Path) -> dict[str, Stored]:
    manifest = read_json(file, "it says what the converted checkpoint holds")
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise CheckpointError(
            "not a converted checkpoint of this version; convert it again",
            file=str(file),
            expected=f"{FORMAT} version {VERSION}",
            found=f"{manifest.get('format')} version {manifest.get('version')}",
        )
    try:
        entries: dict[str, Any] = manifest["tensors"]
        tensors = {name: Stored(**{**e, "shape": tuple(e["shape"])}) for name, e in entries.items()}
        for stored in tensors.values():
            stored.check()
    except (KeyError, TypeError, ValueError, AttributeError) as why:
        raise CheckpointError(
            "malformed manifest; convert it again", file=str(file), found=str(why)
        ) from None
    if (digest := content_hash(tensors)) != manifest.get("sha256"):
        raise CheckpointError(
            "the manifest was changed after the conversion; convert it again",
            file=str(file),
            expected=f"sha256 {manifest.get('sha256')}",
            found=digest,
        )
    return tensors
