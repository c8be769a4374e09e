"""From what a user calls a model to its checkpoint: a folder, a file, or a name on the Hugging Face hub."""

from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.hub import resolve
from jaxserve.weights.checkpoint import Checkpoint, read_config, read_json
from jaxserve.weights.gguf import SPLIT, GGUFCheckpoint
from jaxserve.weights.orbax import MANIFEST, OrbaxCheckpoint
from jaxserve.weights.quantized import plain
from jaxserve.weights.safetensors import SafetensorsCheckpoint, read_index
from jaxserve.weights.schemes import settings_of


def open_checkpoint(path: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint at `path`: a folder of safetensors, GGUF or converted weights, one file, or a hub name.

    `revision` is the branch, tag or commit of a hub name. Headers are read and checked here, weights later.
    Quantised weights appear as plain ones (see `quantized`).
    """
    local = Path(resolve(path, revision))
    if local.is_dir():
        return plain(_open_folder(local))
    if local.suffix == ".gguf":
        return GGUFCheckpoint(str(local))
    if local.suffix == ".safetensors":
        return plain(SafetensorsCheckpoint(str(local), [str(local)], _config(local.parent)))
    raise CheckpointError(
        "not a checkpoint file",
        file=str(local),
        expected="a .safetensors or .gguf file, or a folder",
        found=local.name,
    )


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / MANIFEST).is_file():
        return OrbaxCheckpoint(folder)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return SafetensorsCheckpoint(str(folder), [str(single)], _config(folder))
    if index.is_file():
        where = read_index(index)
        shards = [str(folder / shard) for shard in sorted(set(where.values()))]
        return SafetensorsCheckpoint(str(folder), shards, _config(folder), where)
    files = sorted(folder.glob("*.gguf"))
    models = {match.group(1) if (match := SPLIT.fullmatch(file.name)) else file.name for file in files}
    if len(models) == 1:
        return GGUFCheckpoint(str(files[0]))
    if models:
        raise CheckpointError(
            "several GGUF models in one folder; name the file",
            file=str(folder),
            found=", ".join(sorted(models)),
        )
    raise _no_weights(folder)


def _config(folder: Path) -> dict[str, Any]:
    """config.json, with what ModelOpt says of the weights in a file of its own."""
    config, beside = read_config(folder), folder / "hf_quant_config.json"
    if settings_of(config) is None and beside.is_file():
        quantization = read_json(beside, "it says how the weights are quantised").get("quantization") or {}
        config["quantization_config"] = {"quant_method": "modelopt"} | quantization
    return config


def _no_weights(folder: Path) -> CheckpointError:
    """Says what the folder holds instead, and for PyTorch pickles what to do."""
    found = sorted(file.name for file in folder.iterdir())
    pickled = [name for name in found if name.endswith((".bin", ".pt", ".pth"))]
    advice = "; PyTorch pickles can run code and are not read: convert them to safetensors" if pickled else ""
    return CheckpointError(
        f"no weights in the folder{advice}",
        file=str(folder),
        expected="model.safetensors, model.safetensors.index.json and its shards, a .gguf file, or a conversion",
        found=", ".join(found[:8]) + (", ..." if len(found) > 8 else "") or "an empty folder",
    )
