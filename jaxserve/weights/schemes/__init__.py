"""Ways of storing quantised weights that Hugging Face repositories use, found by what their config says."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.schemes.awq import awq
from jaxserve.weights.schemes.bitsandbytes import bitsandbytes
from jaxserve.weights.schemes.compressed_tensors import compressed_tensors
from jaxserve.weights.schemes.fp8 import fp8
from jaxserve.weights.schemes.gptq import gptq
from jaxserve.weights.schemes.modelopt import modelopt
from jaxserve.weights.schemes.mxfp4 import mxfp4
from jaxserve.weights.schemes.weight import Stored, Weight

Scheme = Callable[[Stored], Mapping[str, Weight]]
SCHEMES: dict[str, Scheme] = {  # by quant_method
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "bitsandbytes": bitsandbytes,
}
KEYS = ("quantization_config", "compression_config")


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config.json says of its weights' quantisation, at its top or in a multimodal model's text_config."""
    for place in (config, config.get("text_config") or {}):
        for key in KEYS:
            if place.get(key):
                return place[key]
    return None


def without_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with plain weights."""
    plain = {key: value for key, value in config.items() if key not in KEYS}
    if isinstance(plain.get("text_config"), Mapping):
        plain["text_config"] = without_settings(plain["text_config"])
    return plain


def quantised_weights(
    checkpoint: Checkpoint, settings: Mapping[str, Any]
) -> tuple[str, Mapping[str, Weight]]:
    """(the scheme's name, every quantised weight under its plain name); CheckpointError for an unknown scheme."""
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if method not in SCHEMES:
        raise CheckpointError(
            "this way of quantising weights is not supported; use the unquantised model or a GGUF",
            file=checkpoint.path, expected=f"quant_method {', '.join(SCHEMES)}", found=f"quant_method {method}",
        )  # fmt: skip
    return str(method), SCHEMES[str(method)](Stored(checkpoint, settings))
