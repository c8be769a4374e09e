"""GGUF files, whole or split, as Hugging Face tensors: renamed, dequantised, the converter's changes undone."""

import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType

from jaxserve.errors import CheckpointError
from jaxserve.weights.checkpoint import missing_tensor
from jaxserve.weights.dequantize import PLAIN, dequantize, is_known
from jaxserve.weights.gguf_config import architecture, synthesize
from jaxserve.weights.gguf_header import Header, TensorInfo, read_header
from jaxserve.weights.gguf_names import UNUSED, hugging_face_name
from jaxserve.weights.mapped import MappedFile

SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
VIEWS = PLAIN | {GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16)}


class GGUFCheckpoint:
    """The tensors of one model; `path` is its file, or any file of a split one."""

    format = "gguf"

    def __init__(self, path: str):
        self.path = path
        headers = [(file, read_header(file)) for file in map(MappedFile, split_files(path))]
        self._check_split([header for _, header in headers])
        first = headers[0][1]
        stored = {name: (file, info) for file, header in headers for name, info in header.tensors.items()}
        whole = Header(first.metadata, {name: info for name, (_, info) in stored.items()})
        self._architecture = architecture(whole, path)
        self._places: dict[str, tuple[MappedFile, TensorInfo]] = {}
        for name, place in stored.items():
            if name not in UNUSED:
                self._places[hugging_face_name(name, self._architecture.norms) or name] = place
        self._pool = ThreadPoolExecutor(os.cpu_count(), "dequantize")
        factors = stored.get("rope_freqs.weight")
        self.config = synthesize(
            whole, path, None if factors is None else tensor_values(*factors, self._pool)
        )
        self._heads = {
            "q_proj": self.config["num_attention_heads"],
            "k_proj": self.config["num_key_value_heads"],
        }

    def names(self) -> Iterable[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._place(name)[1].shape

    def dtype(self, name: str) -> np.dtype:
        return VIEWS.get(self._place(name)[1].type, np.dtype(np.float32))

    def nbytes(self, name: str) -> int:
        return self._place(name)[1].nbytes

    def file(self, name: str) -> str:
        return self._place(name)[0].path

    def read(self, name: str) -> np.ndarray:
        file, info = self._place(name)
        if info.type not in VIEWS and not is_known(info.type):
            raise CheckpointError(
                "unsupported tensor type", tensor=name, file=file.path,
                expected="a type the gguf package dequantises", found=info.type.name,
            )  # fmt: skip
        file.prefetch(info.offset, info.nbytes)
        heads = self._permuted_heads(name)
        values = tensor_values(file, info, self._pool, heads)
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            return values.astype(np.float32) - np.float32(self._architecture.norm_offset)
        return values

    def release(self, name: str) -> None:
        file, info = self._place(name)
        file.release(info.offset, info.nbytes)

    def _permuted_heads(self, name: str) -> int:
        """How many heads the rows of this tensor were reordered in; 0 for those left alone."""
        part = name.split(".")[-2] if "." in name else ""
        return self._heads.get(part, 0) if self._architecture.interleaved_rope else 0

    def _place(self, name: str) -> tuple[MappedFile, TensorInfo]:
        if name not in self._places:
            raise missing_tensor(name, self._places, self.path)
        return self._places[name]

    def _check_split(self, headers: list[Header]) -> None:
        names = [name for header in headers for name in header.tensors]
        expected = headers[0].metadata.get("split.tensors.count", len(names))
        if len(set(names)) != len(names) or len(names) != expected:
            raise CheckpointError(
                "the parts do not make one model", file=self.path, expected=f"{expected} different tensors",
                found=f"{len(names)} in {len(headers)} files",
            )  # fmt: skip


def split_files(path: str) -> list[str]:
    """All files of the model that `path` is, or is a part of, the first one first."""
    match = SPLIT.fullmatch(Path(path).name)
    if not match:
        return [path]
    stem, _, count = match.groups()
    files = [Path(path).with_name(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                "a part of the split model is missing",
                file=str(file),
                expected=f"{count} parts",
                found="no such file",
            )
    return [str(file) for file in files]


def tensor_values(file: MappedFile, info: TensorInfo, pool: ThreadPoolExecutor, heads: int = 0) -> np.ndarray:
    """The tensor's values; with `heads`, the rows of each head from neighbouring pairs back to halves."""
    data = file.view(info.offset, info.nbytes)
    if heads:
        rows = info.shape[0]
        if rows % (2 * heads):
            raise CheckpointError(
                "rows do not split into heads",
                file=file.path,
                expected=f"a multiple of {2 * heads}",
                found=str(rows),
            )
        data = data.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(-1)
    if info.type in VIEWS:
        return data.view(VIEWS[info.type]).reshape(info.shape)
    return dequantize(data, info.type, info.shape, pool)
