"""Run a model step by step as an engine would: sequences in pages, any chunk of any of them in a step."""

import json
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch import Batch
from jaxserve.models import ModelConfig, model_for
from jaxserve.pool import layer_pages
from jaxserve.weights import load, open_checkpoint
from sharding.params import Param

GOLDEN = Path(__file__).parents[2] / "golden"
PAGE = 8
ROWS = 144  # of a step that is not one token a sequence: few shapes, few compiles


def golden_config(arch: str, file: str = "config.json", **fields: Any) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((GOLDEN / arch / file).read_text()) | fields)


def golden_params(arch: str, config: ModelConfig, dtype: Any = jnp.float32) -> Any:
    """The golden's weights; every tensor of its file must be used, but for a draft layer after the last."""
    checkpoint = open_checkpoint(str(GOLDEN / arch))
    tree = model_for(config).params(config)
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Param))
    used = {
        name for leaf in leaves for name in ((leaf.source,) if isinstance(leaf.source, str) else leaf.source)
    }
    draft = f"{config.prefix}layers.{config.num_layers}."
    unused = {name for name in checkpoint.names() if not name.startswith(draft)} - used
    assert not unused, f"not read: {sorted(unused)}"
    return load(tree, checkpoint, dtype, progress=False)


def golden_prompts(arch: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / arch / "prompts.json").read_text())["prompts"]


def stacked(params: Any) -> Any:
    """The same weights with neighbouring layers of equal structure as one stack, as an accelerator wants them."""
    runs = groupby(params["layers"], key=lambda layer: jax.tree.map(jnp.shape, layer))
    return params | {"layers": [jax.tree.map(lambda *layers: jnp.stack(layers), *run) for _, run in runs]}


@dataclass
class Run:
    """A model, its weights and its pages; pages of sequence b are its own, in an order that is not sorted."""

    config: ModelConfig
    params: Any
    sequences: int = 1
    longest: int = 160
    stack: bool = False
    dtype: Any = jnp.float32
    cache: str | None = None  # data type of the pages as a setting has it, if not `dtype`
    pool: Any = field(init=False)
    done: list[int] = field(init=False)

    def __post_init__(self):
        self.model = model_for(self.config)
        self.pages_each = -(-self.longest // PAGE)
        lead, layers = (1 + self.sequences * self.pages_each,), self.config.num_layers
        cache = self.cache or jnp.dtype(self.dtype).name
        if self.stack:
            self.pool = _left_by_others(layer_pages(self.config, cache, PAGE, (layers, *lead)))
        else:
            one = layer_pages(self.config, cache, PAGE, lead)
            self.pool = tuple(_left_by_others(one) for _ in range(layers))
        self.done = [0] * self.sequences
        order = np.random.default_rng(0).permutation(self.sequences * self.pages_each).astype(np.int32)
        self.page_table = 1 + order.reshape(self.sequences, self.pages_each)

    def step(self, chunks: dict[int, list[int]]) -> np.ndarray:
        """Logits [T, V] of the new tokens of each sequence, in order of sequence."""
        return self.inside(chunks)["logits"]

    def inside(self, chunks: dict[int, list[int]]) -> dict[str, np.ndarray]:
        """What the model computed for the new tokens: logits [T, V], hidden [T, D] and what `collect` gives."""
        batch, count = self._batch(chunks)
        forward = _forward_tiny if self.config.hidden_size < 256 else _forward
        out, self.pool = forward(self.config, self.params, batch, self.pool)
        loads = {name: np.asarray(out.pop(name)) for name in ("expert_loads", "device_loads") if name in out}
        return {name: np.asarray(values)[..., :count, :] for name, values in out.items()} | loads

    def _batch(self, chunks: dict[int, list[int]]) -> tuple[Batch, int]:
        tokens, positions, places, starts = [], [], [], [0]
        for b in range(self.sequences):
            new = chunks.get(b, [])
            at = np.arange(self.done[b], self.done[b] + len(new))
            tokens += new
            positions += at.tolist()
            places += (self.page_table[b, at // PAGE] * PAGE + at % PAGE).tolist()
            starts.append(len(tokens))
            self.done[b] += len(new)
        count, single = len(tokens), all(len(chunks.get(b, [])) == 1 for b in range(self.sequences))
        padding = [0] * ((self.sequences if single else ROWS) - count)
        lens = [self.done[b] if b in chunks else 0 for b in range(self.sequences)]
        batch = Batch(
            tokens=jnp.asarray(tokens + padding, jnp.int32),
            positions=jnp.asarray(positions + padding, jnp.int32),
            places=jnp.asarray(places + padding, jnp.int32),
            q_starts=jnp.asarray(starts, jnp.int32),
            kv_lens=jnp.asarray(lens, jnp.int32),
            page_table=jnp.asarray(self.page_table),
        )
        return batch, count


def _run_forward(config: ModelConfig, params, batch, pool):
    model = model_for(config)
    hidden, pool, inside = model.forward(config, params, batch, pool, collect=True)
    return {"logits": model.logits(config, params, hidden), "hidden": hidden, **inside}, pool


def _left_by_others(shapes: Any) -> Any:
    """Pages full of what must never matter."""

    def full(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 127, x.dtype)

    return jax.tree.map(full, shapes)


_forward = jax.jit(_run_forward, static_argnums=0, donate_argnums=3)
# A tiny model takes longer to compile than to run.
_forward_tiny = jax.jit(
    _run_forward,
    static_argnums=0,
    donate_argnums=3,
    compiler_options={"xla_backend_optimization_level": 0},
)
