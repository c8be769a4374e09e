"""Writes a checkpoint in jaxserve's own form (see `orbax`): converted once, fast to load ever after."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.arrays import aligned_empty, convert_into, is_float
from jaxserve.weights.checkpoint import Checkpoint, overflow
from jaxserve.weights.open import open_checkpoint
from jaxserve.weights.orbax import MANIFEST, Stored, checksum, write_manifest
from jaxserve.weights.progress import Progress
from jaxserve.weights.quantized import QuantizedCheckpoint
from jaxserve.weights.text_files import write_text_files

DTYPES = ("auto", "float32", "bfloat16", "float16")
PART = 1 << 30  # bytes of tensors held in memory at a time, and in one Orbax checkpoint
CHUNK = 1 << 22  # bytes of one stored piece: pieces are read in parallel


def convert(
    src: str, dst: str, dtype: str = "auto", overwrite: bool = False, *, progress: bool = True
) -> None:
    """Write the checkpoint `src` (anything `open_checkpoint` takes) as the folder `dst`.

    `dtype` "auto" keeps what is stored (of GGUF's blocks the values), so loading `dst` equals loading `src` bit for
    bit. `overwrite` replaces an earlier conversion, and nothing else. `dst` appears complete or not at all.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"cannot convert to dtype {dtype!r}", expected=f"one of {', '.join(DTYPES)}")
    target = Path(dst).expanduser().absolute()
    _check_target(target, overwrite)
    checkpoint = open_checkpoint(src)
    if dtype == "auto" and isinstance(checkpoint, QuantizedCheckpoint):
        checkpoint = checkpoint.stored
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        work.chmod(0o755)
        tensors = _write_weights(checkpoint, work / "weights", dtype, progress)
        write_text_files(checkpoint, work)
        config = checkpoint.config if dtype == "auto" else _with_dtype(checkpoint.config, dtype)
        (work / "config.json").write_text(json.dumps(config, indent=2))
        write_manifest(work, src, dtype, tensors)
        _put_in_place(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    ours = (target / MANIFEST).is_file()
    if overwrite and ours:
        return
    advice = (
        "pass overwrite=True to replace it" if ours else "it is not a converted checkpoint: give another name"
    )
    raise CheckpointError(f"the destination exists; {advice}", file=str(target))


def _write_weights(checkpoint: Checkpoint, folder: Path, dtype: str, progress: bool) -> dict[str, Stored]:
    """The tensors as Orbax checkpoints of about `PART` bytes each, so that memory stays bounded."""
    tensors: dict[str, Stored] = {}
    total = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    with Progress(total, "Converting weights", visible=progress) as bar:
        for number, names in enumerate(_parts(checkpoint)):
            part = f"{number:05}"
            arrays = {name: _converted(checkpoint, name, dtype) for name in names}
            _save(folder / part, arrays)
            for name, array in arrays.items():
                tensors[name] = Stored(array.dtype.name, array.shape, part, checksum(array))
                bar.advance(checkpoint.nbytes(name))
            arrays.clear()
            for name in names:
                checkpoint.release(name)
    return tensors


def _parts(checkpoint: Checkpoint) -> Iterator[list[str]]:
    """The names in file order, cut where `PART` bytes are full."""
    names, size = [], 0
    for name in checkpoint.names():
        nbytes = int(np.prod(checkpoint.shape(name), dtype=np.int64)) * checkpoint.dtype(name).itemsize
        if not nbytes:
            raise CheckpointError(
                "an empty tensor cannot be converted", tensor=name, file=checkpoint.file(name)
            )
        if names and size + nbytes > PART:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def _converted(checkpoint: Checkpoint, name: str, dtype: str) -> np.ndarray:
    array = checkpoint.read(name)
    if dtype == "auto" or not is_float(array.dtype) or array.dtype.name == dtype:
        return array
    out = aligned_empty(array.shape, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    if not convert_into(out, array):
        raise overflow(checkpoint, name, out.dtype)
    return out


def _save(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp  # seconds to import, and only conversions write

    # Weights hardly compress, and decompressing would halve the loading speed.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)) as saver:
        pieces = {name: ocp.SaveArgs(chunk_byte_size=CHUNK) for name in arrays}
        saver.save(folder, ocp.args.PyTreeSave(arrays, save_args=pieces))


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "dtype"} | {"torch_dtype": dtype}


def _put_in_place(work: Path, target: Path) -> None:
    """`work` becomes `target`; an earlier conversion there goes only once the new one can take its place."""
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        os.replace(target, old)
        os.replace(work, target)
        shutil.rmtree(old)
    else:
        os.replace(work, target)
