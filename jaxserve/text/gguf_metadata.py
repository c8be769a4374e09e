"""The key-value header of a GGUF file, read in a fraction of a second (the vocabulary is in it)."""

import mmap
import struct
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
# GGUF value types (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) as `struct` codes.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Every key of the file's header with its value: numbers, strings and lists of them.

    The `gguf` package's reader makes an array per string, which takes seconds for a vocabulary.
    """
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise CheckpointError(
                "not a GGUF file", file=str(path), expected="the magic bytes GGUF", found="another beginning"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Header(data).read()
            except (struct.error, IndexError, KeyError, ValueError) as why:
                raise CheckpointError(
                    "the GGUF header is truncated or damaged; fetch the file again", file=str(path), found=str(why)
                ) from why


class _Header:
    """A cursor over the bytes of a header."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 4

    def read(self) -> dict[str, Any]:
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, of which only 2 and 3 are known")
        self._scalar("Q")  # tensors
        metadata = {}
        for _ in range(self._scalar("Q")):
            (key,) = self._strings(1)
            metadata[key] = self._value(self._scalar("I"))
        return metadata

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._strings(1)[0]
        if kind == ARRAY:
            kind, count = self._scalar("I"), self._scalar("Q")
            if kind == STRING:
                return self._strings(count)
            if kind == ARRAY:
                return [self._value(ARRAY) for _ in range(count)]
            return self._array(kind, count)
        return self._scalar(SCALARS[kind])

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def _array(self, kind: int, count: int) -> list[Any]:
        layout = f"<{count}{SCALARS[kind]}"
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return list(values)

    def _strings(self, count: int) -> list[str]:
        data, at, length_at = self.data, self.at, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_at(data, at)
            end = at + 8 + length
            if end > len(data):
                raise ValueError(f"a string of {length} bytes at {at} runs over the end of the file")
            strings.append(data[at + 8 : end].decode("utf-8", "replace"))
            at = end
        self.at = at
        return strings
