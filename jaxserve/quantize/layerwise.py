"""One layer of a model at a time: what it gives, and what its weights are multiplied by meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.models import ModelConfig
from jaxserve.quantize.experts import expert_inputs
from jaxserve.quantize.observe import Inputs, inputs, observed
from jaxserve.whole import forward

AT_ONCE = 2048  # tokens


class Layerwise:
    """Calibration text on its way through the layers; `stream` is what the next one gets, in pieces [T, D]."""

    def __init__(self, c: ModelConfig, embed: np.ndarray, tokens: np.ndarray):
        """`tokens` [n, length]."""
        each = max(1, AT_ONCE // tokens.shape[1])
        self._config, self._length = c, tokens.shape[1]
        pieces = [tokens[i : i + each].reshape(-1) for i in range(0, len(tokens), each)]
        self.stream = [jnp.asarray(embed[piece] * np.float32(c.embed_scale)) for piece in pieces]
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def see(self, number: int, layer: Any, paths: Sequence[str]) -> dict[str, Inputs]:
        """The inputs of those of a layer's weights that rows are multiplied by; an expert has "experts.gate.3"."""
        seen: dict[str, Inputs] = {}
        for x in self.stream:
            inside, found, routed = self._seen(number, layer, x)
            parts = {path: inputs(values, x.shape[0]) for path, values in found.items()}
            if routed is not None:
                clamp = self._config.mixture.clamp if self._config.mixture else None
                ids = inside["router_experts"][0]
                for name, each in expert_inputs(layer["experts"], routed, ids, clamp).items():
                    parts |= {f"experts.{name}.{expert}": part for expert, part in enumerate(each)}
            for path, part in parts.items():
                seen[path] = seen[path] + part if path in seen else part
        return {
            path: part for path, part in seen.items() if path in paths or path.rpartition(".")[0] in paths
        }

    def advance(self, number: int, layer: Any) -> None:
        """The stream after this layer."""
        run = [self._compile(number, layer, x, sees=False) for x in self.stream]
        self.stream = [fn(layer, x)["layers"][0] for fn, x in zip(run, self.stream, strict=True)]

    def _seen(
        self, number: int, layer: Any, x: Array
    ) -> tuple[dict[str, Array], dict[str, Any], Array | None]:
        """(what happened inside, what each weight of two axes met, the rows that the router saw)."""
        inside, found, routed = self._compile(number, layer, x, sees=True)(layer, x)
        names = _names(layer)
        return inside, {names[i]: values for i, values in found.items()}, routed

    def _compile(self, number: int, layer: Any, x: Array, *, sees: bool) -> Callable[..., Any]:
        c, sequences = _alone(self._config, number), x.shape[0] // self._length
        fn, names = partial(_inside, c, sequences), _names(layer)
        key = (c, x.shape, jax.tree.structure(layer), sees)
        if key not in self._compiled:
            router = names.index("router") if "router" in names else None
            self._compiled[key] = jax.jit(observed(fn, layer, x, whole=router) if sees else fn)
        return self._compiled[key]


def _names(layer: Any) -> list[str]:
    return [".".join(k.key for k in path) for path, _ in jax.tree.leaves_with_path(layer)]


def _alone(c: ModelConfig, number: int) -> ModelConfig:
    """A model of this layer only."""
    mixture = c.mixture and replace(c.mixture, layers=(c.mixture.layers[number],))
    windows, ropes = (c.windows[number],), (c.layer_ropes[number],)
    return replace(c, windows=windows, layer_ropes=ropes, embed_scale=1.0, mixture=mixture)


def _inside(c: ModelConfig, sequences: int, layer: Any, x: Array) -> dict[str, Array]:
    # Rows of the stream in place of an embedding: token t is row t.
    params = {"embed": x, "layers": [layer], "norm": jnp.zeros(x.shape[1], x.dtype)}
    tokens = jnp.arange(x.shape[0], dtype=jnp.int32)
    return forward(c, params, tokens, sequences=sequences, collect=True)[1]
