"""Loop and scan run the same block the same way; the loop traces it once."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch import Batch
from jaxserve.layers.over_layers import over_layers

LAYERS, PAGES = 5, 3
BATCH = Batch(
    tokens=jnp.zeros(2, jnp.int32),
    positions=jnp.arange(2, dtype=jnp.int32),
    places=jnp.asarray([4, 5]),
    q_starts=jnp.asarray([0, 2]),
    kv_lens=jnp.asarray([2]),
    page_table=jnp.asarray([[1]]),
)


def make(stack: bool):
    layers = [{"w": jnp.full((3,), i + 1.0)} for i in range(LAYERS)]
    pool = [jnp.zeros((PAGES, 1, 4, 1)) for _ in range(LAYERS)]
    if not stack:
        return layers, tuple(pool)
    stacks = [jax.tree.map(lambda *w: jnp.stack(w), *part) for part in (layers[:2], layers[2:])]
    return stacks, jnp.stack(pool)


def run(stack: bool, traced: list[int]):
    def block(x, layer, pages, batch, datum, shared):
        traced.append(1)
        x = x * layer["w"][None] + datum["shift"] + shared
        pages = pages.at[batch.places // 4, :, batch.places % 4].set(x[:, :1, None])
        return x, pages, {"seen": x + pages[batch.page_table[0, 0], 0, 1, 0]}

    def forward(layers, pool):
        data = {"shift": np.arange(LAYERS, dtype=np.float32)}
        return over_layers(block, jnp.ones((2, 3)), layers, pool, 4, BATCH, data, jnp.float32(0.5))

    return jax.jit(forward)(*make(stack))


def test_scan_equals_loop():
    (x, pool, out), (x_scan, pool_scan, out_scan) = run(False, []), run(True, [])
    np.testing.assert_array_equal(x, x_scan)
    np.testing.assert_array_equal(jnp.stack(pool), pool_scan)
    np.testing.assert_array_equal(out["seen"], out_scan["seen"])


def test_a_loop_over_equal_layers_traces_its_block_once():
    traced: list[int] = []
    run(False, traced)
    assert len(traced) == 1
