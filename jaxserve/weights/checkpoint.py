"""What every checkpoint format offers: named tensors, where they lie, and a Hugging Face config."""

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxserve.errors import CheckpointError


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names, whatever the file format calls them."""

    path: str
    format: str  # "safetensors", "gguf" or "orbax"
    config: dict[str, Any]  # with the keys of a Hugging Face config.json

    def names(self) -> Iterable[str]:
        """Tensor names in the order in which reading them passes through each file once."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype:
        """The dtype that `read` gives, float32 where the stored values are low-bit."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes the tensor takes in its file."""
        ...

    def file(self, name: str) -> str: ...

    def read(self, name: str) -> np.ndarray:
        """The tensor, dequantised; a read-only view of the mapped file where that is possible."""
        ...

    def release(self, name: str) -> None:
        """The caller keeps no view of this tensor: its mapped pages may leave memory."""
        ...


def missing_tensor(name: str, names: Iterable[str], path: str) -> CheckpointError:
    """The refusal of a name that a checkpoint does not hold, with the nearest ones it does."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.7)
    found = f"{len(names)} other tensors" + (f", the nearest names {', '.join(near)}" if near else "")
    return CheckpointError(
        "the checkpoint lacks a tensor the model needs; is it complete, and of this architecture?",
        tensor=name,
        file=path,
        found=found,
    )


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in `path`; `what` says in the refusal what the file is for."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"no {path.name} next to the weights: {what}", file=str(path)) from None
    except (OSError, ValueError, RecursionError) as why:
        raise CheckpointError(f"unreadable {path.name}: {what}", file=str(path), found=str(why)) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"malformed {path.name}: {what}", file=str(path), expected="an object", found=type(value).__name__
        )
    return value


def read_config(directory: Path) -> dict[str, Any]:
    """The folder's config.json."""
    return read_json(directory / "config.json", "it says which architecture the weights are for")


def overflow(checkpoint: Checkpoint, name: str, dtype: np.dtype) -> CheckpointError:
    """The refusal of finite values that `dtype` would turn into infinities."""
    return CheckpointError(
        f"values overflow {dtype}; use a dtype of more range (bfloat16 or float32)",
        tensor=name,
        file=checkpoint.file(name),
        expected=f"magnitudes that {dtype} can hold",
        found=f"larger {checkpoint.dtype(name)} values",
    )
