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
        """The inputs of those of a layer's weights that rows are multiplied by."""
        seen: dict[str, Inputs] = {}
        for x in self.stream:
            _, found = self._run(number, layer, x, observed)
            for path, values in found.items():
                part = inputs(values, x.shape[0])
                seen[path] = seen[path] + part if path in seen else part
        return {path: seen[path] for path in paths if path in seen}

    def advance(self, number: int, layer: Any) -> None:
        """The stream after this layer."""
        self.stream = [self._run(number, layer, x, None) for x in self.stream]

    def _run(self, number: int, layer: Any, x: Array, wrap: Callable[..., Any] | None) -> Any:
        c, sequences = _alone(self._config, number), x.shape[0] // self._length
        fn = partial(_output, c, sequences)
        key = (c, x.shape, jax.tree.structure(layer), wrap is None)
        if key not in self._compiled:
            self._compiled[key] = jax.jit(wrap(fn, layer, x) if wrap else fn)
        result = self._compiled[key](layer, x)
        if wrap is None:
            return result
        names = [".".join(k.key for k in path) for path, _ in jax.tree.leaves_with_path(layer)]
        return result[0], {names[i]: values for i, values in result[1].items()}


def _alone(c: ModelConfig, number: int) -> ModelConfig:
    """A model of this layer only."""
    mixture = c.mixture and replace(c.mixture, layers=(c.mixture.layers[number],))
    windows, ropes = (c.windows[number],), (c.layer_ropes[number],)
    return replace(c, windows=windows, layer_ropes=ropes, embed_scale=1.0, mixture=mixture)


def _output(c: ModelConfig, sequences: int, layer: Any, x: Array) -> Array:
    # Rows of the stream in place of an embedding: token t is row t.
    params = {"embed": x, "layers": [layer], "norm": jnp.zeros(x.shape[1], x.dtype)}
    tokens = jnp.arange(x.shape[0], dtype=jnp.int32)
    return forward(c, params, tokens, sequences=sequences, collect=True)[1]["layers"][0]
