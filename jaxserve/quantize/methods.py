"""What each `--method` does: turn or scale the weights of a layer first, or not, and round them in one of two ways."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.models import ModelConfig
from jaxserve.quantize.gptq import gptq
from jaxserve.quantize.observe import Inputs
from jaxserve.quantize.rounding import quantised
from jaxserve.quantize.smoothing import awq_scales, smooth_scales
from pallas_kernels.formats import Format, QTensor

Tree = dict[str, Any]
Scales = Callable[[Sequence[np.ndarray], Inputs, Format], np.ndarray]
READERS = {
    "attn_in": ("q", "k", "v"),
    "mlp_in": ("gate", "up"),
    "up": ("down",),
}  # of what each of these gives


@dataclass(frozen=True)
class Method:
    """How a model is quantised."""

    rotation: str | None = None  # of the residual stream: "hadamard", "learned" or "blocks"
    scales: Scales | None = None  # by which columns are multiplied
    compensates: bool = False  # rounding errors are moved into later columns (GPTQ)

    @property
    def calibrates(self) -> bool:
        """Whether it has to see what the layers are given."""
        return self.compensates or self.scales is not None


METHODS = {
    "rtn": Method(),
    "gptq": Method(compensates=True),
    "awq": Method(scales=awq_scales),
    "smoothquant": Method(scales=smooth_scales),
    "rotate": Method(rotation="hadamard", compensates=True),
    "spinquant": Method(rotation="learned", compensates=True),
    "mr-gptq": Method(rotation="blocks", compensates=True),
}


def check_scalable(c: ModelConfig, name: str) -> None:
    """ConfigError for a model in which nothing before the linear layers can take their scales up."""
    if "attn_in" not in _norms(c) or c.latent is not None or c.mixture is not None:
        raise ConfigError(
            f"{name} puts scales into the norms before linear layers, which needs grouped-query attention and a dense "
            f"feed-forward behind norms; {c.name} is otherwise: use gptq or rtn"
        )


def scaled(
    c: ModelConfig, scales: Scales, layer: Tree, seen: Mapping[str, Inputs], format: Format
) -> tuple[Tree, Mapping[str, Inputs]]:
    """The layer with columns scaled and what feeds them divided; and its inputs, as they are then."""
    layer, seen = dict(layer), dict(seen)
    for feeder, readers in READERS.items():
        by = scales([layer[name] for name in readers], seen[readers[0]], format)
        if feeder in _norms(c):
            layer[feeder] = (layer[feeder] + np.float32(c.norm_offset)) / by - np.float32(c.norm_offset)
        else:
            layer[feeder] = layer[feeder] / by[:, None]
            if f"{feeder}_bias" in layer:
                layer[f"{feeder}_bias"] = layer[f"{feeder}_bias"] / by
        for name in readers:
            layer[name] = layer[name] * by
            x = seen[name]
            seen[name] = replace(
                x, gram=x.gram / np.outer(by, by), largest=x.largest / by, sample=x.sample / by
            )
    return layer, seen


def rounded(method: Method, w: np.ndarray, inputs: Inputs | None, format: Format) -> QTensor:
    """A weight [F, D] in `format`; `inputs` None where what it is multiplied by was not seen."""
    if inputs is None:
        return quantised(w, format)
    if method.compensates:
        return gptq(w, inputs.gram, format)
    return quantised(w, format, np.diag(inputs.gram).astype(np.float32))


def _norms(c: ModelConfig) -> tuple[str, ...]:
    return ("attn_in", "mlp_in") if c.norms in ("pre", "both") else ()
