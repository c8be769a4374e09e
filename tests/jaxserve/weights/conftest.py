"""Checkpoints made on the fly by the formats' own libraries."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from sharding.params import Param

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """`folder(tensors, shards=1, **config)` writes a Hugging Face folder and returns it."""

    def write(tensors: dict[str, np.ndarray], shards: int = 1, **config: Any) -> Path:
        path = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIG | config))
        if shards == 1:
            save_file(tensors, path / "model.safetensors")
            return path
        names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        where = {name: names[i % shards] for i, name in enumerate(tensors)}
        for shard in names:
            save_file({name: tensors[name] for name, s in where.items() if s == shard}, path / shard)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return path

    return write


@pytest.fixture
def params_of() -> Callable[[Any], dict[str, Param]]:
    """One `Param` for every tensor of a checkpoint, shaped as stored."""
    return lambda checkpoint: {
        name: Param(checkpoint.shape(name), (None,) * len(checkpoint.shape(name)), name)
        for name in checkpoint.names()
    }
