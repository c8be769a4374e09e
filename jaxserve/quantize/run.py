"""Quantises a model: layer by layer, so that memory holds one of them, and able to go on where it was stopped."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxserve.checkpoint_config import QuantizeConfig
from jaxserve.errors import CheckpointError
from jaxserve.models import ModelConfig, model_for
from jaxserve.quantize import source
from jaxserve.quantize.experts import steadied
from jaxserve.quantize.layerwise import Layerwise
from jaxserve.quantize.methods import METHODS, Method, check_scalable, rounded, scaled
from jaxserve.quantize.rotation import (
    block_rotation,
    check_rotatable,
    learned_rotation,
    random_rotation,
    rotated,
    rotated_outer,
    without_norms,
)
from jaxserve.quantize.smoothing import output_error
from jaxserve.quantize.targets import Target, stored, target
from jaxserve.text import load_tokenizer
from jaxserve.text_windows import split, windows
from jaxserve.weights import Checkpoint, open_checkpoint
from jaxserve.weights.quantized import plain
from jaxserve.weights.safetensors import SafetensorsCheckpoint
from jaxserve.weights.text_files import write_text_files
from pallas_kernels.formats import dequantise

Tree = dict[str, Any]
PLAN = "quantize.json"
LEARNED_FROM = 4  # layers, evenly spaced, from which a rotation is learned


class Quantizer:
    """A plan at work in the folder `dst`."""

    def __init__(self, plan: QuantizeConfig, dst: Path):
        self.plan, self.dst = plan, dst
        self.method: Method = METHODS[plan.method]
        self.target: Target = target(plan.format, plan.group_size)
        self.checkpoint: Checkpoint = open_checkpoint(plan.source)
        self.config = ModelConfig.from_hf(self.checkpoint.config)
        self.params = model_for(self.config).params(self.config)
        if self.method.rotation:
            check_rotatable(self.config, plan.method)
        if self.method.scales:
            check_scalable(self.config, plan.method)
        self.errors: dict[str, float] = {}  # of each weight's outputs, relative and squared

    def run(self, progress: bool = True) -> None:
        """Write the safetensors checkpoint; what is there already is kept."""
        _begin(self.plan, self.dst)
        self._rotation = self._make_rotation()
        outer = source.read({k: v for k, v in self.params.items() if k != "layers"}, self.checkpoint)
        outer = rotated_outer(self.config, outer, self._rotation[0]) if self._rotation else outer
        calibrates = self.method.calibrates
        stream = Layerwise(self.config, outer["embed"], self.windows()[0]) if calibrates else None
        bar = Progress(
            TextColumn("Quantising layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=Console(file=sys.stderr), disable=not (progress and sys.stderr.isatty()),
        )  # fmt: skip
        with bar:
            for number in bar.track(range(self.config.num_layers)):
                self._layer(number, stream)
        self._finish(outer)

    def windows(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the calibration text: those to calibrate with, and those to judge by."""
        plan = self.plan
        tokenizer = load_tokenizer(plan.source)
        return split(windows(plan.calibration, tokenizer, plan.length, plan.samples, plan.seed))

    def _layer(self, number: int, stream: Layerwise | None) -> None:
        params, path = self.params["layers"][number], self.dst / f"layer-{number:05}.safetensors"
        if not path.is_file():
            self._write_layer(number, params, path, stream)
        with safe_open(path, "np") as file:
            self.errors |= json.loads((file.metadata() or {})["errors"])
        if stream and number + 1 < self.config.num_layers:
            config = self.checkpoint.config | {"quantization_config": self.target.settings([], False)}
            layer = source.read(params, plain(SafetensorsCheckpoint(str(path), [str(path)], config)))
            stream.advance(number, layer)

    def _write_layer(self, number: int, params: Tree, path: Path, stream: Layerwise | None) -> None:
        layer = self._rotated_layer(source.read(params, self.checkpoint))
        found = source.leaves(params)
        linear = {
            at: param
            for at, param in found.items()
            if source.is_linear(at, param) and source.at(layer, at) is not None
        }
        seen = stream.see(number, layer, list(linear)) if stream else {}
        if self.method.scales:
            layer, seen = scaled(self.config, self.method.scales, layer, seen, self.target.format)
        tensors, errors = source.kept(params, layer, self.checkpoint, self.config.dtype), {}
        for at, param in linear.items():
            for number, (name, w) in enumerate(source.matrices(param, source.at(layer, at))):
                inputs = seen.get(at) or steadied(seen.get(f"{at}.{number}"))
                q = rounded(self.method, w, inputs, self.target.format)
                tensors |= stored(name, q)
                gram = inputs.gram if inputs else np.eye(w.shape[1], dtype=np.float32)
                errors[name] = output_error(w, dequantise(q), gram) / max(output_error(w, 0 * w, gram), 1e-30)
        _save(tensors, path, {"errors": json.dumps(errors), "format": "pt"})

    def _make_rotation(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Of the residual stream and of each head's values."""
        c, kind, block = self.config, self.method.rotation, self.target.format.block[1]
        if kind is None:
            return None
        if kind == "blocks":
            block = block or c.head_dim
            return block_rotation(c.hidden_size, block), block_rotation(c.head_dim, block)
        start, heads = (
            random_rotation(c.hidden_size, self.plan.seed),
            random_rotation(c.head_dim, self.plan.seed),
        )
        if kind == "learned":
            every = max(1, c.num_layers // LEARNED_FROM)
            layers = [
                source.read(self.params["layers"][i], self.checkpoint) for i in range(0, c.num_layers, every)
            ]
            layers = [without_norms(c, layer) for layer in layers]
            start = learned_rotation(layers, start, self.target.format, self.plan.learning_steps)
        return start, heads

    def _rotated_layer(self, layer: Tree) -> Tree:
        if self._rotation is None:
            return layer
        return rotated(self.config, without_norms(self.config, layer), *self._rotation)

    def _finish(self, outer: Tree) -> None:
        params = {name: self.params[name] for name in outer if name in self.params}
        tensors = source.kept(params, outer, self.checkpoint, self.config.dtype)
        config = dict(self.checkpoint.config)
        if "head" in outer and "head" not in params:
            embed = params["embed"]
            name = self.config.prefix.removesuffix("model.") + "lm_head.weight"
            tensors[name] = outer["head"].astype(tensors[str(embed.source)].dtype)
            config["tie_word_embeddings"] = False
        _save(tensors, self.dst / "outer.safetensors", {"format": "pt"})
        names = {}
        for file in sorted(self.dst.glob("*.safetensors")):
            with safe_open(file, "np") as f:
                names |= dict.fromkeys(f.keys(), file.name)
        config["quantization_config"] = self.target.settings(
            self._ignored(), self.plan.method == "smoothquant"
        )
        (self.dst / "config.json").write_text(json.dumps(config, indent=1))
        write_text_files(self.checkpoint, self.dst)
        index = {"metadata": {}, "weight_map": names}
        (self.dst / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

    def _ignored(self) -> list[str]:
        """Modules of matrices that were left alone."""
        names = ["lm_head"]
        for layer in self.params["layers"]:
            for at, param in source.leaves(layer).items():
                if len(param.part_shape) > 1 and not source.is_linear(at, param):
                    names += [name.removesuffix(".weight") for name in source.sources(param)]
        return list(dict.fromkeys(names))


def _begin(plan: QuantizeConfig, dst: Path) -> None:
    """Make the folder, or see that the one there is of the same plan."""
    file, wanted = dst / PLAN, asdict(plan)
    del wanted["eval_text"]  # does not change what is written
    if file.is_file():
        found = json.loads(file.read_text())
        if found != wanted:
            different = ", ".join(f"{k}={found.get(k)!r}" for k in wanted if found.get(k) != wanted[k])
            raise CheckpointError(
                "the destination holds another quantisation; give another name or the same settings",
                file=str(dst), expected=", ".join(f"{k}={wanted[k]!r}" for k in wanted if found.get(k) != wanted[k]),
                found=different,
            )  # fmt: skip
    elif dst.exists() and any(dst.iterdir()):
        raise CheckpointError(
            "the destination exists and is no quantisation; give another name", file=str(dst)
        )
    dst.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(wanted, indent=1))


def _save(tensors: dict[str, np.ndarray], path: Path, metadata: dict[str, str]) -> None:
    """The whole file or none."""
    part = path.with_suffix(".part")
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, part, metadata=metadata)
    os.replace(part, path)
