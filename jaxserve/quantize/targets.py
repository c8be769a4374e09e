"""The formats that weights can be quantised to, and how compressed-tensors stores and describes each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.elements import unpack
from pallas_kernels.formats import FP8_CHANNEL, INT8_CHANNEL, MXFP4, NVFP4, Format, QTensor, int4


@dataclass(frozen=True)
class Target:
    """A format, and the words of a compressed-tensors config for it."""

    format: Format
    layout: str
    weights: Mapping[str, Any]

    def settings(self, ignore: list[str], activations: bool) -> dict[str, Any]:
        """The quantization_config; `activations` says that those are meant to be quantised too, token by token."""
        dynamic = {key: self.weights[key] for key in ("num_bits", "type", "symmetric")}
        inputs = dynamic | {"strategy": "token", "dynamic": True} if activations else None
        group = {"targets": ["Linear"], "weights": dict(self.weights), "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.layout,
            "config_groups": {"group_0": group | {"output_activations": None}},
            "ignore": ignore,
            "kv_cache_scheme": None,
        }


def target(name: str, group_size: int = 128) -> Target:
    """What `--format NAME` stands for; `group_size` is int4's."""
    return {
        "fp8": Target(FP8_CHANNEL, "float-quantized", _weights(8, "float", "channel")),
        "int8": Target(INT8_CHANNEL, "int-quantized", _weights(8, "int", "channel")),
        "int4": Target(int4(group_size), "pack-quantized", _weights(4, "int", "group", group_size)),
        "mxfp4": Target(MXFP4, "mxfp4-pack-quantized", _weights(4, "float", "group", 32)),
        "nvfp4": Target(NVFP4, "nvfp4-pack-quantized", _weights(4, "float", "tensor_group", 16)),
    }[name]


def _weights(bits: int, kind: str, strategy: str, group_size: int | None = None) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "group_size": group_size,
        "dynamic": False, "actorder": None, "block_structure": None,
    }  # fmt: skip


def stored(name: str, w: QTensor) -> dict[str, np.ndarray]:
    """The tensors that compressed-tensors keeps for the weight `name`."""
    scales = np.asarray(w.scales)
    if not w.format.packed:
        return {name: np.asarray(w.codes), f"{name}_scale": scales}
    codes = np.asarray(w.codes)
    if w.format.codes == "int4":
        codes, shape = _words(unpack(np, codes, 4)), np.asarray(w.shape, np.int64)
        return {f"{name}_packed": codes, f"{name}_scale": scales, f"{name}_shape": shape}
    tensors = {f"{name}_packed": codes, f"{name}_scale": scales}
    if w.tensor_scale is not None:
        whole = np.float32(1) / np.asarray(w.tensor_scale, np.float32)
        tensors[f"{name}_global_scale"] = whole.reshape(1)
    return tensors


def _words(codes: np.ndarray) -> np.ndarray:
    """[F, D] codes of 4 bits -> [F, D / 8] int32, the first column in the lowest bits."""
    codes = np.pad(codes, [(0, 0), (0, -codes.shape[1] % 8)]).astype(np.uint32)
    places = np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(codes.reshape(len(codes), -1, 8) << places, axis=-1).view(np.int32)
